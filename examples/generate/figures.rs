//! How long it took.

use super::draft::Tally;
use std::time::Duration;

#[derive(Default)]
pub struct Figures {
    /// Tokens of prompts that were fed.
    pub prompt: Meter,
    /// Tokens drawn from decode steps; the first of each completion comes from its prompt's logits.
    pub decode: Meter,
    pub drafts: Tally,
}

#[derive(Default)]
pub struct Meter {
    pub tokens: usize,
    time: Duration,
}

impl Meter {
    pub fn add(&mut self, tokens: usize, time: Duration) {
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
