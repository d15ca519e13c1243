//! Random weights: what a model is timed with where its checkpoint is not at hand.

use candle_core::{bail, DType, Device, Error, Result, Shape, Tensor};
use candle_gdn_models::{Family, ModelConfig};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::Init;

/// Values made at a time, in f32: the experts of a layer together would take gigabytes of it, and small pieces take the
/// same memory again.
const PIECE: usize = 1 << 22;
const SEED: u64 = 299792458;

/// What the names of weights end with; the experts of a layer come as one tensor.
const KNOWN: &[&str] = &[".weight", ".A_log", ".dt_bias", ".experts.gate_up_proj", ".experts.down_proj"];
const INTERLEAVED: &[&str] = &[".in_proj_qkvz.weight", ".in_proj_ba.weight"];
const SPLIT: &[&str] = &[".in_proj_qkv.weight", ".in_proj_z.weight", ".in_proj_b.weight", ".in_proj_a.weight"];

/// A checkpoint that has whatever the model asks for, in the layout of its family. Each weight is made on the model's
/// device, the same in every run, and of such size that activations stay as in a trained model.
pub struct Dummy {
    family: Family,
    tied: bool,
}

impl Dummy {
    pub fn new(config: &ModelConfig, device: &Device) -> Result<Self> {
        if !device.is_cpu() {
            device.set_seed(SEED)?;
        }
        Ok(Self { family: config.family, tied: config.tie_word_embeddings })
    }
}

impl SimpleBackend for Dummy {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        if !self.contains_tensor(name) {
            return Err(Error::CannotFindTensor { path: name.to_string() });
        }
        let (len, range) = (shape.elem_count(), range(name, shape.dims()));
        let piece = |first: usize| uniform(name, first, PIECE.min(len - first), range, device)?.to_dtype(dtype);
        if len <= PIECE {
            return piece(0)?.reshape(shape);
        }
        let all = Tensor::zeros(len, dtype, device)?;
        for first in (0..len).step_by(PIECE) {
            all.slice_set(&piece(first)?, 0, first)?;
        }
        all.reshape(shape)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        bail!("{name}: random weights take their shape from the model, which asks for none here")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let ends = |with: &[&str]| with.iter().any(|end| name.ends_with(end));
        let other = match self.family {
            Family::Qwen3Next => SPLIT,
            _ => INTERLEAVED,
        };
        let one_expert = name.contains(".experts.") && name.ends_with(".weight");
        let tied = self.tied && name == "lm_head.weight";
        ends(KNOWN) && !ends(other) && !one_expert && !tied
    }
}

/// Between which numbers the values lie.
fn range(name: &str, dims: &[usize]) -> [f32; 2] {
    let last = name.rsplit('.').next().unwrap_or(name);
    match (last, dims) {
        // Half of a head's state is gone after some tokens, or some hundreds.
        ("A_log", _) => [-1., 1.],
        ("dt_bias", _) => [-6., -2.],
        (_, [_]) if name.ends_with("linear_attn.norm.weight") => [0.9, 1.1],
        (_, [_]) => [-0.1, 0.1],
        // A sum of `inputs` products has the variance of one input.
        (_, dims) => {
            let inputs = dims.last().copied().unwrap_or(1).max(1);
            let most = (3. / inputs as f32).sqrt();
            [-most, most]
        }
    }
}

/// The values from the place `first` on, `[len]` in f32.
fn uniform(name: &str, first: usize, len: usize, [low, high]: [f32; 2], device: &Device) -> Result<Tensor> {
    if !device.is_cpu() {
        return Tensor::rand(low, high, len, device);
    }
    // candle's generator there has no seed. The hash is taken from the numbers of the places, so that it vectorises.
    let seed = name.bytes().fold(SEED as u32, |h, b| (h ^ u32::from(b)).wrapping_mul(0x0100_0193));
    let step = (high - low) / (1u32 << 24) as f32;
    let value = |i: usize| {
        let x = low + step * (hash((i as u32).wrapping_add(seed)) >> 8) as f32;
        // What bf16 holds, as of published weights: packed, it takes half of the memory.
        f32::from_bits(x.to_bits() & 0xffff_0000)
    };
    Tensor::from_vec((first..first + len).map(value).collect::<Vec<f32>>(), len, device)
}

/// 32 well mixed bits of each number.
fn hash(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}
