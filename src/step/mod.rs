//! What a layer does between its two projections, for a few tokens: convolution, rule and gated norm as one op.

use super::apply::apply3;
use super::check::*;
use super::conv::CausalConv1d;
use super::launch::Launch;
use super::norm::{uniform_tokens, GatedRmsNorm};
use super::options::{Gates, StepAlgo, StepOptions};
use super::plan::StepPlan;
use super::ring::Ring;
use super::rule::Rule;
use super::sequences::CuSeqlens;
use super::slots::Slots;
#[cfg(doc)]
use candle_core::CustomOp3;
use candle_core::{bail, DType, Layout, Result, Shape, Tensor};

pub(super) const OP: &str = "gdn_step";

/// Most tokens of a sequence that a step takes.
pub const STEP_TOKENS: usize = 16;

/// The sizes that the fused kernels are made for: of a head, and of the convolution.
const FUSED_DIM: usize = 128;
const FUSED_WIDTH: usize = 4;

/// A decode step of a layer between its two projections, as a [`CustomOp3`] over (qkv, z, conv_weight); see
/// [`gdn_step_in_place`] for shapes. The op holds both states and updates them when it is applied.
///
/// It has no backward pass: `backward()` through it gives candle's "backward is not supported" error.
#[derive(Debug, Clone)]
pub struct GdnStep {
    /// Its lead is qkv's, call by call.
    pub(super) rule: Rule,
    pub(super) conv: CausalConv1d,
    pub(super) norm: GatedRmsNorm,
    pub(super) conv_state: Tensor,
    pub(super) norm_weight: Tensor,
    pub(super) options: StepOptions,
    /// With one the state is only read, and what would be written is appended to it.
    pub(super) ring: Option<Ring>,
    launch: Launch,
}

/// A checked call, and what its parts need when they run one after the other.
pub(super) struct Composed {
    pub plan: StepPlan,
    pub rule: Rule,
    /// qkv as `[batch, tokens, channels]`, or packed `[tokens, channels]`.
    pub conv_x: Layout,
    /// q, k and v in the convolution's output.
    pub columns: [Layout; 3],
    pub out_shape: Shape,
}

/// Of heads and convolution.
struct Sizes {
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    width: usize,
    channels: usize,
}

