//! One value head, token by token. The state row is read once: with `sk = S k` and `sq = S q` of the old state,
//! `d = beta (v - e^g sk)`, `o = e^g sq + d (k . q)` and `S <- e^g S + d k^T`.

use candle_gdn_core::cpu::simd::{dot, dot2_x4, scale_add};
use pulp::{Simd, WithSimd};

/// One token of one value head.
pub struct Step<'a> {
    /// `[K]`, normalised and scaled.
    pub q: &'a [f32],
    /// `[K]`, normalised.
    pub k: &'a [f32],
    /// `[V]`; replaced by o.
    pub v_to_o: &'a mut [f32],
    pub log_decay: f32,
    pub beta: f32,
    /// `[V, K]`
    pub state: &'a mut [f32],
}

impl WithSimd for Step<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Step { q, k, v_to_o, log_decay, beta, state } = self;
        let decay = log_decay.exp();
        let kq = dot(simd, k, q);
        let mut groups = state.chunks_exact_mut(4 * k.len());
        let mut v_groups = v_to_o.chunks_exact_mut(4);
        for (rows, v) in groups.by_ref().zip(v_groups.by_ref()) {
            let (r01, r23) = rows.split_at_mut(2 * k.len());
            let (r0, r1) = r01.split_at_mut(k.len());
            let (r2, r3) = r23.split_at_mut(k.len());
            let sums = dot2_x4(simd, [r0, r1, r2, r3], k, q);
            for ((row, v), (sk, sq)) in [r0, r1, r2, r3].into_iter().zip(v).zip(sums) {
                let update = beta * (*v - decay * sk);
                *v = decay * sq + update * kq;
                scale_add(simd, row, decay, update, k);
            }
        }
        let rest = groups.into_remainder().chunks_exact_mut(k.len());
        for (row, v) in rest.zip(v_groups.into_remainder()) {
            let update = beta * (*v - decay * dot(simd, row, k));
            *v = decay * dot(simd, row, q) + update * kq;
            scale_add(simd, row, decay, update, k);
        }
    }
}
