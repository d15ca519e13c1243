//! One chunk of tokens of one value head, forward and backward. With S the state before the chunk, c the running sum of the
//! log decays, `e_i = exp(c_i)`, `h_i = exp(c_n - c_i)`, `D_ij = exp(c_i - c_j)` for `i >= j`, q scaled, and dS the gradient of the
//! state after the chunk:
//!
//! ```text
//! L = stril(beta_i (k_i . k_j) D_ij)       P = K S^T             U = (I + L)^-1 beta (V - e P)
//! A = tril(Q K^T) D                        O = e (Q S^T) + A U   S' = e_n S + U^T (h K)
//!
//! dU = A^T dO + h (K dS^T)                 dB = (I + L)^-T dU    dV = beta dB    dP = -e dV
//! dA = tril(dO U^T)    dL = -stril(dB U^T)    F = dA D           M = beta_i dL D
//! dQ1 = e (dO S)       dQ = dQ1 + F K
//! dK1 = h (U dS)       dK = dK1 + dP S + (M + M^T) K + F^T Q
//! dS <- e_n dS + (e dO)^T Q + dP^T K
//! ```
//!
//! The gradient of a log decay adds what crosses its token, and subtracts nothing: the usual difference of two running sums loses all
//! its digits where the decay is strong.
//!
//! ```text
//! dg_t = sum_(i>=t) (dQ1_i . q_i + dP_i . P_i) + sum_(i>=t>j) (dA A + dL L)_ij + sum_(j<t) dK1_j . k_j + e_n <dS, S>
//! ```
#![allow(clippy::needless_range_loop)] // the indices are the formula's

use super::matmul::{product, Base, Left};
use super::tokens::{transpose, Scratch, Sizes, Square, Tokens, CHUNK};
use candle_gdn_core::cpu::prefetch;
use candle_gdn_core::cpu::simd::{axpy, dot};
use pulp::{Simd, WithSimd};

/// What a chunk leaves for its backward pass: `[CHUNK, padded V]` each.
pub struct Kept<'a> {
    pub p: &'a mut [f32],
    pub u: &'a mut [f32],
}

/// The gradients of a chunk's inputs.
pub struct Gradients {
    /// `[2 CHUNK, padded K]`: of the scaled queries, then of the keys. Each value head adds its own.
    pub qk: Vec<f32>,
    /// `[CHUNK, padded V]`
    pub v: Vec<f32>,
    pub log_decay: [f32; CHUNK],
    pub beta: [f32; CHUNK],
}

impl Gradients {
    pub fn new(sizes: Sizes) -> Self {
        Self {
            qk: vec![0.0; 2 * CHUNK * sizes.keys],
            v: vec![0.0; CHUNK * sizes.values],
            log_decay: [0.0; CHUNK],
            beta: [0.0; CHUNK],
        }
    }
}

/// P and U of a chunk, and the state after it where it is wanted.
pub struct Forward<'a, 'b> {
    pub tokens: &'a mut Tokens,
    /// `[V, padded K]`, before the chunk.
    pub state: &'a [f32],
    pub kept: Kept<'b>,
    pub next: Option<&'a mut [f32]>,
}

impl WithSimd for Forward<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { tokens, state, kept, next } = self;
        let Sizes { value_dim, keys, values, .. } = tokens.sizes;
        let l = tokens.lower();
        let Scratch { transposed, decayed, .. } = &mut tokens.scratch;
        with_keys(simd, state, &tokens.keys, next.as_deref().unwrap_or_default(), transposed);
        transpose(transposed, (values, CHUNK), kept.p);
        for i in 0..CHUNK {
            let (done, rest) = kept.u.split_at_mut(i * values);
            let (u, p, v) = (&mut rest[..values], &kept.p[i * values..][..values], &tokens.v[i * values..][..values]);
            let (beta, before) = (tokens.beta[i], tokens.decays.before[i]);
            u.iter_mut().zip(p).zip(v).for_each(|((u, p), v)| *u = beta * (v - before * p));
            for (j, row) in done.chunks_exact(values).enumerate() {
                axpy(simd, u, -l[i][j], row);
            }
        }
        let Some(next) = next else { return };
        let rows = decayed.chunks_exact_mut(keys).zip(tokens.qk[CHUNK * keys..].chunks_exact(keys));
        for ((decayed, k), after) in rows.zip(tokens.decays.after) {
            decayed.iter_mut().zip(k).for_each(|(d, k)| *d = k * after);
        }
        let u = Left::Columns(kept.u, values);
        let base = Base::Other(state, tokens.decays.whole);
        product(simd, (value_dim, keys, CHUNK), u, decayed, base, next);
    }
}

