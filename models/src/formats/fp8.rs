//! Checkpoints in e4m3 with one scale for each block, row or tensor, whole or a rank's shard: dequantised as they are loaded, or
//! as they are stored, for what stays so.

use super::{E4m3Rows, ExpertRows, ExpertShape, Format, Stored, StoredExperts};
use crate::config::Fp8Config;
use crate::parallel::{RowsOrColumns, WeightShards};
use crate::weights::BLOCK_COLUMNS;
use candle_core::{bail, CpuStorage, DType, Device, Result, Shape, Storage, Tensor, WithDType};
use candle_gdn_core::cpu::{parallel, Element, Shared};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use half::{bf16, f16};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// What the names of a weight's scales end with.
const SCALES: [&str; 2] = ["_scale_inv", "_scale"];
/// What stands beside weights in formats that are not read: the name of a weight, or of its module, has one of these ends.
const OF_OTHERS: [&str; 7] =
    ["weight_scale_2", "weight_global_scale", "weight_zero_point", "weight.absmax", "weight_packed", "scales", "SCB"];

/// The weights of `vb`, those with a scale beside them (`{name}_scale_inv` or `{name}_scale`) multiplied by it. With `shards`, `vb`
/// has of each weight what they say, and all scales. `has_dtypes`: `vb` itself refuses a weight in e4m3 that has no scale, so that
/// the lists of the configuration do not matter.
///
/// A weight that is asked for in [`DType::F8E4M3`] comes as it is stored, and its scales (`{name}_scale_inv`) as `[rows, blocks of
/// columns]`: those of each row of the shard.
pub(crate) fn dequantized<'a>(
    vb: VarBuilder<'a>,
    config: Option<&Fp8Config>,
    shards: Option<WeightShards>,
    has_dtypes: bool,
) -> VarBuilder<'a> {
    let (dtype, device) = (vb.dtype(), vb.device().clone());
    VarBuilder::from_backend(Box::new(Fp8 { vb, config: config.cloned(), shards, has_dtypes }), dtype, device)
}

/// Matrices in e4m3 that stay so on CUDA, of a checkpoint that [`dequantized`] reads.
#[derive(Debug, Clone)]
pub(crate) struct Fp8Format {
    /// Whether each of several ranks has a shard.
    shards: bool,
}

impl Fp8Format {
    /// `None` where blocks are known to have other widths than the kernels'.
    pub(crate) fn new(config: &Fp8Config, shards: bool) -> Option<Self> {
        config.weight_block_size.is_none_or(|[_, columns]| columns == BLOCK_COLUMNS).then_some(Self { shards })
    }

    /// Whether the kernels support matrices, or shards, of so many columns. A shard may have been cut across its columns,
    /// which must then be whole blocks.
    pub(crate) fn keeps(&self, columns: usize) -> bool {
        columns > 0 && columns.is_multiple_of(if self.shards { BLOCK_COLUMNS } else { 64 })
    }
}

impl Format for Fp8Format {
    /// Several matrices `[.., rows, columns]` are one below the other.
    fn matrix(&self, weights: &VarBuilder, name: &str, shape: &[usize]) -> Result<Option<Stored>> {
        Ok(self.rows(weights, name, shape)?.map(Stored::E4m3))
    }

