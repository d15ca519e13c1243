//! A projection without bias.

use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;

/// `y = x wᵀ`, the weight `[out, in]` in the model's dtype.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    weight: Tensor,
}

impl Linear {
    /// Reads `weight` at `vb`; another shape than `[out, in]` is an error that names the tensor.
    pub(crate) fn load(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self { weight: vb.get((out_dim, in_dim), "weight")? })
    }

    pub(crate) fn from_weight(weight: Tensor) -> Self {
        Self { weight }
    }

    /// `x [.., in]` of the weight's dtype to `[.., out]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut dims = x.dims().to_vec();
        let in_dim = dims.pop().unwrap_or(0);
        dims.push(self.weight.dim(0)?);
        // One GEMM over all rows: a batched one would read the weight once per sequence.
        let rows = x.elem_count() / in_dim.max(1);
        matmul_t(&x.reshape((rows, in_dim))?, &self.weight)?.reshape(dims)
    }
}

/// `a [n, k]` times the transpose of `b [m, k]`.
pub(crate) fn matmul_t(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if a.device().is_cpu() && a.dtype() == DType::BF16 {
        // candle would widen the whole storage behind `b`, all experts of a layer for one of them.
        let c = a.to_dtype(DType::F32)?.matmul(&b.to_dtype(DType::F32)?.t()?)?;
        return c.to_dtype(DType::BF16);
    }
    a.matmul(&b.t()?)
}
