//! Checkpoints in e4m3 with one scale for each block of a matrix, whole or a rank's part: dequantised as they are loaded, or
//! as they are stored, for what stays so.

use crate::config::Fp8Config;
use crate::parallel::{RowsOrColumns, WeightShards};
use candle_core::{bail, CpuStorage, DType, Device, Result, Shape, Storage, Tensor, WithDType};
use candle_gdn::plumbing::cpu::{parallel, Element, Shared};
use candle_gdn::plumbing::BLOCK_COLUMNS;
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use half::{bf16, f16};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// The weights of `vb`, those with a scale beside them (`{name}_scale_inv`) multiplied by it. With `cuts`, `vb` has of each
/// weight what they say, and all scales.
///
/// A weight that is asked for in [`DType::F8E4M3`] comes as it is stored, and its scales as `[rows, blocks of columns]`: those
/// of each row of the part.
pub(crate) fn dequantized<'a>(vb: VarBuilder<'a>, config: &Fp8Config, cuts: Option<WeightShards>) -> VarBuilder<'a> {
    let (dtype, device) = (vb.dtype(), vb.device().clone());
    VarBuilder::from_backend(Box::new(Fp8 { vb, config: config.clone(), cuts }), dtype, device)
}

/// Which matrices stay in e4m3 on CUDA.
#[derive(Debug, Clone)]
pub(crate) struct KeptFp8 {
    /// Of several ranks each has a part.
    parts: bool,
}

impl KeptFp8 {
    /// `None` where blocks have other widths than the kernels'.
    pub(crate) fn new(config: &Fp8Config, parts: bool) -> Option<Self> {
        (config.weight_block_size[1] == BLOCK_COLUMNS).then_some(Self { parts })
    }

    /// Whether the kernels take matrices, or parts, of so many columns. A part may have been cut across its columns, which
    /// must then be whole blocks.
    pub(crate) fn takes(&self, columns: usize) -> bool {
        columns > 0 && columns.is_multiple_of(if self.parts { BLOCK_COLUMNS } else { 64 })
    }
}

struct Fp8<'a> {
    vb: VarBuilder<'a>,
    config: Fp8Config,
    cuts: Option<WeightShards>,
}

impl Fp8<'_> {
    fn scale_of(&self, name: &str) -> Option<String> {
        Some(format!("{name}_scale_inv")).filter(|scale| self.vb.contains_tensor(scale))
    }

    /// Whether a weight without a scale cannot be in fp8. What is not told is left to the file: gates and embeddings.
    fn may_be_plain(&self, name: &str) -> bool {
        name.strip_suffix(".weight").is_none_or(|module| !self.config.converts(module))
    }

    /// What a part of shape `dims` has of the weight.
    fn taken(&self, name: &str, dims: &[usize]) -> Result<(Matrices, Taken)> {
        let cut = self.cuts.as_ref().and_then(|cuts| cuts.ranges_of(name, dims));
        let whole = cut.as_ref().map_or_else(|| dims.to_vec(), |cut| cut.whole(dims));
        let (lead, n, k) = match *whole {
            [ref lead @ .., n, k] => (lead.to_vec(), n, k),
            _ => bail!("{name}_scale_inv: expected a scale for a matrix, got one for {name} {whole:?}"),
        };
        let (all_rows, all_columns) = (0..lead.iter().product::<usize>() * n, 0..k);
        let taken = match cut.map(|cut| cut.rows_or_columns(&whole)) {
            Some(RowsOrColumns::Rows(rows)) => Taken { rows, columns: Vec::from([all_columns]) },
            Some(RowsOrColumns::Columns(columns)) => Taken { rows: Vec::from([all_rows]), columns },
            None => Taken { rows: Vec::from([all_rows]), columns: Vec::from([all_columns]) },
        };
        Ok((Matrices { lead, n, k }, taken))
    }

    /// All scales of matrices of `columns` blocks a row.
    fn scales(&self, name: &str, Matrices { lead, n, .. }: &Matrices, columns: usize, init: Init) -> Result<Vec<f32>> {
        let shape = [lead.as_slice(), &[n.div_ceil(self.config.weight_block_size[0]), columns]].concat();
        let host = self.vb.clone().set_device(Device::Cpu);
        host.get_with_hints_dtype(shape, name, init, DType::F32)?.flatten_all()?.to_vec1::<f32>()
    }

    /// Those of each row of a part, `shape` in blocks of columns.
    fn scales_of_rows(&self, shape: Shape, weight: &str, init: Init) -> Result<Tensor> {
        let [rows, columns] = self.config.weight_block_size;
        if columns != BLOCK_COLUMNS {
            bail!("{weight}_scale_inv: expected blocks of {BLOCK_COLUMNS} columns, got {columns}")
        }
        let (matrices, taken) = self.taken(weight, shape.dims())?;
        let (n, per_row) = (matrices.n, matrices.k);
        let scales = self.scales(&format!("{weight}_scale_inv"), &matrices, per_row, init)?;
        let mut of_rows = Vec::with_capacity(shape.elem_count());
        for row in taken.rows.into_iter().flatten() {
            let scales = &scales[(row / n * n.div_ceil(rows) + row % n / rows) * per_row..][..per_row];
            taken.columns.iter().for_each(|range| of_rows.extend_from_slice(&scales[range.clone()]));
        }
        Tensor::from_vec(of_rows, shape, &Device::Cpu)
    }
}

