//! A rank's shard of a checkpoint: of each weight the rows or columns that its shard of the model has.

use super::shards::{DimRanges, WeightShards};
use super::Collective;
use crate::config::ModelConfig;
use crate::formats::dequantized;
use candle_core::safetensors::{Load, MmapedSafetensors};
use candle_core::{bail, DType, Device, Error, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::path::Path;

/// What shards are taken from.
enum Whole<'a> {
    /// Files in memory's place: of what lies outside a shard nothing is read.
    Files(MmapedSafetensors),
    /// Anything else: each weight is made whole, on its device, and cut.
    Weights(VarBuilder<'a>),
}

/// Answers with a shard where a whole checkpoint would with the whole.
struct ShardOfWeights<'a> {
    whole: Whole<'a>,
    shards: WeightShards,
}

/// The shard of `weights`, which is at the root of a checkpoint of `config`'s model, that a rank of `group` loads with
/// [`Loader::group`](crate::Loader::group). Each weight is made whole, on the device of `weights`,
/// and cut; in fp8 on the CPU, where the shard is dequantised. A shard of it that is asked for in
/// [`DType::F8E4M3`] comes as it is stored.
///
/// # Errors
/// Where the model cannot be divided so ([`ModelConfig::split`]).
pub fn shard_of<'a>(weights: VarBuilder<'a>, config: &ModelConfig, group: &dyn Collective) -> Result<VarBuilder<'a>> {
    let (dtype, device) = (weights.dtype(), weights.device().clone());
    shard(Whole::Weights(weights), config, group, dtype, &device)
}

/// [`shard_of`] of safetensors files in `dtype` on `device`. The files are mapped, and nothing is read of what other ranks
/// have.
///
/// # Safety
/// The files must not change while the mapping lives.
///
/// # Errors
/// As [`shard_of`], or a file that cannot be mapped.
pub unsafe fn shard_of_safetensors<P: AsRef<Path>>(
    files: &[P],
    config: &ModelConfig,
    group: &dyn Collective,
    dtype: DType,
    device: &Device,
) -> Result<VarBuilder<'static>> {
    shard(Whole::Files(MmapedSafetensors::multi(files)?), config, group, dtype, device)
}

fn shard<'a>(
    whole: Whole<'a>,
    config: &ModelConfig,
    group: &dyn Collective,
    dtype: DType,
    device: &Device,
) -> Result<VarBuilder<'a>> {
    let shards = WeightShards::new(config, group)?;
    let shard = ShardOfWeights { whole, shards: shards.clone() };
    let shard = VarBuilder::from_backend(Box::new(shard), dtype, device.clone());
    Ok(match &config.fp8 {
        Some(fp8) => dequantized(shard, fp8, Some(shards)),
        None => shard,
    })
}

impl SimpleBackend for ShardOfWeights<'_> {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let slice = self.shards.ranges_of(name, shape.dims());
        let whole = slice.as_ref().map_or_else(|| shape.dims().to_vec(), |slice| slice.whole(shape.dims()));
        let got = match &self.whole {
            Whole::Files(files) => {
                let view = files.get(name)?;
                if view.shape() != whole {
                    bail!("shape mismatch for {name}: expected {whole:?}, got {:?}", view.shape())
                }
                match &slice {
                    Some(slice) => {
                        let of_file = DType::try_from(view.dtype())?;
                        let bytes = bytes_of_slice(view.data(), slice, shape.dims(), of_file.size_in_bytes());
                        let shard = Tensor::from_raw_buffer(&bytes, of_file, shape.dims(), &Device::Cpu)?;
                        shard.to_device(device)?.to_dtype(dtype)?
                    }
                    None => view.load(device)?.to_dtype(dtype)?,
                }
            }
            Whole::Weights(weights) => {
                let weights = weights.clone().set_device(device.clone());
                let got = weights.get_with_hints_dtype(whole, name, init, dtype)?;
                match &slice {
                    Some(slice) => {
                        let ranges = slice.ranges.iter().map(|range| got.narrow(slice.dim, range.start, range.len()));
                        // A copy: a view would keep the whole.
                        Tensor::cat(&ranges.collect::<Result<Vec<_>>>()?, slice.dim)?.force_contiguous()?
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
        bail!("{name}: which shard of it a rank has depends on its shape, and none was asked for")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        match &self.whole {
            Whole::Files(files) => files.get(name).is_ok(),
            Whole::Weights(weights) => weights.contains_tensor(name),
        }
    }
}

/// Of the bytes of a weight those that a slice to `shape` has; `size` is that of an element.
fn bytes_of_slice(data: &[u8], slice: &DimRanges, shape: &[usize], size: usize) -> Vec<u8> {
    let row = shape[slice.dim + 1..].iter().product::<usize>() * size;
    let mut bytes = Vec::with_capacity(shape.iter().product::<usize>() * size);
    for block in data.chunks_exact((slice.of * row).max(1)) {
        slice.ranges.iter().for_each(|range| bytes.extend_from_slice(&block[range.start * row..range.end * row]));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `[2, 6, 2]`: the shards of both halves of the middle.
    #[test]
    fn sections_of_a_middle_dimension() {
        let data: Vec<u8> = (0..24).collect();
        let slice = DimRanges { dim: 1, of: 6, ranges: vec![1..2, 4..5] };
        assert_eq!(bytes_of_slice(&data, &slice, &[2, 2, 2], 1), [2, 3, 8, 9, 14, 15, 20, 21]);
    }
}
