//! One value head, a chunk of tokens at a time (FLA's chunk form, arXiv 2412.06464 section 3.2). With `c` the running
//! sum of the log decay inside the chunk,
//!
//! ```text
//! L_ij = beta_i (k_i . k_j) e^(c_i - c_j),  i > j          P_ij = (q_i . k_j) e^(c_i - c_j),  i >= j
//! (I + L) X = beta (V - e^c K S^T)                          O = e^c Q S^T + P X
//! S <- e^(c_C) S + X^T (e^(c_C - c) K)
//! ```
//!
//! The triangular system is solved by blocks of rows, never inverted: substitution is the recurrence itself and stays
//! accurate where the inverse blows up (repeated keys, beta near 2).

use super::simd::{axpy, exp};
use pulp::{Simd, WithSimd};

/// Tokens of a chunk.
pub(super) const CHUNK: usize = 64;
/// Rows that are substituted one by one; blocks above them are eliminated by a matrix product.
const BLOCK: usize = 16;

/// Memory of one head's worker, reused from chunk to chunk.
pub(super) struct Workspace {
    /// `[CHUNK, K]` each, the chunk's keys and queries in f32.
    pub k: Vec<f32>,
    pub q: Vec<f32>,
    /// `[CHUNK, V]`: v in, X after.
    pub v: Vec<f32>,
    /// `[CHUNK, V]`: o out.
    pub o: Vec<f32>,
    /// Log decay and beta of each token.
    pub gates: Vec<(f32, f32)>,
    lower: Vec<f32>,
    scores: Vec<f32>,
    sums: Vec<f64>,
    k64: Vec<f64>,
    product64: Vec<f64>,
}

impl Workspace {
    pub fn new(key_dim: usize, value_dim: usize) -> Self {
        Self {
            k: vec![0.0; CHUNK * key_dim],
            q: vec![0.0; CHUNK * key_dim],
            v: vec![0.0; CHUNK * value_dim],
            o: vec![0.0; CHUNK * value_dim],
            gates: Vec::with_capacity(CHUNK),
            lower: vec![0.0; CHUNK * CHUNK],
            scores: vec![0.0; CHUNK * CHUNK],
            sums: Vec::with_capacity(CHUNK),
            k64: Vec::with_capacity(CHUNK * key_dim),
            product64: vec![0.0; BLOCK * CHUNK],
        }
    }

    /// Advances `state` (`[V, K]`) over the `gates.len()` tokens that lie in the workspace, and leaves o in `self.o`.
    pub fn advance(&mut self, key_dim: usize, value_dim: usize, state: &mut [f32]) {
        let c = self.gates.len();
        // The running sum in f64: differences of neighbours must survive a strong decay before them.
        let mut sum = 0f64;
        self.sums.clear();
        self.sums.extend(self.gates.iter().map(|&(g, _)| {
            // e^-1000 is zero in f32; the bound keeps an infinite decay from making inf - inf. Not `max`: it would take a
            // NaN for the bound and hide it.
            sum += if g < -1000.0 { -1000.0 } else { f64::from(g) };
            sum
        }));

        let (kd, vd) = (key_dim, value_dim);
        // lower <- K K^T, scores <- Q K^T
        self.key_products(c, kd);
        matmul(&mut self.scores, CHUNK, Accumulate::No, &self.q, (kd, 1), &self.k, (1, kd), (c, c, kd), 1.0);
        super::simd::dispatch(MaskAndDecay {
            lower: &mut self.lower,
            scores: &mut self.scores,
            gates: &self.gates,
            sums: &self.sums,
        });

        // v <- beta (v - e^c K S^T), with K S^T passing through o
        matmul(&mut self.o, vd, Accumulate::No, &self.k, (kd, 1), state, (1, kd), (c, vd, kd), 1.0);
        for i in 0..c {
            let decay = (self.sums[i] as f32).exp();
            let beta = self.gates[i].1;
            let v = &mut self.v[i * vd..][..vd];
            v.iter_mut().zip(&self.o[i * vd..][..vd]).for_each(|(v, ks)| *v = beta * (*v - decay * ks));
        }
        self.solve(c, vd);

        // o <- e^c Q S^T + P X
        matmul(&mut self.o, vd, Accumulate::No, &self.q, (kd, 1), state, (1, kd), (c, vd, kd), 1.0);
        for i in 0..c {
            let decay = (self.sums[i] as f32).exp();
            self.o[i * vd..][..vd].iter_mut().for_each(|o| *o *= decay);
        }
        let scores = (CHUNK, 1);
        matmul(&mut self.o, vd, Accumulate::Scaled(1.0), &self.scores, scores, &self.v, (vd, 1), (c, vd, c), 1.0);

        // S <- e^(c_C) S + X^T (e^(c_C - c) K)
        let last = self.sums[c - 1];
        for i in 0..c {
            let decay = ((last - self.sums[i]) as f32).exp();
            self.k[i * kd..][..kd].iter_mut().for_each(|k| *k *= decay);
        }
        let keep = Accumulate::Scaled((last as f32).exp());
        matmul(state, kd, keep, &self.v, (1, vd), &self.k, (kd, 1), (vd, kd, c), 1.0);
    }

