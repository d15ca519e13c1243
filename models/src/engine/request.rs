//! What goes into an engine.

use crate::abi::logprobs::GDN_MOST_LIKELIEST;
use crate::abi::sampling::SamplingRow;
use crate::sampling::{Choice, Sampling};
use crate::sequences::SequenceSnapshot;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A prompt, and how it is to be completed.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt, at least one token.
    pub tokens: Vec<u32>,
    /// The most tokens of the completion.
    pub max_new_tokens: usize,
    /// Tokens that end the completion; they are not part of it.
    pub stop: BTreeSet<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// The seed of the random choices.
    pub seed: u64,
    /// Requests [`Logprobs`](crate::Logprobs) with each token, of this many of the likeliest tokens besides, at most
    /// [`MOST_LOGPROBS`](Self::MOST_LOGPROBS).
    pub logprobs: Option<usize>,
    /// A sequence that the prompt continues. Its tokens are the first of [`tokens`](Self::tokens), fewer than all, and
    /// are not fed again. With [`Followers`](super::Followers) none is possible, as a snapshot is one of a single rank.
    pub resume: Option<Arc<SequenceSnapshot>>,
    /// After this many tokens of the prompt the engine makes a snapshot ([`Event::Snapshot`](super::Event::Snapshot)), if they
    /// are fed. With [`Followers`](super::Followers) neither this nor [`snapshot_end`](Self::snapshot_end) is possible.
    pub snapshot_at: Option<usize>,
    /// Whether the engine makes a snapshot before the completion finishes. There is none without memory for it, where the request fails, or
    /// where it is cancelled before its first token.
    pub snapshot_end: bool,
}

impl Request {
    /// The most that [`logprobs`](Self::logprobs) may request.
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

    /// How token number `index` of the completion is chosen after `tokens` and then `more`, at most `most` tokens in all.
    pub(super) fn choice(&self, index: usize, most: usize, tokens: &[u32], more: &[u32]) -> Choice {
        let choice = self.sampling.choice(self.seed, index, most, tokens, more);
        let likeliest = self.logprobs.map_or(0, |count| 1 + count as u32);
        Choice { row: SamplingRow { likeliest, ..choice.row }, ..choice }
    }
}

/// A request of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(super) u64);