impl SimpleBackend for Fp8<'_> {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        if let Some(weight) = name.strip_suffix("_scale_inv") {
            return self.scales_of_rows(shape, weight, init)?.to_dtype(dtype)?.to_device(device);
        }
        let Some(scale) = self.scale_of(name) else {
            if !self.may_be_plain(name) {
                bail!(
                    "cannot find tensor {name}_scale_inv: the checkpoint is in fp8, and `{name}` is not among its \
                     `modules_to_not_convert`"
                )
            }
            let vb = self.vb.clone().set_device(device.clone());
            return vb.get_with_hints_dtype(shape, name, init, dtype);
        };
        let host = self.vb.clone().set_device(Device::Cpu);
        let weight = host.get_with_hints_dtype(shape.clone(), name, init, DType::F8E4M3)?;
        if dtype == DType::F8E4M3 {
            return weight.to_device(device);
        }
        let [rows, columns] = self.config.weight_block_size;
        let (matrices, taken) = self.taken(name, shape.dims())?;
        let scale = self.scales(&scale, &matrices, matrices.k.div_ceil(columns), init)?;
        let Matrices { n, k, .. } = matrices;
        let weight = weight.contiguous()?;
        let (storage, layout) = weight.storage_and_layout();
        let Storage::Cpu(CpuStorage::F8E4M3(data)) = &*storage else { bail!("{name}: expected a tensor on the CPU") };
        let data = &data[layout.start_offset()..][..shape.elem_count()];
        let bits = |at: usize| data[at].to_bits();
        let blocks = Blocks { n, k, rows, columns, scale: &scale };
        let made = match dtype {
            DType::BF16 => blocks.dequantize::<bf16>(shape, &taken, bits)?,
            DType::F16 => blocks.dequantize::<f16>(shape, &taken, bits)?,
            _ => blocks.dequantize::<f32>(shape, &taken, bits)?.to_dtype(dtype)?,
        };
        made.to_device(device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.scale_of(name) {
            Some(_) => bail!("{name}: expected a shape, for a weight in fp8"),
            None => self.vb.clone().set_device(device.clone()).get_unchecked_dtype(name, dtype),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.vb.contains_tensor(name)
    }
}

/// Matrices `[lead.., n, k]`.
struct Matrices {
    lead: Vec<usize>,
    n: usize,
    k: usize,
}

/// Matrices `[n, k]` in blocks `[rows, columns]`, the last ones cut off where they do not divide.
struct Blocks<'a> {
    n: usize,
    k: usize,
    rows: usize,
    columns: usize,
    scale: &'a [f32],
}

/// What a part has of them: rows, of all matrices one below the other, and columns.
struct Taken {
    rows: Vec<Range<usize>>,
    columns: Vec<Range<usize>>,
}

impl Blocks<'_> {
    /// The numbers of what is `taken`, whose `bits` follow each other; `shape` is theirs.
    fn dequantize<T: Element + WithDType>(
        &self,
        shape: Shape,
        taken: &Taken,
        bits: impl Fn(usize) -> u8 + Sync,
    ) -> Result<Tensor> {
        let &Self { n, k, rows, columns, scale } = self;
        let table: Vec<f32> = (0..=u8::MAX).map(e4m3).collect();
        let (per_row, per_matrix) = (k.div_ceil(columns), k.div_ceil(columns) * n.div_ceil(rows));
        let row_of: Vec<usize> = taken.rows.iter().cloned().flatten().collect();
        let width = taken.columns.iter().map(Range::len).sum::<usize>();
        // Up to the end of each block.
        let pieces: Vec<Range<usize>> = taken.columns.iter().flat_map(|range| within_blocks(range, columns)).collect();
        let mut out = vec![T::ZERO; shape.elem_count()];
        let to = Shared::new(&mut out);
        parallel(row_of.len(), width, |i| {
            // SAFETY: each task has a row of its own.
            let mut rest = unsafe { to.part(i * width, width) };
            let (row, mut at) = (row_of[i], i * width);
            let scales = &scale[row / n * per_matrix + row % n / rows * per_row..][..per_row];
            for piece in &pieces {
                let (to, behind) = rest.split_at_mut(piece.len());
                let scale = scales[piece.start / columns];
                to.iter_mut().enumerate().for_each(|(i, to)| {
                    *to = Element::from_f32(table[usize::from(bits(at + i))] * scale);
                });
                at += piece.len();
                rest = behind;
            }
        });
        Tensor::from_vec(out, shape, &Device::Cpu)
    }
}

