//! How tokens are chosen.

use super::Choice;
use crate::abi::sampling::SamplingRow;
use candle_core::{bail, Result};
use std::f64::consts::LOG2_E;

/// How the next token is chosen: the penalties change the logits, the temperature divides them, then `top_k`, `top_p` and `min_p`
/// bound the choice, in this order.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Flatness of the distribution; 0 chooses the most likely token.
    pub temperature: f64,
    /// The choice is among this many of the most likely tokens; 0 means all.
    pub top_k: usize,
    /// The choice is among the most likely tokens that together have this probability; 1 means all.
    pub top_p: f64,
    /// The choice is among tokens whose probability is at least this fraction of the most likely token's; 0 means all.
    pub min_p: f64,
    /// Makes tokens that occurred recently, in the prompt too, less likely: positive logits are divided by it, negative ones
    /// multiplied. 1 does nothing.
    pub repeat_penalty: f32,
    /// How many of the last tokens that penalty concerns; `usize::MAX` means all.
    pub repeat_last_n: usize,
    /// Subtracted from the logits of tokens in the completion so far, after the repeat penalty; 0 does nothing.
    pub presence_penalty: f32,
    /// Subtracted once for each time that a token occurs in the completion; 0 does nothing.
    pub frequency_penalty: f32,
}

impl Default for Sampling {
    /// The most likely token.
    fn default() -> Self {
        Self {
            temperature: 0.,
            top_k: 0,
            top_p: 1.,
            min_p: 0.,
            repeat_penalty: 1.,
            repeat_last_n: 64,
            presence_penalty: 0.,
            frequency_penalty: 0.,
        }
    }
}

impl Sampling {
    /// Whether a token can be chosen so. The engine checks every request.
    ///
    /// # Errors
    /// When a value is not finite or outside its range: the error names the field.
    pub fn check(&self) -> Result<()> {
        let fields = [
            ("temperature", self.temperature, self.temperature >= 0., " of at least 0"),
            ("top_p", self.top_p, self.top_p > 0. && self.top_p <= 1., " in (0, 1]"),
            ("min_p", self.min_p, (0. ..=1.).contains(&self.min_p), " in [0, 1]"),
            ("repeat_penalty", self.repeat_penalty.into(), self.repeat_penalty > 0., " above 0"),
            ("presence_penalty", self.presence_penalty.into(), true, ""),
            ("frequency_penalty", self.frequency_penalty.into(), true, ""),
        ];
        match fields.iter().find(|(_, x, valid, _)| !valid || !x.is_finite()) {
            Some((name, x, _, range)) => bail!("sampling: {name}: expected a finite number{range}, got {x}"),
            None => Ok(()),
        }
    }

    /// How token number `index` of a request is chosen after `tokens` and then `more`, at most `most` tokens in all. Its random
    /// number follows from the seed and the index: neither other requests nor drafts change it.
    pub(crate) fn choice(&self, seed: u64, index: usize, most: usize, tokens: &[u32], more: &[u32]) -> Choice {
        let repeats = if self.repeat_penalty == 1. { 0 } else { self.repeat_last_n.min(most) };
        // On the device the completion grows after what is uploaded.
        let all = tokens.len() + more.len();
        let (window, own) = match self.presence_penalty == 0. && self.frequency_penalty == 0. {
            true => (repeats, 0),
            false => (most, index.min(most).min(all)),
        };
        let known = all.min(repeats.max(own).max(1));
        let mut recent: Vec<u32> = tokens.iter().chain(more).skip(all - known).copied().collect();
        let last = recent.pop().unwrap_or(0);
        let drawn = match self.temperature > 0. {
            // A greedy row needs no random number.
            false => SamplingRow::GREEDY,
            true => SamplingRow {
                // Not 0 however flat: that is the most likely token.
                scale: (LOG2_E / self.temperature).max(f64::MIN_POSITIVE),
                top_p: self.top_p,
                seed,
                index: index as u64,
                top_k: u32::try_from(self.top_k).unwrap_or(u32::MAX),
                gap: (-self.min_p.ln() * self.temperature) as f32,
                ..SamplingRow::GREEDY
            },
        };
        let row = SamplingRow {
            window: window as u32,
            seen: recent.len() as u32,
            penalty: self.repeat_penalty,
            repeats: repeats as u32,
            own: (known - own) as u32,
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
            ..drawn
        };
        Choice { row, last, recent }
    }
}

/// A generator of random numbers, written out here so that a seed gives the same text with every version of every dependency.
#[derive(Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The seed of sequence number `n` of several that share a seed; number 0 has that seed itself. `seed + n` would give
    /// generators of the same numbers, shifted by `n`.
    pub fn seed(seed: u64, n: usize) -> u64 {
        if n == 0 {
            seed
        } else {
            Self(seed ^ Self(n as u64).next()).next()
        }
    }

    /// The next number.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
