//! The command line of a model: its device, dtype and weights, and how it is loaded.

use crate::dummy::Dummy;
use crate::memory::{weights, with_draft_head};
use crate::{bar, status, Checkpoint, Rank};
use anyhow::{Context, Error, Result};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, DeviceLocation};
use candle_gdn::Algo;
use candle_gdn_models::{shard_of, CausalLm, DraftHeadChoice, ModelConfig};
use candle_nn::VarBuilder;
use clap::builder::{NonEmptyStringValueParser, PossibleValue, PossibleValuesParser, TypedValueParser};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Where weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LoadFormat {
    /// The checkpoint's files
    Auto,
    /// Random ones, to time a model by its config.json alone
    Dummy,
}

/// Types of quantised matrices: the name of the option, the name that llama.cpp gives it, the type.
const QUANTISED: [(&str, &str, GgmlDType); 10] = [
    ("q4_0", "q4_0", GgmlDType::Q4_0),
    ("q4_1", "q4_1", GgmlDType::Q4_1),
    ("q5_0", "q5_0", GgmlDType::Q5_0),
    ("q5_1", "q5_1", GgmlDType::Q5_1),
    ("q8_0", "q8_0", GgmlDType::Q8_0),
    ("q2k", "q2_k", GgmlDType::Q2K),
    ("q3k", "q3_k", GgmlDType::Q3K),
    ("q4k", "q4_k", GgmlDType::Q4K),
    ("q5k", "q5_k", GgmlDType::Q5K),
    ("q6k", "q6_k", GgmlDType::Q6K),
];

fn quantised() -> impl TypedValueParser<Value = GgmlDType> {
    let values = QUANTISED.map(|(name, alias, _)| PossibleValue::new(name).alias(alias));
    PossibleValuesParser::new(values).map(|given| {
        let found = QUANTISED.into_iter().find(|(name, alias, _)| given == *name || given == *alias);
        found.expect("one of the possible values").2
    })
}

/// The arguments that say what runs where.
#[derive(clap::Args, Clone, Debug)]
pub struct ModelArgs {
    /// Directory of a checkpoint, a GGUF file, or a name on the Hugging Face hub: owner/name, of GGUF files with a type as in
    /// owner/name:Q4_K_M or with a file as in owner/name/FILE.gguf, or a link to these; with --load-format dummy
    /// also a config.json, or the short name of a published model, as in qwen3.5-4b
    /// [default: the demo that comes with the repository]
    #[arg(long, value_name = "DIR|ID|FILE")]
    pub model: Option<String>,

    /// Where the weights come from
    #[arg(long, value_enum, default_value = "auto")]
    pub load_format: LoadFormat,

    /// Revision on the hub: a branch, a tag or a commit; owner/name@REVISION says it too [default: main]
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    pub revision: Option<String>,

    /// Quantise the matrices as they are loaded, those that are not so already; embeddings stay as they are
    #[arg(long, value_parser = quantised())]
    pub quantize: Option<GgmlDType>,

    /// Folder of a LoRA adapter in PEFT's format, merged into the weights as they are loaded; these must not be quantised in
    /// their files
    #[arg(long, value_name = "DIR")]
    pub lora: Option<PathBuf>,

    /// Number format of weights and activations [default: bf16 on a GPU, f32 on the CPU]
    #[arg(long, value_parser = PossibleValuesParser::new(["f32", "bf16", "f16"]).try_map(|name| name.parse::<DType>()))]
    dtype: Option<DType>,

    /// Run on the CPU even if there is a GPU
    #[arg(long)]
    pub cpu: bool,

    /// Kernel that runs the gated delta rule, whatever the shape: recurrent, recurrent_128, decode, chunked_sm80 or
    /// chunked_sm90; a shape that it does not support is an error [default: the variable CANDLE_GDN_ALGO, or auto]
    #[arg(long, value_name = "NAME")]
    algo: Option<Algo>,

