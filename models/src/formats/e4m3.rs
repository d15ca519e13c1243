//! Matrices that stay in e4m3, with a scale for each block of them: on the host, on their way to CUDA.

use super::fp8::{bytes_of, e4m3};
use super::Source;
use candle_core::{bail, DType, Device, Result, Tensor};
use candle_gdn::plumbing::{BlockScaled, BLOCK_COLUMNS};

/// Rows in e4m3, each with its scales, so that they can be put in any order.
#[derive(Debug, Clone)]
pub(crate) struct E4m3Rows {
    /// `[rows, columns]` in u8, no NaN among them.
    bytes: Tensor,
    /// `[rows, ceil(columns / 128)]` in f32.
    scales: Tensor,
    /// Where parts begin, which views are to be taken of.
    begins: Vec<usize>,
}

impl E4m3Rows {
    fn new(bytes: Tensor, scales: Tensor) -> Self {
        Self { bytes, scales, begins: Vec::new() }
    }

    /// The rows in the order that `order` gives those of any matrix.
    pub(crate) fn in_order(&self, order: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self::new(order(&self.bytes)?, order(&self.scales)?))
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
    pub(crate) fn on(&self, device: &Device) -> Result<BlockScaled> {
        let (scales, block_rows) = Scales::new(&self.scales)?.blocks(&self.begins)?;
        BlockScaled::new(self.bytes.to_device(device)?, scales.to_device(device)?, block_rows)
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

    pub(crate) fn finish(self) -> Result<BlockScaled> {
        if self.rows != self.bytes.dim(0)? {
            bail!("experts in e4m3: expected {} rows, got {}", self.bytes.dim(0)?, self.rows)
        }
        let scales = Tensor::cat(&self.scales, 0)?;
        let (scales, block_rows) = Scales::new(&scales)?.blocks(&[])?;
        let scales = scales.to_device(self.bytes.device())?;
        BlockScaled::new(self.bytes, scales, block_rows)
    }
}

impl Source<'_> {
    /// A matrix `[rows, columns]`, or several `[.., rows, columns]` one below the other, in e4m3; `None` where it is not
    /// stored so, or the kernels do not take its columns.
    pub(crate) fn e4m3(&self, shape: &[usize], name: &str) -> Result<Option<E4m3Rows>> {
        let Some(kept) = &self.kept_fp8 else { return Ok(None) };
        let ([.., columns], scale) = (shape, format!("{name}_scale_inv")) else { return Ok(None) };
        if !kept.takes(*columns) || !self.dense.contains_tensor(&scale) {
            return Ok(None);
        }
        let host = self.dense.clone().set_device(Device::Cpu);
        let get =
            |shape: &[usize], name: &str, dtype| host.get_with_hints_dtype(shape, name, Default::default(), dtype);
        // The kernels know no NaN.
        let Some(bytes) = bytes_of(&get(shape, name, DType::F8E4M3)?)? else { return Ok(None) };
        let (blocks, rows) = (columns.div_ceil(BLOCK_COLUMNS), bytes.len() / columns);
        let scales = get(&[&shape[..shape.len() - 1], &[blocks]].concat(), &scale, DType::F32)?;
        let bytes = Tensor::from_vec(bytes, (rows, *columns), &Device::Cpu)?;
        Ok(Some(E4m3Rows::new(bytes, scales.reshape((rows, blocks))?)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{dequantized, KeptFp8};
    use super::*;
    use crate::config::Fp8Config;
    use candle_nn::VarBuilder;
    use std::collections::HashMap;

    /// `w` of this shape in blocks of [rows, 128], and what is kept of it.
    fn source(shape: &[usize], rows: usize, bytes: impl Fn(usize) -> u8) -> Result<Source<'static>> {
        let &[ref lead @ .., n, k] = shape else { bail!("a matrix") };
        let count: usize = shape.iter().product();
        let numbers: Vec<f32> = (0..count).map(|i| e4m3(bytes(i))).collect();
        let weight = Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_dtype(DType::F8E4M3)?;
        let blocks = [lead, &[n.div_ceil(rows), k.div_ceil(128)]].concat();
        let scales: Vec<f32> = (0..blocks.iter().product()).map(|i: usize| 0.5 + i as f32).collect();
        let scales = Tensor::from_vec(scales, blocks, &Device::Cpu)?;
        let weights = HashMap::from([("w".to_string(), weight), ("w_scale_inv".to_string(), scales)]);
        let config = Fp8Config { weight_block_size: [rows, 128], modules_to_not_convert: vec![] };
        let vb = dequantized(VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu), &config, None);
        Ok(Source::new(vb).keeping_fp8(KeptFp8::new(&config, false).expect("blocks of 128 columns")))
    }

    fn numbers(x: &Tensor) -> Result<Vec<f32>> {
        x.flatten_all()?.to_vec1()
    }

    #[test]
    fn they_stand_for_the_dequantised_numbers() -> Result<()> {
        for shape in [&[7, 64][..], &[5, 320], &[3, 6, 256], &[2, 3, 7, 128]] {
            for rows in [1, 2, 3, 128] {
                let any = source(shape, rows, |i| (i * 37 % 127) as u8 | (i as u8 & 128))?;
                let got = any.e4m3(shape, "w")?.expect("in e4m3").dense(DType::F32, &Device::Cpu)?;
                assert_eq!(numbers(&got)?, numbers(&any.get(shape, "w")?)?, "{shape:?} in blocks of {rows}");
            }
        }
        Ok(())
    }

    #[test]
    fn rows_in_another_order_keep_their_scales() -> Result<()> {
        let any = source(&[6, 192], 2, |i| (i % 120) as u8)?;
        let turned = |x: &Tensor| Tensor::cat(&[x.narrow(0, 3, 3)?, x.narrow(0, 0, 3)?], 0);
        let rows = any.e4m3(&[6, 192], "w")?.expect("in e4m3");
        let got = E4m3Rows::stack(&[rows.in_order(turned)?, rows.clone()])?.dense(DType::F32, &Device::Cpu)?;
        let whole = any.get((6, 192), "w")?;
        assert_eq!(numbers(&got)?, numbers(&Tensor::cat(&[turned(&whole)?, whole], 0)?)?);
        Ok(())
    }

    #[test]
    fn what_the_kernels_do_not_take_is_not_kept() -> Result<()> {
        assert!(source(&[4, 96], 128, |_| 1)?.e4m3(&[4, 96], "w")?.is_none());
        for nan in [0x7f, 0xff] {
            let any = source(&[4, 128], 128, |i| if i == 200 { nan } else { 1 })?;
            assert!(any.e4m3(&[4, 128], "w")?.is_none());
        }
        let config = Fp8Config { weight_block_size: [128, 64], modules_to_not_convert: vec![] };
        assert!(KeptFp8::new(&config, false).is_none());
        let config = Fp8Config { weight_block_size: [128, 128], modules_to_not_convert: vec![] };
        let kept = [false, true].map(|parts| KeptFp8::new(&config, parts).expect("blocks of 128 columns"));
        assert_eq!(kept.map(|kept| [64, 96, 128].map(|n| kept.takes(n))), [[true, false, true], [false, false, true]]);
        Ok(())
    }

    #[test]
    fn blocks_begin_where_scales_change() -> Result<()> {
        let blocks = |each: &[f32], begins: &[usize]| -> Result<(Vec<f32>, usize)> {
            let each = Tensor::new(each, &Device::Cpu)?.reshape(((), 1))?;
            let (scales, rows) = Scales::new(&each)?.blocks(begins)?;
            Ok((numbers(&scales)?, rows))
        };
        let of = |runs: &[(f32, usize)]| runs.iter().flat_map(|&(x, n)| vec![x; n]).collect::<Vec<_>>();
        assert_eq!(blocks(&of(&[(1., 128), (2., 256), (3., 5)]), &[])?, (vec![1., 2., 2., 3.], 128));
        assert_eq!(blocks(&of(&[(1., 128), (2., 64)]), &[0, 32])?, (of(&[(1., 4), (2., 2)]), 32));
        assert_eq!(blocks(&of(&[(1., 3), (2., 3)]), &[])?, (vec![1., 1., 1., 2., 2., 2.], 1));
        assert_eq!(blocks(&of(&[(1., 4), (2., 2)]), &[])?, (vec![1., 2.], 4));
        assert_eq!(blocks(&of(&[(7., 300)]), &[])?, (vec![7.; 3], 128));
        Ok(())
    }
}
