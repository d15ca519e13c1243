//! Whether a run fits into memory, checked before anything is loaded.

mod advice;
mod free;
#[cfg(test)]
mod tests;

use crate::load::{LoadFormat, ModelArgs};
use crate::{is_first, status, Checkpoint, Rank};
use anyhow::{bail, Result};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, DeviceLocation};
use candle_gdn::{Algo, RingSpans};
use candle_gdn_models::{
    quantized_cpu_bytes, DraftDepth, FfnKind, GgufFile, LoraAdapter, MixerKind, ModelConfig, StateLayout,
};
use free::free;

/// Kernels and workspaces of libraries, on a GPU.
const LIBRARIES: u64 = 512 << 20;

/// The memory that a run needs.
pub struct Need<'a> {
    run: Run<'a>,
    bytes: Bytes,
}

/// What runs where.
#[derive(Clone)]
struct Run<'a> {
    args: ModelArgs,
    checkpoint: &'a Checkpoint,
    /// A rank's.
    config: &'a ModelConfig,
    room: Room,
    device: DeviceLocation,
    ranks: usize,
}

#[derive(Clone, Copy)]
struct Bytes {
    weights: u64,
    states: u64,
    kv: u64,
    working: u64,
}

/// What must fit at once.
#[derive(Clone, Debug)]
pub struct Room {
    pub sequences: usize,
    /// Tokens of one sequence.
    pub max_len: usize,
    /// With fewer the run would be of no use.
    pub least_len: usize,
    /// Tokens that `--draft` drafts at once.
    pub draft: usize,
    /// Snapshots of sequences.
    pub snapshots: usize,
    /// Bytes of the prefix cache, and how many prefixes it can have.
    pub cache: usize,
    pub prefixes: usize,
    /// Whether the draft head is loaded.
    pub draft_head: bool,
}

impl Room {
    /// The most drafts that a sequence has verified at once.
    fn drafted(&self) -> usize {
        self.draft.max(if self.draft_head { DraftDepth::MOST } else { 0 })
    }
}

impl<'a> Need<'a> {
    /// What a rank needs of its device; on the CPU, which all ranks share, what all of them need. `config` is a rank's.
    ///
    /// # Errors
    /// When the files of the checkpoint cannot be read.
    pub fn new(
        args: &ModelArgs,
        checkpoint: &'a Checkpoint,
        config: &'a ModelConfig,
        room: &Room,
        rank: &Rank,
    ) -> Result<Self> {
        let (device, ranks) = (rank.device.location(), rank.group.as_ref().map_or(1, |group| group.size()));
        Run { args: args.clone(), checkpoint, config, room: room.clone(), device, ranks }.need()
    }

    /// Whether the device has enough free memory; true where the system does not say.
    pub fn fits(&self, device: &Device) -> bool {
        free(device).is_none_or(|free| self.bytes.total() <= free)
    }

    /// Reports what the run needs and what is free. Ranks on the CPU wait for the first one, which looks before any of them loads.
    ///
    /// # Errors
    /// When the run cannot fit; the message says with what settings it would.
    pub fn check(&self, rank: &Rank) -> Result<()> {
        if !rank.device.is_cpu() || is_first() {
            self.report(&rank.device)?;
        }
        if rank.device.is_cpu() {
            rank.pace.agree(0);
        }
        Ok(())
    }

    fn report(&self, device: &Device) -> Result<()> {
        let Bytes { weights, states, kv, working } = self.bytes;
        let [weights, states, kv, working, total] = [weights, states, kv, working, self.bytes.total()].map(Size);
        let parts = format!("{weights} weights, {states} states, {kv} keys and values, about {working} to work with");
        let place = if device.is_cpu() { "the machine" } else { "the GPU" };
        let Some(free) = free(device).map(Size) else {
            status!("memory: {total} on {place}: {parts}");
            return Ok(());
        };
        if total.0 > free.0 {
            let advice = self.run.advice(free.0)?;
            bail!("the run needs {total} of memory ({parts}) and {place} has {free} free; {advice}")
        }
        status!("memory: {total} of the {free} free on {place}: {parts}");
        Ok(())
    }
}