    /// Tokens of prompts that run in one pass: bounds the memory, not the result [default: 8192 on a GPU, 1024 on the CPU]
    #[arg(long, value_name = "N")]
    pub(crate) prefill_chunk: Option<NonZeroUsize>,

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

    /// Tokens of prompts that run in one pass. A pass reads all weights, so that a GPU has larger ones.
    pub fn prefill_chunk(&self, device: &Device) -> usize {
        self.prefill_chunk_at(device.location())
    }

    pub(crate) fn prefill_chunk_at(&self, device: DeviceLocation) -> usize {
        self.prefill_chunk.map_or(if device == DeviceLocation::Cpu { 1024 } else { 8192 }, NonZeroUsize::get)
    }

    /// The kernel of the gated delta rule: `--algo`, else the variable `CANDLE_GDN_ALGO`, else auto.
    pub fn algo(&self) -> Result<Algo> {
        Ok(self.algo.map_or_else(Algo::from_env, Ok)?)
    }

    /// The dtype of weights and activations.
    pub fn dtype(&self, device: &Device) -> DType {
        self.dtype_at(device.location())
    }

    pub(crate) fn dtype_at(&self, device: DeviceLocation) -> DType {
        self.dtype.unwrap_or(if device == DeviceLocation::Cpu { DType::F32 } else { DType::BF16 })
    }
}

/// One of the machine's GPUs.
pub fn gpu(ordinal: usize) -> Result<Device> {
    let device = candle_gdn::single_stream_device(ordinal)
        .with_context(|| format!("cannot open GPU {ordinal} (--cpu runs without it)"))?;
    candle_gdn::keep_freed_memory(&device)?;
    #[cfg(feature = "cuda")]
    pretend_memory(&device)?;
    Ok(device)
}

/// With the variable `CANDLE_GDN_CUDA_MEMORY_LIMIT` a GPU stands in for one of so many bytes: the program holds the rest and never uses it.
#[cfg(feature = "cuda")]
fn pretend_memory(device: &Device) -> Result<()> {
    const VARIABLE: &str = "CANDLE_GDN_CUDA_MEMORY_LIMIT";
    let (Device::Cuda(device), Ok(limit)) = (device, std::env::var(VARIABLE)) else { return Ok(()) };
    let limit: usize =
        limit.parse().with_context(|| format!("{VARIABLE}: expected a number of bytes, got {limit:?}"))?;
    let (free, total) = device.cuda_stream().context().mem_get_info()?;
    let rest = total.saturating_sub(limit).min(free);
    if rest > 0 {
        // SAFETY: nobody reads it.
        std::mem::forget(unsafe { device.alloc::<u8>(rest)? });
    }
    Ok(())
}

/// How long decoding runs before the first draft of a head that `--mtp on` did not ask for. On a CPU the first drafts take milliseconds
/// more than later ones, to move states and touch memory: a short run of a small model would not regain them.
pub fn draft_after(choice: DraftHeadChoice, device: &Device) -> Duration {
    Duration::from_secs(if choice == DraftHeadChoice::Auto && device.is_cpu() { 2 } else { 0 })
}

/// Sets rayon's number of threads to candle's. Call it first, while there is one thread: candle needs the number at every matrix product,
/// and reads /proc/cpuinfo where this variable is not set.
pub fn fix_thread_count() {
    const VARIABLE: &str = "RAYON_NUM_THREADS";
    if std::env::var_os(VARIABLE).is_none() {
        let candles = std::env::var("CANDLE_NUM_THREADS").ok();
        std::env::set_var(VARIABLE, thread_count(candles.as_deref()).to_string());
    }
}

/// As candle reads its variable for its own pool; `get_num_threads` looks at rayon's alone.
fn thread_count(candles: Option<&str>) -> usize {
    let given = candles.and_then(|count| count.parse().ok()).filter(|count| *count > 0);
    given.unwrap_or_else(candle_core::utils::get_num_threads)
}