    /// All of them, or none.
    fn experts(&self, weights: &VarBuilder, shape: ExpertShape) -> Result<Option<StoredExperts>> {
        let room = |(n, rows, columns)| ExpertRows::new(n * rows, columns, weights.device());
        let [of_gate_up, of_down] = shape.stacked();
        let (mut gate_up, mut down) = (room(of_gate_up)?, room(of_down)?);
        let push = |dst: &mut ExpertRows, weights: &VarBuilder, name: &str, shape: &[usize]| -> Result<bool> {
            let rows = self.rows(weights, name, shape)?;
            rows.iter().try_for_each(|rows| dst.push(rows))?;
            Ok(rows.is_some())
        };
        if weights.contains_tensor("gate_up_proj") {
            let all = push(&mut gate_up, weights, "gate_up_proj", &<[usize; 3]>::from(of_gate_up))?
                && push(&mut down, weights, "down_proj", &<[usize; 3]>::from(of_down))?;
            return Ok(if all { Some(StoredExperts::E4m3([gate_up.finish()?, down.finish()?])) } else { None });
        }
        for (j, (name, rows, columns)) in (0..shape.experts).flat_map(|j| shape.matrices().map(|m| (j, m))) {
            let dst = if name == "down_proj" { &mut down } else { &mut gate_up };
            if !push(dst, &weights.pp(j).pp(name), "weight", &[rows, columns])? {
                return Ok(None);
            }
        }
        Ok(Some(StoredExperts::E4m3([gate_up.finish()?, down.finish()?])))
    }
}

impl Fp8Format {
    /// `None` where the matrix is not stored so, or the kernels do not support its columns or numbers.
    fn rows(&self, weights: &VarBuilder, name: &str, shape: &[usize]) -> Result<Option<E4m3Rows>> {
        let ([.., columns], scale) = (shape, format!("{name}_scale_inv")) else { return Ok(None) };
        if !self.keeps(*columns) || !weights.contains_tensor(&scale) {
            return Ok(None);
        }
        let host = weights.clone().set_device(Device::Cpu);
        let get =
            |shape: &[usize], name: &str, dtype| host.get_with_hints_dtype(shape, name, Default::default(), dtype);
        let blocks = columns.div_ceil(BLOCK_COLUMNS);
        // What is wrong with them is told when the matrix is dequantised.
        let Ok(scales) = get(&[&shape[..shape.len() - 1], &[blocks]].concat(), &scale, DType::F32) else {
            return Ok(None);
        };
        // The kernels know no NaN.
        let Some(bytes) = bytes_of(&get(shape, name, DType::F8E4M3)?)? else { return Ok(None) };
        let rows = bytes.len() / columns;
        let bytes = Tensor::from_vec(bytes, (rows, *columns), &Device::Cpu)?;
        Ok(Some(E4m3Rows::new(bytes, scales.reshape((rows, blocks))?)))
    }
}

struct Fp8<'a> {
    vb: VarBuilder<'a>,
    config: Option<Fp8Config>,
    shards: Option<WeightShards>,
    has_dtypes: bool,
}

