//! A projection without bias.

mod quantized;

use crate::cpu::matmul::{multiply, Product, Weights};
use crate::host;
use crate::weights::Matrix;
use candle_core::quantized::QTensor;
use candle_core::{Device, Result, Tensor};
use quantized::Quantized;
use std::sync::Arc;

/// `y = x wᵀ`, the weight `[out, in]` in the model's dtype or quantised.
#[derive(Debug, Clone)]
pub(crate) enum Linear {
    /// Packed for the kernels of [`crate::cpu`].
    Cpu(Arc<Weights>),
    /// As it was loaded.
    Device(Tensor),
    /// In ggml's types, all or some of its rows.
    Quantized(Quantized),
}

impl Linear {
    pub(crate) fn from_weight(weight: Tensor) -> Result<Self> {
        Ok(match weight.device().is_cpu() {
            true => Self::Cpu(Arc::new(host::pack(&weight)?)),
            false => Self::Device(weight),
        })
    }

    /// One projection of the rows of all parts, one below the other.
    pub(crate) fn stack(parts: Vec<Matrix>, device: &Device) -> Result<Self> {
        let dense = parts.iter().map(|part| match part {
            Matrix::Dense(weight) => Some(weight),
            _ => None,
        });
        match dense.collect::<Option<Vec<_>>>() {
            Some(weights) => match *weights {
                [weight] => Self::from_weight(weight.clone()),
                ref weights => Self::from_weight(Tensor::cat(weights, 0)?),
            },
            None => Quantized::new(parts, device).map(Self::Quantized),
        }
    }

    /// Of a quantised weight `[out, in]` that is in use elsewhere, too.
    pub(crate) fn of(weight: Arc<QTensor>) -> Result<Self> {
        Quantized::of(weight).map(Self::Quantized)
    }

    /// `x [.., in]` of the weight's dtype to `[.., out]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_with(x, false)
    }

    /// The same; with `overlap` a CUDA kernel may read the weight while the kernel before it on the stream still runs,
    /// which must therefore not write it.
    pub(crate) fn forward_with(&self, x: &Tensor, overlap: bool) -> Result<Tensor> {
        let mut dims = x.dims().to_vec();
        let in_dim = dims.pop().unwrap_or(0);
        match self {
            Self::Cpu(weights) => {
                dims.push(weights.outputs());
                let [y] = host::with_f32(x, |x| products(x, [weights]))?;
                host::tensor(y, dims, x.dtype())
            }
            Self::Device(weight) => {
                dims.push(weight.dim(0)?);
                // One GEMM over all rows: a batched one would read the weight once per sequence.
                let rows = x.elem_count() / in_dim.max(1);
                rows_by_weight(&x.reshape((rows, in_dim))?, weight, overlap)?.reshape(dims)
            }
            Self::Quantized(weight) => {
                let y = weight.forward(&x.reshape((x.elem_count() / in_dim.max(1), in_dim))?)?;
                dims.push(y.dim(1)?);
                y.reshape(dims)
            }
        }
    }
}

/// `x [rows, in]` times the transpose of `weight [out, in]`, by the kernel for few rows where it takes them.
fn rows_by_weight(x: &Tensor, weight: &Tensor, overlap: bool) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(y) = crate::cuda::linear::few_rows_if_faster(x, weight, overlap)? {
        return Ok(y);
    }
    let _ = overlap; // a GEMM waits for all before it
    matmul_t(x, weight)
}

/// `a [n, k]` times the transpose of `b [m, k]`.
pub(crate) fn matmul_t(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.matmul(&b.t()?)
}

/// The products of `x [rows, in]` with each of the weights, `[rows, out]`.
pub(crate) fn products<const N: usize>(x: &[f32], weights: [&Weights; N]) -> [Vec<f32>; N] {
    let mut outs = weights.map(|w| vec![0f32; x.len() / w.inputs() * w.outputs()]);
    let mut jobs = Vec::with_capacity(N);
    for (weights, out) in weights.into_iter().zip(&mut outs) {
        jobs.push(Product { x, rows: None, weights, matrix: 0, out });
    }
    multiply(&mut jobs);
    outs
}
