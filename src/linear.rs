//! A dense projection without bias, by the kernels of this crate where they are the fastest.

use crate::block_scaled::BlockScaled;
use candle_core::{bail, Module, Result, Tensor};
use candle_gdn_core::cpu::matmul::{multiply, Product, Weights};
use candle_gdn_core::device::Launch;
use candle_gdn_core::host;
use std::sync::Arc;

/// `y = x wᵀ` with a weight `[out, in]` in f32, bf16 or f16.
///
/// On the CPU the weight is packed when it is made, for products of this crate; matrices in f32 that bf16 or f16 holds
/// exactly are kept in it. On CUDA up to 32 rows in bf16 and f16 take a kernel of this crate where it is faster than
/// cuBLAS, which takes the rest.
#[derive(Debug, Clone)]
pub struct Linear(Weight);

/// Where the weight lies.
#[derive(Debug, Clone)]
pub enum Weight {
    /// Packed for the CPU kernels.
    Packed(Arc<Weights>),
    /// As it was given, on a device.
    Tensor(Tensor),
    /// In e4m3, on CUDA.
    BlockScaled(BlockScaled),
}

impl Linear {
    /// # Errors
    /// When the weight is no matrix of a float dtype.
    pub fn new(weight: Tensor) -> Result<Self> {
        if weight.rank() != 2 {
            bail!("Linear: weight: expected shape [out, in], got {:?}", weight.dims());
        }
        Ok(Self(match weight.device().is_cpu() {
            true => Weight::Packed(Arc::new(host::pack(&weight)?)),
            false => Weight::Tensor(weight),
        }))
    }

    /// Width of y.
    pub fn outputs(&self) -> usize {
        match &self.0 {
            Weight::Packed(weights) => weights.outputs(),
            Weight::Tensor(weight) => weight.dims()[0],
            Weight::BlockScaled(weight) => weight.outputs(),
        }
    }

    /// Width of x.
    pub fn inputs(&self) -> usize {
        match &self.0 {
            Weight::Packed(weights) => weights.inputs(),
            Weight::Tensor(weight) => weight.dims()[1],
            Weight::BlockScaled(weight) => weight.inputs(),
        }
    }

    #[doc(hidden)]
    pub fn weight(&self) -> &Weight {
        &self.0
    }

    /// `silu(gate) * up` of `x [rows, in]` in one kernel, the weight's rows being the gate's, then up's; `None` where none
    /// takes them or a product and a kernel behind it are faster.
    #[cfg(feature = "cuda")]
    #[doc(hidden)]
    pub fn swiglu_if_faster(&self, x: &Tensor, launch: &Launch) -> Result<Option<Tensor>> {
        match &self.0 {
            Weight::Packed(_) => Ok(None),
            Weight::Tensor(weight) => crate::cuda::linear::few_rows_swiglu_if_faster(x, weight, launch),
            Weight::BlockScaled(weight) => crate::cuda::block_scaled::few_rows_swiglu(x, weight, launch),
        }
    }

    /// `x [.., in]` of the weight's dtype to `[.., out]`. With `launch.overlap` a CUDA kernel may read the weight while
    /// the kernel before it on the stream still runs, which must therefore not write it.
    #[doc(hidden)]
    pub fn forward_launched(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        let mut dims = x.dims().to_vec();
        let inputs = dims.pop().unwrap_or(0);
        if inputs != self.inputs() {
            bail!("Linear: x: expected shape [.., {}], got {:?}", self.inputs(), x.dims());
        }
        dims.push(self.outputs());
        match &self.0 {
            Weight::Packed(weights) => {
                let [y] = host::with_f32(x, |x| products(x, [weights]))?;
                host::tensor(y, dims, x.dtype())
            }
            Weight::Tensor(weight) => {
                // One product of all rows: a batched one would read the weight once per sequence.
                let rows = x.elem_count() / inputs.max(1);
                rows_by_weight(&x.reshape((rows, inputs))?, weight, launch)?.reshape(dims)
            }
            Weight::BlockScaled(weight) => {
                let rows = x.elem_count() / inputs.max(1);
                weight.forward(&x.reshape((rows, inputs))?, launch)?.reshape(dims)
            }
        }
    }
}

impl From<BlockScaled> for Linear {
    fn from(weight: BlockScaled) -> Self {
        Self(Weight::BlockScaled(weight))
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_launched(x, &Launch::default())
    }
}

/// `x [rows, in]` times the transpose of `weight [out, in]`, by the kernel for few rows where it takes them.
fn rows_by_weight(x: &Tensor, weight: &Tensor, launch: &Launch) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(y) = crate::cuda::linear::few_rows_if_faster(x, weight, launch)? {
        return Ok(y);
    }
    let _ = launch; // a GEMM waits for all before it
    x.matmul(&weight.t()?)
}

/// The products of `x [rows, in]` with each of the weights, `[rows, out]`.
pub fn products<const N: usize>(x: &[f32], weights: [&Weights; N]) -> [Vec<f32>; N] {
    let mut outs = weights.map(|w| vec![0f32; x.len() / w.inputs() * w.outputs()]);
    let mut jobs = Vec::with_capacity(N);
    for (weights, out) in weights.into_iter().zip(&mut outs) {
        jobs.push(Product { x, rows: None, weights, matrix: 0, out });
    }
    multiply(&mut jobs);
    outs
}
