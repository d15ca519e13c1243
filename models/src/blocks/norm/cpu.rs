//! RMS norm of rows: `out = x * rsqrt(mean(x^2) + eps) * scale`.

use candle_gdn_core::cpu::simd::{dispatch, sum_of_squares};
use candle_gdn_core::cpu::{parallel, Shared};
use pulp::{Simd, WithSimd};

/// Rows of one task.
const ROWS: usize = 16;

/// `x` and `out` are `[rows, dim]`, `scale` is `[dim]`.
pub(crate) fn rms_norm(x: &[f32], scale: &[f32], eps: f32, out: &mut [f32]) {
    let dim = scale.len();
    assert_eq!(x.len(), out.len());
    assert!(dim > 0 && x.len().is_multiple_of(dim));
    let rows = x.len() / dim;
    let out = Shared::new(out);
    parallel(rows.div_ceil(ROWS), ROWS * dim / 4, |task| {
        let range = task * ROWS * dim..rows.min((task + 1) * ROWS) * dim;
        // SAFETY: each task owns its rows.
        let out = unsafe { out.part(range.start, range.len()) };
        dispatch(Rows { x: &x[range], scale, eps, out });
    });
}

struct Rows<'a> {
    x: &'a [f32],
    scale: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl WithSimd for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let dim = self.scale.len();
        for (x, out) in self.x.chunks_exact(dim).zip(self.out.chunks_exact_mut(dim)) {
            norm_row(x, self.scale, self.eps, out);
        }
    }
}

/// One row.
#[inline(always)]
pub(crate) fn norm_row(x: &[f32], scale: &[f32], eps: f32, out: &mut [f32]) {
    let factor = 1.0 / (sum_of_squares(x) / x.len() as f32 + eps).sqrt();
    out.iter_mut().zip(x).zip(scale).for_each(|((out, x), s)| *out = x * factor * s);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_the_definition() {
        for rows in [0, 1, 3, 16, 100] {
            for dim in [1, 5, 16, 33, 700] {
                let x: Vec<f32> = (0..rows * dim).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
                let scale: Vec<f32> = (0..dim).map(|i| (i as f32).cos()).collect();
                let mut got = vec![f32::NAN; rows * dim];
                rms_norm(&x, &scale, 1e-3, &mut got);
                for (x, got) in x.chunks_exact(dim).zip(got.chunks_exact(dim)) {
                    let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / dim as f64;
                    for ((x, scale), got) in x.iter().zip(&scale).zip(got) {
                        let want = f64::from(*x) / (mean + 1e-3).sqrt() * f64::from(*scale);
                        assert!((f64::from(*got) - want).abs() < 1e-6 * (1.0 + want.abs()), "{got} {want}");
                    }
                }
            }
        }
    }
}
