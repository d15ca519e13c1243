//! Log-probabilities of a row, as `models/cuda/logprobs` gives them.

use crate::cpu::sampling::ordered;

/// What the softmax of a row of logits is computed with, and the ids of its likeliest tokens.
#[derive(Debug)]
pub(crate) struct LogSoftmax {
    most: f32,
    log_sum: f64,
    pub likeliest: Vec<u32>,
}

impl LogSoftmax {
    /// Of logits, which must be finite, with so many of the likeliest tokens, the likeliest first; of equal ones that of the
    /// lower id.
    pub fn new(logits: &[f32], likeliest: usize) -> Self {
        let most = logits.iter().fold(f32::NEG_INFINITY, |most, x| most.max(*x));
        let sum: f64 = logits.iter().map(|x| f64::from((x - most).exp())).sum();
        let mut ranks: Vec<u64> = Vec::new();
        if likeliest > 0 {
            let rank =
                |(id, x): (usize, &f32)| u64::from(ordered(*x) as u32 ^ (1 << 31)) << 32 | u64::from(!(id as u32));
            ranks.extend(logits.iter().enumerate().map(rank));
            if likeliest < ranks.len() {
                ranks.select_nth_unstable_by(likeliest - 1, |a, b| b.cmp(a));
                ranks.truncate(likeliest);
            }
            ranks.sort_unstable_by(|a, b| b.cmp(a));
        }
        Self { most, log_sum: sum.ln(), likeliest: ranks.into_iter().map(|rank| !rank as u32).collect() }
    }

    /// Of a token with this logit.
    pub fn of(&self, logit: f32) -> f32 {
        (f64::from(logit) - f64::from(self.most) - self.log_sum) as f32
    }
}