/// The gradients of a chunk's inputs, and the gradient of the state before it in place of that of the state after it.
pub struct Backward<'a> {
    pub tokens: &'a mut Tokens,
    /// `[V, padded K]`, before the chunk.
    pub state: &'a [f32],
    /// `[CHUNK, padded V]`
    pub p: &'a [f32],
    pub u: &'a [f32],
    /// `[V, padded K]`
    pub d_state: &'a mut [f32],
    pub out: &'a mut Gradients,
}

/// What two tokens owe each other: the attention and the triangular system, with their gradients.
struct Pairs {
    l: Square,
    a: Square,
    d_a: Square,
    d_l: Square,
}

impl WithSimd for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let pairs = self.pairs(simd);
        let mut across = self.values(simd, &pairs);
        let inside = self.keys(simd, &pairs, &mut across);
        let whole = self.tokens.decays.whole * inner(simd, self.d_state, self.state);
        self.out.log_decay = log_decays(&pairs, &across, &inside, whole);
        self.states(simd);
    }
}

impl Backward<'_> {
    /// The matrices of two tokens, and dB in `d_u`.
    #[inline(always)]
    fn pairs<S: Simd>(&mut self, simd: S) -> Pairs {
        let tokens = &mut *self.tokens;
        let Sizes { value_dim, values, .. } = tokens.sizes;
        let l = tokens.lower();
        let mut a = tokens.with_keys[1];
        masked(&mut a, &tokens.decays.between);

        let Scratch { transposed, updates, d_u, .. } = &mut tokens.scratch;
        with_keys(simd, self.d_state, &tokens.keys, self.state, transposed);
        transpose(transposed, (values, CHUNK), d_u);
        for (row, after) in d_u.chunks_exact_mut(values).zip(tokens.decays.after) {
            row.iter_mut().for_each(|d| *d *= after);
        }
        let a_t = Left::Columns(a.as_flattened(), CHUNK);
        product(simd, (CHUNK, values, CHUNK), a_t, &tokens.d_op, Base::Own(1.0), d_u);
        for i in (0..CHUNK).rev() {
            let (rest, done) = d_u.split_at_mut((i + 1) * values);
            for (j, row) in (i + 1..CHUNK).zip(done.chunks_exact(values)) {
                axpy(simd, &mut rest[i * values..], -l[j][i], row);
            }
        }
        transpose(self.u, (CHUNK, values), updates);
        let updates = &updates[..value_dim * CHUNK];
        let d_a = with_updates(simd, &tokens.d_op[..CHUNK * values], values, updates);
        let mut d_l = with_updates(simd, d_u, values, updates);
        d_l.as_flattened_mut().iter_mut().for_each(|d| *d = -*d);
        Pairs { l, a, d_a, d_l }
    }

    /// The gradients of v, beta and P, and what that of P tells of the log decays.
    #[inline(always)]
    fn values<S: Simd>(&mut self, simd: S, pairs: &Pairs) -> [f32; CHUNK] {
        let tokens = &mut *self.tokens;
        let values = tokens.sizes.values;
        let (_, d_p) = tokens.d_op.split_at_mut(CHUNK * values);
        let mut across = [0.0; CHUNK];
        for i in 0..CHUNK {
            let row = i * values..(i + 1) * values;
            let (d_b, beta, before) = (&tokens.scratch.d_u[row.clone()], tokens.beta[i], tokens.decays.before[i]);
            let with_p = before * dot(simd, d_b, &self.p[row.clone()]);
            let mut d_beta = dot(simd, d_b, &tokens.v[row.clone()]) - with_p;
            for j in 0..i {
                d_beta += pairs.d_l[i][j] * tokens.with_keys[0][i][j] * tokens.decays.between[i][j];
            }
            self.out.beta[i] = d_beta;
            across[i] = -beta * with_p;
            for ((d_v, d_p), d_b) in self.out.v[row.clone()].iter_mut().zip(&mut d_p[row]).zip(d_b) {
                *d_v = beta * d_b;
                *d_p = -before * *d_v;
            }
        }
        across
    }

    /// Adds the gradients of q and k, and what they tell of the log decays: to `across` for what reads the state before the chunk, and as
    /// the result for what goes into the one after it.
    #[inline(always)]
    fn keys<S: Simd>(&mut self, simd: S, pairs: &Pairs, across: &mut [f32; CHUNK]) -> [f32; CHUNK] {
        let (tokens, out) = (&mut *self.tokens, &mut *self.out);
        let Sizes { value_dim, keys, values, .. } = tokens.sizes;
        let (q, k) = tokens.qk.split_at(CHUNK * keys);
        let (d_q, d_k) = out.qk.split_at_mut(CHUNK * keys);
        let (d_op_s, u_ds) = tokens.scratch.with_states.split_at_mut(2 * CHUNK * keys);
        let (d_op, u) = (Left::Rows(&tokens.d_op, values), Left::Rows(self.u, values));
        product(simd, (2 * CHUNK, keys, value_dim), d_op, self.state, Base::None, d_op_s);
        product(simd, (CHUNK, keys, value_dim), u, self.d_state, Base::None, u_ds);
        let (d_o_s, d_p_s) = d_op_s.split_at(CHUNK * keys);
        let mut inside = [0.0; CHUNK];
        for i in 0..CHUNK {
            let row = i * keys..(i + 1) * keys;
            let (before, after) = (tokens.decays.before[i], tokens.decays.after[i]);
            across[i] += before * dot(simd, &d_o_s[row.clone()], &q[row.clone()]);
            inside[i] = after * dot(simd, &u_ds[row.clone()], &k[row.clone()]);
            axpy(simd, &mut d_q[row.clone()], before, &d_o_s[row.clone()]);
            axpy(simd, &mut d_k[row.clone()], after, &u_ds[row.clone()]);
            axpy(simd, &mut d_k[row.clone()], 1.0, &d_p_s[row]);
        }
        // [F^T | M + M^T] and F.
        let (mut both, mut f) = ([[0.0; 2 * CHUNK]; CHUNK], pairs.d_a);
        masked(&mut f, &tokens.decays.between);
        for i in 0..CHUNK {
            for j in 0..=i {
                both[j][i] = f[i][j];
            }
            for j in 0..i {
                let m = tokens.beta[i] * pairs.d_l[i][j] * tokens.decays.between[i][j];
                both[i][CHUNK + j] += m;
                both[j][CHUNK + i] += m;
            }
        }
        let f = Left::Rows(f.as_flattened(), CHUNK);
        product(simd, (CHUNK, keys, CHUNK), f, k, Base::Own(1.0), d_q);
        let both = Left::Rows(both.as_flattened(), 2 * CHUNK);
        product(simd, (CHUNK, keys, 2 * CHUNK), both, &tokens.qk, Base::Own(1.0), d_k);
        inside
    }

    /// The gradient of the state before the chunk.
    #[inline(always)]
    fn states<S: Simd>(&mut self, simd: S) {
        let tokens = &mut *self.tokens;
        let Sizes { value_dim, keys, values, .. } = tokens.sizes;
        let decayed = &mut tokens.scratch.decayed;
        let rows = decayed.chunks_exact_mut(keys).zip(tokens.qk.chunks_exact(keys));
        for ((decayed, q), before) in rows.zip(tokens.decays.before) {
            decayed.iter_mut().zip(q).for_each(|(d, q)| *d = q * before);
        }
        decayed[CHUNK * keys..].copy_from_slice(&tokens.qk[CHUNK * keys..]);
        let d_op = Left::Columns(&tokens.d_op, values);
        let base = Base::Own(tokens.decays.whole);
        product(simd, (value_dim, keys, 2 * CHUNK), d_op, decayed, base, self.d_state);
    }
}

