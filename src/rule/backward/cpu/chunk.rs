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

use super::matmul::{product, Base, Left, ALIGN};
use candle_gdn_core::cpu::simd::{axpy, dot, exp};
use pulp::{Simd, WithSimd};

/// Tokens of a chunk. More would make the products among tokens larger, fewer those with the state less efficient.
pub const CHUNK: usize = ALIGN;

/// A matrix of two tokens.
type Square = [[f32; CHUNK]; CHUNK];

/// Head sizes, and the same padded with zeros.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub key_dim: usize,
    pub value_dim: usize,
    pub keys: usize,
    pub values: usize,
}

impl Sizes {
    pub fn new(key_dim: usize, value_dim: usize) -> Self {
        let padded = |dim: usize| dim.next_multiple_of(ALIGN);
        Self { key_dim, value_dim, keys: padded(key_dim), values: padded(value_dim) }
    }

    /// Elements of a state `[V, padded K]`.
    pub fn state(&self) -> usize {
        self.value_dim * self.keys
    }
}

/// The inputs of a chunk, zeros where there is no token.
pub struct Tokens {
    pub sizes: Sizes,
    /// `[2 CHUNK, padded K]`: the queries, scaled, then the keys.
    pub qk: Vec<f32>,
    /// `[CHUNK, padded V]`
    pub v: Vec<f32>,
    /// `[2 CHUNK, padded V]`: the gradient of o; the second half is that of P.
    pub d_op: Vec<f32>,
    pub beta: [f32; CHUNK],
    pub decays: Decays,
    /// `[padded K, CHUNK]`: the keys transposed.
    keys: Vec<f32>,
    scratch: Scratch,
}

/// Products of decays.
pub struct Decays {
    /// `e`
    before: [f32; CHUNK],
    /// `h`
    after: [f32; CHUNK],
    /// `e_n`
    whole: f32,
    /// `D`, zero above the diagonal.
    between: Square,
}

impl Decays {
    /// Of log decays. Sums are f64: differences of large ones count.
    pub fn new(log_decays: &[f32; CHUNK]) -> Self {
        let (mut sums, mut sum) = ([0f64; CHUNK], 0f64);
        for (s, g) in sums.iter_mut().zip(log_decays) {
            sum += f64::from(*g);
            *s = sum;
        }
        let mut between = [[0.0; CHUNK]; CHUNK];
        for (i, row) in between.iter_mut().enumerate() {
            for (j, d) in row[..=i].iter_mut().enumerate() {
                *d = exp((sums[i] - sums[j]) as f32);
            }
        }
        Self {
            before: sums.map(|s| exp(s as f32)),
            after: sums.map(|s| exp((sum - s) as f32)),
            whole: exp(sum as f32),
            between,
        }
    }
}

/// Room for what a chunk computes on its way.
struct Scratch {
    /// `[V, CHUNK]`
    transposed: Vec<f32>,
    /// `[CHUNK, padded V]`
    d_u: Vec<f32>,
}

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

impl Tokens {
    pub fn new(sizes: Sizes) -> Self {
        Self {
            sizes,
            qk: vec![0.0; 2 * CHUNK * sizes.keys],
            v: vec![0.0; CHUNK * sizes.values],
            d_op: vec![0.0; 2 * CHUNK * sizes.values],
            beta: [0.0; CHUNK],
            decays: Decays::new(&[0.0; CHUNK]),
            keys: vec![0.0; sizes.keys * CHUNK],
            scratch: Scratch { transposed: vec![0.0; sizes.value_dim * CHUNK], d_u: vec![0.0; CHUNK * sizes.values] },
        }
    }

    /// The keys times the transpose of a matrix of which `[rows, padded K]` are given: `L` but for the decays.
    #[inline(always)]
    fn products<S: Simd>(&self, simd: S, rows: &[f32]) -> Square {
        let mut out = [[0.0; CHUNK]; CHUNK];
        let a = Left { data: rows, strides: (self.sizes.keys, 1) };
        product(simd, (CHUNK, CHUNK, self.sizes.keys), a, &self.keys, Base::None, out.as_flattened_mut());
        out
    }

    /// `L` from the products of keys.
    #[inline(always)]
    fn lower(&self, keys: &Square) -> Square {
        let mut l = [[0.0; CHUNK]; CHUNK];
        for i in 0..CHUNK {
            for j in 0..i {
                l[i][j] = self.beta[i] * keys[i][j] * self.decays.between[i][j];
            }
        }
        l
    }

