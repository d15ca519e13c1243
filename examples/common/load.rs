//! Device, dtype, and the model.

use super::{bar, Checkpoint};
use anyhow::{Context, Result};
use candle_core::{DType, Device};
use candle_gdn::models::{CausalLm, ModelConfig};
use candle_nn::VarBuilder;
use std::num::NonZeroUsize;
use std::time::Instant;

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum DtypeArg {
    F32,
    Bf16,
    F16,
}

/// The arguments that say what runs where.
#[derive(clap::Args, Debug)]
pub struct ModelArgs {
    /// Directory of a checkpoint, or its id on the Hugging Face hub (owner/name)
    /// [default: the demo that comes with the repository]
    #[arg(long, value_name = "DIR|ID")]
    pub model: Option<String>,

    /// Revision on the hub: a branch, a tag or a commit
    #[arg(long, default_value = "main")]
    pub revision: String,

    /// Number format of weights and activations [default: bf16 on a GPU, f32 on the CPU]
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,

    /// Number format the rotary frequencies are rounded to. Models are trained and run with f32; bf16 repeats the
    /// figures of a model that was cast as a whole
    #[arg(long, value_enum, default_value = "f32")]
    rope_dtype: DtypeArg,

    /// Run on the CPU even if there is a GPU
    #[arg(long)]
    pub cpu: bool,

    /// Tokens of prompts that run in one pass: bounds the memory, not the result
    #[arg(long, value_name = "N", default_value = "1024")]
    pub prefill_chunk: NonZeroUsize,
}

impl ModelArgs {
    /// The first GPU if the build and the machine have one, else the CPU.
    fn device(&self) -> Result<Device> {
        if self.cpu {
            return Ok(Device::Cpu);
        }
        let device = Device::cuda_if_available(0).context("cannot open the GPU (--cpu runs without it)")?;
        candle_gdn::keep_freed_memory(&device)?;
        Ok(device)
    }

    fn dtype(&self, device: &Device) -> DType {
        match (self.dtype, device.is_cpu()) {
            (Some(DtypeArg::F32), _) | (None, true) => DType::F32,
            (Some(DtypeArg::Bf16), _) | (None, false) => DType::BF16,
            (Some(DtypeArg::F16), _) => DType::F16,
        }
    }
}

/// The config with its rotary frequencies rounded to `dtype`.
fn round_rope(config: &ModelConfig, dtype: DtypeArg) -> ModelConfig {
    let mut config = config.clone();
    for f in &mut config.attention.rope_inv_freq {
        *f = match dtype {
            DtypeArg::F32 => *f,
            DtypeArg::Bf16 => half::bf16::from_f64(*f).to_f64(),
            DtypeArg::F16 => half::f16::from_f64(*f).to_f64(),
        };
    }
    config
}

/// To be called first, while there is one thread: candle asks for the number of threads at every
/// matrix product, and looks it up in /proc/cpuinfo unless this variable tells it.
pub fn fix_thread_count() {
    const VARIABLE: &str = "RAYON_NUM_THREADS";
    if std::env::var_os(VARIABLE).is_none() {
        std::env::set_var(VARIABLE, candle_core::utils::get_num_threads().to_string());
    }
}

/// Loads the weights, memory-mapped, with a progress bar.
pub fn load_model(args: &ModelArgs, checkpoint: &Checkpoint, config: &ModelConfig) -> Result<CausalLm> {
    let start = Instant::now();
    let device = args.device()?;
    let dtype = args.dtype(&device);
    let files = checkpoint.weights()?;
    // SAFETY: the files are read-only here; like every mapping, it relies on nobody truncating them.
    let vb = unsafe { VarBuilder::from_mmaped_safetensors(&files, dtype, &device)? };
    let bar = bar("loading", config.layers.len(), "layers");
    let config = round_rope(config, args.rope_dtype);
    let model = CausalLm::load_with_progress(&config, vb, |done, _| bar.set_position(done as u64))
        .with_context(|| format!("cannot load {}", checkpoint.dir().display()))?;
    bar.finish_and_clear();
    let place = if device.is_cpu() { "the CPU" } else { "the GPU" };
    eprintln!("loaded {:?} weights on {place} in {:.2} s", dtype, start.elapsed().as_secs_f64());
    Ok(model)
}
