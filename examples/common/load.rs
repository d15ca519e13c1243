//! Device, dtype, and the model.

use super::dummy::Dummy;
use super::{bar, tell, Checkpoint, Rank};
use anyhow::{Context, Error, Result};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device};
use candle_gdn_models::{part_of, part_of_safetensors, CausalLm, ModelConfig};
use candle_nn::VarBuilder;
use std::num::NonZeroUsize;
use std::time::Instant;

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum DtypeArg {
    F32,
    Bf16,
    F16,
}

/// Where weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LoadFormat {
    /// The checkpoint's files
    Auto,
    /// Random ones, to time a model by its config.json alone
    Dummy,
}

/// Types of quantised matrices, by the names that llama.cpp gives them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum QuantizeArg {
    #[value(name = "q4_0")]
    Q4_0,
    #[value(name = "q4_1")]
    Q4_1,
    #[value(name = "q5_0")]
    Q5_0,
    #[value(name = "q5_1")]
    Q5_1,
    #[value(name = "q8_0")]
    Q8_0,
    #[value(name = "q2k", alias = "q2_k")]
    Q2k,
    #[value(name = "q3k", alias = "q3_k")]
    Q3k,
    #[value(name = "q4k", alias = "q4_k")]
    Q4k,
    #[value(name = "q5k", alias = "q5_k")]
    Q5k,
    #[value(name = "q6k", alias = "q6_k")]
    Q6k,
}

impl QuantizeArg {
    fn dtype(self) -> GgmlDType {
        match self {
            Self::Q4_0 => GgmlDType::Q4_0,
            Self::Q4_1 => GgmlDType::Q4_1,
            Self::Q5_0 => GgmlDType::Q5_0,
            Self::Q5_1 => GgmlDType::Q5_1,
            Self::Q8_0 => GgmlDType::Q8_0,
            Self::Q2k => GgmlDType::Q2K,
            Self::Q3k => GgmlDType::Q3K,
            Self::Q4k => GgmlDType::Q4K,
            Self::Q5k => GgmlDType::Q5K,
            Self::Q6k => GgmlDType::Q6K,
        }
    }
}

/// The arguments that say what runs where.
#[derive(clap::Args, Debug)]
pub struct ModelArgs {
    /// Directory of a checkpoint, its id on the Hugging Face hub (owner/name), or a GGUF file; with --load-format dummy
    /// also a config.json, or the short name of a published model, as in qwen3.5-4b
    /// [default: the demo that comes with the repository]
    #[arg(long, value_name = "DIR|ID|FILE")]
    pub model: Option<String>,

    /// Where the weights come from
    #[arg(long, value_enum, default_value = "auto")]
    pub load_format: LoadFormat,

    /// Revision on the hub: a branch, a tag or a commit
    #[arg(long, default_value = "main")]
    pub revision: String,

    /// Quantise the matrices as they are loaded, those that are not so already; embeddings stay as they are
    #[arg(long, value_enum)]
    quantize: Option<QuantizeArg>,

    /// Number format of weights and activations [default: bf16 on a GPU, f32 on the CPU]
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,

    /// Run on the CPU even if there is a GPU
    #[arg(long)]
    pub cpu: bool,

    /// Tokens of prompts that run in one pass: bounds the memory, not the result [default: 8192 on a GPU, 1024 on the CPU]
    #[arg(long, value_name = "N")]
    prefill_chunk: Option<NonZeroUsize>,

    /// Divide the model over N GPUs of this machine; with --cpu over N threads that act as devices
    #[arg(long, value_name = "N", default_value = "1")]
    pub tensor_parallel: NonZeroUsize,
}

impl ModelArgs {
    /// The first GPU if the build and the machine have one, else the CPU.
    pub fn device(&self) -> Result<Device> {
        if self.on_cpu() {
            return Ok(Device::Cpu);
        }
        gpu(0)
    }

    /// Whether the run is on the CPU.
    pub fn on_cpu(&self) -> bool {
        self.cpu || !candle_core::utils::cuda_is_available()
    }

