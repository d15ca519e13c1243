//! A step's one check of a call, and how it runs: as one kernel on CUDA where that supports it, else as convolution, rule and
//! norm one after the other.

use super::{GdnStep, OP};
use crate::algo::Algo;
use crate::conv::CausalConv1d;
use crate::norm::GatedRmsNorm;
use crate::plan::{refuses_step, STEP_TOKENS};
use crate::rule::RulePlan;
use candle_core::{bail, CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Storage, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::cpu_slots;

/// A checked call.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct StepPlan {
    lead: Lead,
    /// q, k and v in it are columns of the convolution's output.
    pub rule: RulePlan,
    pub x: HeadsLayout,
    pub z: HeadsLayout,
    pub conv_weight_offset: usize,
    pub conv_width: usize,
    /// qkv as `[batch, tokens, channels]`, or packed `[tokens, channels]`.
    conv_x: Layout,
    /// q, k and v in the convolution's output.
    columns: [Layout; 3],
    out_shape: Shape,
}

/// Sizes of heads and convolution.
struct Sizes {
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    width: usize,
    channels: usize,
}

impl GdnStep {
    /// The sizes that the states have.
    fn sizes(&self) -> Result<Sizes> {
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
        Ok(Sizes { key_heads, value_heads, key_dim, value_dim, width, channels })
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
    fn plan(&self, args: [Arg<'_>; 3]) -> Result<StepPlan> {
        self.check_args(args)?;
        let [x, z, conv_weight] = args.map(|arg| arg.layout);
        let Sizes { key_heads, value_heads, key_dim, value_dim, width, channels } = self.sizes()?;
        let (lead, value_size) = (self.lead(x, channels)?, value_heads * value_dim);
        let lead_dims = &x.dims()[..lead.rank()];
        let tokens = match &self.rule.cu_seqlens {
            Some(cu_seqlens) => cu_seqlens.max_len(),
            None => lead_dims.get(1).copied().unwrap_or(1),
        };
        if tokens > STEP_TOKENS {
            bail!(
                "{OP}: qkv: expected at most {STEP_TOKENS} tokens a sequence, got {tokens}; gdn_prefill_in_place takes \
                 any number"
            );
        }
        if conv_weight.dims() != [channels, width] || !conv_weight.is_contiguous() {
            let dims = conv_weight.dims();
            bail!("{OP}: conv_weight: expected a contiguous tensor of shape {:?}, got {dims:?}", [channels, width]);
        }
        let algo = self.algo;
        if let Some(why) = refuses_step(algo, (key_dim, value_dim, width), tokens, lead == Lead::Packed) {
            bail!("{OP}: algo: {algo:?} {why}");
        }

        let x_heads = heads_layout(OP, "qkv", x, lead, lead_dims, (1, channels))?;
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
            z: heads_layout(OP, "z", z, lead, lead_dims, (value_heads, value_dim))?,
            conv_weight_offset: conv_weight.start_offset(),
            conv_width: width,
            conv_x: Layout::new(conv_x.0, conv_x.1, x.start_offset()),
            columns,
            out_shape: lead_dims.iter().copied().chain([value_size]).collect::<Vec<_>>().into(),
        })
    }
}

impl GdnStep {
    /// How a call on these tensors runs.
    pub(super) fn choice(&self, qkv: &Tensor, z: &Tensor, conv_weight: &Tensor) -> Result<Algo> {
        let args = [("qkv", qkv), ("z", z), ("conv_weight", conv_weight)];
        let plan = self.plan(args.map(|(name, tensor)| Arg::tensor(name, tensor)))?;
        #[cfg(feature = "cuda")]
        if self.may_fuse(&plan) {
            let guards = args.map(|(_, tensor)| tensor.storage_and_layout().0);
            if let [Storage::Cuda(x), Storage::Cuda(z), Storage::Cuda(w)] = [&*guards[0], &*guards[1], &*guards[2]] {
                return match super::cuda::StepCall::new(self, &plan, [x, z, w])?.choice()? {
                    Some(algo) => Ok(algo),
                    None => self.unfused(),
                };
            }
        }
        drop(plan);
        Ok(Algo::Unfused)
    }

    /// Whether to ask for a fused kernel.
    #[cfg(feature = "cuda")]
    fn may_fuse(&self, plan: &StepPlan) -> bool {
        let RulePlan { sizes, seqs, .. } = &plan.rule;
        self.algo.may_fuse()
            && crate::plan::has_fused_step(sizes.key_dim, sizes.value_dim, plan.conv_width)
            && seqs.total_tokens > 0
    }

