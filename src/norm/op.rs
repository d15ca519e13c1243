//! The op of the gated norm and the one check of its calls.

#[cfg(doc)]
use candle_core::CustomOp3;
use candle_core::{bail, Layout, Result, Shape};
use candle_gdn_core::check::*;

pub(super) const OP: &str = "gated_rms_norm";

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
/// [`gated_rms_norm`](super::gated_rms_norm).
#[derive(Debug, Clone, Copy)]
pub struct GatedRmsNorm {
    pub(super) eps: f64,
    pub(super) gate: GateActivation,
}

/// A checked call.
pub(super) struct NormPlan {
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

    pub(super) fn plan(&self, [x, z, weight]: [Arg<'_>; 3]) -> Result<NormPlan> {
        check_float(OP, "x", x.dtype)?;
        check_dtype(OP, "z", z.dtype, x.dtype)?;
        check_weight_dtype(OP, "weight", weight.dtype, x.dtype)?;
        for arg in [z, weight] {
            arg.check_same_device(OP, x)?;
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
        if weight.dims() != [dim] || !weight.is_contiguous() {
            bail!("{OP}: weight: expected a contiguous tensor of shape {:?}, got {:?}", [dim], weight.dims());
        }
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
}

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