    /// Tokens of prompts that run in one pass. Weights are read once a pass, of which a GPU wants fewer.
    pub fn prefill_chunk(&self, device: &Device) -> usize {
        self.prefill_chunk.map_or(if device.is_cpu() { 1024 } else { 8192 }, NonZeroUsize::get)
    }

    /// What matrices are quantised to.
    pub fn quantize(&self) -> Option<GgmlDType> {
        self.quantize.map(QuantizeArg::dtype)
    }

    /// Of weights and activations.
    pub fn dtype(&self, device: &Device) -> DType {
        match (self.dtype, device.is_cpu()) {
            (Some(DtypeArg::F32), _) | (None, true) => DType::F32,
            (Some(DtypeArg::Bf16), _) | (None, false) => DType::BF16,
            (Some(DtypeArg::F16), _) => DType::F16,
        }
    }
}

/// One of the machine's GPUs.
pub fn gpu(ordinal: usize) -> Result<Device> {
    let device = candle_gdn::single_stream_device(ordinal)
        .with_context(|| format!("cannot open GPU {ordinal} (--cpu runs without it)"))?;
    candle_gdn::keep_freed_memory(&device)?;
    Ok(device)
}

/// To be called first, while there is one thread: candle asks for the number of threads at every
/// matrix product, and looks it up in /proc/cpuinfo unless this variable tells it.
pub fn fix_thread_count() {
    const VARIABLE: &str = "RAYON_NUM_THREADS";
    if std::env::var_os(VARIABLE).is_none() {
        std::env::set_var(VARIABLE, candle_core::utils::get_num_threads().to_string());
    }
}

/// Loads the weights, memory-mapped, or makes them up, with a progress bar.
pub fn load_model(args: &ModelArgs, checkpoint: &Checkpoint, config: &ModelConfig, rank: &Rank) -> Result<CausalLm> {
    let (start, device) = (Instant::now(), &rank.device);
    let dtype = args.dtype(device);
    let bar = bar("loading", config.layers.len(), "layers");
    let progress = |done: usize, _| bar.set_position(done as u64);
    let loader = CausalLm::loader(config).quantize(args.quantize()).group(rank.group.clone()).progress(progress);
    let load = || match (args.load_format, checkpoint.gguf()) {
        (LoadFormat::Auto, Some(file)) => Ok::<_, Error>(loader.load_gguf(file, dtype, device)?),
        (LoadFormat::Auto, None) => {
            let files = &checkpoint.weights()?;
            // SAFETY: the files are read-only here; like every mapping, it relies on nobody truncating them.
            let vb = match &rank.group {
                Some(group) => unsafe { part_of_safetensors(files, config, &**group, dtype, device)? },
                None => unsafe { VarBuilder::from_mmaped_safetensors(files, dtype, device)? },
            };
            Ok(loader.load(vb)?)
        }
        (LoadFormat::Dummy, _) => {
            let vb = VarBuilder::from_backend(Box::new(Dummy::new(config, device)?), dtype, device.clone());
            let vb = match &rank.group {
                Some(group) => part_of(vb, config, &**group)?,
                None => vb,
            };
            Ok(loader.load(vb)?)
        }
    };
    let model = load().with_context(|| format!("cannot load {}", checkpoint.name()))?;
    bar.finish_and_clear();
    if let [other, ..] = model.other_types() {
        let what = other.dtype.map_or("dense".to_string(), |dtype| format!("{dtype:?}"));
        let count = model.other_types().len();
        tell!("{count} matrices are of another type, for want of whole blocks: {} is {what}", other.name);
    }
    let place = match (&rank.group, device.is_cpu()) {
        (None, true) => "the CPU".to_string(),
        (None, false) => "the GPU".to_string(),
        (Some(group), true) => format!("{} threads", group.size()),
        (Some(group), false) => format!("{} GPUs", group.size()),
    };
    let random = if args.load_format == LoadFormat::Dummy { "random " } else { "" };
    let matrices = args.quantize().map_or(String::new(), |to| format!(", matrices {to:?},"));
    tell!("loaded {random}{dtype:?} weights{matrices} on {place} in {:.2} s", start.elapsed().as_secs_f64());
    Ok(model)
}