#[cfg(test)]
#[test]
fn rayon_has_as_many_threads_as_candle() {
    let all = candle_core::utils::get_num_threads();
    let counts = [Some("1"), Some("17"), None, Some("0"), Some("-1"), Some("many")].map(thread_count);
    assert_eq!(counts, [1, 17, all, all, all, all]);
}

/// Loads the memory-mapped weights, or makes them up, with a progress bar. `draft_head`: those of the draft head too.
pub fn load_model(
    args: &ModelArgs,
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    draft_head: bool,
    rank: &Rank,
) -> Result<CausalLm> {
    let (start, device) = (Instant::now(), &rank.device);
    let dtype = args.dtype(device);
    let bar = bar("loading", config.layers.len(), "layers");
    let progress = |done: usize, _| bar.set_position(done as u64);
    let head = if draft_head { DraftHeadChoice::On } else { DraftHeadChoice::Off };
    let loader = CausalLm::loader(config).algo(args.algo()?).quantize(args.quantize).group(rank.group.clone());
    let loader = loader.lora(checkpoint.lora()).draft_head(head).progress(progress);
    let load = || match (args.load_format, checkpoint.gguf()) {
        (LoadFormat::Auto, Some(file)) => Ok::<_, Error>(loader.load_gguf(file, dtype, device)?),
        (LoadFormat::Auto, None) => Ok(loader.load_safetensors(checkpoint.files()?, dtype, device)?),
        (LoadFormat::Dummy, _) => {
            let vb = VarBuilder::from_backend(Box::new(Dummy::new(config)), dtype, device.clone());
            let vb = match &rank.group {
                Some(group) => shard_of(vb, config, &**group)?,
                None => vb,
            };
            Ok(loader.load(vb)?)
        }
    };
    let model = load().with_context(|| format!("cannot load {}", checkpoint.name()))?;
    bar.finish_and_clear();
    model.remarks().iter().for_each(|remark| status!("{remark}"));
    if let [other, ..] = model.other_types() {
        let what = other.dtype.map_or("dense".to_string(), |dtype| format!("{dtype:?}"));
        let count = model.other_types().len();
        status!("{count} matrices are of another type, for want of whole blocks: {} is {what}", other.name);
    }
    let kept = checkpoint.gguf().filter(|_| args.quantize.is_none() && args.load_format == LoadFormat::Auto);
    let loaded = if draft_head { &with_draft_head(config) } else { config };
    for (of, dtype, count) in kept.iter().flat_map(|file| file.kept_types(loaded)) {
        status!("{count} tensors of {of} are kept as {dtype:?}: there are no kernels for their own type");
    }
    let place = match (&rank.group, device.is_cpu()) {
        (None, true) => "the CPU".to_string(),
        (None, false) => "the GPU".to_string(),
        (Some(group), true) => format!("{} threads", group.size()),
        (Some(group), false) => format!("{} GPUs", group.size()),
    };
    let random = if args.load_format == LoadFormat::Dummy { "random " } else { "" };
    let adapter = if args.lora.is_some() { " with the adapter" } else { "" };
    let converted = |to: GgmlDType| match checkpoint.gguf().filter(|_| args.load_format == LoadFormat::Auto) {
        None => format!(", matrices {to:?},"),
        Some(file) => match file.converted(loaded, to) {
            0 => ", of which --quantize changed none,".to_string(),
            count => format!(", {count} matrices {to:?},"),
        },
    };
    let matrices = args.quantize.map_or(String::new(), converted);
    device.synchronize()?;
    let seconds = start.elapsed().as_secs_f64();
    let shard = rank.group.as_ref().map(|group| config.split(group.size())).transpose()?;
    let bytes = weights(args, checkpoint, shard.as_ref().unwrap_or(config), dtype, device.location())?;
    let rate = bytes as f64 / 1e9 / seconds;
    let each = if shard.is_some() { " each" } else { "" };
    status!("loaded {random}{dtype:?} weights{adapter}{matrices} on {place} in {seconds:.2} s, {rate:.2} GB/s{each}");
    Ok(model)
}