/// `<dS, S>` in four vectors of sums: one would wait for itself.
#[inline(always)]
fn inner<S: Simd>(simd: S, d_state: &[f32], state: &[f32]) -> f32 {
    let (d, s) = (S::as_simd_f32s(d_state).0, S::as_simd_f32s(state).0);
    let mut sums = [simd.splat_f32s(0.0); 4];
    let ((d, d_rest), (s, s_rest)) = (d.as_chunks::<4>(), s.as_chunks::<4>());
    for (d, s) in d.iter().zip(s) {
        for i in 0..4 {
            sums[i] = simd.mul_add_e_f32s(d[i], s[i], sums[i]);
        }
    }
    for (d, s) in d_rest.iter().zip(s_rest) {
        sums[0] = simd.mul_add_e_f32s(*d, *s, sums[0]);
    }
    let [a, b, c, d] = sums;
    simd.reduce_sum_f32s(simd.add_f32s(simd.add_f32s(a, b), simd.add_f32s(c, d)))
}

/// A state, or its gradient, by the keys `[padded K, CHUNK]`: `[V, CHUNK]`. On the way it prefetches another state, which is used next and
/// lies in memory.
#[inline(always)]
fn with_keys<S: Simd>(simd: S, state: &[f32], keys: &[f32], ahead: &[f32], out: &mut [f32]) {
    const ROWS: usize = 8;
    let row = keys.len() / CHUNK;
    for (i, (rows, out)) in state.chunks(ROWS * row).zip(out.chunks_mut(ROWS * CHUNK)).enumerate() {
        prefetch(ahead.chunks(ROWS * row).nth(i).unwrap_or_default());
        product(simd, (rows.len() / row, CHUNK, row), Left::Rows(rows, row), keys, Base::None, out);
    }
}

