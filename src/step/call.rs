//! The one check of a step's calls.

use super::op::{GdnStep, OP};
use crate::plan::{refuses_step, STEP_TOKENS};
use crate::reference::Dims;
use crate::rule::RulePlan;
use candle_core::{bail, Layout, Result, Shape};
use candle_gdn_core::check::*;

/// A checked call.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct StepPlan {
    pub lead: Lead,
    /// q, k and v in it are columns of the convolution's output.
    pub rule: RulePlan,
    pub x: HeadsLayout,
    pub z: HeadsLayout,
    pub conv_weight_offset: usize,
    pub conv_width: usize,
    /// qkv as `[batch, tokens, channels]`, or packed `[tokens, channels]`.
    pub conv_x: Layout,
    /// q, k and v in the convolution's output.
    pub columns: [Layout; 3],
    pub out_shape: Shape,
}

impl GdnStep {
    /// The sizes that the states have: of the heads, the convolution's width and its channels.
    fn sizes(&self) -> Result<(Dims, usize, usize)> {
        let (conv_slots, history, channels) = self.conv_state.dims3()?;
        let (slots, value_heads, value_dim, key_dim) = self.rule.state.dims4()?;
        let (width, value_size) = (history + 1, value_heads * value_dim);
        if !(2..=8).contains(&width) || channels == 0 {
            bail!(
                "{OP}: conv_state: expected [slots, width - 1, channels] with a width of 2 to 8, got {:?}",
                self.conv_state.dims()
            );
        }
        if conv_slots != slots {
            bail!("{OP}: conv_state: expected {slots} slots (the state's), got {conv_slots}");
        }
        let key_heads = match channels.checked_sub(value_size) {
            Some(keys) if keys > 0 && key_dim > 0 && keys % (2 * key_dim) == 0 => keys / (2 * key_dim),
            _ => bail!(
                "{OP}: conv_state: expected 2 * key_heads * {key_dim} + {value_size} channels (q, k and v of the \
                 state's heads), got {channels}"
            ),
        };
        if value_heads % key_heads != 0 {
            bail!(
                "{OP}: conv_state: expected channels for a number of key heads that divides the {value_heads} value \
                 heads, got {channels}, which is {key_heads} key heads"
            );
        }
        Ok((Dims { key_heads, value_heads, key_dim, value_dim }, width, channels))
    }

    fn lead(&self, x: &Layout, channels: usize) -> Result<Lead> {
        Ok(match (x.dims(), &self.rule.cu_seqlens) {
            ([_, n], Some(_)) if *n == channels => Lead::Packed,
            (dims, Some(_)) => bail!("{OP}: qkv: expected shape [tokens, {channels}], got {dims:?}"),
            ([_, n], None) if *n == channels => Lead::Decode,
            ([_, _, n], None) if *n == channels => Lead::Batched,
            (dims, None) => {
                bail!("{OP}: qkv: expected shape [batch, {channels}] or [batch, tokens, {channels}], got {dims:?}")
            }
        })
    }

    fn check_args(&self, args: [Arg<'_>; 3]) -> Result<()> {
        let (io, state) = (self.conv_state.dtype(), &self.rule.state);
        for arg in args {
            match arg.name {
                "conv_weight" => check_weight_dtype(OP, arg.name, arg.dtype, io)?,
                _ => check_dtype(OP, arg.name, arg.dtype, io)?,
            }
            arg.check_place(OP, state.device(), &[("the state", state), ("conv_state", &self.conv_state)])?;
        }
        Ok(())
    }

    /// Checks a call: qkv, z and the convolution's weight against each other and against what the op holds.
    pub(super) fn plan(&self, args: [Arg<'_>; 3]) -> Result<StepPlan> {
        self.check_args(args)?;
        let [x, z, conv_weight] = args.map(|arg| arg.layout);
        let (Dims { key_heads, value_heads, key_dim, value_dim }, width, channels) = self.sizes()?;
        let (lead, value_size) = (self.lead(x, channels)?, value_heads * value_dim);
        let lead_dims = &x.dims()[..lead.rank()];
        let tokens = match &self.rule.cu_seqlens {
            Some(cu_seqlens) => cu_seqlens.max_len(),
            None => lead_dims.get(1).copied().unwrap_or(1),
        };
        if tokens > STEP_TOKENS {
            bail!(
                "{OP}: qkv: expected at most {STEP_TOKENS} tokens a sequence, got {tokens}; gdn_prefill_in_place supports \
                 any number"
            );
        }
        check_dense(OP, "conv_weight", conv_weight, &[channels, width])?;
        let algo = self.algo;
        if let Some(why) = refuses_step(algo, (key_dim, value_dim, width), tokens, lead == Lead::Packed) {
            bail!("{OP}: algo: {algo:?} {why}");
        }

        let x_heads = heads_layout(OP, "qkv", x, lead, lead_dims, (1, channels))?;
        let z_heads = heads_layout(OP, "z", z, lead, lead_dims, (value_heads, value_dim))?;
        // The norm refuses others, after the states have advanced. `GdnStep::forward` copies them.
        if token_stride(lead_dims, &z.stride()[..lead.rank()]).is_none() {
            bail!("{OP}: z: expected leading dimensions with one common stride, got {:?}", z.stride());
        }
        let convolved = Layout::contiguous(x.dims());
        let keys = key_heads * key_dim;
        let column = |start, n| convolved.narrow(lead.rank(), start, n);
        let columns = [column(0, keys)?, column(keys, keys)?, column(2 * keys, value_size)?];
        let (seq_stride, token_stride) = (x_heads.seq_stride, x_heads.token_stride);
        let conv_x = match lead {
            Lead::Packed => (Shape::from((lead_dims[0], channels)), vec![token_stride, 1]),
            _ => (Shape::from((lead_dims[0], tokens, channels)), vec![seq_stride, token_stride, 1]),
        };
        Ok(StepPlan {
            lead,
            rule: self.rule.plan_layouts(lead, args[0].dtype, columns.each_ref())?,
            x: x_heads,
            z: z_heads,
            conv_weight_offset: conv_weight.start_offset(),
            conv_width: width,
            conv_x: Layout::new(conv_x.0, conv_x.1, x.start_offset()),
            columns,
            out_shape: lead_dims.iter().copied().chain([value_size]).collect::<Vec<_>>().into(),
        })
    }
}
