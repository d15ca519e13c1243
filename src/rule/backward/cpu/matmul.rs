//! Products of matrices small enough for a core's caches: `C = keep * base + A B`, the columns of B and C along the vectors, the
//! elements of A one at a time; and triangular systems. Loops instead of closures, which would not be compiled for the instruction set.
#![allow(clippy::needless_range_loop)]

use candle_gdn_core::cpu::prefetch;
use pulp::{NullaryFnOnce, Simd};

/// Columns are padded to a multiple of this, which is a multiple of every vector's length.
pub const ALIGN: usize = 16;

/// What the product is added to.
pub enum Base<'a> {
    /// Nothing: C is only written.
    None,
    /// C itself, times a factor.
    Own(f32),
    /// Another matrix of C's shape, times a factor.
    Other(&'a [f32], f32),
}

/// `A [m, k]`, with the elements from one of its rows, or columns, to the next.
#[derive(Clone, Copy)]
pub enum Left<'a> {
    Rows(&'a [f32], usize),
    Columns(&'a [f32], usize),
}

/// Rows, columns (a multiple of [`ALIGN`]) and the length of the sums. B is `[k, n]` and C is `[m, n]`, both contiguous.
#[inline(always)]
pub fn product<S: Simd>(
    simd: S,
    (m, n, k): (usize, usize, usize),
    a: Left<'_>,
    b: &[f32],
    base: Base<'_>,
    c: &mut [f32],
) {
    product_ahead(simd, (m, n, k), a, b, base, &[], c);
}

/// A product which on its way prefetches what is used after it and lies in memory: all at once the core would wait for that.
#[inline(always)]
pub fn product_ahead<S: Simd>(
    simd: S,
    (m, n, k): (usize, usize, usize),
    a: Left<'_>,
    b: &[f32],
    base: Base<'_>,
    ahead: &[f32],
    c: &mut [f32],
) {
    let (b, _) = S::as_simd_f32s(&b[..k * n]);
    let (c, _) = S::as_mut_simd_f32s(&mut c[..m * n]);
    let keep = match base {
        Base::None => Keep::None,
        Base::Own(keep) => Keep::Own(keep),
        Base::Other(other, keep) => Keep::Other(S::as_simd_f32s(&other[..m * n]).0, keep),
    };
    let call = Call { n: n / S::F32_LANES, k, a, b, keep, ahead };
    // Sixteen sums of 32 registers, or eight of 16.
    match S::F32_LANES {
        16 => call.panels::<8>(simd, m, c),
        _ => call.panels::<4>(simd, m, c),
    }
}

struct Call<'a, S: Simd> {
    /// In vectors.
    n: usize,
    k: usize,
    a: Left<'a>,
    b: &'a [S::f32s],
    keep: Keep<'a, S>,
    ahead: &'a [f32],
}

/// [`Base`] in vectors.
enum Keep<'a, S: Simd> {
    None,
    Own(f32),
    Other(&'a [S::f32s], f32),
}

/// All rows of some columns.
struct Panel<'a, S: Simd, const ROWS: usize, const VECTORS: usize> {
    call: &'a Call<'a, S>,
    simd: S,
    m: usize,
    column: usize,
    c: &'a mut [S::f32s],
}

impl<S: Simd, const ROWS: usize, const VECTORS: usize> NullaryFnOnce for Panel<'_, S, ROWS, VECTORS> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { call, simd, m, column, c } = self;
        // Of what lies ahead, each panel has its part, and of this each tile.
        let panel = call.ahead.len() * VECTORS / call.n;
        let mut ahead = call.ahead[call.ahead.len() * column / call.n..].chunks((panel * ROWS).div_ceil(m).max(1));
        let mut row = 0;
        while row + ROWS <= m {
            prefetch(ahead.next().unwrap_or_default());
            call.tile::<ROWS, VECTORS>(simd, row, column, c);
            row += ROWS;
        }
        for row in row..m {
            call.tile::<1, VECTORS>(simd, row, column, c);
        }
    }
}