    /// `lower <- K K^T` on and below the diagonal blocks, in f64: repeated keys give every product the same rounding
    /// error, which the triangular system then adds up over the whole chunk.
    fn key_products(&mut self, c: usize, kd: usize) {
        self.k64.clear();
        self.k64.extend(self.k[..c * kd].iter().map(|&k| f64::from(k)));
        for start in (0..c).step_by(BLOCK) {
            let rows = BLOCK.min(c - start);
            let cols = start + rows;
            let product = &mut self.product64[..rows * cols];
            let keys = &self.k64[start * kd..];
            matmul(product, cols, Accumulate::No, keys, (kd, 1), &self.k64, (1, kd), (rows, cols, kd), 1.0);
            for (i, row) in product.chunks_exact(cols).enumerate() {
                let to = &mut self.lower[(start + i) * CHUNK..][..cols];
                to.iter_mut().zip(row).for_each(|(to, &x)| *to = x as f32);
            }
        }
    }

    /// `v <- (I + lower)^-1 v`, blockwise forward substitution.
    fn solve(&mut self, c: usize, vd: usize) {
        for start in (0..c).step_by(BLOCK) {
            let rows = BLOCK.min(c - start);
            let (done, rest) = self.v.split_at_mut(start * vd);
            let block = &mut rest[..rows * vd];
            if start > 0 {
                let lower = &self.lower[start * CHUNK..];
                let add = Accumulate::Scaled(1.0);
                matmul(block, vd, add, lower, (CHUNK, 1), done, (vd, 1), (rows, vd, start), -1.0);
            }
            super::simd::dispatch(Substitute { lower: &self.lower, block, start, rows, vd });
        }
    }
}

/// Masks both score matrices and multiplies in the decay between the two tokens; `lower` gets beta as well.
struct MaskAndDecay<'a> {
    lower: &'a mut [f32],
    scores: &'a mut [f32],
    gates: &'a [(f32, f32)],
    sums: &'a [f64],
}

impl WithSimd for MaskAndDecay<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let c = self.gates.len();
        for i in 0..c {
            let (beta, sum) = (self.gates[i].1, self.sums[i]);
            let lower = &mut self.lower[i * CHUNK..][..c];
            let scores = &mut self.scores[i * CHUNK..][..c];
            // Only j <= i is ever exponentiated, so the exponent is never positive.
            for j in 0..=i {
                let decay = exp((sum - self.sums[j]) as f32);
                lower[j] *= beta * decay;
                scores[j] *= decay;
            }
            lower[i..].fill(0.0);
            scores[i + 1..].fill(0.0);
        }
    }
}

/// Substitution inside one diagonal block, row by row.
struct Substitute<'a> {
    lower: &'a [f32],
    block: &'a mut [f32],
    start: usize,
    rows: usize,
    vd: usize,
}

impl WithSimd for Substitute<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for i in 1..self.rows {
            let (above, row) = self.block.split_at_mut(i * self.vd);
            let row = &mut row[..self.vd];
            let lower = &self.lower[(self.start + i) * CHUNK + self.start..][..i];
            for (j, &l) in lower.iter().enumerate() {
                axpy(simd, row, -l, &above[j * self.vd..][..self.vd]);
            }
        }
    }
}

enum Accumulate<T> {
    /// The destination is not read.
    No,
    /// The destination is multiplied by this first.
    Scaled(T),
}

/// `dst[m, n] <- scale * dst + factor * lhs[m, k] rhs[k, n]`; `dst` is row-major with `dst_stride`, the others have
/// (row, column) strides.
#[allow(clippy::too_many_arguments)]
fn matmul<T: Default + 'static>(
    dst: &mut [T],
    dst_stride: usize,
    accumulate: Accumulate<T>,
    lhs: &[T],
    lhs_strides: (usize, usize),
    rhs: &[T],
    rhs_strides: (usize, usize),
    (m, n, k): (usize, usize, usize),
    factor: T,
) {
    let reach = |(rows, cols): (usize, usize), (r, c): (usize, usize)| (rows - 1) * r + (cols - 1) * c;
    assert!(m > 0 && n > 0 && k > 0);
    assert!(reach((m, n), (dst_stride, 1)) < dst.len());
    assert!(reach((m, k), lhs_strides) < lhs.len() && reach((k, n), rhs_strides) < rhs.len());
    let (read, scale) = match accumulate {
        Accumulate::No => (false, T::default()),
        Accumulate::Scaled(scale) => (true, scale),
    };
    // SAFETY: the three assertions above keep every access inside its slice.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            dst_stride as isize,
            read,
            lhs.as_ptr(),
            lhs_strides.1 as isize,
            lhs_strides.0 as isize,
            rhs.as_ptr(),
            rhs_strides.1 as isize,
            rhs_strides.0 as isize,
            scale,
            factor,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
