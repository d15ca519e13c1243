//! Dense products without bias, by the kernels of this crate where they are the fastest.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod plan;

use candle_core::{bail, DType, Device, Module, Result, Tensor};
use candle_gdn_core::check::{check_device, check_dtype, check_float, check_untracked, zeros};
use candle_gdn_core::cpu::matmul::{products, Weights};
use candle_gdn_core::device::{Launch, Working};
use candle_gdn_core::host;
use std::sync::Arc;

/// A dense weight `[out, in]` in f32, bf16 or f16, which multiplies `y = x wᵀ`.
///
/// On the CPU the weight is packed when it is made, for products of this crate; matrices in f32 that bf16 or f16 holds
/// exactly are kept in it. On CUDA up to 16 rows in bf16 and f16 use a kernel of this crate where it is faster than
/// cuBLAS, which multiplies the rest. On any device the weight is copied: what an optimiser or `VarMap::load` writes later is not
/// seen, and there is no backward pass: to train, use a `candle_nn::Linear`.
#[derive(Debug, Clone)]
pub struct DenseWeight {
    storage: Storage,
    /// Those of the tensor it was made of, and of x: panels alone do not show them.
    dtype: DType,
    device: Device,
}

#[derive(Debug, Clone)]
enum Storage {
    /// Packed for the CPU kernels.
    Panels(Arc<Weights>),
    /// On a device.
    Tensor(Tensor),
}

impl DenseWeight {
    /// # Errors
    /// When the weight is no matrix of f32, bf16 or f16, or has no rows or columns.
    pub fn new(weight: Tensor) -> Result<Self> {
        let _working = Working::new(weight.device());
        check_float("DenseWeight", "weight", weight.dtype())?;
        if weight.rank() != 2 || weight.elem_count() == 0 {
            bail!("DenseWeight: weight: expected shape [out, in], both at least 1, got {:?}", weight.dims());
        }
        let storage = match weight.device().is_cpu() {
            true => Storage::Panels(Arc::new(host::pack(&weight)?)),
            false => Storage::Tensor(weight.detach().force_contiguous()?),
        };
        Ok(Self { storage, dtype: weight.dtype(), device: weight.device().clone() })
    }

    /// That of x and y.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// That of x and y.
    pub fn device(&self) -> &Device {
        &self.device
    }
    /// Width of y.
    pub fn outputs(&self) -> usize {
        match &self.storage {
            Storage::Panels(weights) => weights.outputs(),
            Storage::Tensor(weight) => weight.dims()[0],
        }
    }

    /// Width of x.
    pub fn inputs(&self) -> usize {
        match &self.storage {
            Storage::Panels(weights) => weights.inputs(),
            Storage::Tensor(weight) => weight.dims()[1],
        }
    }

    /// `x [.., in]` of the weight's dtype to `[.., out]`. With `launch.overlap` a CUDA kernel may read the weight while
    /// the kernel before it on the stream still runs, which must therefore not write it.
    pub(crate) fn multiply(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        let _working = Working::new(x.device());
        check_float("DenseWeight", "x", x.dtype())?;
        check_dtype("DenseWeight", "x", x.dtype(), self.dtype)?;
        check_device("DenseWeight", "x", x, &self.device)?;
        check_untracked("DenseWeight", "x", x)?;
        let mut dims = x.dims().to_vec();
        let inputs = dims.pop().unwrap_or(0);
        if inputs != self.inputs() {
            bail!("DenseWeight: x: expected shape [.., {}], got {:?}", self.inputs(), x.dims());
        }
        dims.push(self.outputs());
        match &self.storage {
            Storage::Panels(weights) => {
                let [y] = host::with_f32(x, |x| products(x, [weights]))?;
                host::tensor(y, dims, x.dtype())
            }
            Storage::Tensor(weight) => {
                // One product of all rows: a batched one would read the weight once per sequence.
                let rows = x.elem_count() / inputs.max(1);
                multiply(&x.reshape((rows, inputs))?, weight, launch)?.reshape(dims)
            }
        }
    }
}

impl Module for DenseWeight {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.multiply(x, &Launch::default())
    }
}

/// `x [rows, in]` times the transpose of `weight [out, in]` on one device, both in f32, bf16 or f16, by the kernel for few
/// rows where it is faster. Candle multiplies what is tracked for gradients, and has their backward pass.
///
/// # Errors
/// When a dtype, shape or device does not fit.
pub fn multiply(x: &Tensor, weight: &Tensor, launch: &Launch) -> Result<Tensor> {
    let _working = Working::new(x.device());
    check_float("multiply", "x", x.dtype())?;
    check_dtype("multiply", "weight", weight.dtype(), x.dtype())?;
    let ((rows, inputs), (outputs, wanted)) = (x.dims2()?, weight.dims2()?);
    if inputs != wanted {
        bail!("multiply: x: expected {wanted} columns (the weight's inputs), got {inputs}");
    }
    if rows == 0 && !x.track_op() && !weight.track_op() {
        return zeros("multiply", "x", &[0, outputs], x.dtype(), x.device());
    }
    #[cfg(feature = "cuda")]
    if plan::kernel_wins(rows, inputs, outputs, launch.overlap) {
        if let Some(y) = cuda::multiply(x, weight, launch)? {
            return Ok(y);
        }
    }
    let _ = launch; // a GEMM waits for all before it
    x.matmul(&weight.t()?)
}
