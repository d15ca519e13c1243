//! The short causal convolution before the rule.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod op;

pub use op::CausalConv1d;

use candle_core::{bail, CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::cpu::Element;
use candle_gdn_core::device::{apply2, elements, in_place_cpu, CpuWritten};
use candle_gdn_core::{cpu_slots, CpuSlots, CuSeqlens};
use half::{bf16, f16};
use op::{ConvPlan, OP};

impl CausalConv1d {
    /// Applies the op: y in x's shape and dtype, contiguous.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit, or an input shares its storage with the state.
    pub fn forward(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        apply2(self, None, &dense_rows(x)?, &weight.contiguous()?)
    }
}

impl CustomOp2 for CausalConv1d {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, xl: &Layout, weight: &CpuStorage, wl: &Layout) -> Result<(CpuStorage, Shape)> {
        let plan = self.plan(Arg::cpu("x", x, xl), Arg::cpu("weight", weight, wl))?;
        let slots = cpu_slots(OP, self.slots.as_ref(), plan.seqs.num_slots)?;
        let run = CpuRun { op: self, plan: &plan, x, weight, slots };
        let out = in_place_cpu(OP, &self.state, |state| run.run(state))?;
        Ok((out, plan.out_shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &candle_core::CudaStorage,
        xl: &Layout,
        weight: &candle_core::CudaStorage,
        wl: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let plan = self.plan(Arg::cuda("x", x, xl), Arg::cuda("weight", weight, wl))?;
        Ok((cuda::run(self, &plan, x, weight)?, plan.out_shape))
    }
}

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
        use CpuStorage::{BF16, F16, F32};
        Ok(match (self.x, self.weight) {
            (F32(x), F32(w)) => F32(self.typed::<f32, f32>(x, w, state)?),
            (BF16(x), BF16(w)) => BF16(self.typed::<bf16, bf16>(x, w, state)?),
            (BF16(x), F32(w)) => BF16(self.typed::<bf16, f32>(x, w, state)?),
            (F16(x), F16(w)) => F16(self.typed::<f16, f16>(x, w, state)?),
            (F16(x), F32(w)) => F16(self.typed::<f16, f32>(x, w, state)?),
            (x, w) => bail!(
                "{OP}: weight: expected x's dtype or f32, got {:?} with x in {:?}",
                storage_dtype(w),
                storage_dtype(x)
            ),
        })
    }

    fn typed<T: Element, W: Element>(&self, x: &[T], weight: &[W], (state, layout): CpuWritten<'_>) -> Result<Vec<T>> {
        let plan = self.plan;
        let stride = layout.stride()[0];
        let state = elements::<T>((OP, "state"), (state, layout))?;
        let mut out = vec![T::ZERO; plan.out_shape.elem_count()];
        let conv = cpu::Conv {
            x: heads(x, plan.x),
            weight: &weight[plan.weight_offset..],
            channels: plan.channels,
            width: plan.width,
            seqs: plan.seqs.cpu(self.op.cu_seqlens.as_ref()),
            slots: self.slots.of_stride(stride),
            max_tokens: plan.seqs.max_tokens,
            silu: self.op.silu,
        };
        conv.run(&mut out, state);
        Ok(out)
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
/// When a rank, shape, dtype or device does not fit, or an input shares its storage with the state; the message names
/// the argument, what was expected and what came.
pub fn causal_conv1d(
    x: &Tensor,
    weight: &Tensor,
    state: &Tensor,
    cu_seqlens: Option<&CuSeqlens>,
    silu: bool,
) -> Result<Tensor> {
    CausalConv1d::new(state, cu_seqlens, silu)?.forward(x, weight)
}
