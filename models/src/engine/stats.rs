//! What an engine has done.

use crate::drafting::depth::MOST;
use std::time::Duration;

/// Tokens and their time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Meter {
    /// The number of tokens.
    pub tokens: usize,
    /// Their time.
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
    /// Tokens of decode steps. The first token of each completion comes from its prompt's logits and does not count.
    pub decode: Meter,
    /// Drafts of [`EngineOptions::draft`](super::EngineOptions::draft).
    pub drafts: DraftTally,
    /// Drafts of the model's draft head.
    pub head: HeadTally,
    /// Use of [`EngineOptions::prefix_cache`](super::EngineOptions::prefix_cache).
    pub prefixes: PrefixTally,
}

/// Acceptance of drafts by prompt look-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftTally {
    /// Tokens drafted.
    pub drafted: usize,
    /// Drafts accepted.
    pub accepted: usize,
    /// Tokens of decode steps, summed over the sequences.
    pub tokens: usize,
    /// These steps, summed over the sequences.
    pub steps: usize,
}

impl std::fmt::Display for DraftTally {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let percent = 100. * self.accepted as f64 / self.drafted.max(1) as f64;
        let a_step = self.tokens as f64 / self.steps.max(1) as f64;
        let Self { accepted, drafted, .. } = self;
        write!(f, "draft: {accepted} of {drafted} tokens accepted ({percent:.0} %), {a_step:.1} tokens a step")
    }
}

/// Acceptance of drafts of the draft head by depth: the first token drafted at a step, the second, and so on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeadTally {
    /// Tokens drafted.
    pub drafted: [usize; MOST],
    /// Those that were accepted with all before them.
    pub accepted: [usize; MOST],
    /// Tokens of decode steps, summed over the sequences.
    pub tokens: usize,
    /// These steps, summed over the sequences.
    pub steps: usize,
}

impl std::fmt::Display for HeadTally {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Self { drafted, accepted, tokens, steps } = self;
        let depths = drafted.iter().take_while(|drafted| **drafted > 0).count();
        write!(f, "mtp: ")?;
        for depth in 0..depths {
            let percent = 100. * accepted[depth] as f64 / drafted[depth] as f64;
            write!(f, "{percent:.0} % of {} accepted at depth {}, ", drafted[depth], depth + 1)?;
        }
        if depths == 0 {
            write!(f, "nothing drafted, ")?;
        }
        write!(f, "{:.2} tokens a step", *tokens as f64 / (*steps).max(1) as f64)
    }
}

/// Use of the prefix cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixTally {
    /// Prompt tokens that came from the cache.
    pub reused: usize,
    /// Prompt tokens of all requests that began.
    pub asked: usize,
    /// Requests that found a prefix.
    pub hits: u64,
    /// Requests that found none.
    pub misses: u64,
    /// Bytes held now; keys and values that several states share count once.
    pub bytes: usize,
}
