//! The gated norm after the rule.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod op;

pub use op::{GateActivation, GatedRmsNorm};

use candle_core::{bail, CpuStorage, CustomOp3, Layout, Result, Shape, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::cpu::Element;
use candle_gdn_core::device::apply3;
use half::{bf16, f16};
use op::{NormPlan, OP};

impl GatedRmsNorm {
    /// Applies the op: the result has x's shape and dtype, contiguous.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit; the message names the argument.
    pub fn forward(&self, x: &Tensor, z: &Tensor, weight: &Tensor) -> Result<Tensor> {
        if x.rank() < 2 {
            bail!("{OP}: x: expected shape [.., heads, dim], got {:?}", x.dims());
        }
        let lead = x.rank() - 2;
        let (x, z, weight) = (uniform_tokens(x, lead)?, uniform_tokens(z, lead)?, weight.contiguous()?);
        apply3(self, None, &x, &z, &weight)
    }

    fn run<T: Element, W: Element>(&self, plan: &NormPlan, x: &[T], z: &[T], weight: &[W]) -> Vec<T> {
        let mut out = vec![T::ZERO; plan.out_shape.elem_count()];
        let norm = cpu::Norm {
            x: heads(x, plan.x),
            z: heads(z, plan.z),
            weight: &weight[plan.weight_offset..plan.weight_offset + plan.dim],
            tokens: plan.tokens,
            heads: plan.heads,
            eps: self.eps as f32,
            sigmoid: self.gate == GateActivation::Sigmoid,
        };
        norm.run(&mut out);
        out
    }
}

impl CustomOp3 for GatedRmsNorm {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        xl: &Layout,
        z: &CpuStorage,
        zl: &Layout,
        weight: &CpuStorage,
        wl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        use CpuStorage::{BF16, F16, F32};
        let args = [Arg::cpu("x", x, xl), Arg::cpu("z", z, zl), Arg::cpu("weight", weight, wl)];
        let plan = self.plan(args)?;
        let out = match (x, z, weight) {
            (F32(x), F32(z), F32(w)) => F32(self.run(&plan, x, z, w)),
            (BF16(x), BF16(z), BF16(w)) => BF16(self.run::<bf16, bf16>(&plan, x, z, w)),
            (BF16(x), BF16(z), F32(w)) => BF16(self.run::<bf16, f32>(&plan, x, z, w)),
            (F16(x), F16(z), F16(w)) => F16(self.run::<f16, f16>(&plan, x, z, w)),
            (F16(x), F16(z), F32(w)) => F16(self.run::<f16, f32>(&plan, x, z, w)),
            (x, z, w) => bail!(
                "{OP}: x, z, weight: expected one float dtype (weight may be f32), got {:?}, {:?} and {:?}",
                storage_dtype(x),
                storage_dtype(z),
                storage_dtype(w)
            ),
        };
        Ok((out, plan.out_shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &candle_core::CudaStorage,
        xl: &Layout,
        z: &candle_core::CudaStorage,
        zl: &Layout,
        weight: &candle_core::CudaStorage,
        wl: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let args = [Arg::cuda("x", x, xl), Arg::cuda("z", z, zl), Arg::cuda("weight", weight, wl)];
        let plan = self.plan(args)?;
        Ok((cuda::run(self, &plan, x, z, weight)?, plan.out_shape))
    }
}

/// RMS norm of each head, times its weight, times an activated gate (Qwen3-Next's `linear_attn.norm`):
///
/// ```text
/// out = x * rsqrt(mean(x^2) + eps) * weight * act(z)
/// ```
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `x` | `[.., heads, dim]`, dim 1 to 256 | f32, bf16 or f16 |
/// | `z` | as x, or with the last two dimensions merged; may be a strided view | as x |
/// | `weight` | `[dim]`, plain (not zero-centred) | as x, or f32 |
/// | result | as x, contiguous | as x |
///
/// Everything between reading and the last rounding is f32.
///
/// # Errors
/// When a rank, shape, dtype or device does not fit; the message names the argument, what was expected and what came.
pub fn gated_rms_norm(x: &Tensor, z: &Tensor, weight: &Tensor, eps: f64, gate: GateActivation) -> Result<Tensor> {
    GatedRmsNorm::new(eps, gate)?.forward(x, z, weight)
}