impl Fp8<'_> {
    fn scale_of(&self, name: &str) -> Option<String> {
        SCALES.iter().map(|end| format!("{name}{end}")).find(|scale| self.vb.contains_tensor(scale))
    }

    /// Whether a weight without a scale cannot be in fp8. Gates and embeddings are not listed: the file decides.
    fn may_be_plain(&self, name: &str) -> bool {
        let converts = |module| self.config.as_ref().is_some_and(|config| config.converts(module));
        self.has_dtypes || name.strip_suffix(".weight").is_none_or(|module| !converts(module))
    }

    /// # Errors
    /// When a tensor of another format stands beside the weight.
    fn check_alone(&self, name: &str) -> Result<()> {
        let Some(module) = name.strip_suffix("weight") else { return Ok(()) };
        match OF_OTHERS.iter().map(|end| format!("{module}{end}")).find(|other| self.vb.contains_tensor(other)) {
            Some(other) => {
                bail!("tensor {other}: expected {name} in a float type, or in e4m3 with one scale, got this beside it")
            }
            None => Ok(()),
        }
    }

    /// What a shard of shape `dims` has of the weight.
    fn taken(&self, name: &str, dims: &[usize]) -> Result<(Matrices, Taken)> {
        let slice = self.shards.as_ref().and_then(|shards| shards.ranges_of(name, dims));
        let whole = slice.as_ref().map_or_else(|| dims.to_vec(), |slice| slice.whole(dims));
        let (lead, n, k) = match *whole {
            [ref lead @ .., n, k] => (lead.to_vec(), n, k),
            _ => bail!("{name}_scale_inv: expected a scale for a matrix, got one for {name} {whole:?}"),
        };
        let (all_rows, all_columns) = (0..lead.iter().product::<usize>() * n, 0..k);
        let taken = match slice.map(|slice| slice.rows_or_columns(&whole)) {
            Some(RowsOrColumns::Rows(rows)) => Taken { rows, columns: Vec::from([all_columns]) },
            Some(RowsOrColumns::Columns(columns)) => Taken { rows: Vec::from([all_rows]), columns },
            None => Taken { rows: Vec::from([all_rows]), columns: Vec::from([all_columns]) },
        };
        Ok((Matrices { lead, n, k }, taken))
    }

    /// All scales of matrices, and the rows and columns of their blocks.
    fn scales(&self, name: &str, matrices: &Matrices) -> Result<(Vec<f32>, [usize; 2])> {
        let &Matrices { ref lead, n, k } = matrices;
        let host = self.vb.clone().set_device(Device::Cpu);
        if let Some([rows, columns]) = self.config.as_ref().and_then(|config| config.weight_block_size) {
            let shape = [lead.as_slice(), &[n.div_ceil(rows), k.div_ceil(columns)]].concat();
            let scales = host.get_with_hints_dtype(shape, name, Init::default(), DType::F32)?;
            return Ok((scales.flatten_all()?.to_vec1()?, [rows, columns]));
        }
        let scales = host.get_unchecked_dtype(name, DType::F32)?;
        let Some(block) = matrices.blocks_of(scales.dims()) else {
            bail!(
                "{name}: expected a scale for each matrix, row or block of {:?}, got {:?}",
                [lead.as_slice(), &[n, k]].concat(),
                scales.dims()
            )
        };
        let (scales, count) = (scales.flatten_all()?.to_vec1()?, lead.iter().product::<usize>());
        Ok((if scales.len() == 1 { vec![scales[0]; count] } else { scales }, block))
    }

    /// Those of each row of a shard, `shape` in blocks of columns.
    fn scales_of_rows(&self, shape: Shape, weight: &str) -> Result<Tensor> {
        let Some(name) = self.scale_of(weight) else { bail!("cannot find tensor {weight}_scale_inv") };
        let (blocks, taken) = self.taken(weight, shape.dims())?;
        let (n, k) = (blocks.n, blocks.k * BLOCK_COLUMNS);
        let (scales, [rows, columns]) = self.scales(&name, &Matrices { k, ..blocks })?;
        // A width that is no multiple of 128 is not seen here: of other blocks than the usual ones the config must speak.
        let is_known = rows == BLOCK_COLUMNS || self.config.as_ref().is_some_and(|c| c.weight_block_size.is_some());
        if columns != k && !(columns == BLOCK_COLUMNS && is_known) {
            bail!("{name}: expected blocks of {BLOCK_COLUMNS} columns or whole rows, got {rows} x {columns}")
        }
        let per_row = k / columns;
        let mut of_rows = Vec::with_capacity(shape.elem_count());
        for row in taken.rows.into_iter().flatten() {
            let scales = &scales[(row / n * n.div_ceil(rows) + row % n / rows) * per_row..][..per_row];
            let of_block = |block: usize| scales[block * BLOCK_COLUMNS / columns];
            of_rows.extend(taken.columns.iter().cloned().flatten().map(of_block));
        }
        Tensor::from_vec(of_rows, shape, &Device::Cpu)
    }
}

