//! A rank's part of a checkpoint: of each weight the rows or columns that its part of the model has.

use super::cut::{DimRanges, WeightCuts};
use super::Collective;
use crate::config::ModelConfig;
use crate::formats::dequantized;
use candle_core::safetensors::{Load, MmapedSafetensors};
use candle_core::{bail, DType, Device, Error, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::path::Path;

/// What parts are taken from.
enum Whole<'a> {
    /// Files in memory's place: of what lies outside a part nothing is read.
    Files(MmapedSafetensors),
    /// Anything else: each weight is made whole, on its device, and cut.
    Weights(VarBuilder<'a>),
}

/// Answers with a part where a whole checkpoint would with the whole.
struct PartOfWeights<'a> {
    whole: Whole<'a>,
    cuts: WeightCuts,
}

/// The part of `weights`, which is at the root of a checkpoint of `config`'s model, that a rank of `group` loads with
/// [`Loader::group`](crate::Loader::group). Each weight is made whole, on the device of `weights`,
/// and cut; in fp8 on the CPU, where the part is dequantised. A part of it that is asked for in
/// [`DType::F8E4M3`] comes as it is stored.
///
/// # Errors
/// Where the model cannot be divided so ([`ModelConfig::split`]).
pub fn part_of<'a>(weights: VarBuilder<'a>, config: &ModelConfig, group: &dyn Collective) -> Result<VarBuilder<'a>> {
    let (dtype, device) = (weights.dtype(), weights.device().clone());
    part(Whole::Weights(weights), config, group, dtype, &device)
}

/// [`part_of`] of safetensors files in `dtype` on `device`. The files are mapped, and nothing is read of what other ranks
/// have.
///
/// # Safety
/// The files must not change while the mapping lives.
///
/// # Errors
/// As [`part_of`], or a file that cannot be mapped.
pub unsafe fn part_of_safetensors<P: AsRef<Path>>(
    files: &[P],
    config: &ModelConfig,
    group: &dyn Collective,
    dtype: DType,
    device: &Device,
) -> Result<VarBuilder<'static>> {
    part(Whole::Files(MmapedSafetensors::multi(files)?), config, group, dtype, device)
}

fn part<'a>(
    whole: Whole<'a>,
    config: &ModelConfig,
    group: &dyn Collective,
    dtype: DType,
    device: &Device,
) -> Result<VarBuilder<'a>> {
    let cuts = WeightCuts::new(config, group)?;
    let part = PartOfWeights { whole, cuts: cuts.clone() };
    let part = VarBuilder::from_backend(Box::new(part), dtype, device.clone());
    Ok(match &config.fp8 {
        Some(fp8) => dequantized(part, fp8, Some(cuts)),
        None => part,
    })
}

impl SimpleBackend for PartOfWeights<'_> {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let cut = self.cuts.ranges_of(name, shape.dims());
        let whole = cut.as_ref().map_or_else(|| shape.dims().to_vec(), |cut| cut.whole(shape.dims()));
        let got = match &self.whole {
            Whole::Files(files) => {
                let view = files.get(name)?;
                if view.shape() != whole {
                    bail!("shape mismatch for {name}: expected {whole:?}, got {:?}", view.shape())
                }
                match &cut {
                    Some(cut) => {
                        let of_file = DType::try_from(view.dtype())?;
                        let bytes = pieces(view.data(), cut, shape.dims(), of_file.size_in_bytes());
                        let piece = Tensor::from_raw_buffer(&bytes, of_file, shape.dims(), &Device::Cpu)?;
                        piece.to_device(device)?.to_dtype(dtype)?
                    }
                    None => view.load(device)?.to_dtype(dtype)?,
                }
            }
            Whole::Weights(weights) => {
                let weights = weights.clone().set_device(device.clone());
                let got = weights.get_with_hints_dtype(whole, name, init, dtype)?;
                match &cut {
                    Some(cut) => {
                        let ranges = cut.ranges.iter().map(|range| got.narrow(cut.dim, range.start, range.len()));
                        // A copy: a view would keep the whole.
                        Tensor::cat(&ranges.collect::<Result<Vec<_>>>()?, cut.dim)?.force_contiguous()?
                    }
                    None => got,
                }
            }
        };
        if got.shape() != &shape {
            return Err(Error::UnexpectedShape {
                msg: format!("shape mismatch for {name}"),
                expected: shape,
                got: got.shape().clone(),
            });
        }
        Ok(got)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        bail!("{name}: which part of it a rank has depends on its shape, and none was asked for")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        match &self.whole {
            Whole::Files(files) => files.get(name).is_ok(),
            Whole::Weights(weights) => weights.contains_tensor(name),
        }
    }
}

/// Of the bytes of a weight those that a cut to `shape` has; `size` is that of an element.
fn pieces(data: &[u8], cut: &DimRanges, shape: &[usize], size: usize) -> Vec<u8> {
    let row = shape[cut.dim + 1..].iter().product::<usize>() * size;
    let mut bytes = Vec::with_capacity(shape.iter().product::<usize>() * size);
    for block in data.chunks_exact((cut.of * row).max(1)) {
        cut.ranges.iter().for_each(|range| bytes.extend_from_slice(&block[range.start * row..range.end * row]));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `[2, 6, 2]`: the parts of both halves of the middle.
    #[test]
    fn sections_of_a_middle_dimension() {
        let data: Vec<u8> = (0..24).collect();
        let cut = DimRanges { dim: 1, of: 6, ranges: vec![1..2, 4..5] };
        assert_eq!(pieces(&data, &cut, &[2, 2, 2], 1), [2, 3, 8, 9, 14, 15, 20, 21]);
    }
}
