//! The gated norm after the rule.

mod backward;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

#[cfg(doc)]
use candle_core::CustomOp3;
use candle_core::{bail, CpuStorage, Layout, Result, Shape, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::cpu::Element;
use candle_gdn_core::device::{apply3, Working};
use candle_gdn_core::{by_dtype, custom_op, host};

const OP: &str = "gated_rms_norm";

/// Activation of an output gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum GateActivation {
    /// `z * sigmoid(z)`
    #[default]
    Silu,
    /// `sigmoid(z)`
    Sigmoid,
}

/// RMS norm of each head times an activated gate, as a [`CustomOp3`] over (x, z, weight); see
/// [`gated_rms_norm`].
#[derive(Debug, Clone, Copy)]
pub struct GatedRmsNorm {
    eps: f64,
    gate: GateActivation,
}

/// A checked call.
struct NormPlan {
    pub x: HeadsLayout,
    pub z: HeadsLayout,
    pub tokens: usize,
    pub heads: usize,
    pub dim: usize,
    pub weight_offset: usize,
    pub out_shape: Shape,
}

impl GatedRmsNorm {
    /// # Errors
    /// When `eps` is negative or not finite.
    pub fn new(eps: f64, gate: GateActivation) -> Result<Self> {
        if !eps.is_finite() || eps < 0.0 {
            bail!("{OP}: eps: expected a finite value of at least 0, got {eps}");
        }
        Ok(Self { eps, gate })
    }

    /// Applies the op: the result has x's shape and dtype, contiguous.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit; the message names the argument.
    pub fn forward(&self, x: &Tensor, z: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let _working = Working::new(x.device());
        if x.rank() < 2 {
            bail!("{OP}: x: expected shape [.., heads, dim], got {:?}", x.dims());
        }
        for (arg, tensor) in [("z", z), ("weight", weight)] {
            check_device(OP, arg, tensor, x.device())?;
        }
        let lead = x.rank() - 2;
        let (x, z, weight) = (uniform_tokens(x, lead)?, uniform_tokens(z, lead)?, weight.contiguous()?);
        if [&x, &z, &weight].iter().any(|tensor| tensor.track_op()) {
            return x.apply_op3(&z, &weight, *self);
        }
        apply3(self, None, [("x", &x), ("z", &z), ("weight", &weight)])
    }

    fn plan(&self, [x, z, weight]: [Arg<'_>; 3]) -> Result<NormPlan> {
        check_float(OP, "x", x.dtype)?;
        check_dtype(OP, "z", z.dtype, x.dtype)?;
        check_weight_dtype(OP, "weight", weight.dtype, x.dtype)?;
        for arg in [z, weight] {
            arg.check_place(OP, &x.device(), &[])?;
        }
        let (x, z, weight) = (x.layout, z.layout, weight.layout);
        let rank = x.dims().len();
        if rank < 2 {
            bail!("{OP}: x: expected shape [.., heads, dim], got {:?}", x.dims());
        }
        let (lead, heads, dim) = (&x.dims()[..rank - 2], x.dims()[rank - 2], x.dims()[rank - 1]);
        if !(1..=256).contains(&dim) {
            bail!("{OP}: x: expected heads of size 1 to 256, got shape {:?}", x.dims());
        }
        check_dense(OP, "weight", weight, &[dim])?;
        Ok(NormPlan {
            x: flat_layout("x", x, lead, (heads, dim))?,
            z: flat_layout("z", z, lead, (heads, dim))?,
            tokens: lead.iter().product(),
            heads,
            dim,
            weight_offset: weight.start_offset(),
            out_shape: x.shape().clone(),
        })
    }

    pub(crate) fn on_cpu(&self, [x, z, weight]: [CpuArg<'_>; 3]) -> CpuOutput {
        let plan = self.plan([Arg::cpu("x", x), Arg::cpu("z", z), Arg::cpu("weight", weight)])?;
        let (x, z, weight) = (x.0, z.0, &host::values(weight.0, plan.weight_offset, plan.dim)?[..]);
        let out = by_dtype!(x, z => self.run(&plan, [x, z], weight), else bail!("{OP}: z: expected x's dtype"));
        Ok((out, plan.out_shape))
    }

    fn run<T: Element>(&self, plan: &NormPlan, xz: [&Vec<T>; 2], weight: &[f32]) -> CpuStorage {
        let mut out = vec![T::ZERO; plan.out_shape.elem_count()];
        self.rows(plan, xz, weight).run(&mut out);
        T::storage(out)
    }

    fn rows<'a, T>(&self, plan: &NormPlan, [x, z]: [&'a Vec<T>; 2], weight: &'a [f32]) -> cpu::Norm<'a, T> {
        cpu::Norm {
            x: heads(x, plan.x),
            z: heads(z, plan.z),
            weight,
            tokens: plan.tokens,
            heads: plan.heads,
            eps: self.eps as f32,
            sigmoid: self.gate == GateActivation::Sigmoid,
        }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn on_cuda(&self, [x, z, weight]: [CudaArg<'_>; 3]) -> CudaOutput {
        let plan = self.plan([Arg::cuda("x", x), Arg::cuda("z", z), Arg::cuda("weight", weight)])?;
        Ok((cuda::run(self, &plan, x.0, z.0, weight.0)?, plan.out_shape))
    }
}

custom_op!(differentiable CustomOp3 for GatedRmsNorm, OP, x x_layout, z z_layout, weight weight_layout);

fn flat_layout(arg: &str, layout: &Layout, lead: &[usize], (heads, dim): (usize, usize)) -> Result<HeadsLayout> {
    let (dims, stride, r) = (layout.dims(), layout.stride(), lead.len());
    let fits = dims.len() > r && dims[..r] == *lead && (dims[r..] == [heads, dim] || dims[r..] == [heads * dim]);
    if !fits {
        let want: Vec<_> = lead.iter().copied().chain([heads, dim]).collect();
        bail!("{OP}: {arg}: expected shape {want:?} (the last two may be merged), got {dims:?}");
    }
    let Some(token_stride) = token_stride(&dims[..r], &stride[..r]) else {
        bail!("{OP}: {arg}: expected leading dimensions with one common stride, got {stride:?}");
    };
    if stride[dims.len() - 1] != 1 && dims[dims.len() - 1] > 1 {
        bail!("{OP}: {arg}: expected a contiguous last dimension, got strides {stride:?}");
    }
    let head_stride = if dims.len() == r + 1 { dim } else { stride[r] };
    Ok(HeadsLayout { offset: layout.start_offset(), seq_stride: 0, token_stride, head_stride })
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
/// Everything between reading and the last rounding is f32. All three tensors have gradients; the sum of the weight's over tokens
/// and heads has a fixed order, so that equal inputs give equal bits.
///
/// # Errors
/// When a rank, shape, dtype or device does not fit; the message names the argument, what was expected and what came.
pub fn gated_rms_norm(x: &Tensor, z: &Tensor, weight: &Tensor, eps: f64, gate: GateActivation) -> Result<Tensor> {
    GatedRmsNorm::new(eps, gate)?.forward(x, z, weight)
}
