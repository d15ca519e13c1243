//! Matrices that stay in e4m3, with a scale for each block of them: on the host, on their way to CUDA.

use super::fp8::e4m3;
use crate::weights::{E4m3, BLOCK_COLUMNS};
use candle_core::{bail, DType, Device, Result, Tensor};
use candle_gdn::formats::select_rows;
use std::ops::Range;

/// Rows in e4m3, each with its scales, so that they can be put in any order.
#[derive(Debug, Clone)]
pub(crate) struct E4m3Rows {
    /// `[rows, columns]` in u8, no NaN among them.
    bytes: Tensor,
    /// `[rows, ceil(columns / 128)]` in f32.
    scales: Tensor,
    /// Where stacked matrices begin, which views are made of.
    begins: Vec<usize>,
}

impl E4m3Rows {
    pub(super) fn new(bytes: Tensor, scales: Tensor) -> Self {
        Self { bytes, scales, begins: Vec::new() }
    }

    /// The rows in the order of `ranges`.
    pub(crate) fn select_rows(&self, ranges: &[Range<usize>]) -> Result<Self> {
        Ok(Self::new(select_rows(&self.bytes, ranges)?, select_rows(&self.scales, ranges)?))
    }

    pub(crate) fn rows(&self) -> usize {
        self.bytes.dims()[0]
    }

    /// One below the other.
    pub(crate) fn stack(parts: &[Self]) -> Result<Self> {
        let mut begins = Vec::with_capacity(parts.len());
        let mut rows = 0;
        for part in parts {
            begins.push(rows);
            rows += part.bytes.dim(0)?;
        }
        let cat = |of: fn(&Self) -> &Tensor| Tensor::cat(&parts.iter().map(of).collect::<Vec<_>>(), 0);
        Ok(Self { bytes: cat(|part| &part.bytes)?, scales: cat(|part| &part.scales)?, begins })
    }

    /// The weight on a CUDA device.
    pub(crate) fn place(&self, device: &Device) -> Result<E4m3> {
        let (scales, block_rows) = Scales::new(&self.scales)?.blocks(&self.begins)?;
        E4m3::new(self.bytes.to_device(device)?, scales.to_device(device)?, block_rows)
    }

    /// The numbers that they stand for.
    pub(crate) fn dense(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        let table: Vec<f32> = (0..=u8::MAX).map(e4m3).collect();
        let ((_, columns), scales) = (self.bytes.dims2()?, self.scales.to_vec2::<f32>()?);
        let mut numbers = Vec::with_capacity(self.bytes.elem_count());
        for (row, scales) in self.bytes.to_vec2::<u8>()?.iter().zip(&scales) {
            numbers
                .extend(row.iter().enumerate().map(|(j, bits)| table[usize::from(*bits)] * scales[j / BLOCK_COLUMNS]));
        }
        Tensor::from_vec(numbers, (scales.len(), columns), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
    }
}

/// Scales of rows, `[rows, blocks]`.
struct Scales<'a> {
    each: &'a Tensor,
    rows: Vec<Vec<f32>>,
}

impl<'a> Scales<'a> {
    fn new(each: &'a Tensor) -> Result<Self> {
        Ok(Self { each, rows: each.to_vec2()? })
    }

    /// One of each block of rows, and how many those are: the largest power of two up to 128 by which blocks begin wherever
    /// scales change or a part begins.
    fn blocks(&self, begins: &[usize]) -> Result<(Tensor, usize)> {
        let changes = (1..self.rows.len()).filter(|&i| self.rows[i] != self.rows[i - 1]);
        let rows = changes.chain(begins.iter().copied()).fold(128usize, |rows, i| rows.min(lowest_bit(i)));
        let first = Tensor::from_iter((0..self.rows.len()).step_by(rows).map(|i| i as u32), self.each.device())?;
        Ok((self.each.index_select(&first, 0)?, rows))
    }
}

/// The largest power of two that divides a number; any divides 0.
fn lowest_bit(i: usize) -> usize {
    match i {
        0 => usize::MAX,
        i => i & i.wrapping_neg(),
    }
}

/// Matrices of experts, one below the other, on a CUDA device.
pub(crate) struct ExpertRows {
    bytes: Tensor,
    scales: Vec<Tensor>,
    rows: usize,
}

impl ExpertRows {
    /// With room for `[rows, columns]`.
    pub(crate) fn new(rows: usize, columns: usize, device: &Device) -> Result<Self> {
        Ok(Self { bytes: Tensor::zeros((rows, columns), DType::U8, device)?, scales: Vec::new(), rows: 0 })
    }

    /// More of them below.
    pub(crate) fn push(&mut self, rows: &E4m3Rows) -> Result<()> {
        self.bytes.slice_set(&rows.bytes.to_device(self.bytes.device())?, 0, self.rows)?;
        self.rows += rows.bytes.dim(0)?;
        self.scales.push(rows.scales.clone());
        Ok(())
    }

    pub(crate) fn finish(self) -> Result<E4m3> {
        if self.rows != self.bytes.dim(0)? {
            bail!("experts in e4m3: expected {} rows, got {}", self.bytes.dim(0)?, self.rows)
        }
        let scales = Tensor::cat(&self.scales, 0)?;
        let (scales, block_rows) = Scales::new(&scales)?.blocks(&[])?;
        let scales = scales.to_device(self.bytes.device())?;
        E4m3::new(self.bytes, scales, block_rows)
    }
}

#[cfg(test)]
mod tests;
