//! How an engine runs.

use crate::drafting::depth::MOST;
use std::time::Duration;

/// How an [`Engine`](super::Engine) runs.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The most sequences at once. Further requests wait.
    pub sequences: usize,
    /// The most tokens of a sequence, prompt and completion together; at most `max_position_embeddings`. A prompt of as many gets no token.
    pub max_len: usize,
    /// The most requests that wait for a sequence to end; one more is refused. With 0 none waits, but a free sequence is used.
    pub max_waiting: usize,
    /// The most prompt tokens of a pass, which bounds its memory. Prompts are fed first come, first served: one that is longer than
    /// this holds back those behind it, which get no tokens until it is fed. Completions under way go on, a token a pass.
    pub prefill_chunk: usize,
    /// The most tokens to draft at each step by prompt look-up: what followed the last tokens earlier in the text. Fewer where
    /// drafts were rejected; 0 for none.
    pub draft: usize,
    /// Tokens that the model's draft head drafts at each step, where the model has one. If [`draft`](Self::draft) is set too,
    /// each sequence uses the source with the higher expected acceptance.
    pub draft_depth: DraftDepth,
    /// With [`DraftDepth::Auto`]: the time of steps without drafts before the first draft, which is slower than later ones by
    /// several steps of a small model.
    pub draft_after: Duration,
    /// Bytes for the states of prefixes that waiting requests share, which are then fed once; 0 keeps none.
    pub prefix_cache: usize,
    /// For requests that come one after the other: the longest prefix that a prompt shares with one of this many earlier prompts
    /// is kept, and its own end; 0 keeps nothing for such requests.
    pub prefix_recent: usize,
    /// Shared prefixes are cut to a multiple of this number of tokens, which is a positive multiple of 64.
    pub prefix_block: usize,
    /// Whether decode steps are CUDA graphs.
    pub cuda_graph: GraphChoice,
}

impl EngineOptions {
    /// Room for `sequences` sequences of `max_len` tokens each, without a prefix cache and without prompt look-up. A model's draft head drafts
    /// all the same and CUDA graphs are captured, which takes memory too.
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
        }
    }
}

/// Whether decode steps are CUDA graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GraphChoice {
    /// Where a graph can be captured.
    Auto,
    /// Always: [`Engine::new`](super::Engine::new) fails where one cannot be captured. Steps that need another graph later, with
    /// more drafts or with log-probabilities, run without where that cannot be captured ([`Event::NoGraph`](super::Event::NoGraph)).
    On,
    /// Never.
    Off,
}

/// How many tokens the model's draft head drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DraftDepth {
    /// As many as save time, by the measured times of steps and the acceptance of drafts; none where none do.
    Auto,
    /// This many at each step, at most [`DraftDepth::MOST`]; 0 for none.
    Fixed(usize),
}

impl DraftDepth {
    /// The most drafts of a step.
    pub const MOST: usize = MOST;
}
