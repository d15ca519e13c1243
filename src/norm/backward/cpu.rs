//! Gradients of the gated norm, row by row: with `r = rsqrt(mean(x^2) + eps)`, `n = r x` and `dn = dy w act(z)`,
//!
//! ```text
//! dx = r (dn - n mean(n dn));   dz = dy w n act'(z);   dw = sum dy n act(z)
//! ```

use crate::norm::cpu::Norm;
use candle_gdn_core::cpu::simd::{dispatch, sigmoid, sum_of_squares};
use candle_gdn_core::cpu::{parallel, Element, Heads, Shared};
use pulp::{Simd, WithSimd};

/// Rows of one task, and of one partial sum of the weight's gradient.
const ROWS: usize = 64;

/// Everything but the results.
pub struct NormBackward<'a, T> {
    pub norm: Norm<'a, T>,
    pub d_y: Heads<'a, T>,
}

impl<T: Element> NormBackward<'_, T> {
    /// Writes the gradients of x and z, contiguous `[tokens, heads, dim]`, and returns that of the weight.
    pub fn run(&self, d_x: &mut [T], d_z: &mut [T]) -> Vec<f32> {
        let norm = &self.norm;
        let (dim, rows) = (norm.weight.len(), norm.tokens * norm.heads);
        let tasks = rows.div_ceil(ROWS);
        let mut partial = vec![0f32; tasks * dim];
        let (d_x, d_z, sums) = (Shared::new(d_x), Shared::new(d_z), Shared::new(&mut partial));
        parallel(tasks, 12 * ROWS * dim, |task| {
            let first = task * ROWS;
            // SAFETY: each task owns its rows and its sums.
            let d_weight = unsafe { sums.part(task * dim, dim) };
            for row in first..rows.min(first + ROWS) {
                let (token, head) = (row / norm.heads, row % norm.heads);
                // SAFETY: as above.
                let (d_x, d_z) = unsafe { (d_x.part(row * dim, dim), d_z.part(row * dim, dim)) };
                let [x, z, d_y] = [norm.x, norm.z, self.d_y].map(|heads| heads.row(0, token, head, dim));
                dispatch(Row { norm, x, z, d_y, d_x, d_z, d_weight });
            }
        });
        // In the order of the tasks: equal inputs give equal bits.
        (0..dim).map(|c| (0..tasks).map(|task| f64::from(partial[task * dim + c])).sum::<f64>() as f32).collect()
    }
}

struct Row<'a, 'b, T> {
    norm: &'a Norm<'b, T>,
    x: &'a [T],
    z: &'a [T],
    d_y: &'a [T],
    d_x: &'a mut [T],
    d_z: &'a mut [T],
    d_weight: &'a mut [f32],
}

impl<T: Element> WithSimd for Row<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Row { norm, x, z, d_y, d_x, d_z, d_weight } = self;
        let dim = x.len();
        let factor = 1.0 / (sum_of_squares(x) / dim as f32 + norm.eps).sqrt();
        let mut d_n = [0f32; 256];
        for c in 0..dim {
            let (z, d_y, w) = (z[c].to_f32(), d_y[c].to_f32(), norm.weight[c]);
            let s = sigmoid(z);
            let (gate, slope) = if norm.sigmoid { (s, s * (1.0 - s)) } else { (z * s, s * (1.0 + z * (1.0 - s))) };
            let n = x[c].to_f32() * factor;
            d_weight[c] += d_y * n * gate;
            d_z[c] = T::from_f32(d_y * w * n * slope);
            d_n[c] = d_y * w * gate;
        }
        let d_n = &d_n[..dim];
        let mut sums = [0f32; 16];
        for (x, d_n) in x.chunks(16).zip(d_n.chunks(16)) {
            sums.iter_mut().zip(x).zip(d_n).for_each(|((sum, x), d_n)| *sum += x.to_f32() * factor * d_n);
        }
        let mean = sums.iter().sum::<f32>() / dim as f32;
        for ((d_x, x), d_n) in d_x.iter_mut().zip(x).zip(d_n) {
            *d_x = T::from_f32(factor * (d_n - x.to_f32() * factor * mean));
        }
    }
}
