//! Random weights, to time a model without its checkpoint.

use candle_core::{bail, DType, Device, Error, Result, Shape, Tensor};
use candle_gdn_models::{Family, Fp8Config, ModelConfig};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::Init;
use float8::F8E4M3;
use rayon::prelude::*;
use std::collections::HashMap;
use std::sync::Mutex;

/// Values made at a time, in f32: the experts of a layer together would need gigabytes.
const CHUNK: usize = 1 << 22;
const SEED: u32 = 299792458;

/// What the names of weights end with; the experts of a layer come as one tensor.
const KNOWN: &[&str] = &[".weight", ".A_log", ".dt_bias", ".experts.gate_up_proj", ".experts.down_proj"];
const INTERLEAVED: &[&str] = &[".in_proj_qkvz.weight", ".in_proj_ba.weight"];
const SPLIT: &[&str] = &[".in_proj_qkv.weight", ".in_proj_z.weight", ".in_proj_b.weight", ".in_proj_a.weight"];
const ONE_MATRIX: &[&str] = &[".in_proj.weight"];

/// The largest number in e4m3.
const MOST: f32 = 448.;
/// What the name of a weight's scales ends with.
const SCALE: &str = "_scale_inv";

/// A checkpoint with every weight of a model, in the layout of its family. Each weight is made on the model's device, is the same
/// in every run, and keeps activations in the range of a trained model.
pub struct Dummy {
    family: Family,
    zero_centred: bool,
    tied: bool,
    fp8: Option<Fp8Config>,
    /// Matrices in e4m3 by their number of elements. Two matrices with as many elements hold the same numbers: to make those of the
    /// experts of one layer takes about a second.
    in_fp8: Mutex<HashMap<usize, Tensor>>,
}

impl Dummy {
    pub fn new(config: &ModelConfig) -> Self {
        let (tied, fp8) = (config.tie_word_embeddings, config.fp8.clone());
        let (family, zero_centred) = (config.family, config.zero_centred_norms);
        Self { family, zero_centred, tied, fp8, in_fp8: Mutex::default() }
    }

    /// Whether a weight is in e4m3, with scales beside it.
    fn in_fp8(&self, name: &str) -> bool {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        self.fp8.as_ref().is_some_and(|fp8| fp8.converts(module)) && self.contains_tensor(name)
    }

    /// Rows and columns of the blocks that have a scale each.
    fn block(&self) -> Option<[usize; 2]> {
        self.fp8.as_ref()?.weight_block_size
    }

    /// Numbers of a uniform distribution, rounded to e4m3.
    fn e4m3(&self, shape: Shape) -> Result<Tensor> {
        let Ok(mut made) = self.in_fp8.lock() else { bail!("random weights: another thread has failed") };
        let len = shape.elem_count();
        if let Some(numbers) = made.get(&len) {
            return numbers.reshape(shape);
        }
        let table: Vec<F8E4M3> = (0..4096).map(|i| F8E4M3::from_f32((i as f32 / 2047.5 - 1.) * MOST)).collect();
        let numbers: Vec<F8E4M3> = (0..len).map(|i| table[(hash(i as u32) >> 20) as usize]).collect();
        let numbers = Tensor::from_vec(numbers, len, &Device::Cpu)?;
        made.insert(len, numbers.clone());
        numbers.reshape(shape)
    }
}

impl SimpleBackend for Dummy {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        if !self.contains_tensor(name) {
            return Err(Error::CannotFindTensor { path: name.to_string() });
        }
        if dtype == DType::F8E4M3 {
            return self.e4m3(shape)?.to_device(device);
        }
        if let (Some(weight), Some([_, columns])) = (name.strip_suffix(SCALE), self.block()) {
            let inputs = shape.dims().last().map_or(1, |blocks| blocks * columns);
            let scale = range(weight, &[1, inputs])[1] / MOST;
            return Tensor::full(scale, shape, device)?.to_dtype(dtype);
        }
        let (len, mut range) = (shape.elem_count(), range(name, shape.dims()));
        if !self.zero_centred && name.ends_with("norm.weight") {
            range = [0.9, 1.1];
        }
        if !device.is_cpu() {
            device.set_seed(u64::from(seed(name)))?;
        }
        // In f32 on the CPU they are what is asked for: nothing is copied.
        let most = if device.is_cpu() && dtype == DType::F32 { len.max(1) } else { CHUNK };
        let chunk = |first: usize| uniform(name, first, most.min(len - first), range, device)?.to_dtype(dtype);
        if len <= most {
            return chunk(0)?.reshape(shape);
        }
        let all = Tensor::zeros(len, dtype, device)?;
        for first in (0..len).step_by(most) {
            all.slice_set(&chunk(first)?, 0, first)?;
        }
        all.reshape(shape)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        if name.ends_with(SCALE) && self.contains_tensor(name) {
            // One for the whole matrix, as if it had so many inputs.
            return Tensor::full(range(name, &[1, 1 << 11])[1] / MOST, 1, device)?.to_dtype(dtype);
        }
        bail!("{name}: random weights take their shape from the model, which asks for none here")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        if let Some(weight) = name.strip_suffix(SCALE) {
            return self.in_fp8(weight);
        }
        let ends = |with: &[&str]| with.iter().any(|end| name.ends_with(end));
        let other: &[&[&str]] = match self.family {
            Family::Qwen3Next => &[SPLIT],
            Family::OlmoHybrid => &[SPLIT, INTERLEAVED, ONE_MATRIX],
            Family::LaraMini => &[SPLIT, INTERLEAVED],
            _ => &[INTERLEAVED],
        };
        let one_expert = name.contains(".experts.") && name.ends_with(".weight");
        let tied = self.tied && name.ends_with("lm_head.weight");
        ends(KNOWN) && !other.iter().any(|names| ends(names)) && !one_expert && !tied
    }
}

/// The lowest and the highest value of a weight.
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

/// The values from index `first` on, `[len]` in f32, each exact in bf16 as published weights are: the CPU then packs them in half
/// of the memory.
fn uniform(name: &str, first: usize, len: usize, [low, high]: [f32; 2], device: &Device) -> Result<Tensor> {
    if !device.is_cpu() {
        return Tensor::rand(low, high, len, device)?.to_dtype(DType::BF16)?.to_dtype(DType::F32);
    }
    // candle's generator on the CPU has no seed. A hash of the index vectorises.
    let seed = seed(name);
    let step = (high - low) / (1u32 << 24) as f32;
    let value = |i: usize| {
        let x = low + step * (hash((i as u32).wrapping_add(seed)) >> 8) as f32;
        f32::from_bits(x.to_bits() & 0xffff_0000)
    };
    Tensor::from_vec(
        (first..first + len).into_par_iter().with_min_len(1 << 16).map(value).collect::<Vec<f32>>(),
        len,
        device,
    )
}

/// A seed of the name, so that a weight holds the same numbers whatever was loaded before it.
fn seed(name: &str) -> u32 {
    name.bytes().fold(SEED, |h, b| (h ^ u32::from(b)).wrapping_mul(0x0100_0193))
}

/// 32 well mixed bits of each number.
fn hash(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}