impl SimpleBackend for Fp8<'_> {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        if let Some(weight) = name.strip_suffix("_scale_inv") {
            return self.scales_of_rows(shape, weight)?.to_dtype(dtype)?.to_device(device);
        }
        self.check_alone(name)?;
        let Some(scale) = self.scale_of(name) else {
            if !self.may_be_plain(name) {
                let unknown = self.config.as_ref().map_or(&[][..], Fp8Config::unknown_patterns);
                let but = if unknown.is_empty() { "" } else { ", of which some are no regular expressions here: " };
                bail!(
                    "cannot find tensor {name}_scale_inv: the checkpoint is in fp8, and `{name}` is not among its \
                     `modules_to_not_convert`{but}{}",
                    unknown.join(", ")
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
        let (matrices, taken) = self.taken(name, shape.dims())?;
        let (scale, [rows, columns]) = self.scales(&scale, &matrices)?;
        let Matrices { n, k, .. } = matrices;
        let weight = weight.contiguous()?;
        let (storage, layout) = weight.storage_and_layout();
        let Storage::Cpu(CpuStorage::F8E4M3(data)) = &*storage else { bail!("{name}: expected a tensor on the CPU") };
        let data = &data[layout.start_offset()..][..shape.elem_count()];
        let bits = |place: usize| data[place].to_bits();
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
            || name.strip_suffix(SCALES[0]).is_some_and(|weight| self.scale_of(weight).is_some())
    }
}

/// Matrices `[lead.., n, k]`.
struct Matrices {
    lead: Vec<usize>,
    n: usize,
    k: usize,
}

impl Matrices {
    /// Rows and columns of the blocks that scales of a shape are of; `None` where the shape does not say it.
    fn blocks_of(&self, scales: &[usize]) -> Option<[usize; 2]> {
        let &Self { ref lead, n, k } = self;
        let [a, b] = match scales {
            [] | [1] => [1, 1],
            scales => match *scales.strip_prefix(lead.as_slice())? {
                [] => [1, 1],
                [a] => [a, 1],
                // Modelopt has blocks with their sizes of one between.
                [a, b] | [a, 1, b, 1] => [a, b],
                _ => return None,
            },
        };
        // The usual blocks, of which the last may be smaller.
        if [n.div_ceil(BLOCK_COLUMNS), k.div_ceil(BLOCK_COLUMNS)] == [a, b] {
            return Some([BLOCK_COLUMNS; 2]);
        }
        (a > 0 && b > 0 && n.is_multiple_of(a) && k.is_multiple_of(b)).then(|| [n / a, k / b])
    }
}

/// Matrices `[n, k]` in blocks `[rows, columns]`, the last ones cut off where they do not divide.
struct Blocks<'a> {
    n: usize,
    k: usize,
    rows: usize,
    columns: usize,
    scale: &'a [f32],
}

/// What a shard has of them: rows, of all matrices one below the other, and columns.
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
        let dst = Shared::new(&mut out);
        parallel(row_of.len(), width, |i| {
            // SAFETY: each task has a row of its own.
            let mut rest = unsafe { dst.part(i * width, width) };
            let (row, mut place) = (row_of[i], i * width);
            let scales = &scale[row / n * per_matrix + row % n / rows * per_row..][..per_row];
            for piece in &pieces {
                let (dst, tail) = rest.split_at_mut(piece.len());
                let scale = scales[piece.start / columns];
                dst.iter_mut().enumerate().for_each(|(i, dst)| {
                    *dst = Element::from_f32(table[usize::from(bits(place + i))] * scale);
                });
                place += piece.len();
                rest = tail;
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
fn bytes_of(weight: &Tensor) -> Result<Option<Vec<u8>>> {
    const PIECE: usize = 1 << 18;
    let weight = weight.contiguous()?;
    let (storage, layout) = weight.storage_and_layout();
    let Storage::Cpu(CpuStorage::F8E4M3(data)) = &*storage else { bail!("expected a tensor in e4m3 on the CPU") };
    let data = &data[layout.start_offset()..][..weight.elem_count()];
    let (mut bytes, is_nan) = (vec![0u8; data.len()], AtomicBool::new(false));
    let all = Shared::new(&mut bytes);
    parallel(data.len().div_ceil(PIECE), PIECE, |i| {
        let src = &data[i * PIECE..data.len().min((i + 1) * PIECE)];
        // SAFETY: each task has a piece of its own.
        let dst = unsafe { all.part(i * PIECE, src.len()) };
        let mut found = 0;
        for (dst, number) in dst.iter_mut().zip(src) {
            *dst = number.to_bits();
            found |= u8::from(*dst & 0x7f == 0x7f);
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
mod tests;
