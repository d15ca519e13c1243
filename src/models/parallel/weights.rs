//! A rank's part of a checkpoint: of each weight the rows or columns that its part of the model has.

use super::super::config::ModelConfig;
use super::{Collective, Part};
use crate::weights::dequantized;
use candle_core::safetensors::{Load, MmapedSafetensors};
use candle_core::{bail, DType, Device, Error, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::ops::Range;
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
    /// Of the whole model.
    config: ModelConfig,
    part: Part,
}

/// Ranges along one dimension, kept in this order.
#[derive(Debug, PartialEq)]
struct Cut {
    dim: usize,
    /// Length of the dimension in the whole.
    of: usize,
    ranges: Vec<Range<usize>>,
}

/// The part of `weights`, which is at the root of a checkpoint of `config`'s model, that a rank of `group` loads with
/// [`CausalLm::load_part`](crate::models::CausalLm::load_part). Each weight is made whole, on the device of `weights`,
/// and cut.
///
/// # Errors
/// Where the model cannot be divided so ([`ModelConfig::split`]).
pub fn part_of<'a>(weights: VarBuilder<'a>, config: &ModelConfig, group: &dyn Collective) -> Result<VarBuilder<'a>> {
    config.split(group.size())?;
    let (dtype, device) = (weights.dtype(), weights.device().clone());
    let weights = match &config.fp8 {
        Some(fp8) => dequantized(weights, fp8),
        None => weights,
    };
    let part = PartOfWeights { whole: Whole::Weights(weights), config: config.clone(), part: Part::of(group)? };
    Ok(VarBuilder::from_backend(Box::new(part), dtype, device))
}

/// [`part_of`] of safetensors files in `dtype` on `device`. The files are mapped, and nothing is read of what other ranks
/// have, unless weights are in fp8.
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
    if config.fp8.is_some() {
        return part_of(VarBuilder::from_mmaped_safetensors(files, dtype, device)?, config, group);
    }
    config.split(group.size())?;
    let whole = Whole::Files(MmapedSafetensors::multi(files)?);
    let part = PartOfWeights { whole, config: config.clone(), part: Part::of(group)? };
    Ok(VarBuilder::from_backend(Box::new(part), dtype, device.clone()))
}

impl PartOfWeights<'_> {
    /// What the rank has of a weight, of which it asks for `shape`; nothing where it has all of it.
    fn cut(&self, name: &str, shape: &[usize]) -> Option<Cut> {
        let (c, a, part) = (&self.config.gdn, &self.config.attention, self.part);
        let name = name.strip_suffix(".weight").unwrap_or(name);
        let mut parts = name.rsplit('.');
        let (last, above) = (parts.next()?, parts.next().unwrap_or_default());
        let along = |dim: usize| {
            let of = shape.get(dim)? * part.size;
            Some(Cut { dim, of, ranges: vec![part.range(of)] })
        };
        // q, k and v, or the gate and up: each has its part.
        let sections = |dim: usize, sizes: &[usize]| {
            let mut start = 0;
            let ranges = sizes.iter().map(|size| {
                let range = part.range(*size);
                start += size;
                start - size + range.start..start - size + range.end
            });
            Some(Cut { dim, ranges: ranges.collect(), of: sizes.iter().sum() })
        };
        match (above, last) {
            // By key head, and so are the value heads that belong to them.
            ("linear_attn", "in_proj_qkvz" | "in_proj_ba" | "in_proj_z" | "in_proj_b" | "in_proj_a") => along(0),
            ("linear_attn", "A_log" | "dt_bias") => along(0),
            ("linear_attn", "in_proj_qkv" | "conv1d") => sections(0, &[c.key_size(), c.key_size(), c.value_size()]),
            ("linear_attn", "out_proj") => along(1),
            ("self_attn", "q_proj") => along(0),
            ("self_attn", "k_proj" | "v_proj") if part.size.is_multiple_of(a.num_kv_heads) => {
                let head = part.rank * a.num_kv_heads / part.size;
                let range = head * a.head_dim..(head + 1) * a.head_dim;
                Some(Cut { dim: 0, of: a.num_kv_heads * a.head_dim, ranges: vec![range] })
            }
            ("self_attn", "k_proj" | "v_proj") => along(0),
            ("self_attn", "o_proj") => along(1),
            ("experts", "gate_up_proj") => {
                let inner = shape.get(1)? / 2 * part.size;
                sections(1, &[inner, inner])
            }
            ("experts", "down_proj") => along(2),
            (_, "gate_proj" | "up_proj") => along(0),
            (_, "down_proj") => along(1),
            (_, "embed_tokens" | "lm_head") => along(0),
            _ => None,
        }
    }
}

impl SimpleBackend for PartOfWeights<'_> {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let cut = self.cut(name, shape.dims());
        let mut whole = shape.dims().to_vec();
        if let Some(cut) = &cut {
            whole[cut.dim] = cut.of;
        }
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
fn pieces(data: &[u8], cut: &Cut, shape: &[usize], size: usize) -> Vec<u8> {
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
        let cut = Cut { dim: 1, of: 6, ranges: vec![1..2, 4..5] };
        assert_eq!(pieces(&data, &cut, &[2, 2, 2], 1), [2, 3, 8, 9, 14, 15, 20, 21]);
    }

    #[test]
    fn more_ranks_than_key_value_heads() -> Result<()> {
        let config = include_str!("../../../examples/generate/configs/qwen3.5-35b-a3b.json");
        let config = ModelConfig::from_json(config)?;
        assert_eq!(config.attention.num_kv_heads, 2);
        let heads: Vec<_> = (0..4)
            .map(|rank| {
                let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
                let (whole, part) = (Whole::Weights(vb), Part { rank, size: 4 });
                let part = PartOfWeights { whole, config: config.clone(), part };
                part.cut("model.layers.3.self_attn.k_proj.weight", &[256, 2048]).map(|cut| cut.ranges[0].start / 256)
            })
            .collect();
        assert_eq!(heads, [Some(0), Some(0), Some(1), Some(1)]);
        Ok(())
    }
}
