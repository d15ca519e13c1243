//! The next token of a row and its log-probabilities, as `models/cuda/sampling` and `models/cuda/logprobs` compute them.
//!
//! Weights of tokens are whole numbers, so that their sums are the same in any order. The operations that make them round
//! the same everywhere.

use super::{Drawn, Logprobs};
use crate::abi::sampling::SamplingRow;
use std::collections::HashMap;
use std::f32::consts::LN_2;

/// The weight of the most likely token.
const HEAVIEST: u64 = 1 << 38;

/// The token that `row` chooses by its logits, None where one of them is not finite. `recent` has the tokens that the penalties
/// concern, the latest last; their logits are overwritten. Of equal logits the one of the lower id counts as more likely.
fn draw(logits: &mut [f32], row: &SamplingRow, recent: &[u32]) -> Option<u32> {
    // Without an early end, so that one instruction checks many logits.
    if logits.iter().fold(false, |found, x| found | !x.is_finite()) {
        return None;
    }
    penalise(logits, row, recent);
    let best = logits.iter().map(|x| ordered(*x)).max()?;
    let first = logits.iter().position(|x| ordered(*x) == best)?;
    if row.scale == 0. {
        return Some(first as u32);
    }
    let mut kept = weighed(logits, logits[first], row.scale);
    let k = row.top_k as usize;
    if k > 0 && k < kept.len() {
        let mut ranks: Vec<u64> = kept.iter().map(|token| token.rank).collect();
        let (_, cut, _) = ranks.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        let cut = *cut;
        kept.retain(|token| token.rank >= cut);
    }
    if row.top_p < 1. {
        let cut = nucleus(&kept, row.top_p);
        kept.retain(|token| token.rank >= cut);
    }
    if row.gap < f32::INFINITY {
        let least = f64::from(logits[first]) - f64::from(row.gap);
        kept.retain(|token| f64::from(logits[token.id() as usize]) >= least);
    }
    let total: u64 = kept.iter().map(|token| token.weight).sum();
    let mut rest = ((u128::from(random_bits(row.seed, row.index)) * u128::from(total)) >> 64) as u64;
    for token in &kept {
        if rest < token.weight {
            return Some(token.id());
        }
        rest -= token.weight;
    }
    None
}

/// [`draw`], with the log-probabilities that the row requests. They are those of the logits before penalties.
pub(super) fn draw_with_logprobs(logits: &mut [f32], row: &SamplingRow, recent: &[u32]) -> Option<Drawn> {
    if row.likeliest == 0 {
        return draw(logits, row, recent).map(|id| Drawn { id, logprobs: None });
    }
    let raw = logits.to_vec();
    let id = draw(logits, row, recent)?;
    let softmax = LogSoftmax::new(&raw, row.likeliest as usize - 1);
    let logprob = |id: u32| softmax.logprob(raw[id as usize]);
    let likeliest = softmax.likeliest.iter().map(|&id| (id, logprob(id))).collect();
    Some(Drawn { id, logprobs: Some(Box::new(Logprobs { token: logprob(id), likeliest })) })
}

/// A token that can be drawn.
struct Token {
    rank: u64,
    weight: u64,
}

impl Token {
    fn id(&self) -> u32 {
        !self.rank as u32
    }
}

fn weighed(logits: &[f32], best: f32, scale: f64) -> Vec<Token> {
    let tokens = logits.iter().enumerate().map(|(id, &x)| Token { rank: rank(id, x), weight: weight(x, best, scale) });
    tokens.filter(|token| token.weight > 0).collect()
}

/// The rank of the last of the most likely tokens that together have the share `p`.
fn nucleus(tokens: &[Token], p: f64) -> u64 {
    let total: u64 = tokens.iter().map(|token| token.weight).sum();
    let need = ((p * total as f64).ceil() as u64).clamp(1, total);
    let (mut rest, mut before) = (tokens.iter().map(|token| (token.rank, token.weight)).collect::<Vec<_>>(), 0);
    // Keeps the half in which the share is reached, again and again, instead of sorting a whole vocabulary.
    while rest.len() > 1 {
        let middle = (rest.len() - 1) / 2;
        rest.select_nth_unstable_by_key(middle, |token| std::cmp::Reverse(token.0));
        let sum: u64 = rest[..=middle].iter().map(|token| token.1).sum();
        if before + sum >= need {
            rest.truncate(middle + 1);
        } else {
            before += sum;
            rest.drain(..=middle);
        }
    }
    rest.first().map_or(0, |token| token.0)
}

