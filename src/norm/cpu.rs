//! Gated RMSNorm per head: `out = x * rsqrt(mean(x^2) + eps) * weight * act(z)`.

use candle_gdn_core::cpu::simd::{dispatch, sigmoid, silu, sum_of_squares};
use candle_gdn_core::cpu::{parallel, Element, Heads, Shared};
use pulp::{Simd, WithSimd};

/// Rows of one task.
const ROWS: usize = 16;

/// Everything but the output.
pub struct Norm<'a, T> {
    pub x: Heads<'a, T>,
    pub z: Heads<'a, T>,
    /// `[dim]`
    pub weight: &'a [f32],
    pub tokens: usize,
    pub heads: usize,
    pub eps: f32,
    /// The gate is `sigmoid(z)` instead of `silu(z)`.
    pub sigmoid: bool,
}

impl<T: Element> Norm<'_, T> {
    /// Writes `out`, contiguous `[tokens, heads, dim]`.
    pub fn run(&self, out: &mut [T]) {
        let dim = self.weight.len();
        let rows = self.tokens * self.heads;
        let out = Shared::new(out);
        parallel(rows.div_ceil(ROWS), 4 * ROWS * dim, |task| {
            let first = task * ROWS;
            let count = ROWS.min(rows - first);
            // SAFETY: each task owns its rows.
            let out = unsafe { out.part(first * dim, count * dim) };
            for (row, dst) in (first..first + count).zip(out.chunks_exact_mut(dim)) {
                let (token, head) = (row / self.heads, row % self.heads);
                dispatch(Row {
                    x: self.x.row(0, token, head, dim),
                    z: self.z.row(0, token, head, dim),
                    weight: self.weight,
                    dst,
                    eps: self.eps,
                    sigmoid: self.sigmoid,
                });
            }
        });
    }
}

struct Row<'a, T> {
    x: &'a [T],
    z: &'a [T],
    weight: &'a [f32],
    dst: &'a mut [T],
    eps: f32,
    sigmoid: bool,
}

impl<T: Element> WithSimd for Row<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Row { x, z, weight, dst, eps, sigmoid: use_sigmoid } = self;
        let mean = sum_of_squares(x) / x.len() as f32;
        let factor = 1.0 / (mean + eps).sqrt();
        for (((dst, x), z), w) in dst.iter_mut().zip(x).zip(z).zip(weight) {
            let z = z.to_f32();
            let gate = if use_sigmoid { sigmoid(z) } else { silu(z) };
            *dst = T::from_f32(x.to_f32() * factor * w * gate);
        }
    }
}
