//! Matrices in e4m3 with a scale for each block, which stay so on CUDA.

use candle_core::{bail, DType, Result, Tensor};
use candle_gdn_core::device::Launch;

/// A weight `[out, in]` on CUDA, a byte a number. Up to 64 rows of x are multiplied with it as it is, if they fit into the
/// device's shared memory; for more it is dequantised to x's dtype into memory that is freed behind the product.
#[derive(Debug, Clone)]
pub struct BlockScaled {
    bytes: Tensor,
    scales: Tensor,
    block_rows: usize,
    below: Option<Tensor>,
}

/// Columns of a block.
pub const BLOCK_COLUMNS: usize = crate::abi::GDN_SCALE_COLUMNS;

impl BlockScaled {
    /// Numbers in e4m3, `bytes [out, in]` in u8, none of them NaN. `(i, j)` is to be multiplied by `(i / block_rows, j / 128)`
    /// of `scales [ceil(out / block_rows), ceil(in / 128)]` in f32. `in` is a multiple of 64.
    ///
    /// # Errors
    /// When shapes or dtypes are others, `block_rows` is no power of two, or a tensor is not contiguous on CUDA.
    pub fn new(bytes: Tensor, scales: Tensor, block_rows: usize) -> Result<Self> {
        let (outputs, inputs) = bytes.dims2()?;
        if bytes.dtype() != DType::U8 || inputs == 0 || !inputs.is_multiple_of(64) {
            bail!("weight in e4m3: expected shape [out, in] in U8, in a multiple of 64, got {bytes:?}")
        }
        if !block_rows.is_power_of_two() {
            bail!("weight in e4m3: expected blocks of 1, 2, 4, .. rows, got {block_rows}")
        }
        let want = [outputs.div_ceil(block_rows), inputs.div_ceil(BLOCK_COLUMNS)];
        if scales.dims() != want || scales.dtype() != DType::F32 {
            bail!("weight in e4m3: scales: expected shape {want:?} in F32, got {scales:?}")
        }
        for tensor in [&bytes, &scales] {
            if !tensor.device().is_cuda() || !tensor.device().same_device(bytes.device()) || !tensor.is_contiguous() {
                bail!("weight in e4m3: expected contiguous tensors on one CUDA device, got {tensor:?}")
            }
        }
        Ok(Self { bytes, scales, block_rows, below: None })
    }

    /// The same with the rows of `below [rows, in]`, in x's dtype, under its own.
    ///
    /// # Errors
    /// When it has another width or is not contiguous on the same device.
    pub fn with_rows_below(self, below: Tensor) -> Result<Self> {
        let fits =
            below.rank() == 2 && below.dims()[1] == self.inputs() && matches!(below.dtype(), DType::BF16 | DType::F16);
        if self.below.is_some() || !fits || !below.is_contiguous() || !below.device().same_device(self.bytes.device()) {
            bail!("weight in e4m3: rows below it: expected shape [rows, {}] in 16 bits, got {below:?}", self.inputs())
        }
        Ok(Self { below: Some(below), ..self })
    }

    /// A view of `count` rows from `first` on, where a block begins.
    ///
    /// # Errors
    /// When there are none such.
    pub fn rows(&self, first: usize, count: usize) -> Result<Self> {
        if !first.is_multiple_of(self.block_rows) {
            bail!("weight in e4m3: rows from {first}: expected a multiple of {}", self.block_rows)
        }
        let blocks = count.div_ceil(self.block_rows);
        Ok(Self {
            bytes: self.bytes.narrow(0, first, count)?,
            scales: self.scales.narrow(0, first / self.block_rows, blocks)?,
            block_rows: self.block_rows,
            below: None,
        })
    }

    /// Width of y.
    pub fn outputs(&self) -> usize {
        self.bytes.dims()[0] + self.below.as_ref().map_or(0, |below| below.dims()[0])
    }

    /// Width of x.
    pub fn inputs(&self) -> usize {
        self.bytes.dims()[1]
    }

    /// `[out, in]` in u8, without the rows below.
    pub fn bytes(&self) -> &Tensor {
        &self.bytes
    }

    /// `[ceil(out / block_rows), ceil(in / 128)]` in f32.
    pub fn scales(&self) -> &Tensor {
        &self.scales
    }

    /// Rows of a block.
    pub fn block_rows(&self) -> usize {
        self.block_rows
    }

    /// Rows below, in 16 bits.
    pub fn below(&self) -> Option<&Tensor> {
        self.below.as_ref()
    }

    /// `x [rows, in]` times the transpose of the weight. With `launch.overlap` the weight is read while the kernel before
    /// this one on the stream may still run.
    pub(crate) fn forward(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        {
            match crate::cuda::block_scaled::few_rows(x, self, launch)? {
                Some(y) => Ok(y),
                None => x.matmul(&crate::cuda::block_scaled::dense(self, x.dtype())?.t()?),
            }
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = launch;
            bail!("weight in e4m3: expected a build with CUDA, x is {x:?}")
        }
    }
}
