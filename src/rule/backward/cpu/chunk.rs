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
//! P is not kept for it: what the gradients need of it, `dP_i . P_i`, is `(dP S)_i . k_i`. Since a beta may be zero, dP is held divided
//! by it: `W = -e dB`, `dbeta_i = dB_i . V_i + (W S)_i . k_i + sum_j (dL L)_ij / beta_i`.
//!
//! The gradient of a log decay adds what crosses its token, and subtracts nothing: the usual difference of two running sums loses all
//! its digits where the decay is strong.
//!
//! ```text
//! dg_t = sum_(i>=t) (dQ1_i . q_i + dP_i . P_i) + sum_(i>=t>j) (dA A + dL L)_ij + sum_(j<t) dK1_j . k_j + e_n <dS, S>
//! ```
#![allow(clippy::needless_range_loop)] // the indices are the formula's

use super::matmul::{product, product_ahead, solve, Base, Left};
use super::tokens::{transpose, Scratch, Sizes, Square, Tokens, CHUNK};
use candle_gdn_core::cpu::simd::{axpy, dot};
use pulp::{Simd, WithSimd};

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

/// U of a chunk, and the state after it where it is wanted.
pub struct Forward<'a> {
    pub tokens: &'a mut Tokens,
    /// `[V, padded K]`, before the chunk; `None` is zeros, whose products nobody needs to compute.
    pub state: Option<&'a [f32]>,
    /// `[CHUNK, padded V]`
    pub u: &'a mut [f32],
    pub next: Option<&'a mut [f32]>,
    /// Where the next call will write the state.
    pub ahead: &'a [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { tokens, state, u, next, ahead } = self;
        let ahead = ahead.split_at(ahead.len() / 2);
        let Sizes { value_dim, keys, values, .. } = tokens.sizes;
        let l = tokens.lower();
        let Scratch { transposed, decayed, .. } = &mut tokens.scratch;
        match state {
            Some(state) => {
                with_keys(simd, state, &tokens.keys, ahead.0, transposed);
                transpose(transposed, (values, CHUNK), u);
            }
            None => u.fill(0.0),
        }
        for (i, (u, v)) in u.chunks_exact_mut(values).zip(tokens.v.chunks_exact(values)).enumerate() {
            let (beta, before) = (tokens.beta[i], tokens.decays.before[i]);
            u.iter_mut().zip(v).for_each(|(u, v)| *u = beta * (v - before * *u));
        }
        solve(simd, &l, &std::array::from_fn(|i| i), u);
        let Some(next) = next else { return };
        let rows = decayed.chunks_exact_mut(keys).zip(tokens.qk[CHUNK * keys..].chunks_exact(keys));
        for ((decayed, k), after) in rows.zip(tokens.decays.after) {
            decayed.iter_mut().zip(k).for_each(|(d, k)| *d = k * after);
        }
        let u = Left::Columns(u, values);
        let base = state.map_or(Base::None, |state| Base::Other(state, tokens.decays.whole));
        product_ahead(simd, (value_dim, keys, CHUNK), u, decayed, base, ahead.1, next);
    }
}

