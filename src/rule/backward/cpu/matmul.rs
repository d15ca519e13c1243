//! Products of matrices small enough for a core's caches: `C = keep * base + A B`, the columns of B and C along the vectors, the
//! elements of A, in any strides, one at a time.

use pulp::Simd;

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

/// `A [m, k]` with the strides of its rows and columns.
#[derive(Clone, Copy)]
pub struct Left<'a> {
    pub data: &'a [f32],
    pub strides: (usize, usize),
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
    assert!(n % ALIGN == 0 && b.len() >= k * n && c.len() >= m * n);
    assert!(m == 0 || k == 0 || a.data.len() > (m - 1) * a.strides.0 + (k - 1) * a.strides.1);
    let (base, keep) = match base {
        Base::None => (c.as_ptr(), None),
        Base::Own(keep) => (c.as_ptr(), Some(keep)),
        Base::Other(base, keep) => {
            assert!(base.len() >= m * n);
            (base.as_ptr(), Some(keep))
        }
    };
    let call = Call { n, k, a, b, base, keep };
    // Sixteen sums of 32 registers, or eight of 16.
    match S::F32_LANES {
        16 => call.panels::<S, 8>(simd, m, c),
        _ => call.panels::<S, 4>(simd, m, c),
    }
}

struct Call<'a> {
    n: usize,
    k: usize,
    a: Left<'a>,
    b: &'a [f32],
    base: *const f32,
    keep: Option<f32>,
}

impl Call<'_> {
    /// Columns outside, so that those of B stay in the first-level cache for all rows of A.
    #[inline(always)]
    fn panels<S: Simd, const ROWS: usize>(&self, simd: S, m: usize, c: &mut [f32]) {
        let mut column = 0;
        while column + 2 * S::F32_LANES <= self.n {
            self.rows::<S, ROWS, 2>(simd, m, column, c);
            column += 2 * S::F32_LANES;
        }
        if column < self.n {
            self.rows::<S, ROWS, 1>(simd, m, column, c);
        }
    }

    #[inline(always)]
    fn rows<S: Simd, const ROWS: usize, const VECTORS: usize>(&self, simd: S, m: usize, column: usize, c: &mut [f32]) {
        let mut row = 0;
        while row + ROWS <= m {
            // SAFETY: `product` has checked that these rows and columns lie in the slices.
            unsafe { self.tile::<S, ROWS, VECTORS>(simd, row, column, c) };
            row += ROWS;
        }
        for row in row..m {
            // SAFETY: as above.
            unsafe { self.tile::<S, 1, VECTORS>(simd, row, column, c) };
        }
    }

    /// # Safety
    /// The rows from `row` on and the columns from `column` on must lie in the matrices.
    #[allow(clippy::needless_range_loop)] // closures would not be compiled for the instruction set
    #[inline(always)]
    unsafe fn tile<S: Simd, const ROWS: usize, const VECTORS: usize>(
        &self,
        simd: S,
        row: usize,
        column: usize,
        c: &mut [f32],
    ) {
        let (row_stride, column_stride) = self.a.strides;
        let mut sums = [[simd.splat_f32s(0.0); VECTORS]; ROWS];
        let mut a = self.a.data.as_ptr().add(row * row_stride);
        let mut b = self.b.as_ptr().add(column);
        for _ in 0..self.k {
            let mut values = [simd.splat_f32s(0.0); VECTORS];
            for i in 0..VECTORS {
                values[i] = load::<S>(b, i);
            }
            for r in 0..ROWS {
                let factor = simd.splat_f32s(*a.add(r * row_stride));
                for i in 0..VECTORS {
                    sums[r][i] = simd.mul_add_e_f32s(factor, values[i], sums[r][i]);
                }
            }
            a = a.wrapping_add(column_stride);
            b = b.wrapping_add(self.n);
        }
        // One loop each, small enough to be unrolled: else the sums lie in memory all along.
        let c = c.as_mut_ptr().add(row * self.n + column);
        match self.keep {
            None => {
                for r in 0..ROWS {
                    for i in 0..VECTORS {
                        store::<S>(c.add(r * self.n), i, sums[r][i]);
                    }
                }
            }
            Some(keep) => {
                let (keep, base) = (simd.splat_f32s(keep), self.base.add(row * self.n + column));
                for r in 0..ROWS {
                    for i in 0..VECTORS {
                        let sum = simd.mul_add_e_f32s(keep, load::<S>(base.add(r * self.n), i), sums[r][i]);
                        store::<S>(c.add(r * self.n), i, sum);
                    }
                }
            }
        }
    }
}

/// # Safety
/// As [`load`].
#[inline(always)]
unsafe fn store<S: Simd>(data: *mut f32, i: usize, value: S::f32s) {
    data.add(i * S::F32_LANES).cast::<S::f32s>().write_unaligned(value);
}

/// Vector `i` from an address on.
///
/// # Safety
/// It must lie in what the address is of.
#[inline(always)]
unsafe fn load<S: Simd>(data: *const f32, i: usize) -> S::f32s {
    data.add(i * S::F32_LANES).cast::<S::f32s>().read_unaligned()
}