/// Rows `[CHUNK, padded V]` by the updates of tokens, `[V, CHUNK]`. A function, since a closure would not be compiled for the
/// instruction set.
#[inline(always)]
fn with_updates<S: Simd>(simd: S, rows: &[f32], values: usize, updates: &[f32]) -> Square {
    let mut out = [[0.0; CHUNK]; CHUNK];
    let a = Left::Rows(rows, values);
    product(simd, (CHUNK, CHUNK, updates.len() / CHUNK), a, updates, Base::None, out.as_flattened_mut());
    out
}

/// Times the decays, which are zero above the diagonal.
#[inline(always)]
fn masked(x: &mut Square, between: &Square) {
    x.as_flattened_mut().iter_mut().zip(between.as_flattened()).for_each(|(x, d)| *x *= d);
}

/// `dg`; see the formula above.
#[inline(always)]
fn log_decays(pairs: &Pairs, across: &[f32; CHUNK], inside: &[f32; CHUNK], whole: f32) -> [f32; CHUNK] {
    let mut out = [whole; CHUNK];
    let mut sum = 0.0;
    for t in (0..CHUNK).rev() {
        sum += across[t];
        out[t] += sum;
    }
    // Of each row, the sum of the columns before t.
    let mut rows = [0f32; CHUNK];
    let mut sum = 0.0;
    for t in 1..CHUNK {
        sum += inside[t - 1];
        for (i, row) in rows.iter_mut().enumerate().skip(t) {
            *row += pairs.d_a[i][t - 1] * pairs.a[i][t - 1] + pairs.d_l[i][t - 1] * pairs.l[i][t - 1];
        }
        out[t] += sum + rows[t..].iter().sum::<f32>();
    }
    out
}
