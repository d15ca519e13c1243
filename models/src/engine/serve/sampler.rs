//! From logits to the next token.

use super::greedy::Logits;
use candle_core::{bail, Result};
use std::cmp::Ordering;
use std::collections::HashSet;

/// How the next token is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Flatness of the distribution; 0 takes the most likely token.
    pub temperature: f64,
    /// The choice is among so many of the most likely tokens; 0 is all.
    pub top_k: usize,
    /// The choice is among the most likely tokens that together have this probability; 1 is all.
    pub top_p: f64,
    /// Makes tokens that occurred lately less likely; 1 does nothing.
    pub repeat_penalty: f32,
    /// How many of the last tokens the penalty looks at.
    pub repeat_last_n: usize,
}

impl Default for Sampling {
    /// The most likely token.
    fn default() -> Self {
        Self { temperature: 0., top_k: 0, top_p: 1., repeat_penalty: 1., repeat_last_n: 64 }
    }
}

impl Sampling {
    /// Whether the most likely token is taken, whatever came before.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0. && self.repeat_penalty == 1.
    }
}

#[derive(Debug)]
pub(super) struct Sampler {
    sampling: Sampling,
    rng: SplitMix64,
}

impl Sampler {
    /// Each sequence has a generator of its own, so that what it draws does not depend on the others.
    pub fn new(sampling: Sampling, seed: u64) -> Self {
        Self { sampling, rng: SplitMix64(seed) }
    }

    /// Chooses by the logits of the next token; `tokens` are all so far.
    pub fn next(&mut self, logits: Logits, tokens: &[u32]) -> Result<u32> {
        let mut logits = match logits {
            Logits::All(logits) => logits,
            Logits::Best { id, sound: true } => return Ok(id),
            Logits::Best { .. } => bail!("the model gave a logit that is no number after {} tokens", tokens.len()),
        };
        // Looked for without stopping: that is many logits an instruction.
        if logits.iter().fold(false, |found, x| found | !x.is_finite()) {
            let i = logits.iter().position(|x| !x.is_finite()).unwrap_or(0);
            bail!("the model gave the logit {} for token {i} after {} tokens", logits[i], tokens.len())
        }
        let s = &self.sampling;
        if s.repeat_penalty != 1. {
            let recent = &tokens[tokens.len().saturating_sub(s.repeat_last_n)..];
            for &id in recent.iter().collect::<HashSet<_>>() {
                if let Some(x) = logits.get_mut(id as usize) {
                    *x = if *x > 0. { *x / s.repeat_penalty } else { *x * s.repeat_penalty };
                }
            }
        }
        // Equal logits go by id, so that a choice never depends on the order of a sort.
        let likelier = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        let best = logits.iter().map(|x| ordered(*x)).max();
        let Some(best) = logits.iter().position(|x| Some(ordered(*x)) == best) else {
            bail!("the model has no tokens")
        };
        if s.temperature == 0. {
            return Ok(best as u32);
        }
        let best = logits[best];
        let mut candidates: Vec<(u32, f32)> = logits.into_iter().enumerate().map(|(i, x)| (i as u32, x)).collect();
        if s.top_k > 0 && s.top_k < candidates.len() {
            candidates.select_nth_unstable_by(s.top_k - 1, likelier);
            candidates.truncate(s.top_k);
        }
        if s.top_p < 1. {
            candidates.sort_unstable_by(likelier);
        } else {
            candidates.sort_unstable_by_key(|c| c.0);
        }
        let weights: Vec<f64> = candidates.iter().map(|c| ((c.1 as f64 - best as f64) / s.temperature).exp()).collect();
        let kept = if s.top_p < 1. { nucleus(&weights, s.top_p) } else { weights.len() };
        let mut x = self.rng.uniform() * weights[..kept].iter().sum::<f64>();
        for (c, w) in candidates[..kept].iter().zip(&weights) {
            x -= w;
            if x.partial_cmp(&0.) == Some(Ordering::Less) {
                return Ok(c.0);
            }
        }
        // Rounding can leave a sliver after the last weight.
        Ok(candidates[kept - 1].0)
    }
}

/// Integers in the order of `f32::total_cmp`, of which the greatest is found faster.
fn ordered(x: f32) -> i32 {
    let bits = x.to_bits() as i32;
    bits ^ ((bits >> 31) as u32 >> 1) as i32
}

/// How many of the sorted weights reach the share `p`; at least one.
fn nucleus(weights: &[f64], p: f64) -> usize {
    let enough = p * weights.iter().sum::<f64>();
    let mut sum = 0.;
    for (i, w) in weights.iter().enumerate() {
        sum += w;
        if sum >= enough {
            return i + 1;
        }
    }
    weights.len()
}

/// A generator of random numbers, written out here so that a seed gives the same text with every version of every dependency.
#[derive(Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The seed of number `n` of several sequences that share a seed: number 0 has that itself. Not `seed + n`, whose
    /// generators give the same numbers, one shifted against the other.
    pub fn seed(seed: u64, n: usize) -> u64 {
        if n == 0 {
            seed
        } else {
            Self(seed ^ Self(n as u64).next()).next()
        }
    }

    /// In [0, 1).
    fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
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
