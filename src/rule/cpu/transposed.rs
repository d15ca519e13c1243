//! One value head over many tokens: the recurrence with the state transposed, [`AT_ONCE`] tokens a pass.
//!
//! With value rows along the vectors nothing is ever summed across lanes: the products with the state add whole vectors,
//! and what tokens of a pass owe each other is elementwise,
//!
//! ```text
//! d_i = beta_i (v_i - c_i S k_i - sum_(j<i) (c_i / c_j) (k_j . k_i) d_j)
//! o_i = c_i S q_i + sum_(j<=i) (c_i / c_j) (k_j . q_i) d_j
//! S <- c_n S + sum_j (c_n / c_j) d_j k_j^T
//! ```
//!
//! with `c` the running product of the decays and S the state before the pass. This is the chunk form of a chunk so small
//! that its triangular system is solved in registers.

use candle_gdn_core::cpu::simd::{dispatch, dot};
use pulp::{Simd, WithSimd};

#[cfg(test)]
mod tests;

/// Tokens of a pass.
pub const AT_ONCE: usize = 4;
/// Value rows that lie together. Padded to a multiple of this, which is a multiple of every vector length.
const BLOCK: usize = 32;
/// Elements of a row that are transposed in one go: a cache line.
const LINE: usize = 16;

/// A head's state for as long as its tokens last: blocks of value rows, `[padded V / BLOCK, K, BLOCK]`. A block is
/// walked twice a pass and is contiguous, so that it stays in the first-level cache whatever K and V are.
pub struct TransposedState {
    data: Vec<f32>,
    key_dim: usize,
    value_dim: usize,
}

impl TransposedState {
    /// From `[V, K]`.
    pub fn new(state: &[f32], key_dim: usize, value_dim: usize) -> Self {
        let mut data = vec![0.0; key_dim * padded(value_dim)];
        let blocks = data.chunks_exact_mut(key_dim * BLOCK).zip(state.chunks(key_dim * BLOCK));
        for (block, rows) in blocks {
            for start in (0..key_dim).step_by(LINE) {
                let len = LINE.min(key_dim - start);
                for (v, row) in rows.chunks_exact(key_dim).enumerate() {
                    for (k, &s) in row[start..start + len].iter().enumerate() {
                        block[(start + k) * BLOCK + v] = s;
                    }
                }
            }
        }
        Self { data, key_dim, value_dim }
    }

    /// Back to `[V, K]`.
    pub fn store(&self, state: &mut [f32]) {
        let key_dim = self.key_dim;
        let blocks = self.data.chunks_exact(key_dim * BLOCK).zip(state.chunks_mut(key_dim * BLOCK));
        for (block, rows) in blocks {
            for start in (0..key_dim).step_by(LINE) {
                let len = LINE.min(key_dim - start);
                for (v, row) in rows.chunks_exact_mut(key_dim).enumerate() {
                    for (k, s) in row[start..start + len].iter_mut().enumerate() {
                        *s = block[(start + k) * BLOCK + v];
                    }
                }
            }
        }
    }

    /// Advances over `N` tokens: `q` and `k` are `[N, K]`, normalised and scaled, `v_to_o` is `[N, padded V]` and becomes
    /// o, `gates` are log decay and beta.
    pub fn advance<const N: usize>(&mut self, q: &[f32], k: &[f32], v_to_o: &mut [f32], gates: [(f32, f32); N]) {
        let (key_dim, padded) = (self.key_dim, padded(self.value_dim));
        assert!(v_to_o.len() >= N * padded, "v");
        let q = std::array::from_fn(|i| &q[i * key_dim..][..key_dim]);
        let k = std::array::from_fn(|i| &k[i * key_dim..][..key_dim]);
        dispatch(Pass { q, k, v_to_o, gates, state: &mut self.data, padded });
    }
}

/// Length of a padded value row.
pub fn padded(value_dim: usize) -> usize {
    value_dim.next_multiple_of(BLOCK)
}

struct Pass<'a, const N: usize> {
    q: [&'a [f32]; N],
    k: [&'a [f32]; N],
    v_to_o: &'a mut [f32],
    gates: [(f32, f32); N],
    state: &'a mut [f32],
    padded: usize,
}

/// What the tokens of a pass owe each other, the same for every value row.
struct Scalars<const N: usize> {
    beta: [f32; N],
    /// Decay from before the first token to after token i.
    decay: [f32; N],
    /// `(c_i / c_j) (k_j . k_i)` for j < i, else 0.
    keys: [[f32; N]; N],
    /// `(c_i / c_j) (k_j . q_i)` for j <= i, else 0.
    queries: [[f32; N]; N],
    /// `c_n / c_j`
    rest: [f32; N],
}

impl<const N: usize> Pass<'_, N> {
    #[inline(always)]
    fn scalars<S: Simd>(&self, simd: S) -> Scalars<N> {
        let mut s = Scalars {
            beta: self.gates.map(|(_, beta)| beta),
            decay: [0.0; N],
            keys: [[0.0; N]; N],
            queries: [[0.0; N]; N],
            rest: [0.0; N],
        };
        let mut log_decay = 0.0;
        for i in 0..N {
            log_decay += self.gates[i].0;
            s.decay[i] = log_decay.exp();
            // Summed again from token i down, since a ratio of running products may be 0 / 0.
            let mut between = 0.0;
            for j in (0..=i).rev() {
                let decay = f32::exp(between);
                if j < i {
                    s.keys[i][j] = decay * dot(simd, self.k[j], self.k[i]);
                }
                s.queries[i][j] = decay * dot(simd, self.k[j], self.q[i]);
                if i == N - 1 {
                    s.rest[j] = decay;
                }
                between += self.gates[j].0;
            }
        }
        s
    }
}

