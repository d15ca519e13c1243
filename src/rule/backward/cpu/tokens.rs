//! The tokens of a chunk, and what they owe each other: decays, and products of keys and queries.
#![allow(clippy::needless_range_loop)] // the indices are the formula's

use super::matmul::{product, Base, Left, ALIGN};
use candle_gdn_core::cpu::simd::{dispatch, exp};
use pulp::{Simd, WithSimd};

/// Tokens of a chunk. More would make the products among tokens larger, fewer those with the state less efficient.
pub const CHUNK: usize = ALIGN;

/// What a log decay below counts as: its exp is zero, and sums stay finite and keep what is small.
const LEAST_DECAY: f32 = -200.0;

/// A matrix of two tokens.
pub(super) type Square = [[f32; CHUNK]; CHUNK];

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

/// The inputs of a chunk, zeros where there is no token: those of a key head, and those of one of its value heads.
pub struct Tokens {
    pub sizes: Sizes,
    /// `[2 CHUNK, padded K]`: the queries, scaled, then the keys.
    pub qk: Vec<f32>,
    /// By what the rows of q and k were multiplied.
    pub factors: [f64; 2 * CHUNK],
    /// `[CHUNK, padded V]`
    pub v: Vec<f32>,
    /// `[2 CHUNK, padded V]`: the gradient of o, then W.
    pub d_ow: Vec<f32>,
    pub beta: [f32; CHUNK],
    pub decays: Decays,
    /// `[padded K, CHUNK]`: the keys transposed.
    pub(super) keys: Vec<f32>,
    /// The products of keys, and of queries, with keys.
    pub(super) with_keys: [Square; 2],
    pub(super) scratch: Scratch,
}

/// Products of decays.
pub struct Decays {
    /// `e`
    pub(super) before: [f32; CHUNK],
    /// `h`
    pub(super) after: [f32; CHUNK],
    /// `e_n`
    pub(super) whole: f32,
    /// `D`, zero above the diagonal.
    pub(super) between: Square,
}

impl Decays {
    /// Of log decays. Sums are f64: differences of large ones count.
    pub fn new(log_decays: &[f32; CHUNK]) -> Self {
        dispatch(NewDecays(log_decays))
    }
}

struct NewDecays<'a>(&'a [f32; CHUNK]);

impl WithSimd for NewDecays<'_> {
    type Output = Decays;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) -> Decays {
        let (mut sums, mut sum) = ([0f64; CHUNK], 0f64);
        for (s, &g) in sums.iter_mut().zip(self.0) {
            // `max` would hide a NaN.
            sum += f64::from(if g < LEAST_DECAY { LEAST_DECAY } else { g });
            *s = sum;
        }
        let mut decays = Decays {
            before: [0.0; CHUNK],
            after: [0.0; CHUNK],
            whole: exp(sum as f32),
            between: [[0.0; CHUNK]; CHUNK],
        };
        for i in 0..CHUNK {
            // All of the row, in loops that vectorise; above the diagonal it may be infinite.
            let row = &mut decays.between[i];
            for j in 0..CHUNK {
                row[j] = (sums[i] - sums[j]) as f32;
            }
            row.iter_mut().for_each(|d| *d = exp(*d));
            row[i + 1..].fill(0.0);
        }
        decays.before = sums.map(|s| s as f32);
        decays.before.iter_mut().for_each(|d| *d = exp(*d));
        decays.after = sums.map(|s| (sum - s) as f32);
        decays.after.iter_mut().for_each(|d| *d = exp(*d));
        decays
    }
}

/// Room for what a chunk computes on its way.
pub(super) struct Scratch {
    /// `[padded V, CHUNK]`; what is padded stays zero, whatever the inputs are.
    pub(super) transposed: Vec<f32>,
    /// `[padded V, CHUNK]`: U transposed.
    pub(super) updates: Vec<f32>,
    /// `[CHUNK, padded V]`
    pub(super) d_u: Vec<f32>,
    /// `[3 CHUNK, padded K]`: dO S, W S and U dS.
    pub(super) with_states: Vec<f32>,
    /// `[2 CHUNK, padded K]`: queries and keys times decays or beta.
    pub(super) decayed: Vec<f32>,
}

impl Tokens {
    pub fn new(sizes: Sizes) -> Self {
        Self {
            sizes,
            qk: vec![0.0; 2 * CHUNK * sizes.keys],
            factors: [0.0; 2 * CHUNK],
            v: vec![0.0; CHUNK * sizes.values],
            d_ow: vec![0.0; 2 * CHUNK * sizes.values],
            beta: [0.0; CHUNK],
            decays: Decays::new(&[0.0; CHUNK]),
            keys: vec![0.0; sizes.keys * CHUNK],
            with_keys: [[[0.0; CHUNK]; CHUNK]; 2],
            scratch: Scratch {
                transposed: vec![0.0; sizes.values * CHUNK],
                updates: vec![0.0; sizes.values * CHUNK],
                d_u: vec![0.0; CHUNK * sizes.values],
                with_states: vec![0.0; 3 * CHUNK * sizes.keys],
                decayed: vec![0.0; 2 * CHUNK * sizes.keys],
            },
        }
    }

    /// `L` from the products of keys.
    #[inline(always)]
    pub(super) fn lower(&self) -> Square {
        let keys = &self.with_keys[0];
        let mut l = [[0.0; CHUNK]; CHUNK];
        for i in 0..CHUNK {
            for j in 0..i {
                l[i][j] = self.beta[i] * keys[i][j] * self.decays.between[i][j];
            }
        }
        l
    }
}

/// What all value heads of a key head share, of keys that were loaded; the products of queries only where they are wanted.
pub struct Prepare<'a> {
    pub tokens: &'a mut Tokens,
    pub queries: bool,
}

impl WithSimd for Prepare<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Tokens { sizes, qk, keys: transposed, with_keys, .. } = self.tokens;
        let keys = sizes.keys;
        transpose(&qk[CHUNK * keys..], (CHUNK, keys), transposed);
        let rows = [&qk[CHUNK * keys..], &qk[..CHUNK * keys]];
        for (rows, out) in rows.into_iter().zip(with_keys).take(1 + usize::from(self.queries)) {
            let (a, out) = (Left::Rows(rows, keys), out.as_flattened_mut());
            product(simd, (CHUNK, CHUNK, keys), a, transposed, Base::None, out);
        }
    }
}

/// `src [rows, columns]` to `[columns, rows]`, both multiples of four.
#[inline(always)]
pub(super) fn transpose(src: &[f32], (rows, columns): (usize, usize), dst: &mut [f32]) {
    for r in (0..rows).step_by(4) {
        for c in (0..columns).step_by(4) {
            // Copies of constant length become whole vectors.
            let mut block = [[0.0; 4]; 4];
            for i in 0..4 {
                block[i].copy_from_slice(&src[(r + i) * columns + c..][..4]);
            }
            for i in 0..4 {
                dst[(c + i) * rows + r..][..4].copy_from_slice(&block.map(|row| row[i]));
            }
        }
    }
}
