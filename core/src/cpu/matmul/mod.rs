//! Products of rows with weight matrices, `out[rows, n] = x[rows, k] w[n, k]ᵀ`, from one row (decode) to many (prompts).
//!
//! The weights lie in panels of [`PANEL`] outputs, `[n / PANEL, k, PANEL]`: a product walks its panel once from front to
//! back, adds whole vectors and never sums across lanes. Half-precision weights stay as they are in memory and are widened
//! on the way into registers, or, where there are many rows, a part of a panel at a time.

/// The products of `x [rows, in]` with each of the weights, `[rows, out]`, on the CPU.
pub fn products<const N: usize>(x: &[f32], weights: [&Weights; N]) -> [Vec<f32>; N] {
    let mut outs = weights.map(|w| vec![0f32; x.len() / w.inputs() * w.outputs()]);
    let mut jobs = Vec::with_capacity(N);
    for (weights, out) in weights.into_iter().zip(&mut outs) {
        jobs.push(Product { x, rows: None, weights, matrix: 0, out });
    }
    multiply(&mut jobs);
    outs
}

#[cfg(test)]
mod tests;
mod weights;

pub use weights::{Half, Weights, PANEL};

use super::dispatch::dispatch;
use super::element::Element;
use super::view::{parallel, Shared};
use pulp::{bytemuck, Simd, WithSimd};
use weights::Data;

/// Rows of one task.
const ROWS: usize = 96;
/// Up to this many rows it does not pay to widen a panel first.
const DIRECT_ROWS: usize = 8;
/// Inputs of the part of a panel that is widened at a time; it stays in the first-level cache.
const DEPTH: usize = 128;

/// One product of a call.
pub struct Product<'a> {
    /// `[.., k]`
    pub x: &'a [f32],
    /// Which rows of x are multiplied, in this order; all of them if absent.
    pub rows: Option<&'a [u32]>,
    pub weights: &'a Weights,
    /// Which of the matrices.
    pub matrix: usize,
    /// `[rows, n]`
    pub out: &'a mut [f32],
}

impl Product<'_> {
    fn row_count(&self) -> usize {
        match self.rows {
            Some(rows) => rows.len(),
            None => self.x.len() / self.weights.k.max(1),
        }
    }
}

/// Runs the products, which need not be of one size, as one parallel loop.
pub fn multiply(products: &mut [Product<'_>]) {
    let mut jobs = Vec::with_capacity(products.len());
    let (mut tasks, mut work) = (0, 0);
    for p in products {
        let (rows, &Weights { n, k, count, .. }) = (p.row_count(), p.weights);
        assert!(p.matrix < count, "matrix");
        assert_eq!(p.out.len(), rows * n, "out");
        if p.rows.is_none() {
            assert_eq!(p.x.len(), rows * k, "x");
        }
        let (panels, blocks) = (n.div_ceil(PANEL), rows.div_ceil(ROWS));
        jobs.push(Job {
            first: tasks,
            x: p.x,
            rows: p.rows,
            row_count: rows,
            weights: p.weights,
            matrix: p.matrix,
            panels,
            out: Shared::new(p.out),
        });
        tasks += panels * blocks;
        work += p.weights.work(rows);
    }
    parallel(tasks, work.div_ceil(tasks.max(1)), |task| {
        let job = &jobs[jobs.partition_point(|job| job.first <= task) - 1];
        match &job.weights.data {
            Data::F32(data) => job.run(task - job.first, data),
            Data::BF16(data) => job.run(task - job.first, data),
            Data::F16(data) => job.run(task - job.first, data),
        }
    });
}

struct Job<'a> {
    /// Its first task.
    first: usize,
    x: &'a [f32],
    rows: Option<&'a [u32]>,
    row_count: usize,
    weights: &'a Weights,
    matrix: usize,
    panels: usize,
    out: Shared<'a, f32>,
}

impl Job<'_> {
    fn run<W: Element>(&self, task: usize, data: &[W]) {
        let k = self.weights.k;
        let (first, panel) = (task / self.panels * ROWS, task % self.panels);
        let rows = first..self.row_count.min(first + ROWS);
        let column = panel * PANEL;
        let panel = &data[(self.matrix * self.panels + panel) * k * PANEL..][..k * PANEL];
        dispatch(PanelTask { job: self, panel, column, rows });
    }

    #[inline(always)]
    fn row(&self, i: usize) -> &[f32] {
        let k = self.weights.k;
        let row = self.rows.map_or(i, |rows| rows[i] as usize);
        &self.x[row * k..][..k]
    }
}

/// A block of rows times one panel.
struct PanelTask<'a, 'b, W> {
    job: &'a Job<'b>,
    panel: &'a [W],
    column: usize,
    rows: std::ops::Range<usize>,
}

impl<W: Element> WithSimd for PanelTask<'_, '_, W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // Rows and vectors of a tile whose sums fit the registers (32, 16, 32 of them) and keep the multipliers busy.
        match S::F32_LANES {
            16 => self.run::<S, 12, 2>(simd),
            8 => self.run::<S, 6, 2>(simd),
            4 => self.run::<S, 6, 4>(simd),
            _ => self.run::<S, 4, 4>(simd),
        }
    }
}