/// A range cut at the borders of blocks of `size`.
fn within_blocks(range: &Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let range = range.clone();
    (range.start / size..range.end.div_ceil(size))
        .map(move |block| range.start.max(block * size)..range.end.min((block + 1) * size))
}

/// The bytes of a tensor in e4m3 on the CPU; `None` where a NaN is among them.
pub(super) fn bytes_of(weight: &Tensor) -> Result<Option<Vec<u8>>> {
    const PIECE: usize = 1 << 18;
    let weight = weight.contiguous()?;
    let (storage, layout) = weight.storage_and_layout();
    let Storage::Cpu(CpuStorage::F8E4M3(data)) = &*storage else { bail!("expected a tensor in e4m3 on the CPU") };
    let data = &data[layout.start_offset()..][..weight.elem_count()];
    let (mut bytes, is_nan) = (vec![0u8; data.len()], AtomicBool::new(false));
    let all = Shared::new(&mut bytes);
    parallel(data.len().div_ceil(PIECE), PIECE, |i| {
        let from = &data[i * PIECE..data.len().min((i + 1) * PIECE)];
        // SAFETY: each task has a piece of its own.
        let to = unsafe { all.part(i * PIECE, from.len()) };
        let mut found = 0;
        for (to, number) in to.iter_mut().zip(from) {
            *to = number.to_bits();
            found |= u8::from(*to & 0x7f == 0x7f);
        }
        is_nan.fetch_or(found != 0, Ordering::Relaxed);
    });
    Ok((!is_nan.into_inner()).then_some(bytes))
}

/// The number that 8 bits are: a sign, 4 bits of exponent and 3 of mantissa, without infinities.
pub(super) fn e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    let magnitude = match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8. + mantissa) * 2f32.powi(exponent - 10),
    };
    match bits >> 7 {
        0 => magnitude,
        _ => -magnitude,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn config(listed: &[&str]) -> Fp8Config {
        Fp8Config {
            weight_block_size: [2, 3],
            modules_to_not_convert: listed.iter().map(|name| name.to_string()).collect(),
        }
    }

    #[test]
    fn the_numbers_of_e4m3() {
        assert_eq!(
            [0x00, 0x01, 0x07, 0x08, 0x38, 0x39, 0x7e].map(e4m3),
            [0., 2f32.powi(-9), 7. * 2f32.powi(-9), 2f32.powi(-6), 1., 1.125, 448.]
        );
        assert_eq!(e4m3(0xb8), -1.);
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
    }

    /// Two matrices of [3, 4] in blocks of [2, 3]: neither divides.
    #[test]
    fn every_block_has_its_scale() -> Result<()> {
        let ones = Tensor::ones((2, 3, 4), DType::F32, &Device::Cpu)?.to_dtype(DType::F8E4M3)?;
        let scales = Tensor::arange(1f32, 9., &Device::Cpu)?.reshape((2, 2, 2))?;
        let weights = HashMap::from([("w".to_string(), ones), ("w_scale_inv".to_string(), scales)]);
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let vb = VarBuilder::from_tensors(weights.clone(), dtype, &Device::Cpu);
            let got = dequantized(vb, &config(&[]), None).get((2, 3, 4), "w")?;
            assert_eq!(got.dtype(), dtype);
            let want = [
                [[1f32, 1., 1., 2.], [1., 1., 1., 2.], [3., 3., 3., 4.]],
                [[5., 5., 5., 6.], [5., 5., 5., 6.], [7., 7., 7., 8.]],
            ];
            assert_eq!(got.to_dtype(DType::F32)?.to_vec3::<f32>()?, want.map(|m| m.map(|row| row.to_vec()).to_vec()));
        }
        Ok(())
    }

    #[test]
    fn only_listed_projections_are_plain() {
        let vb = VarBuilder::from_tensors(HashMap::new(), DType::F32, &Device::Cpu);
        let listed = config(&["lm_head", "model.layers.1.mlp.gate_proj", "model.layers.2.self_attn", "up_proj"]);
        let fp8 = Fp8 { vb, config: listed, cuts: None };
        for (name, plain) in [
            ("model.layers.0.mlp.gate_proj.weight", false),
            ("model.layers.1.mlp.gate_proj.weight", true),
            ("model.language_model.layers.1.mlp.gate_proj.weight", true),
            ("model.layers.2.self_attn.q_proj.weight", true),
            ("model.layers.3.self_attn.q_proj.weight", false),
            ("model.layers.3.mlp.up_proj.weight", true),
            ("model.layers.0.linear_attn.in_proj_qkvz.weight", false),
            ("model.layers.0.linear_attn.in_proj_ba.weight", true),
            ("model.layers.0.mlp.gate.weight", true),
            ("model.layers.0.linear_attn.A_log", true),
            ("lm_head.weight", true),
        ] {
            assert_eq!(fp8.may_be_plain(name), plain, "{name}");
        }
    }
}