impl<'a> Run<'a> {
    fn need(self) -> Result<Need<'a>> {
        Ok(Need { bytes: self.bytes()?, run: self })
    }

    fn bytes(&self) -> Result<Bytes> {
        let Self { args, checkpoint, room, device, .. } = self;
        let (dtype, is_cpu) = (args.dtype_at(*device), *device == DeviceLocation::Cpu);
        let with_head = with_draft_head(self.config);
        let config = if room.draft_head { &with_head } else { self.config };
        let mut weights = weights(args, checkpoint, config, dtype, *device)?;
        // Its drafts read a copy of `lm_head` in q8_0.
        if room.draft_head && !is_cpu && dtype != DType::F32 && args.quantize.is_none() {
            let blocks = product(&[config.vocab_size, config.hidden_size]) / GgmlDType::Q8_0.block_size() as u64;
            weights = weights.saturating_add(blocks * GgmlDType::Q8_0.type_size() as u64);
        }
        let sequence = config.sequence_bytes(dtype);
        let states = sequence.recurrent.saturating_add(sequence.conv);
        // A kernel that was chosen supports no ring.
        let has_rings = args.algo()? == Algo::Auto && StateLayout::Auto.has_ring(config, *device);
        // A sampled token and its drafts are fed. Where they do not fit into a ring they need states of their own, and while the pool
        // grows for these, the old one is still there. The head's drafts fit.
        let fits = has_rings && room.draft < RingSpans::MAX_TOKENS;
        let drafts = room.draft > 0 || room.draft_head;
        let spare_states = if drafts && !fits { room.sequences.saturating_mul(2) } else { 0 };
        let rings = match has_rings {
            true => sequence.ring.saturating_mul(room.sequences.saturating_add(spare_states) as u64),
            false => 0,
        };
        let all = room.sequences.saturating_add(spare_states).saturating_add(room.snapshots) as u64;
        // A state is there, within the budget, before others are dropped for it.
        let (longest, budget) = (sequence.total(room.max_len), room.cache as u64);
        let cache = longest.saturating_mul(room.prefixes as u64).min(budget.saturating_add(longest.min(budget)));
        // The adapter's own numbers on the host, and a copy by each rank that adds them as it loads.
        let adapter = checkpoint.lora().filter(|_| is_cpu).map_or(0, LoraAdapter::size_in_bytes);
        // Snapshots of one sequence share their keys and values.
        let caches = room.sequences.saturating_add(room.snapshots.min(1));
        // A pass that verifies drafts has the logits of each, and may have more rows than one that feeds prompts.
        let verified = product(&[room.sequences, room.drafted().saturating_add(1).min(room.max_len)]) as usize;
        let tokens = product(&[room.sequences, room.max_len]).min(args.prefill_chunk_at(*device) as u64) as usize;
        let tokens = tokens.max(verified);
        let pass = pass(config, tokens, room.sequences, verified, is_cpu);
        let ranks = if is_cpu { self.ranks as u64 } else { 1 };
        let of_all = |bytes: u64| bytes.saturating_mul(ranks);
        Ok(Bytes {
            weights: of_all(weights.saturating_add(adapter)).saturating_add(adapter),
            states: of_all(states.saturating_mul(all).saturating_add(rings).saturating_add(cache)),
            kv: of_all(sequence.kv(room.max_len).saturating_mul(caches as u64)),
            working: of_all(if is_cpu {
                let unpacked = unpacked(config, args, dtype, checkpoint.lora().is_some());
                pass.saturating_add(self.repacked()).max(unpacked)
            } else {
                let dequantised = config.dequantised_bytes(dtype, self.is_packed(), tokens, verified);
                pass.saturating_add(LIBRARIES).saturating_add(dequantised)
            }),
        })
    }
}

impl Run<'_> {
    /// The GGUF file that the weights are read from.
    fn gguf(&self) -> Option<&GgufFile> {
        self.checkpoint.gguf().filter(|_| self.args.load_format == LoadFormat::Auto)
    }

    /// Whether matrices are in a type that our kernels on CUDA multiply; of a file, in any quantised one.
    fn is_packed(&self) -> bool {
        use GgmlDType::{Q4K, Q6K, Q8_0};
        let becomes = self.args.quantize.is_some_and(|to| matches!(to, Q4K | Q6K | Q8_0));
        becomes || self.gguf().is_some_and(|file| file.is_quantized(self.config))
    }

    /// Bytes that matrices which are quantised as they are loaded take on the CPU besides those of their type. Those of a GGUF file
    /// are among its weights.
    fn repacked(&self) -> u64 {
        let config = self.config;
        let Some(to) = self.args.quantize.filter(|_| self.gguf().is_none()) else { return 0 };
        let table = if config.tie_word_embeddings { 0 } else { product(&[config.vocab_size, config.hidden_size]) };
        let blocks = config.parameters().saturating_sub(table) / 256;
        let in_memory: u64 = quantized_cpu_bytes(to, 256).iter().sum();
        blocks.saturating_mul(in_memory.saturating_sub((256 / to.block_size() * to.type_size()) as u64))
    }
}

impl Bytes {
    fn total(&self) -> u64 {
        [self.weights, self.states, self.kv, self.working].into_iter().fold(0, u64::saturating_add)
    }
}

/// The draft head is one more softmax layer, and a projection that is small beside it.
pub fn with_draft_head(config: &ModelConfig) -> ModelConfig {
    let mut config = config.clone();
    if let Some(mut head) = config.layers.last().copied() {
        (head.mixer, head.window) = (MixerKind::FullAttention, None);
        config.layers.push(head);
    }
    config
}

