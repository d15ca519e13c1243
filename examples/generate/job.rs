//! What is to be done, and the engine that does it.

use anyhow::{Context, Result};
use candle_gdn_cli::args::RunArgs;
use candle_gdn_cli::plan::Plan;
use candle_gdn_cli::ranks::Pace;
use candle_gdn_cli::settings::Settings;
use candle_gdn_cli::{draft_after, status};
use candle_gdn_models::{CausalLm, Engine, EngineOptions, Event, GraphChoice, Request, SplitMix64};
use std::sync::atomic::AtomicBool;
use tokenizers::Tokenizer;

pub const MIB: f64 = (1 << 20) as f64;

/// What to do.
pub struct Job<'a> {
    pub model: &'a CausalLm,
    /// Without one nothing is printed but figures.
    pub tokenizer: Option<&'a Tokenizer>,
    pub settings: &'a Settings,
    /// Texts that end a completion.
    pub stop: &'a [String],
    pub run: &'a RunArgs,
    pub plan: &'a Plan,
    pub prompts: &'a [Vec<u32>],
    pub prefill_chunk: usize,
    pub sample_len: usize,
    pub seed: u64,
    pub interrupt: &'a AtomicBool,
    pub pace: &'a Pace,
}

impl<'a> Job<'a> {
    /// Room for as many sequences, and as long ones, as are planned.
    pub fn engine(&self) -> Result<Engine<&'a CausalLm>> {
        let &Plan { batch: sequences, max_len, cache: prefix_cache, .. } = self.plan;
        let options = EngineOptions {
            prefill_chunk: self.prefill_chunk,
            draft: self.run.draft,
            draft_after: draft_after(self.run.mtp, self.model.device()),
            prefix_cache,
            prefix_block: self.run.prefix_block,
            cuda_graph: self.run.cuda_graph,
            ..EngineOptions::new(sequences, max_len)
        };
        Engine::new(self.model, options).with_context(|| {
            let room =
                format!("no room for {sequences} sequences of {max_len} tokens at once (--batch, --max-seq-len)");
            match self.run.cuda_graph {
                GraphChoice::On => format!("--cuda-graph on: cannot capture one, or {room}"),
                _ => room,
            }
        })
    }

    /// The request that completes prompt number `n`.
    pub fn request(&self, n: usize, tokens: Vec<u32>) -> Request {
        let stop = self.settings.eos.clone();
        let (sampling, seed) = (self.settings.sampling.clone(), SplitMix64::seed(self.seed, n));
        Request { stop, sampling, seed, ..Request::new(tokens, self.sample_len) }
    }

    /// The line for the user that an event is worth.
    pub fn line(&self, event: &Event) -> Option<String> {
        match event {
            Event::NoGraph { sequences, why } => {
                Some(format!("no CUDA graph of {sequences} sequences, going on without: {why}"))
            }
            Event::PrefixTooLarge { tokens, bytes } => {
                let (need, room) = (*bytes as f64 / MIB, self.plan.cache as f64 / MIB);
                Some(format!(
                    "cache: the state after {tokens} tokens takes {need:.1} MiB, more than --prefix-cache {room:.0}"
                ))
            }
            _ => None,
        }
    }

    /// The figures of a run.
    pub fn tell_decode(&self, engine: &Engine<&CausalLm>) {
        status!("decode: {}", engine.stats().decode);
        if self.run.draft > 0 {
            status!("{}", engine.stats().drafts);
        }
        if self.model.has_draft_head() {
            status!("{}", engine.stats().head);
        }
    }
}
