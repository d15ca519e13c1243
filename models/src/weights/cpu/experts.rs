//! What a mixture of experts needs besides its MLPs: the router's probabilities before them and the weighted sum after them.

use candle_gdn_core::cpu::simd::{axpy, dispatch, exp, sigmoid};
use candle_gdn_core::cpu::{parallel, Shared};
use pulp::{Simd, WithSimd};

/// Tokens of one task.
const TOKENS: usize = 16;

/// Softmax over the first `n` of each row's `stride` scores, to `[rows, n]`.
pub(crate) fn softmax(scores: &[f32], stride: usize, n: usize) -> Vec<f32> {
    let rows = scores.len() / stride;
    let mut out = vec![0f32; rows * n];
    let shared = Shared::new(&mut out);
    parallel(rows.div_ceil(TOKENS), 4 * TOKENS * n, |task| {
        let range = task * TOKENS..rows.min((task + 1) * TOKENS);
        // SAFETY: each task owns its rows.
        let dst = unsafe { shared.part(range.start * n, range.len() * n) };
        dispatch(Softmax { scores: &scores[range.start * stride..range.end * stride], stride, n, dst });
    });
    out
}

struct Softmax<'a> {
    scores: &'a [f32],
    stride: usize,
    n: usize,
    dst: &'a mut [f32],
}

impl WithSimd for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        for (row, dst) in self.scores.chunks_exact(self.stride).zip(self.dst.chunks_exact_mut(self.n)) {
            let row = &row[..self.n];
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            dst.iter_mut().zip(row).for_each(|(dst, x)| *dst = exp(x - max));
            let factor = 1.0 / dst.iter().sum::<f32>();
            dst.iter_mut().for_each(|dst| *dst *= factor);
        }
    }
}

/// `out[t] = sum_j weights[row] * experts[row]` over the rows `choices[t, j]`, plus `sigmoid(gate) * shared[t]` where there
/// is a shared expert.
pub(crate) struct Combine<'a> {
    /// `[rows, hidden]`
    pub experts: &'a [f32],
    /// `[rows]`
    pub weights: &'a [f32],
    /// `[tokens, choices of a token]`
    pub choices: &'a [u32],
    pub per_token: usize,
    pub shared: Option<Shares<'a>>,
    pub hidden: usize,
}

/// The shared expert's part.
#[derive(Clone, Copy)]
pub(crate) struct Shares<'a> {
    /// `[tokens, hidden]`
    pub out: &'a [f32],
    /// The gates before the sigmoid: one every `stride`, from the first on.
    pub gates: &'a [f32],
    pub stride: usize,
}

impl Combine<'_> {
    /// Writes `[tokens, hidden]`.
    pub fn run(&self, out: &mut [f32]) {
        let tokens = self.choices.len() / self.per_token;
        assert_eq!(out.len(), tokens * self.hidden);
        let out = Shared::new(out);
        parallel(tokens.div_ceil(TOKENS), TOKENS * self.per_token * self.hidden / 4, |task| {
            let first = task * TOKENS;
            let tokens = first..tokens.min(first + TOKENS);
            // SAFETY: each task owns its tokens.
            let dst = unsafe { out.part(first * self.hidden, tokens.len() * self.hidden) };
            dispatch(CombineTokens { combine: self, tokens, dst });
        });
    }
}

struct CombineTokens<'a, 'b> {
    combine: &'a Combine<'b>,
    tokens: std::ops::Range<usize>,
    dst: &'a mut [f32],
}

impl WithSimd for CombineTokens<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Combine { experts, weights, choices, per_token, shared, hidden } = *self.combine;
        for (t, dst) in self.tokens.zip(self.dst.chunks_exact_mut(hidden)) {
            dst.fill(0.0);
            for &row in &choices[t * per_token..][..per_token] {
                let row = row as usize;
                axpy(simd, dst, weights[row], &experts[row * hidden..][..hidden]);
            }
            if let Some(Shares { out, gates, stride }) = shared {
                axpy(simd, dst, sigmoid(gates[t * stride]), &out[t * hidden..][..hidden]);
            }
        }
    }
}

#[cfg(test)]
mod tests;