fn penalise(logits: &mut [f32], row: &SamplingRow, recent: &[u32]) {
    // How often each is of the completion, and whether it is among the last ones.
    let mut occurred: HashMap<u32, (u32, bool)> = HashMap::new();
    for (age, &id) in recent.iter().rev().enumerate() {
        let (count, repeats) = occurred.entry(id).or_default();
        *count += u32::from(row.seen as usize >= row.own as usize + age);
        *repeats |= age < row.repeats as usize;
    }
    for (id, (count, repeats)) in occurred {
        let Some(logit) = logits.get_mut(id as usize) else { continue };
        let mut y = *logit;
        if repeats {
            y = if y > 0. { y / row.penalty } else { y * row.penalty };
        }
        if count > 0 {
            y = y - row.frequency * count as f32 - row.presence;
        }
        #[allow(clippy::manual_clamp)] // a NaN, of a penalty that is none, is to become a number
        let y = y.max(f32::MIN).min(f32::MAX);
        *logit = y;
    }
}

/// The order of a logit, then the complement of its id: no two ranks are equal.
fn rank(id: usize, logit: f32) -> u64 {
    u64::from(ordered(logit) as u32 ^ (1 << 31)) << 32 | u64::from(!(id as u32))
}

/// Integers in the order of `f32::total_cmp`, whose maximum is found faster.
fn ordered(x: f32) -> i32 {
    let bits = x.to_bits() as i32;
    bits ^ ((bits >> 31) as u32 >> 1) as i32
}

/// `2^38 * exp((x - best) / temperature)`, rounded down.
fn weight(x: f32, best: f32, scale: f64) -> u64 {
    let z = (f64::from(x) - f64::from(best)) * scale;
    // Not `z >= 0`: where the scale is infinite, the best token has none.
    if z.is_nan() || z >= 0. {
        return HEAVIEST;
    }
    if z <= -39. {
        return 0;
    }
    let whole = z.floor();
    let f = (z - whole) as f32;
    // 2^f on [0, 1], to 1e-7
    let terms = [2.190_095_5e-4, 1.240_786_8e-3, 9.678_594e-3, 5.548_587e-2, 2.402_286e-1, LN_2, 1.];
    let p = terms.into_iter().fold(0f32, |p, term| p * f + term);
    let mantissa = (p * 8_388_608.) as u64;
    (mantissa << 15) >> (-whole) as u32
}

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): 64 bits of it, the same with every
/// version of every dependency.
fn random_bits(seed: u64, index: u64) -> u64 {
    let mut key = [seed as u32, (seed >> 32) as u32];
    let mut c = [index as u32, (index >> 32) as u32, 0, 0];
    for _ in 0..10 {
        let (a, b) = (0xd251_1f53u64 * u64::from(c[0]), 0xcd9e_8d57u64 * u64::from(c[2]));
        c = [(b >> 32) as u32 ^ c[1] ^ key[0], b as u32, (a >> 32) as u32 ^ c[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    u64::from(c[1]) << 32 | u64::from(c[0])
}

/// The terms of a row's log-softmax, and the ids of its likeliest tokens.
#[derive(Debug)]
pub(super) struct LogSoftmax {
    most: f32,
    log_sum: f64,
    pub likeliest: Vec<u32>,
}

impl LogSoftmax {
    /// Of finite logits, with so many of the likeliest tokens, the likeliest first; of equal ones the lower id comes first.
    pub fn new(logits: &[f32], likeliest: usize) -> Self {
        let most = logits.iter().fold(f32::NEG_INFINITY, |most, x| most.max(*x));
        let sum: f64 = logits.iter().map(|x| f64::from((x - most).exp())).sum();
        let mut ranks: Vec<u64> = Vec::new();
        if likeliest > 0 {
            ranks.extend(logits.iter().enumerate().map(|(id, x)| rank(id, *x)));
            if likeliest < ranks.len() {
                ranks.select_nth_unstable_by(likeliest - 1, |a, b| b.cmp(a));
                ranks.truncate(likeliest);
            }
            ranks.sort_unstable_by(|a, b| b.cmp(a));
        }
        Self { most, log_sum: sum.ln(), likeliest: ranks.into_iter().map(|rank| !rank as u32).collect() }
    }

    /// The log-probability of a token with this logit.
    pub fn logprob(&self, logit: f32) -> f32 {
        (f64::from(logit) - f64::from(self.most) - self.log_sum) as f32
    }
}

#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