impl<const N: usize> WithSimd for Pass<'_, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let scalars = self.scalars(simd);
        // The sums of a tile stay in registers: 2 N W vectors, of 32 or 16.
        if S::F32_LANES >= 16 {
            self.tiles::<S, 2>(simd, &scalars);
        } else {
            self.tiles::<S, 1>(simd, &scalars);
        }
    }
}

impl<const N: usize> Pass<'_, N> {
    /// All value rows, `W` vectors at a time.
    #[inline(always)]
    fn tiles<S: Simd, const W: usize>(&mut self, simd: S, scalars: &Scalars<N>) {
        let key_dim = self.k[0].len();
        let (state, _) = S::as_mut_simd_f32s(self.state);
        let (values, _) = S::as_mut_simd_f32s(self.v_to_o);
        let (row, padded) = (BLOCK / S::F32_LANES, self.padded / S::F32_LANES);
        for (b, block) in state.chunks_exact_mut(key_dim * row).enumerate() {
            for tile in (0..row).step_by(W) {
                self::tile::<S, N, W>(
                    simd,
                    &self.q,
                    &self.k,
                    scalars,
                    block,
                    (row, tile),
                    values,
                    (padded, b * row + tile),
                );
            }
        }
    }
}

/// `W` vectors of value rows: `tile` of a block whose rows are `row` vectors long. Their values lie at `at` in each of the
/// tokens' rows of `padded` vectors.
#[allow(clippy::too_many_arguments)]
#[allow(clippy::needless_range_loop)] // the indices are the formula's
#[inline(always)]
fn tile<S: Simd, const N: usize, const W: usize>(
    simd: S,
    q: &[&[f32]; N],
    k: &[&[f32]; N],
    scalars: &Scalars<N>,
    block: &mut [S::f32s],
    (row, tile): (usize, usize),
    values: &mut [S::f32s],
    (padded, at): (usize, usize),
) {
    let key_dim = block.len() / row;
    let (q, k) = (q.map(|q| &q[..key_dim]), k.map(|k| &k[..key_dim]));
    let splat = |x: f32| simd.splat_f32s(x);

    let (mut sk, mut sq) = ([[splat(0.0); W]; N], [[splat(0.0); W]; N]);
    for (x, s) in block.chunks_exact(row).enumerate() {
        let s = &s[tile..tile + W];
        for i in 0..N {
            let (k, q) = (splat(k[i][x]), splat(q[i][x]));
            for w in 0..W {
                sk[i][w] = simd.mul_add_e_f32s(s[w], k, sk[i][w]);
                sq[i][w] = simd.mul_add_e_f32s(s[w], q, sq[i][w]);
            }
        }
    }
    // Updates take the place of the sums with k; each is scaled to the end of the block once all are known.
    for i in 0..N {
        for w in 0..W {
            let mut read = simd.mul_f32s(splat(scalars.decay[i]), sk[i][w]);
            for j in 0..i {
                read = simd.mul_add_e_f32s(splat(scalars.keys[i][j]), sk[j][w], read);
            }
            let value = &mut values[i * padded + at + w];
            sk[i][w] = simd.mul_f32s(splat(scalars.beta[i]), simd.sub_f32s(*value, read));
            let mut out = simd.mul_f32s(splat(scalars.decay[i]), sq[i][w]);
            for j in 0..=i {
                out = simd.mul_add_e_f32s(splat(scalars.queries[i][j]), sk[j][w], out);
            }
            *value = out;
        }
    }
    for j in 0..N {
        for w in 0..W {
            sk[j][w] = simd.mul_f32s(splat(scalars.rest[j]), sk[j][w]);
        }
    }
    let keep = splat(scalars.decay[N - 1]);
    for (x, s) in block.chunks_exact_mut(row).enumerate() {
        let s = &mut s[tile..tile + W];
        for w in 0..W {
            let mut new = simd.mul_f32s(keep, s[w]);
            for j in 0..N {
                new = simd.mul_add_e_f32s(splat(k[j][x]), sk[j][w], new);
            }
            s[w] = new;
        }
    }
}