impl<S: Simd> Call<'_, S> {
    /// Columns outside, so that those of B stay in the first-level cache for all rows of A. A panel is a function of its own: in one
    /// as large as all of a chunk the compiler keeps the sums in memory.
    #[inline(always)]
    fn panels<const ROWS: usize>(&self, simd: S, m: usize, c: &mut [S::f32s]) {
        let mut column = 0;
        while column + 2 <= self.n {
            simd.vectorize(Panel::<'_, S, ROWS, 2> { call: self, simd, m, column, c });
            column += 2;
        }
        if column < self.n {
            simd.vectorize(Panel::<'_, S, ROWS, 1> { call: self, simd, m, column, c });
        }
    }

    #[inline(always)]
    fn tile<const ROWS: usize, const VECTORS: usize>(&self, simd: S, row: usize, column: usize, c: &mut [S::f32s]) {
        let mut sums = [[simd.splat_f32s(0.0); VECTORS]; ROWS];
        let b = self.b.chunks_exact(self.n);
        match self.a {
            Left::Rows(data, stride) => {
                let mut rows = [&[][..]; ROWS];
                for r in 0..ROWS {
                    rows[r] = &data[(row + r) * stride..][..self.k];
                }
                for (p, b) in (0..self.k).zip(b) {
                    let b = &b[column..column + VECTORS];
                    for r in 0..ROWS {
                        let factor = simd.splat_f32s(rows[r][p]);
                        for i in 0..VECTORS {
                            sums[r][i] = simd.mul_add_e_f32s(factor, b[i], sums[r][i]);
                        }
                    }
                }
            }
            Left::Columns(data, stride) => {
                for (a, b) in data.chunks(stride).zip(b) {
                    let (a, b) = (&a[row..row + ROWS], &b[column..column + VECTORS]);
                    for r in 0..ROWS {
                        let factor = simd.splat_f32s(a[r]);
                        for i in 0..VECTORS {
                            sums[r][i] = simd.mul_add_e_f32s(factor, b[i], sums[r][i]);
                        }
                    }
                }
            }
        }
        // Written out: in a loop that is not unrolled the sums would lie in memory, there and above.
        macro_rules! store {
            ($($r:literal)+) => {
                $(if $r < ROWS {
                    self.store(simd, sums[$r % ROWS], (row + $r) * self.n + column, c);
                })+
            };
        }
        store!(0 1 2 3 4 5 6 7);
    }

    #[inline(always)]
    fn store<const VECTORS: usize>(&self, simd: S, sums: [S::f32s; VECTORS], start: usize, c: &mut [S::f32s]) {
        let c = &mut c[start..start + VECTORS];
        match self.keep {
            Keep::None => c.copy_from_slice(&sums),
            Keep::Own(keep) => {
                for i in 0..VECTORS {
                    c[i] = simd.mul_add_e_f32s(simd.splat_f32s(keep), c[i], sums[i]);
                }
            }
            Keep::Other(base, keep) => {
                let base = &base[start..start + VECTORS];
                for i in 0..VECTORS {
                    c[i] = simd.mul_add_e_f32s(simd.splat_f32s(keep), base[i], sums[i]);
                }
            }
        }
    }
}

/// Solves `(I + L) X = B` in the place of B, row by row in `order`; `l` is zero, or not read, where its column comes after its row.
#[inline(always)]
pub fn solve<S: Simd, const N: usize>(simd: S, l: &[[f32; N]; N], order: &[usize; N], x: &mut [f32]) {
    let (x, _) = S::as_mut_simd_f32s(x);
    let n = x.len() / N;
    let mut column = 0;
    while column + 2 <= n {
        simd.vectorize(Solve::<'_, S, N, 2> { simd, l, order, n, column, x });
        column += 2;
    }
    if column < n {
        simd.vectorize(Solve::<'_, S, N, 1> { simd, l, order, n, column, x });
    }
}

/// Some columns of the system, four rows at a time: the sums over the rows before these, then what they owe each other, in registers.
struct Solve<'a, S: Simd, const N: usize, const VECTORS: usize> {
    simd: S,
    l: &'a [[f32; N]; N],
    order: &'a [usize; N],
    n: usize,
    column: usize,
    x: &'a mut [S::f32s],
}

impl<S: Simd, const N: usize, const VECTORS: usize> NullaryFnOnce for Solve<'_, S, N, VECTORS> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { simd, l, order, n, column, x } = self;
        for (done, rows) in order.as_chunks::<4>().0.iter().enumerate() {
            let l = rows.map(|i| &l[i]);
            let mut sums = [[simd.splat_f32s(0.0); VECTORS]; 4];
            for &j in &order[..4 * done] {
                let row = &x[j * n + column..][..VECTORS];
                for r in 0..4 {
                    let factor = simd.splat_f32s(l[r][j]);
                    for i in 0..VECTORS {
                        sums[r][i] = simd.mul_add_e_f32s(factor, row[i], sums[r][i]);
                    }
                }
            }
            // Written out, as above.
            macro_rules! row {
                ($r:literal: $($s:literal)*) => {
                    let row = &mut x[rows[$r] * n + column..][..VECTORS];
                    for i in 0..VECTORS {
                        $(
                            let factor = simd.splat_f32s(l[$r][rows[$s]]);
                            sums[$r][i] = simd.mul_add_e_f32s(factor, sums[$s][i], sums[$r][i]);
                        )*
                        sums[$r][i] = simd.sub_f32s(row[i], sums[$r][i]);
                        row[i] = sums[$r][i];
                    }
                };
            }
            row!(0:);
            row!(1: 0);
            row!(2: 0 1);
            row!(3: 0 1 2);
        }
    }
}