impl GdnStep {
    /// Checks the gates, the norm's weight `[V]` and the states: `conv_state` `[batch, width - 1, channels]`, `state`
    /// `[batch, HV, V, K]`.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit; the message names the argument.
    pub fn new(
        gates: Gates,
        norm_weight: &Tensor,
        conv_state: &Tensor,
        state: &Tensor,
        options: StepOptions,
    ) -> Result<Self> {
        let rule = Rule::new(OP, Lead::Batched, gates, state, None, options.rule)?;
        check_float(OP, "conv_state", conv_state.dtype())?;
        if conv_state.rank() != 3 {
            bail!("{OP}: conv_state: expected shape [slots, width - 1, channels], got {:?}", conv_state.dims());
        }
        check_state_strides(OP, "conv_state", conv_state.layout())?;
        check_weight_dtype(OP, "norm_weight", norm_weight.dtype(), conv_state.dtype())?;
        check_shape(OP, "norm_weight", norm_weight, &[state.dims()[2]])?;
        for (arg, tensor) in [("conv_state", conv_state), ("norm_weight", norm_weight)] {
            check_device(OP, arg, tensor, state.device())?;
            check_not_state(OP, arg, storage_key(tensor), state)?;
        }
        let Gates { a, b, a_log, dt_bias } = &rule.gates;
        let read = [("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias), ("norm_weight", norm_weight)];
        for (arg, tensor) in read {
            check_not_conv_state(arg, storage_key(tensor), conv_state)?;
        }
        if !options.norm_eps.is_finite() || options.norm_eps < 0.0 {
            bail!("{OP}: norm_eps: expected a finite value of at least 0, got {}", options.norm_eps);
        }
        Ok(Self {
            conv: CausalConv1d::new(conv_state, None, true)?,
            norm: GatedRmsNorm::new(options.norm_eps, options.gate)?,
            conv_state: conv_state.clone(),
            norm_weight: norm_weight.contiguous()?,
            rule,
            options,
            ring: None,
            launch: Launch::default(),
        })
    }

    /// Sequence `n` uses slot `slots[n]` of both states, or reads one slot and writes another; see
    /// [`crate::GdnDecode::with_slots`].
    pub fn with_slots(mut self, slots: impl Into<Slots>) -> Self {
        let slots = slots.into();
        self.conv = self.conv.with_slots(&slots);
        self.rule.slots = Some(slots);
        self
    }

    /// The tokens of all sequences are packed along one dimension: qkv is `[tokens, channels]`, z and the result
    /// `[tokens, HV * V]`, the gates `[tokens, HV]`. Sequences have up to 16 tokens each and may be empty.
    ///
    /// # Errors
    /// When `cu_seqlens` is not on the state's device.
    pub fn with_cu_seqlens(mut self, cu_seqlens: &CuSeqlens) -> Result<Self> {
        check_device(OP, "cu_seqlens", cu_seqlens.tensor(), self.rule.state.device())?;
        self.conv = self.conv.packed(cu_seqlens);
        self.rule.cu_seqlens = Some(cu_seqlens.clone());
        Ok(self)
    }

    /// The state is only read, and the tokens are appended to the ring of its slots, whose cursors are for the caller to move;
    /// the convolution's state is any memory of its shape. Up to 16 tokens a sequence.
    pub(crate) fn with_ring(mut self, ring: &Ring) -> Self {
        self.ring = Some(ring.clone());
        self
    }

    /// How the kernel is launched. With `overlap` it may read the weights, the old states and the slots, which are u32,
    /// while the kernel before it on the stream still runs, which must therefore write none of them.
    pub(crate) fn launched(mut self, launch: &Launch) -> Self {
        self.launch = launch.clone();
        self
    }

    /// Applies the op: `[batch, HV * V]`, or with several tokens `[batch, tokens, HV * V]`, in qkv's dtype.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit, or tensors share a storage that one of them is written in.
    pub fn forward(&self, qkv: &Tensor, z: &Tensor, conv_weight: &Tensor) -> Result<Tensor> {
        let [qkv, z, conv_weight] = self.prepare(qkv, z, conv_weight)?;
        apply3(self, self.launch.arena.as_ref(), &qkv, &z, &conv_weight)
    }

    /// The tensors as the op takes them, copied only where their rows are not contiguous, or where the sequences and
    /// tokens of z do not count through.
    pub(super) fn prepare(&self, qkv: &Tensor, z: &Tensor, conv_weight: &Tensor) -> Result<[Tensor; 3]> {
        let z = uniform_tokens(z, qkv.rank().saturating_sub(1))?;
        let (mut qkv, mut z, conv_weight) = (dense_rows(qkv)?, z, conv_weight.contiguous()?);
        if self.ring.is_some() {
            // Its kernel takes rows at multiples of 16 bytes.
            for x in [&mut qkv, &mut z] {
                if !on_16_bytes(x) {
                    *x = x.force_contiguous()?;
                }
            }
        }
        for (arg, tensor) in [("qkv", &qkv), ("z", &z), ("conv_weight", &conv_weight)] {
            self.check_input(arg, tensor.dtype(), storage_key(tensor))?;
            check_device(OP, arg, tensor, self.rule.state.device())?;
        }
        Ok([qkv, z, conv_weight])
    }

    /// Dtype of one of the three inputs, and that nothing is written where it lies.
    pub(super) fn check_input(&self, arg: &str, dtype: DType, key: usize) -> Result<()> {
        let io = self.conv_state.dtype();
        match arg {
            "conv_weight" => check_weight_dtype(OP, arg, dtype, io)?,
            _ => check_dtype(OP, arg, dtype, io)?,
        }
        check_not_state(OP, arg, key, &self.rule.state)?;
        check_not_conv_state(arg, key, &self.conv_state)
    }

    /// What the states say of the sizes: key heads, value heads, K, V, and the convolution's width and channels.
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

    pub(super) fn call(&self, x: &Layout, z: &Layout, conv_weight: &Layout) -> Result<Composed> {
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
            bail!(
                "{OP}: conv_weight: expected a contiguous tensor of shape {:?}, got {:?}",
                [channels, width],
                conv_weight.dims()
            );
        }
        let algo = self.options.algo;
        if !matches!(algo, StepAlgo::Auto | StepAlgo::Composed) && !fused_sizes(key_dim, value_dim, width) {
            bail!(
                "{OP}: algo: {algo:?} takes heads of size {FUSED_DIM} and a convolution of width {FUSED_WIDTH}, got \
                 {key_dim} (K), {value_dim} (V) and {width}"
            );
        }
        if algo == StepAlgo::Split && (tokens > 1 || lead == Lead::Packed) {
            let packed = if lead == Lead::Packed { " packed" } else { "" };
            bail!("{OP}: algo: Split takes one token a sequence, got {tokens}{packed}");
        }

        let x_heads = heads_layout(OP, "qkv", x, lead, lead_dims, (1, channels))?;
        let convolved = Layout::contiguous(x.dims());
        let keys = key_heads * key_dim;
        let column = |start, n| convolved.narrow(lead.rank(), start, n);
        let columns = [column(0, keys)?, column(keys, keys)?, column(2 * keys, value_size)?];
        let rule = Rule { lead, ..self.rule.clone() };
        let plan = StepPlan {
            rule: rule.plan(self.conv_state.dtype(), [&columns[0], &columns[1], &columns[2]])?,
            z: heads_layout(OP, "z", z, lead, lead_dims, (value_heads, value_dim))?,
            conv_weight_offset: conv_weight.start_offset(),
            conv_width: width,
            options: self.options,
            launch: self.launch.clone(),
            x: x_heads,
        };
        let (seq_stride, token_stride) = (x_heads.seq_stride, x_heads.token_stride);
        let conv_x = match lead {
            Lead::Packed => (Shape::from((lead_dims[0], channels)), vec![token_stride, 1]),
            _ => (Shape::from((lead_dims[0], tokens, channels)), vec![seq_stride, token_stride, 1]),
        };
        Ok(Composed {
            plan,
            rule,
            conv_x: Layout::new(conv_x.0, conv_x.1, x.start_offset()),
            columns,
            out_shape: lead_dims.iter().copied().chain([value_size]).collect::<Vec<_>>().into(),
        })
    }
}

pub(crate) fn fused_sizes(key_dim: usize, value_dim: usize, width: usize) -> bool {
    (key_dim, value_dim, width) == (FUSED_DIM, FUSED_DIM, FUSED_WIDTH)
}

/// Whether all rows begin at multiples of 16 bytes.
fn on_16_bytes(x: &Tensor) -> bool {
    let (layout, each) = (x.layout(), 16 / x.dtype().size_in_bytes());
    let lead = &layout.stride()[..layout.stride().len() - 1];
    layout.start_offset().is_multiple_of(each) && lead.iter().all(|stride| stride.is_multiple_of(each))
}

/// As `check_not_state` for the convolution's state.
fn check_not_conv_state(arg: &str, key: usize, conv_state: &Tensor) -> Result<()> {
    if key == storage_key(conv_state) {
        bail!("{OP}: {arg}: shares its storage with conv_state, which is written in place; pass a copy");
    }
    Ok(())
}

/// A decode step of a layer between its two projections: [`causal_conv1d`](crate::causal_conv1d) with SiLU, the gated
/// delta rule ([`gdn_decode_in_place`](crate::gdn_decode_in_place) has its formula) and
/// [`gated_rms_norm`](crate::gated_rms_norm), updating both states in place:
///
/// ```text
/// q, k, v = silu(causal_conv1d(qkv))
/// o = gated_delta_rule(q, k, v, a, b)
/// out = rms_norm(o) * act(z)
/// ```
///
/// On CUDA this is one kernel where K = V = 128 and the convolution's width is 4 ([`StepAlgo`] tells the rest), and
/// nothing is rounded between its parts; otherwise and on the CPU the three run one after the other.
///
/// | tensor | one token a sequence | up to 16 tokens a sequence | dtype |
/// |---|---|---|---|
/// | `qkv` | `[batch, channels]` | `[batch, tokens, channels]` | f32, bf16 or f16 |
/// | `z` | `[batch, HV * V]` | `[batch, tokens, HV * V]` | as qkv |
/// | `conv_weight` | `[channels, width]`, width 2 to 8 | same | as qkv, or f32 |
/// | `gates.a`, `gates.b` | `[batch, HV]` | `[batch, tokens, HV]` | f32, bf16 or f16 |
/// | `gates.a_log`, `gates.dt_bias` | `[HV]` | same | f32 |
/// | `norm_weight` | `[V]` | same | as qkv, or f32 |
/// | `conv_state` | `[batch, width - 1, channels]`, the last inputs, oldest first | same | as qkv |
/// | `state` | `[batch, HV, V, K]` | same | f32 or bf16 |
/// | result | `[batch, HV * V]` | `[batch, tokens, HV * V]` | as qkv |
///
/// `channels` is `2 * HK * K + HV * V`: q, k and v, each by head. The last dimension of z may be split into `[HV, V]`.
/// qkv, z and the gates may be strided views of one projection, and the states views of larger pools. K and V are 1 to
/// 256, HK divides HV. A padding row's output is zero where its z is finite.
///
/// # Errors
/// When a rank, shape, dtype or device does not fit, there are more than 16 tokens a sequence, or an input shares its
/// storage with a state, or the states with each other; the message names the argument, what was expected and what
/// came.
#[allow(clippy::too_many_arguments)]
pub fn gdn_step_in_place(
    qkv: &Tensor,
    z: &Tensor,
    conv_weight: &Tensor,
    gates: &Gates,
    norm_weight: &Tensor,
    conv_state: &Tensor,
    state: &Tensor,
    options: StepOptions,
) -> Result<Tensor> {
    GdnStep::new(gates.clone(), norm_weight, conv_state, state, options)?.forward(qkv, z, conv_weight)
}