/// Bytes of the weights: those of one rank where `config` is a rank's, else of all ranks.
pub fn weights(
    args: &ModelArgs,
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    dtype: DType,
    device: DeviceLocation,
) -> Result<u64> {
    // What an adapter was added to 16 bits do not hold.
    let lora = checkpoint.lora().filter(|_| args.quantize.is_none());
    let changed = lora.map_or(0, |lora| lora.changed_parameters(config));
    let widened = if device == DeviceLocation::Cpu && dtype == DType::F32 { changed.saturating_mul(2) } else { 0 };
    if let (LoadFormat::Auto, Some(file)) = (args.load_format, checkpoint.gguf()) {
        let bytes = file.weight_bytes(config, dtype, args.quantize, device, args.tensor_parallel.get());
        return Ok(bytes.saturating_add(widened));
    }
    if let Some(to) = args.quantize {
        return Ok(config.quantized_weight_bytes(dtype, to));
    }
    if device != DeviceLocation::Cpu && dtype != DType::F32 {
        return Ok(config.fp8_weight_bytes(dtype));
    }
    let all = config.weight_bytes(dtype);
    if device == DeviceLocation::Cpu && dtype == DType::F32 {
        // Everything is packed in 16 bits but what was in fp8 or more bits, and an embedding table that is not the head.
        let table = if config.tie_word_embeddings { 0 } else { product(&[config.vocab_size, config.hidden_size]) };
        let of_files = checkpoint.wide_parameters(config)?.div_ceil(args.tensor_parallel.get() as u64);
        let wide = [config.fp8_parameters(), of_files].into_iter().fold(table, u64::saturating_add);
        let bytes = config.weight_bytes(DType::BF16).saturating_add(wide.saturating_mul(2));
        return Ok(bytes.saturating_add(widened).min(all));
    }
    Ok(all)
}

/// An estimate of the activations of the widest pass: rows in f32 between two operations, and the logits of `verified` rows.
fn pass(config: &ModelConfig, tokens: usize, sequences: usize, verified: usize, is_cpu: bool) -> u64 {
    let (gdn, attention, hidden) = (&config.gdn, &config.attention, config.hidden_size);
    let keys = product(&[4, gdn.num_key_heads, gdn.key_head_dim]);
    let linear = keys.saturating_add(product(&[4, gdn.num_value_heads, gdn.value_head_dim]));
    let full = product(&[6, attention.num_heads, attention.head_dim]);
    let ffn = config.layers.iter().map(|layer| match (layer.ffn, &config.moe) {
        (FfnKind::Dense { intermediate_size }, _) => product(&[4, intermediate_size]),
        (FfnKind::Moe, Some(moe)) => {
            let routed = product(&[moe.experts_per_token, 4 * moe.intermediate_size + 3 * hidden]);
            routed.saturating_add(product(&[4, moe.shared_intermediate_size]))
        }
        _ => 0,
    });
    let widest = ffn.max().unwrap_or(0).max(linear).max(full).saturating_add(product(&[6, hidden]));
    let rows = widest.saturating_mul(4).saturating_mul(tokens as u64);
    // Logits in the model's dtype, in f32, and as the sampler has them.
    let logits = product(&[sequences, config.vocab_size, 12]);
    // Those of drafts on a GPU in the model's dtype and in f32; on the CPU in f32, which the sampler copies.
    let of_drafts = product(&[verified.saturating_sub(sequences), config.vocab_size, if is_cpu { 8 } else { 6 }]);
    rows.saturating_add(logits).saturating_add(of_drafts)
}

/// Bytes of the largest weights that the CPU holds twice at a time: as read, in fp8 also before that, and packed. To be quantised
/// they are read in f32, and out of a file in 16 bits first, experts without their `down_proj` at a time. An adapter is added to them in f32.
fn unpacked(config: &ModelConfig, args: &ModelArgs, dtype: DType, has_adapter: bool) -> u64 {
    let head = product(&[config.vocab_size, config.hidden_size]);
    let at_once = if args.quantize.is_some() { 2 } else { 3 };
    let experts = config.moe.as_ref().map(|moe| [moe.num_experts, at_once, moe.intermediate_size, config.hidden_size]);
    let bytes = match (args.quantize, args.load_format) {
        (Some(_), _) if has_adapter => 8,
        (None, _) if has_adapter => 4 + dtype.size_in_bytes(),
        (None, _) => dtype.size_in_bytes(),
        (Some(_), LoadFormat::Auto) => 6,
        (Some(_), LoadFormat::Dummy) => 4,
    } + usize::from(config.fp8.is_some());
    head.max(experts.map_or(0, |factors| product(&factors))).saturating_mul(bytes as u64)
}

fn product(factors: &[usize]) -> u64 {
    factors.iter().fold(1, |product, &factor| product.saturating_mul(factor as u64))
}

/// A number of bytes, written in MiB or GiB.
struct Size(u64);

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let (bytes, gib) = (self.0 as f64, (1u64 << 30) as f64);
        match bytes >= gib {
            true => write!(f, "{:.1} GiB", bytes / gib),
            false => write!(f, "{:.1} MiB", bytes / (1 << 20) as f64),
        }
    }
}
