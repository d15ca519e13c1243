//! Matrices as ggml stores them, on the host: rows of whole blocks, which can be moved about without being read.

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{bail, CpuStorage, DType, Device, Result, Shape, Storage, Tensor};
use candle_gdn_core::cpu::{parallel, Element, Shared};
use std::borrow::Cow;
use std::ops::Range;

/// `[rows, columns]` in one ggml type. The float types are blocks of one.
#[derive(Clone)]
pub(crate) struct Blocks {
    pub dtype: GgmlDType,
    pub rows: usize,
    pub columns: usize,
    /// The bytes as ggml has them, row by row.
    pub data: Vec<u8>,
}

/// Bytes of a row, if it is whole blocks and they can be counted.
pub(super) fn row_bytes(dtype: GgmlDType, columns: usize) -> Option<usize> {
    let blocks = columns.is_multiple_of(dtype.block_size()).then(|| columns / dtype.block_size());
    blocks?.checked_mul(dtype.type_size())
}

/// The dtype of a type that is not quantised.
pub(super) fn float(dtype: GgmlDType) -> Option<DType> {
    match dtype {
        GgmlDType::F32 => Some(DType::F32),
        GgmlDType::F16 => Some(DType::F16),
        GgmlDType::BF16 => Some(DType::BF16),
        _ => None,
    }
}

impl Blocks {
    pub(super) fn new(dtype: GgmlDType, rows: usize, columns: usize, data: Vec<u8>) -> Result<Self> {
        match row_bytes(dtype, columns) {
            Some(row) if rows * row == data.len() => Ok(Self { dtype, rows, columns, data }),
            _ => bail!("{} bytes are no [{rows}, {columns}] of {dtype:?}", data.len()),
        }
    }

    /// Quantises a matrix in f32, bf16 or f16, on whichever device it is, whose rows are whole blocks.
    pub(crate) fn quantize(matrix: &Tensor, dtype: GgmlDType) -> Result<Self> {
        let (rows, columns) = matrix.dims2()?;
        let matrix = matrix.to_device(&Device::Cpu)?.contiguous()?;
        let (storage, layout) = matrix.storage_and_layout();
        let range = layout.start_offset()..layout.start_offset() + rows * columns;
        match &*storage {
            Storage::Cpu(CpuStorage::F32(x)) => Self::of_rows(dtype, rows, columns, widen(&x[range], columns)),
            Storage::Cpu(CpuStorage::BF16(x)) => Self::of_rows(dtype, rows, columns, widen(&x[range], columns)),
            Storage::Cpu(CpuStorage::F16(x)) => Self::of_rows(dtype, rows, columns, widen(&x[range], columns)),
            _ => bail!("expected a matrix in f32, bf16 or f16, got {:?}", matrix.dtype()),
        }
    }

    /// Quantises rows of numbers, which `row` writes.
    pub(super) fn of_rows(
        dtype: GgmlDType,
        rows: usize,
        columns: usize,
        row: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Result<Self> {
        let Some(bytes) = row_bytes(dtype, columns) else {
            bail!("expected rows of whole blocks of {dtype:?}, got {columns} values")
        };
        let mut data = vec![0u8; rows * bytes];
        quantize_rows(rows, columns, dtype, &mut data, row);
        Self::new(dtype, rows, columns, data)
    }

    fn row_bytes(&self) -> usize {
        self.data.len() / self.rows.max(1)
    }

    /// Some of the columns, in the order that `ranges` has them. Nothing where a range is not whole blocks.
    pub(super) fn select_columns(&self, ranges: &[Range<usize>]) -> Option<Self> {
        let bytes = |range: &Range<usize>| Some(row_bytes(self.dtype, range.start)?..row_bytes(self.dtype, range.end)?);
        let columns = ranges.iter().map(Range::len).sum();
        let ranges = ranges.iter().map(bytes).collect::<Option<Vec<_>>>()?;
        let mut data = Vec::with_capacity(self.rows * ranges.iter().map(Range::len).sum::<usize>());
        for row in self.data.chunks_exact(self.row_bytes().max(1)) {
            ranges.iter().for_each(|range| data.extend_from_slice(&row[range.clone()]));
        }
        Some(Self { data, columns, ..*self })
    }

    /// Those of one type and width as one, one below the other.
    pub(crate) fn stack(parts: Vec<Self>) -> Vec<Self> {
        let mut stacked: Vec<Self> = Vec::with_capacity(parts.len());
        for part in parts {
            match stacked.last_mut() {
                Some(last) if last.dtype == part.dtype && last.columns == part.columns => {
                    last.rows += part.rows;
                    last.data.extend_from_slice(&part.data);
                }
                _ => stacked.push(part),
            }
        }
        stacked
    }

    /// All as one, if they are of one type and width.
    pub(crate) fn one(parts: Vec<Self>) -> Option<Self> {
        let mut stacked = Self::stack(parts);
        stacked.pop().filter(|_| stacked.is_empty())
    }

    /// `shape`, whose last dimension is a row, on `device`.
    pub(crate) fn qtensor(&self, shape: impl Into<Shape>, device: &Device) -> Result<QTensor> {
        QTensor::new(QStorage::from_data(Cow::Borrowed(&self.data), device, self.dtype)?, shape)
    }

    /// The numbers, `[rows, columns]` on the CPU: those of a float type in it, others in f32.
    pub(crate) fn tensor(&self) -> Result<Tensor> {
        let shape = (self.rows, self.columns);
        match float(self.dtype) {
            Some(dtype) => Tensor::from_raw_buffer(&self.data, dtype, &[self.rows, self.columns], &Device::Cpu),
            None => self.qtensor(shape, &Device::Cpu)?.dequantize(&Device::Cpu),
        }
    }

    /// Some of the rows, in the order that `ranges` has them.
    pub(crate) fn select_rows(&self, ranges: &[Range<usize>]) -> Self {
        let row = self.row_bytes();
        let mut data = Vec::with_capacity(ranges.iter().map(|r| r.len() * row).sum());
        ranges.iter().for_each(|r| data.extend_from_slice(&self.data[r.start * row..r.end * row]));
        Self { rows: ranges.iter().map(Range::len).sum(), data, ..*self }
    }
}

/// Row `i` of a matrix, widened.
fn widen<T: Element>(matrix: &[T], columns: usize) -> impl Fn(usize, &mut [f32]) + Sync + '_ {
    move |i, wide| wide.iter_mut().zip(&matrix[i * columns..]).for_each(|(wide, x)| *wide = x.to_f32())
}

/// Quantises rows of `columns` numbers, which `row` writes. candle has one thread for it and for widening, and the K types take long.
fn quantize_rows(
    rows: usize,
    columns: usize,
    dtype: GgmlDType,
    data: &mut [u8],
    row: impl Fn(usize, &mut [f32]) + Sync,
) {
    let bytes = data.len() / rows.max(1);
    let dst = Shared::new(data);
    parallel(rows, 8 * columns, |i| {
        let mut wide = vec![0f32; columns];
        row(i, &mut wide);
        let mut blocks = dtype.cpu_zeros(columns);
        blocks.from_float(&wide);
        // SAFETY: each task has a row of its own; the blocks are plain data of just so many bytes.
        unsafe {
            let dst = dst.part(i * bytes, bytes);
            assert_eq!(blocks.storage_size_in_bytes(), bytes);
            dst.copy_from_slice(std::slice::from_raw_parts(blocks.as_ptr(), bytes));
        }
    });
}

impl std::fmt::Debug for Blocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Blocks([{}, {}] in {:?})", self.rows, self.columns, self.dtype)
    }
}

#[cfg(test)]
mod tests;