impl<W: Element> PanelTask<'_, '_, W> {
    #[inline(always)]
    fn run<S: Simd, const M: usize, const N: usize>(self, simd: S) {
        let k = self.job.weights.k;
        if self.rows.len() <= DIRECT_ROWS {
            self.tiles::<S, W, M, N>(simd, 0, self.panel);
            return;
        }
        let mut wide = [0f32; DEPTH * PANEL];
        for start in (0..k).step_by(DEPTH) {
            let part = &self.panel[start * PANEL..(start + DEPTH).min(k) * PANEL];
            let wide = &mut wide[..part.len()];
            wide.iter_mut().zip(part).for_each(|(wide, x)| *wide = x.to_f32());
            self.tiles::<S, f32, M, N>(simd, start, wide);
        }
        if k == 0 {
            self.tiles::<S, W, M, N>(simd, 0, &[]);
        }
    }

    /// All rows times the part of the panel that begins at input `start`; adds to the sums of the earlier parts.
    #[inline(always)]
    fn tiles<S: Simd, P: Element, const M: usize, const N: usize>(&self, simd: S, start: usize, part: &[P]) {
        let mut row = self.rows.start;
        while self.rows.end - row >= M {
            self.tile::<S, P, M, N, 1>(simd, row, start, part);
            row += M;
        }
        while self.rows.end - row >= 3 {
            self.tile::<S, P, 3, N, 1>(simd, row, start, part);
            row += 3;
        }
        match self.rows.end - row {
            2 => self.tile::<S, P, 2, N, 2>(simd, row, start, part),
            1 => self.tile::<S, P, 1, N, 4>(simd, row, start, part),
            _ => {}
        }
    }

    #[inline(always)]
    fn tile<S: Simd, P: Element, const M: usize, const N: usize, const U: usize>(
        &self,
        simd: S,
        row: usize,
        start: usize,
        part: &[P],
    ) {
        let n = self.job.weights.n;
        let mut x = [&[][..]; M];
        for (m, x) in x.iter_mut().enumerate() {
            *x = &self.job.row(row + m)[start..][..part.len() / PANEL];
        }
        for at in (0..PANEL.min(n - self.column)).step_by(N * S::F32_LANES) {
            let column = self.column + at;
            let width = (N * S::F32_LANES).min(n - column);
            // SAFETY: a task owns the columns of its panel in its rows.
            let out = |m: usize| unsafe { self.job.out.part((row + m) * n + column, width) };
            let mut sums = [[simd.splat_f32s(0.0); N]; M];
            if start > 0 {
                for (m, sums) in sums.iter_mut().enumerate() {
                    *sums = load_row::<S, N>(simd, out(m));
                }
            }
            add_products::<S, P, M, N, U>(simd, x, part, (PANEL, at), &mut sums);
            for (m, sums) in sums.iter().enumerate() {
                store_row::<S, N>(out(m), sums);
            }
        }
    }
}

/// `sums[m] += sum_k x[m][k] * rows[k, at..]`, where `rows` has `stride` columns and `N` vectors of them are taken. `U`
/// inputs are added up apart from each other, since a single row leaves too few sums to hide the latency of one.
///
/// NOTES: loops, not `array::from_fn` or `map`: their closures are not always inlined, and then lose the instruction set.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // the indices are the formula's
pub fn add_products<S: Simd, W: Element, const M: usize, const N: usize, const U: usize>(
    simd: S,
    x: [&[f32]; M],
    rows: &[W],
    (stride, at): (usize, usize),
    sums: &mut [[S::f32s; N]; M],
) {
    let depth = rows.len() / stride;
    let mut x = x;
    for x in &mut x {
        *x = &x[..depth];
    }
    let mut parts = [[[simd.splat_f32s(0.0); N]; M]; U];
    parts[0] = *sums;
    let mut blocks = rows.chunks_exact(U * stride);
    let mut k = 0;
    for block in blocks.by_ref() {
        for u in 0..U {
            add_product::<S, W, M, N>(simd, x, k + u, &block[u * stride + at..][..N * S::F32_LANES], &mut parts[u]);
        }
        k += U;
    }
    for row in blocks.remainder().chunks_exact(stride) {
        add_product::<S, W, M, N>(simd, x, k, &row[at..][..N * S::F32_LANES], &mut parts[0]);
        k += 1;
    }
    *sums = parts[0];
    for u in 1..U {
        for m in 0..M {
            for i in 0..N {
                sums[m][i] = simd.add_f32s(sums[m][i], parts[u][m][i]);
            }
        }
    }
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // as above
fn add_product<S: Simd, W: Element, const M: usize, const N: usize>(
    simd: S,
    x: [&[f32]; M],
    k: usize,
    row: &[W],
    sums: &mut [[S::f32s; N]; M],
) {
    let mut w = [simd.splat_f32s(0.0); N];
    for i in 0..N {
        w[i] = W::load(simd, &row[i * S::F32_LANES..]);
    }
    for m in 0..M {
        let x = simd.splat_f32s(x[m][k]);
        for i in 0..N {
            sums[m][i] = simd.mul_add_e_f32s(x, w[i], sums[m][i]);
        }
    }
}

/// `N` vectors, or what there is of them and zeros.
#[inline(always)]
pub fn load_row<S: Simd, const N: usize>(simd: S, src: &[f32]) -> [S::f32s; N] {
    let mut row = [simd.splat_f32s(0.0); N];
    let dst: &mut [f32] = bytemuck::cast_slice_mut(&mut row);
    dst[..src.len()].copy_from_slice(src);
    row
}

/// As much of `N` vectors as fits in `dst`.
#[inline(always)]
pub fn store_row<S: Simd, const N: usize>(dst: &mut [f32], row: &[S::f32s; N]) {
    let row: &[f32] = bytemuck::cast_slice(row);
    if dst.len() == row.len() {
        dst.copy_from_slice(row); // of constant length: no call
    } else {
        dst.copy_from_slice(&row[..dst.len()]);
    }
}