/// The gradients of a chunk's inputs, and the gradient of the state before it in place of that of the state after it.
pub struct Backward<'a> {
    pub tokens: &'a mut Tokens,
    /// `[V, padded K]`, before the chunk; `None` is zeros, whose gradient nobody wants.
    pub state: Option<&'a [f32]>,
    /// `[CHUNK, padded V]`
    pub u: &'a [f32],
    /// `[V, padded K]`
    pub d_state: &'a mut [f32],
    /// Whether that holds anything yet, or counts as zeros.
    pub later: bool,
    /// The state and U of the next call.
    pub ahead: [&'a [f32]; 2],
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
        let mut whole = 0.0;
        if let (Some(state), true) = (self.state, self.later) {
            whole = self.tokens.decays.whole * inner(simd, self.d_state, state);
        }
        self.out.log_decay = log_decays(&pairs, &across, &inside, whole);
        if self.state.is_some() {
            self.states(simd);
        }
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
        if self.later {
            with_keys(simd, self.d_state, &tokens.keys, &self.ahead[0][..self.ahead[0].len() / 2], transposed);
            transpose(transposed, (values, CHUNK), d_u);
            for (row, after) in d_u.chunks_exact_mut(values).zip(tokens.decays.after) {
                row.iter_mut().for_each(|d| *d *= after);
            }
        }
        let base = if self.later { Base::Own(1.0) } else { Base::None };
        product(simd, (CHUNK, values, CHUNK), Left::Columns(a.as_flattened(), CHUNK), &tokens.d_ow, base, d_u);
        let mut upper = [[0.0; CHUNK]; CHUNK];
        transpose(l.as_flattened(), (CHUNK, CHUNK), upper.as_flattened_mut());
        solve(simd, &upper, &std::array::from_fn(|i| CHUNK - 1 - i), d_u);
        transpose(self.u, (CHUNK, values), updates);
        let updates = &updates[..value_dim * CHUNK];
        let d_a = with_updates(simd, &tokens.d_ow[..CHUNK * values], values, updates);
        let mut d_l = with_updates(simd, d_u, values, updates);
        d_l.as_flattened_mut().iter_mut().for_each(|d| *d = -*d);
        Pairs { l, a, d_a, d_l }
    }

    /// The gradient of v, W, and the part of that of beta which needs no state.
    #[inline(always)]
    fn values<S: Simd>(&mut self, simd: S, pairs: &Pairs) {
        let tokens = &mut *self.tokens;
        let values = tokens.sizes.values;
        let (_, w) = tokens.d_ow.split_at_mut(CHUNK * values);
        for i in 0..CHUNK {
            let row = i * values..(i + 1) * values;
            let (d_b, beta, before) = (&tokens.scratch.d_u[row.clone()], tokens.beta[i], tokens.decays.before[i]);
            let mut d_beta = dot(simd, d_b, &tokens.v[row.clone()]);
            for j in 0..i {
                d_beta += pairs.d_l[i][j] * tokens.with_keys[0][i][j] * tokens.decays.between[i][j];
            }
            self.out.beta[i] = d_beta;
            for ((d_v, w), d_b) in self.out.v[row.clone()].iter_mut().zip(&mut w[row]).zip(d_b) {
                *d_v = beta * d_b;
                *w = -before * d_b;
            }
        }
    }

    /// Adds the gradients of q, k and beta, and what those of q and k tell of the log decays: through what reads the state before the
    /// chunk, and through what goes into the one after it.
    #[inline(always)]
    fn keys<S: Simd>(&mut self, simd: S, pairs: &Pairs) -> [[f32; CHUNK]; 2] {
        let (tokens, out) = (&mut *self.tokens, &mut *self.out);
        let Sizes { value_dim, keys, values, .. } = tokens.sizes;
        let (q, k) = tokens.qk.split_at(CHUNK * keys);
        let (d_q, d_k) = out.qk.split_at_mut(CHUNK * keys);
        let (d_ow_s, u_ds) = tokens.scratch.with_states.split_at_mut(2 * CHUNK * keys);
        let (mut across, mut inside) = ([0.0; CHUNK], [0.0; CHUNK]);
        if let Some(state) = self.state {
            let d_ow = Left::Rows(&tokens.d_ow, values);
            product_ahead(simd, (2 * CHUNK, keys, value_dim), d_ow, state, Base::None, self.ahead[1], d_ow_s);
            let (d_o_s, w_s) = d_ow_s.split_at(CHUNK * keys);
            for i in 0..CHUNK {
                let row = i * keys..(i + 1) * keys;
                let (beta, before) = (tokens.beta[i], tokens.decays.before[i]);
                let with_k = dot(simd, &w_s[row.clone()], &k[row.clone()]);
                out.beta[i] += with_k;
                across[i] = before * dot(simd, &d_o_s[row.clone()], &q[row.clone()]) + beta * with_k;
                axpy(simd, &mut d_q[row.clone()], before, &d_o_s[row.clone()]);
                axpy(simd, &mut d_k[row.clone()], beta, &w_s[row]);
            }
        }
        if self.later {
            product(simd, (CHUNK, keys, value_dim), Left::Rows(self.u, values), self.d_state, Base::None, u_ds);
            for i in 0..CHUNK {
                let (row, after) = (i * keys..(i + 1) * keys, tokens.decays.after[i]);
                inside[i] = after * dot(simd, &u_ds[row.clone()], &k[row.clone()]);
                axpy(simd, &mut d_k[row.clone()], after, &u_ds[row]);
            }
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

    /// The gradient of the state before the chunk.
    #[inline(always)]
    fn states<S: Simd>(&mut self, simd: S) {
        let tokens = &mut *self.tokens;
        let Sizes { value_dim, keys, values, .. } = tokens.sizes;
        let decayed = &mut tokens.scratch.decayed;
        let factors = tokens.decays.before.iter().chain(&tokens.beta);
        for ((d, x), factor) in decayed.chunks_exact_mut(keys).zip(tokens.qk.chunks_exact(keys)).zip(factors) {
            d.iter_mut().zip(x).for_each(|(d, x)| *d = x * factor);
        }
        let d_ow = Left::Columns(&tokens.d_ow, values);
        let base = if self.later { Base::Own(tokens.decays.whole) } else { Base::None };
        let ahead = &self.ahead[0][self.ahead[0].len() / 2..];
        product_ahead(simd, (value_dim, keys, 2 * CHUNK), d_ow, decayed, base, ahead, self.d_state);
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

/// A state, or its gradient, by the keys `[padded K, CHUNK]`: `[V, CHUNK]`.
#[inline(always)]
fn with_keys<S: Simd>(simd: S, state: &[f32], keys: &[f32], ahead: &[f32], out: &mut [f32]) {
    let row = keys.len() / CHUNK;
    product_ahead(simd, (state.len() / row, CHUNK, row), Left::Rows(state, row), keys, Base::None, ahead, out);
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
