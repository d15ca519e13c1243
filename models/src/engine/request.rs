//! What goes into an engine, and what comes out.

use super::drafting::{DraftDepth, HeadTally};
use super::guess::DraftTally;
use super::prefixes::PrefixTally;
use super::sampler::Sampling;
use crate::abi::logprobs::GDN_MOST_LIKELIEST;
use crate::abi::sampling::SamplingRow;
use crate::engine::sampling::Choice;
use crate::SequenceSnapshot;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// How an [`Engine`](super::Engine) runs.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Sequences at once. Further requests wait.
    pub sequences: usize,
    /// Tokens of a sequence, prompt and completion together, that there is room for.
    pub max_len: usize,
    /// Requests that may wait; one more is refused.
    pub max_waiting: usize,
    /// Tokens of prompts in one pass: this bounds the memory of a pass.
    pub prefill_chunk: usize,
    /// Tokens to guess at most at each step, from what followed the last tokens earlier in the text, and to check in
    /// one pass; fewer where guesses were wrong. 0 guesses none.
    pub draft: usize,
    /// Tokens that the model's draft head drafts at each step, where the model has one: of each sequence those are
    /// checked, or the guesses of [`draft`](Self::draft), whichever promise more.
    pub draft_depth: DraftDepth,
    /// Where that is [`DraftDepth::Auto`]: how long steps take without drafts before the first draft. It is slower than those that
    /// follow, by several steps of a small model.
    pub draft_after: Duration,
    /// Bytes for the states of beginnings that waiting requests share, which are then fed once; 0 keeps none.
    pub prefix_cache: usize,
    /// For requests that come one after the other: the most that a prompt shares with one of so many before it is kept,
    /// and its own end; 0 keeps nothing for those.
    pub prefix_recent: usize,
    /// Shared beginnings are cut to a multiple of this, itself a multiple of 64.
    pub prefix_block: usize,
    /// Whether decode steps are recorded once and replayed, on a GPU.
    pub cuda_graph: GraphChoice,
    /// For benchmarks with random weights: the chance of a token of the draft head to be taken for right, whatever the model
    /// says, where steps are graphs.
    #[doc(hidden)]
    pub forced_acceptance: Option<f32>,
}

impl EngineOptions {
    /// Room for `sequences` sequences of `max_len` tokens each, and nothing that takes more memory.
    pub fn new(sequences: usize, max_len: usize) -> Self {
        Self {
            sequences,
            max_len,
            max_waiting: usize::MAX,
            prefill_chunk: 1024,
            draft: 0,
            draft_depth: DraftDepth::Auto,
            draft_after: Duration::ZERO,
            prefix_cache: 0,
            prefix_recent: 0,
            prefix_block: 64,
            cuda_graph: GraphChoice::Auto,
            forced_acceptance: None,
        }
    }
}

/// Whether decode steps are CUDA graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphChoice {
    /// Where one can be had.
    Auto,
    /// Always: an error where one cannot be had.
    On,
    /// Never.
    Off,
}

/// A prompt, and how it is to be completed.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt, at least one token.
    pub tokens: Vec<u32>,
    /// Tokens of the completion at most.
    pub max_new_tokens: usize,
    /// Tokens that end the completion; they are not part of it.
    pub stop: BTreeSet<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Of the random choices.
    pub seed: u64,
    /// Whether each token comes with its [`Logprobs`], and of how many of the likeliest tokens, at most
    /// [`MOST_LOGPROBS`](Self::MOST_LOGPROBS).
    pub logprobs: Option<usize>,
    /// A sequence that the prompt continues: its tokens are the first of [`tokens`](Self::tokens), fewer than all of
    /// them, and are not fed again.
    pub resume: Option<Arc<SequenceSnapshot>>,
    /// After so many tokens of the prompt a snapshot is given out ([`Event::Snapshot`]), where they are fed.
    pub snapshot_at: Option<usize>,
    /// Whether a snapshot is given out before the request finishes.
    pub snapshot_end: bool,
}

impl Request {
    /// The most that [`logprobs`](Self::logprobs) may ask for.
    pub const MOST_LOGPROBS: usize = GDN_MOST_LIKELIEST;

