//! A rank's shard of a checkpoint: the rows or columns of each weight that its shard of the model has.

use super::shards::{DimRanges, WeightShards};
use super::Collective;
use crate::config::ModelConfig;
use crate::formats::{dequantized, SafetensorsFiles};
use candle_core::safetensors::Load;
use candle_core::{bail, DType, Device, Error, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::ops::Range;

/// The source of the shards.
enum Whole<'a> {
    /// Mapped files: nothing outside a shard is read.
    Files(&'a SafetensorsFiles),
    /// Any other weights: each is made whole, on its device, and then divided.
    Weights(VarBuilder<'a>),
}

/// Returns a shard of each weight.
struct ShardedWeights<'a> {
    whole: Whole<'a>,
    shards: WeightShards,
}

/// The shard of `weights`, the root of a checkpoint of `config`'s model, that a rank of `group` loads with
/// [`Loader::group`](crate::Loader::group). Each weight is made whole on the device of `weights` and then divided; weights in
/// fp8 on the CPU, where the shard is dequantised. A shard of them requested in [`DType::F8E4M3`] stays as it is stored.
///
/// # Errors
/// When the model cannot be divided among the ranks ([`ModelConfig::split`]).
pub fn shard_of<'a>(weights: VarBuilder<'a>, config: &ModelConfig, group: &dyn Collective) -> Result<VarBuilder<'a>> {
    let (dtype, device) = (weights.dtype(), weights.device().clone());
    sharded(Whole::Weights(weights), config, group, dtype, &device)
}

/// [`shard_of`] of safetensors files in `dtype` on `device`: nothing that other ranks have is read.
///
/// # Errors
/// As [`shard_of`].
pub(crate) fn shard_of_safetensors<'a>(
    files: &'a SafetensorsFiles,
    config: &ModelConfig,
    group: &dyn Collective,
    dtype: DType,
    device: &Device,
) -> Result<VarBuilder<'a>> {
    sharded(Whole::Files(files), config, group, dtype, device)
}

fn sharded<'a>(
    whole: Whole<'a>,
    config: &ModelConfig,
    group: &dyn Collective,
    dtype: DType,
    device: &Device,
) -> Result<VarBuilder<'a>> {
    let shards = WeightShards::new(config, group)?;
    let has_dtypes = matches!(whole, Whole::Files(_));
    let weights = ShardedWeights { whole, shards: shards.clone() };
    let weights = VarBuilder::from_backend(Box::new(weights), dtype, device.clone());
    Ok(dequantized(weights, config.fp8.as_ref(), Some(shards), has_dtypes))
}

impl ShardedWeights<'_> {
    /// The shard of `shape` that has `kept` of the weight.
    fn read(
        &self,
        (name, kept): (&str, Option<&DimRanges>),
        shape: &[usize],
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let whole = kept.map_or_else(|| shape.to_vec(), |kept| kept.whole(shape));
        match &self.whole {
            Whole::Files(files) => {
                let view = files.view(name, dtype)?;
                if view.shape() != whole {
                    bail!("shape mismatch for {name}: expected {whole:?}, got {:?}", view.shape())
                }
                match kept {
                    Some(kept) => {
                        let stored = DType::try_from(view.dtype())?;
                        let bytes = shard_bytes(view.data(), kept, shape, stored.size_in_bytes());
                        let shard = Tensor::from_raw_buffer(&bytes, stored, shape, &Device::Cpu)?;
                        shard.to_device(device)?.to_dtype(dtype)
                    }
                    None => view.load(device)?.to_dtype(dtype),
                }
            }
            Whole::Weights(weights) => {
                let weights = weights.clone().set_device(device.clone());
                let got = weights.get_with_hints_dtype(whole, name, init, dtype)?;
                match kept {
                    Some(kept) => {
                        let ranges = kept.ranges.iter().map(|range| got.narrow(kept.dim, range.start, range.len()));
                        // A copy: a view would keep the whole weight in memory.
                        Tensor::cat(&ranges.collect::<Result<Vec<_>>>()?, kept.dim)?.force_contiguous()
                    }
                    None => Ok(got),
                }
            }
        }
    }
}

impl SimpleBackend for ShardedWeights<'_> {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let kept = self.shards.ranges_of(name, shape.dims());
        let got = match self.read((name, kept.as_ref()), shape.dims(), init, dtype, device) {
            Ok(got) => got,
            Err(error) => {
                let Some(parts) = self.shards.in_thirds(name, shape.dims()) else { return Err(error) };
                let part = |(name, kept): &(String, DimRanges)| {
                    let mut shape = shape.dims().to_vec();
                    shape[0] = kept.ranges.iter().map(Range::len).sum();
                    self.read((name, Some(kept)), &shape, init, dtype, device)
                };
                let parts = parts.iter().map(part).collect::<Result<Vec<_>>>().map_err(|_| error)?;
                Tensor::cat(&parts, 0)?
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

    /// What every rank has whole, as scales.
    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let whole = match &self.whole {
            Whole::Files(files) => files.view(name, dtype)?.load(device)?.to_dtype(dtype)?,
            Whole::Weights(weights) => weights.clone().set_device(device.clone()).get_unchecked_dtype(name, dtype)?,
        };
        match self.shards.ranges_of(name, whole.dims()) {
            None => Ok(whole),
            Some(_) => bail!("{name}: expected a shape, on which the rank's shard depends, got none"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        match &self.whole {
            Whole::Files(files) => files.shape(name).is_some(),
            Whole::Weights(weights) => weights.contains_tensor(name),
        }
    }
}

/// The bytes of a shard of `shape`; `size` is that of an element.
fn shard_bytes(data: &[u8], kept: &DimRanges, shape: &[usize], size: usize) -> Vec<u8> {
    let row = shape[kept.dim + 1..].iter().product::<usize>() * size;
    let mut bytes = Vec::with_capacity(shape.iter().product::<usize>() * size);
    for block in data.chunks_exact((kept.of * row).max(1)) {
        kept.ranges.iter().for_each(|range| bytes.extend_from_slice(&block[range.start * row..range.end * row]));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `[2, 6, 2]`: a range of each half of the middle dimension.
    #[test]
    fn sections_of_a_middle_dimension() {
        let data: Vec<u8> = (0..24).collect();
        let kept = DimRanges { dim: 1, of: 6, ranges: vec![1..2, 4..5] };
        assert_eq!(shard_bytes(&data, &kept, &[2, 2, 2], 1), [2, 3, 8, 9, 14, 15, 20, 21]);
    }
}
