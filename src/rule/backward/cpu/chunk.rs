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

use super::matmul::{product, Base, Left, ALIGN};
use super::tokens::{transpose, Scratch, Sizes, Square, Tokens, CHUNK};
use candle_gdn_core::cpu::simd::{axpy, dot};
use pulp::{Simd, WithSimd};

/// What a chunk leaves for its backward pass: `[CHUNK, padded V]` each.
pub struct Kept<'a> {
    pub p: &'a mut [f32],
    pub u: &'a mut [f32],
}

/// The gradients of a chunk's inputs.
pub struct Gradients {
    /// `[2 CHUNK, padded K]`: of the scaled queries, then of the keys.
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
        let rows = Left::Rows(state, keys);
        product(simd, (value_dim, CHUNK, keys), rows, &tokens.keys, Base::None, transposed);
        transpose(transposed, (value_dim, CHUNK), (CHUNK, values), kept.p);
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
        self.values(simd, &pairs);
        let [across, inside] = self.keys(simd, &pairs);
        self.out.log_decay = log_decays(&pairs, &across, &inside, self.tokens.decays.whole * self.inner());
        self.states(simd);
    }
}

impl Backward<'_> {
    /// The matrices of two tokens, and dB in `d_u`.
    #[inline(always)]
    fn pairs<S: Simd>(&mut self, simd: S) -> Pairs {
        let tokens = &mut *self.tokens;
        let Sizes { value_dim, keys, values, .. } = tokens.sizes;
        let l = tokens.lower();
        let mut a = tokens.with_keys[1];
        masked(&mut a, &tokens.decays.between);

        let Scratch { transposed, d_u, .. } = &mut tokens.scratch;
        let rows = Left::Rows(self.d_state, keys);
        product(simd, (value_dim, CHUNK, keys), rows, &tokens.keys, Base::None, transposed);
        transpose(transposed, (value_dim, CHUNK), (CHUNK, values), d_u);
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
        transpose(self.u, (CHUNK, value_dim), (values, CHUNK), transposed);
        let d_a = with_updates(simd, &tokens.d_op[..CHUNK * values], values, transposed);
        let mut d_l = with_updates(simd, d_u, values, transposed);
        d_l.as_flattened_mut().iter_mut().for_each(|d| *d = -*d);
        Pairs { l, a, d_a, d_l }
    }

    /// The gradients of v, beta and P.
    #[inline(always)]
    fn values<S: Simd>(&mut self, simd: S, pairs: &Pairs) {
        let tokens = &mut *self.tokens;
        let values = tokens.sizes.values;
        let (_, d_p) = tokens.d_op.split_at_mut(CHUNK * values);
        for i in 0..CHUNK {
            let row = i * values..(i + 1) * values;
            let (d_b, beta, before) = (&tokens.scratch.d_u[row.clone()], tokens.beta[i], tokens.decays.before[i]);
            let mut d_beta = dot(simd, d_b, &tokens.v[row.clone()]) - before * dot(simd, d_b, &self.p[row.clone()]);
            for j in 0..i {
                d_beta += pairs.d_l[i][j] * tokens.with_keys[0][i][j] * tokens.decays.between[i][j];
            }
            self.out.beta[i] = d_beta;
            for ((d_v, d_p), d_b) in self.out.v[row.clone()].iter_mut().zip(&mut d_p[row]).zip(d_b) {
                *d_v = beta * d_b;
                *d_p = -before * *d_v;
            }
        }
    }

    /// The gradients of q and k, and what they tell of the log decays: what reads the state before the chunk, and what goes into the
    /// one after it.
    #[inline(always)]
    fn keys<S: Simd>(&mut self, simd: S, pairs: &Pairs) -> [[f32; CHUNK]; 2] {
        let (tokens, out) = (&mut *self.tokens, &mut *self.out);
        let Sizes { value_dim, keys, values, .. } = tokens.sizes;
        let (q, k) = tokens.qk.split_at(CHUNK * keys);
        let d_op = Left::Rows(&tokens.d_op, values);
        product(simd, (2 * CHUNK, keys, value_dim), d_op, self.state, Base::None, &mut out.qk);
        let (d_q, d_k) = out.qk.split_at_mut(CHUNK * keys);
        let (mut across, mut inside) = ([0.0; CHUNK], [0.0; CHUNK]);
        let d_p = &tokens.d_op[CHUNK * values..];
        for i in 0..CHUNK {
            let (key_row, value_row) = (i * keys..(i + 1) * keys, i * values..(i + 1) * values);
            let d_q = &mut d_q[key_row.clone()];
            d_q.iter_mut().for_each(|d| *d *= tokens.decays.before[i]);
            across[i] = dot(simd, d_q, &q[key_row]) + dot(simd, &d_p[value_row.clone()], &self.p[value_row]);
        }
        // K by U dS, into a place of its own for its share of the log decays.
        let d_k1 = &mut tokens.scratch.d_k1;
        let u = Left::Rows(self.u, values);
        product(simd, (CHUNK, keys, value_dim), u, self.d_state, Base::None, d_k1);
        for i in 0..CHUNK {
            let row = i * keys..(i + 1) * keys;
            let after = tokens.decays.after[i];
            inside[i] = after * dot(simd, &d_k1[row.clone()], &k[row.clone()]);
            axpy(simd, &mut d_k[row.clone()], after, &d_k1[row]);
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
        [across, inside]
    }

    /// `<dS, S>` in sixteen sums.
    #[inline(always)]
    fn inner(&self) -> f32 {
        let mut sums = [0f32; ALIGN];
        let (d_state, _) = self.d_state.as_chunks::<ALIGN>();
        let (state, _) = self.state.as_chunks::<ALIGN>();
        for (d, s) in d_state.iter().zip(state) {
            for i in 0..ALIGN {
                sums[i] += d[i] * s[i];
            }
        }
        sums.iter().sum()
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
