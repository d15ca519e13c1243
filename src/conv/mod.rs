//! The short causal convolution before the rule.

mod backward;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

#[cfg(doc)]
use candle_core::CustomOp2;
use candle_core::{bail, CpuStorage, Layout, Result, Shape, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::cpu::Element;
use candle_gdn_core::device::{apply2, elements, in_place_cpu, CpuWritten, Working};
use candle_gdn_core::{by_dtype, cpu_slots, custom_op, CpuSlots, CuSeqlens, SequencePlan, Slots};

pub use backward::causal_conv1d_diff;

const OP: &str = "causal_conv1d";

/// Depthwise causal convolution over time with an optional SiLU, as a [`CustomOp2`] over (x, weight); see
/// [`causal_conv1d`] for shapes. The op holds the state and updates it when it is applied.
#[derive(Debug, Clone)]
pub struct CausalConv1d {
    state: Tensor,
    slots: Option<Slots>,
    cu_seqlens: Option<CuSeqlens>,
    silu: bool,
}

/// A checked call.
struct ConvPlan {
    pub x: HeadsLayout,
    pub channels: usize,
    pub width: usize,
    pub seqs: SequencePlan,
    pub weight_offset: usize,
    pub out_shape: Shape,
}

impl CausalConv1d {
    /// With `cu_seqlens` the tokens of all sequences are packed along one dimension.
    ///
    /// # Errors
    /// When the dtype or shape of the state does not fit; the message names the argument.
    pub fn new(state: &Tensor, cu_seqlens: Option<&CuSeqlens>, silu: bool) -> Result<Self> {
        check_float(OP, "state", state.dtype())?;
        if state.rank() != 3 {
            bail!("{OP}: state: expected shape [slots, width - 1, channels], got {:?}", state.dims());
        }
        check_state_strides(OP, "state", state.layout())?;
        check_untracked(OP, "state", state)?;
        if let Some(cu) = cu_seqlens {
            check_device(OP, "cu_seqlens", cu.tensor(), state.device())?;
        }
        Ok(Self::unchecked(state, cu_seqlens, None, silu))
    }

    /// An op on arguments that a layer or a step has checked.
    pub(crate) fn unchecked(state: &Tensor, cu_seqlens: Option<&CuSeqlens>, slots: Option<&Slots>, silu: bool) -> Self {
        Self { state: state.clone(), slots: slots.cloned(), cu_seqlens: cu_seqlens.cloned(), silu }
    }

    /// Sequence `n` uses slot `slots[n]` of the state, or reads one slot and writes another; see
    /// [`GdnDecode::with_slots`](crate::ops::GdnDecode::with_slots).
    pub fn with_slots(mut self, slots: impl Into<Slots>) -> Self {
        self.slots = Some(slots.into());
        self
    }

    /// Applies the op: y in x's shape and dtype, contiguous.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit, an input shares its storage with the state, or one is tracked for
    /// gradients.
    pub fn forward(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let _working = Working::new(self.state.device());
        for (arg, tensor) in [("x", x), ("weight", weight)] {
            check_device(OP, arg, tensor, self.state.device())?;
        }
        apply2(self, None, [("x", &dense_rows(x)?), ("weight", &weight.contiguous()?)])
    }

    fn plan(&self, [x, weight]: [Arg<'_>; 2]) -> Result<ConvPlan> {
        check_dtype(OP, "x", x.dtype, self.state.dtype())?;
        check_weight_dtype(OP, "weight", weight.dtype, x.dtype)?;
        for arg in [x, weight] {
            arg.check_place(OP, self.state.device(), &[("the state", &self.state)])?;
        }
        let (_, history, channels) = self.state.dims3()?;
        let width = history + 1;
        if !(2..=8).contains(&width) || channels == 0 {
            bail!(
                "{OP}: state: expected [slots, width - 1, channels] with a width of 2 to 8, got {:?}",
                self.state.dims()
            );
        }
        let (cu_seqlens, slots) = (self.cu_seqlens.as_ref(), self.slots.as_ref());
        ConvPlan::new(OP, [x.layout, weight.layout], (channels, width), cu_seqlens, |lead| {
            SequencePlan::new((OP, "x"), lead, cu_seqlens, slots, &self.state)
        })
    }

    pub(crate) fn on_cpu(&self, [x, weight]: [CpuArg<'_>; 2]) -> CpuOutput {
        let plan = self.plan([Arg::cpu("x", x), Arg::cpu("weight", weight)])?;
        let slots = cpu_slots(OP, self.slots.as_ref(), plan.seqs.num_slots)?;
        let run = CpuRun { op: self, plan: &plan, x: x.0, weight: weight.0, slots };
        let out = in_place_cpu(OP, &self.state, |state| run.run(state))?;
        Ok((out, plan.out_shape))
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn on_cuda(&self, [x, weight]: [CudaArg<'_>; 2]) -> CudaOutput {
        let plan = self.plan([Arg::cuda("x", x), Arg::cuda("weight", weight)])?;
        Ok((cuda::run(self, &plan, x.0, weight.0)?, plan.out_shape))
    }
}

impl ConvPlan {
    /// Checks x and the weight against the sizes, and each other's sequences: `seqs` is of x's leading dimensions.
    fn new(
        op: &str,
        [x, weight]: [&Layout; 2],
        (channels, width): (usize, usize),
        cu_seqlens: Option<&CuSeqlens>,
        seqs: impl FnOnce((Lead, &[usize])) -> Result<SequencePlan>,
    ) -> Result<Self> {
        check_dense(op, "weight", weight, &[channels, width])?;
        let lead = Lead::of_tokens(cu_seqlens);
        if x.dims().len() != lead.rank() + 1 {
            let packed = if lead == Lead::Batched { "; packed tokens need cu_seqlens" } else { "" };
            bail!("{op}: x: expected shape [{}, {channels}], got {:?}{packed}", lead.names(), x.dims());
        }
        let lead_dims = &x.dims()[..lead.rank()];
        Ok(Self {
            seqs: seqs((lead, lead_dims))?,
            x: heads_layout(op, "x", x, lead, lead_dims, (1, channels))?,
            channels,
            width,
            weight_offset: weight.start_offset(),
            out_shape: x.shape().clone(),
        })
    }

    /// What the state has of each sequence: `[sequences, width - 1, channels]`.
    fn window_shape(&self) -> [usize; 3] {
        [self.seqs.count, self.width - 1, self.channels]
    }

    fn on_cpu<'a, T, W>(
        &self,
        (x, weight): (&'a [T], &'a [W]),
        cu_seqlens: Option<&'a CuSeqlens>,
        slots: candle_gdn_core::cpu::Slots<'a>,
        silu: bool,
    ) -> cpu::Conv<'a, T, W> {
        cpu::Conv {
            x: heads(x, self.x),
            weight,
            channels: self.channels,
            width: self.width,
            seqs: self.seqs.cpu(cu_seqlens),
            slots,
            max_tokens: self.seqs.max_tokens,
            silu,
        }
    }
}

custom_op!(CustomOp2 for CausalConv1d, OP, x x_layout, weight weight_layout);

/// The run itself, with the state's lock held for writing.
struct CpuRun<'a> {
    op: &'a CausalConv1d,
    plan: &'a ConvPlan,
    x: &'a CpuStorage,
    weight: &'a CpuStorage,
    slots: CpuSlots,
}

impl CpuRun<'_> {
    fn run(&self, state: CpuWritten<'_>) -> Result<CpuStorage> {
        let x = self.x;
        by_dtype!(x => self.typed(x, state), else bail!("{OP}: x: expected dtype f32, bf16 or f16, got {:?}", storage_dtype(x)))
    }

    fn typed<T: Element>(&self, x: &[T], state: CpuWritten<'_>) -> Result<CpuStorage> {
        match (self.weight, T::slice(self.weight)) {
            (_, Some(weight)) => self.weighted(x, weight, state),
            (CpuStorage::F32(weight), None) => self.weighted(x, weight, state),
            (w, None) => bail!("{OP}: weight: expected x's dtype or f32, got {:?}", storage_dtype(w)),
        }
    }

    fn weighted<T: Element, W: Element>(
        &self,
        x: &[T],
        weight: &[W],
        (state, layout): CpuWritten<'_>,
    ) -> Result<CpuStorage> {
        let (plan, slots) = (self.plan, self.slots.of_stride(layout.stride()[0]));
        let state = elements::<T>((OP, "state"), (state, layout))?;
        let mut out = vec![T::ZERO; plan.out_shape.elem_count()];
        let weight = &weight[plan.weight_offset..];
        plan.on_cpu((x, weight), self.op.cu_seqlens.as_ref(), slots, self.op.silu).run(&mut out, state);
        Ok(T::storage(out))
    }
}

/// Depthwise causal convolution over time, then SiLU where `silu` is set, updating `state` in place:
///
/// ```text
/// y[t, c] = silu(sum_j weight[c, j] * x[t - width + 1 + j, c])
/// ```
///
/// where inputs before the sequence come from the state. This is the `conv1d` of Qwen3-Next's Gated DeltaNet layers;
/// its weight `[channels, 1, width]` goes in with the middle dimension squeezed.
///
/// | tensor | without `cu_seqlens` | with `cu_seqlens` (packed) | dtype |
/// |---|---|---|---|
/// | `x` | `[batch, tokens, channels]`, may be a strided view | `[tokens, channels]` | f32, bf16 or f16 |
/// | `weight` | `[channels, width]`, width 2 to 8 | same | as x, or f32 |
/// | `state` | `[batch, width - 1, channels]`, the last inputs, oldest first | `[sequences, ..]` | as x |
/// | result y | as x, contiguous | as x | as x |
///
/// Sums are f32. One token (`tokens` = 1) is the decode update.
///
/// # Errors
/// When a rank, shape, dtype or device does not fit, an input shares its storage with the state, or a tensor is tracked for
/// gradients, since [`causal_conv1d_diff`] is the one with a backward pass; the message names the argument, what was expected and what came.
pub fn causal_conv1d(
    x: &Tensor,
    weight: &Tensor,
    state: &Tensor,
    cu_seqlens: Option<&CuSeqlens>,
    silu: bool,
) -> Result<Tensor> {
    CausalConv1d::new(state, cu_seqlens, silu)?.forward(x, weight)
}