    /// What runs where no fused kernel supports the call.
    #[cfg(feature = "cuda")]
    fn unfused(&self) -> Result<Algo> {
        let besides = match self.algo {
            Algo::StepWhole => "",
            Algo::StepSplit => ", compute capability 9.0, 1 to 4 value heads a key head, gates in f32 or as qkv",
            Algo::StepHeads => ", compute capability 9.0, 2 to 8 value heads a key head",
            _ => return Ok(Algo::Unfused),
        };
        bail!(
            "{OP}: algo: {:?} does not take these tensors on this device: expected rows of qkv, z and conv_state at \
             multiples of 4 elements, state and conv_weight at multiples of 16 bytes{besides}; Auto takes any",
            self.algo
        )
    }

    fn conv(&self) -> CausalConv1d {
        CausalConv1d::unchecked(&self.conv_state, self.rule.cu_seqlens.as_ref(), self.rule.slots.as_ref(), true)
    }

    fn norm(&self) -> Result<GatedRmsNorm> {
        GatedRmsNorm::new(self.norm_eps, self.gate)
    }
}

impl CustomOp3 for GdnStep {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        xl: &Layout,
        z: &CpuStorage,
        zl: &Layout,
        w: &CpuStorage,
        wl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let plan = self.plan([Arg::cpu("qkv", x, xl), Arg::cpu("z", z, zl), Arg::cpu("conv_weight", w, wl)])?;
        // Before anything is written.
        cpu_slots(OP, self.rule.slots.as_ref(), plan.rule.seqs.num_slots)?;
        let [q, k, v] = &plan.columns;
        let (o, o_shape) = match (&self.ring, &self.rule.slots) {
            (Some(ring), Some(slots)) => {
                ring.append_inputs(
                    &self.conv_state,
                    slots,
                    (x, plan.x),
                    &plan.rule.seqs,
                    self.rule.cu_seqlens.as_ref(),
                )?;
                let (y, _) = self.conv().with_slots(slots.written()).cpu_fwd(x, &plan.conv_x, w, wl)?;
                (ring.step(&self.rule, &plan.rule, &y)?, plan.rule.out_shape.clone())
            }
            _ => {
                let (y, _) = self.conv().cpu_fwd(x, &plan.conv_x, w, wl)?;
                self.rule.cpu_fwd(plan.lead, [(&y, q), (&y, k), (&y, v)])?
            }
        };
        let (norm_weight, layout) = self.norm_weight.storage_and_layout();
        let Storage::Cpu(norm_weight) = &*norm_weight else { bail!("{OP}: norm_weight: expected a CPU tensor") };
        let (out, _) = self.norm()?.cpu_fwd(&o, &Layout::contiguous(o_shape), z, zl, norm_weight, layout)?;
        Ok((out, plan.out_shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &candle_core::CudaStorage,
        xl: &Layout,
        z: &candle_core::CudaStorage,
        zl: &Layout,
        w: &candle_core::CudaStorage,
        wl: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        use super::cuda::StepCall;
        let plan = self.plan([Arg::cuda("qkv", x, xl), Arg::cuda("z", z, zl), Arg::cuda("conv_weight", w, wl)])?;
        if let Some(ring) = &self.ring {
            let out = crate::state::ring_cuda::step(&StepCall::new(self, &plan, [x, z, w])?, ring)?;
            return Ok((out, plan.out_shape));
        }
        if self.may_fuse(&plan) {
            if let Some(out) = StepCall::new(self, &plan, [x, z, w])?.run()? {
                return Ok((out, plan.out_shape));
            }
            self.unfused()?;
        }
        let (y, _) = self.conv().cuda_fwd(x, &plan.conv_x, w, wl)?;
        let [q, k, v] = &plan.columns;
        let (o, o_shape) = self.rule.cuda_fwd(plan.lead, [(&y, q), (&y, k), (&y, v)])?;
        let (norm_weight, layout) = self.norm_weight.storage_and_layout();
        let Storage::Cuda(norm_weight) = &*norm_weight else { bail!("{OP}: norm_weight: expected a CUDA tensor") };
        let (out, _) = self.norm()?.cuda_fwd(&o, &Layout::contiguous(o_shape), z, zl, norm_weight, layout)?;
        Ok((out, plan.out_shape))
    }
}