    /// The most likely tokens after `tokens`.
    pub fn new(tokens: Vec<u32>, max_new_tokens: usize) -> Self {
        Self {
            tokens,
            max_new_tokens,
            stop: BTreeSet::new(),
            sampling: Sampling::default(),
            seed: 0,
            logprobs: None,
            resume: None,
            snapshot_at: None,
            snapshot_end: false,
        }
    }

    /// How token number `index` of the completion is chosen, behind `tokens` and then `more`, which are of at most `most` in all.
    pub(super) fn choice(&self, index: usize, most: usize, tokens: &[u32], more: &[u32]) -> Choice {
        let choice = self.sampling.choice(self.seed, index, most, tokens, more);
        let likeliest = self.logprobs.map_or(0, |count| 1 + count as u32);
        Choice { row: SamplingRow { likeliest, ..choice.row }, ..choice }
    }
}

/// Natural logarithms of probabilities, by the softmax of the logits as the model gives them: before penalties, temperature and
/// the choice among likely tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the token itself.
    pub token: f32,
    /// The likeliest tokens, as many as were asked for or as the vocabulary has, the likeliest first, with theirs; of equal ones
    /// the one of the lower id first. The token itself is among them only where it is that likely.
    pub likeliest: Vec<(u32, f32)>,
}

/// A request of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(super) u64);

/// Something that a step brought.
#[derive(Clone, Debug)]
pub enum Event {
    /// The next token of a completion.
    Token {
        /// Whose.
        id: RequestId,
        /// Its number in the vocabulary.
        token: u32,
        /// Where [`Request::logprobs`] asks for them.
        logprobs: Option<Box<Logprobs>>,
    },
    /// A copy of a sequence that the request asked for.
    Snapshot {
        /// Whose.
        id: RequestId,
        /// How it was.
        snapshot: Arc<SequenceSnapshot>,
    },
    /// Nothing more comes for this request.
    Finished {
        /// Whose.
        id: RequestId,
        /// Why it ended.
        reason: FinishReason,
    },
    /// The state after these tokens is in the cache of beginnings from now on.
    PrefixKept {
        /// The beginning, whole blocks.
        tokens: Vec<u32>,
    },
    /// It is no longer.
    PrefixDropped {
        /// The beginning.
        tokens: Vec<u32>,
    },
    /// A state takes more than [`EngineOptions::prefix_cache`] and was not kept; told once.
    PrefixTooLarge {
        /// Tokens of the beginning.
        tokens: usize,
        /// What its state takes.
        bytes: usize,
    },
    /// Decode steps of so many sequences and more, or such with the draft head, go on without a CUDA graph; told once of
    /// each.
    NoGraph {
        /// How many.
        sequences: usize,
        /// The error.
        why: String,
    },
}

/// Why a completion ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A token of [`Request::stop`] came.
    Stop,
    /// As many tokens as were asked for.
    MaxNewTokens,
    /// There is no further position.
    MaxLen,
    /// [`Engine::cancel`](super::Engine::cancel).
    Cancelled,
    /// No token could be chosen, or a pass failed: the error.
    Failed(String),
}

/// Tokens, and the time that they took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Meter {
    /// How many.
    pub tokens: usize,
    /// How long.
    pub time: Duration,
}

impl Meter {
    pub(super) fn add(&mut self, tokens: usize, time: Duration) {
        self.tokens += tokens;
        self.time += time;
    }
}

impl std::fmt::Display for Meter {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let (tokens, seconds) = (self.tokens, self.time.as_secs_f64());
        let rate = if seconds > 0. { tokens as f64 / seconds } else { 0. };
        write!(f, "{tokens} tokens in {seconds:.3} s, {rate:.1} tokens/s")
    }
}

/// What an engine has done so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineStats {
    /// Tokens of prompts that were fed.
    pub prompt: Meter,
    /// Tokens of decode steps; the first of each completion comes from its prompt's logits.
    pub decode: Meter,
    /// Of [`EngineOptions::draft`].
    pub drafts: DraftTally,
    /// Of the model's draft head.
    pub head: HeadTally,
    /// Of [`EngineOptions::prefix_cache`].
    pub prefixes: PrefixTally,
}
