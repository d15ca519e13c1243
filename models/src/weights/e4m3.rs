//! Matrices in e4m3 with a scale for each block, which stay so on CUDA.

use candle_core::{bail, DType, Result, Tensor};

/// A weight `[out, in]` on CUDA, a byte a number. Its kernel multiplies up to 64 rows of x as it is stored, if they fit into
/// the device's shared memory; for more it is dequantised to x's dtype into memory that is freed after the product.
#[derive(Debug, Clone)]
pub(crate) struct E4m3 {
    /// `[out, in]` in u8.
    pub bytes: Tensor,
    /// `[ceil(out / block_rows), ceil(in / 128)]` in f32.
    pub scales: Tensor,
    pub block_rows: usize,
}

/// Columns of a block.
pub(crate) const BLOCK_COLUMNS: usize = crate::abi::scaled::GDN_SCALE_COLUMNS;

impl E4m3 {
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
        Ok(Self { bytes, scales, block_rows })
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
        })
    }
}