    #[inline(always)]
    fn transpose_keys(&mut self) {
        let keys = self.sizes.keys;
        transpose(&self.qk[CHUNK * keys..], (CHUNK, keys), (keys, CHUNK), &mut self.keys);
    }
}

/// `src [rows, columns]` with rows of `strides.0` elements to `[columns, rows]` with rows of `strides.1`.
#[inline(always)]
fn transpose(src: &[f32], (rows, columns): (usize, usize), (from, to): (usize, usize), dst: &mut [f32]) {
    assert!(src.len() >= (rows - 1) * from + columns && dst.len() >= (columns - 1) * to + rows);
    for c0 in (0..columns).step_by(16) {
        for c in c0..columns.min(c0 + 16) {
            for r in 0..rows {
                dst[c * to + r] = src[r * from + c];
            }
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
        tokens.transpose_keys();
        let key_rows = CHUNK * keys..2 * CHUNK * keys;
        let l = tokens.lower(&tokens.products(simd, &tokens.qk[key_rows.clone()]));
        let transposed = &mut tokens.scratch.transposed;
        let rows = Left { data: state, strides: (keys, 1) };
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
        // The keys times h; the plain ones are loaded again for the backward pass.
        for (row, after) in tokens.qk[key_rows.clone()].chunks_exact_mut(keys).zip(tokens.decays.after) {
            row.iter_mut().for_each(|k| *k *= after);
        }
        let u = Left { data: kept.u, strides: (1, values) };
        let base = Base::Other(state, tokens.decays.whole);
        product(simd, (value_dim, keys, CHUNK), u, &tokens.qk[key_rows], base, next);
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
    keys: Square,
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
        tokens.transpose_keys();
        let products = tokens.products(simd, &tokens.qk[CHUNK * keys..]);
        let l = tokens.lower(&products);
        let mut a = tokens.products(simd, &tokens.qk[..CHUNK * keys]);
        masked(&mut a, &tokens.decays.between);

        let Scratch { transposed, d_u } = &mut tokens.scratch;
        let rows = Left { data: self.d_state, strides: (keys, 1) };
        product(simd, (value_dim, CHUNK, keys), rows, &tokens.keys, Base::None, transposed);
        transpose(transposed, (value_dim, CHUNK), (CHUNK, values), d_u);
        for (row, after) in d_u.chunks_exact_mut(values).zip(tokens.decays.after) {
            row.iter_mut().for_each(|d| *d *= after);
        }
        let a_t = Left { data: a.as_flattened(), strides: (1, CHUNK) };
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
        Pairs { keys: products, l, a, d_a, d_l }
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
                d_beta += pairs.d_l[i][j] * pairs.keys[i][j] * tokens.decays.between[i][j];
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
        let (tokens, out) = (&*self.tokens, &mut *self.out);
        let Sizes { value_dim, keys, values, .. } = tokens.sizes;
        let (q, k) = tokens.qk.split_at(CHUNK * keys);
        let d_op = Left { data: &tokens.d_op, strides: (values, 1) };
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
        let mut d_k1 = [0.0; CHUNK * 256];
        let d_k1 = &mut d_k1[..CHUNK * keys];
        let u = Left { data: self.u, strides: (values, 1) };
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
        let f = Left { data: f.as_flattened(), strides: (CHUNK, 1) };
        product(simd, (CHUNK, keys, CHUNK), f, k, Base::Own(1.0), d_q);
        let both = Left { data: both.as_flattened(), strides: (2 * CHUNK, 1) };
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
        for (row, before) in tokens.qk.chunks_exact_mut(keys).zip(tokens.decays.before) {
            row.iter_mut().for_each(|q| *q *= before);
        }
        let d_op = Left { data: &tokens.d_op, strides: (1, values) };
        let base = Base::Own(tokens.decays.whole);
        product(simd, (value_dim, keys, 2 * CHUNK), d_op, &tokens.qk, base, self.d_state);
    }
}

/// Rows `[CHUNK, padded V]` by the updates of tokens, `[V, CHUNK]`. A function, since a closure would not be compiled for the
/// instruction set.
#[inline(always)]
fn with_updates<S: Simd>(simd: S, rows: &[f32], values: usize, updates: &[f32]) -> Square {
    let mut out = [[0.0; CHUNK]; CHUNK];
    let a = Left { data: rows, strides: (values, 1) };
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
