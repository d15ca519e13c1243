//! Products of rows with weight matrices, `out[rows, n] = x[rows, k] w[n, k]ᵀ`, from one row (decode) to many (prompts).
//!
//! The weights lie in panels of [`PANEL`] outputs, `[n / PANEL, k, PANEL]`: a product walks its panel once from front to
//! back, adds whole vectors and never sums across lanes. Half-precision weights stay as they are in memory and are widened
//! on the way into registers, or, where there are many rows, a piece of a panel at a time.

use super::simd::dispatch;
use super::view::{parallel, Element, Shared};
use half::{bf16, f16};
use pulp::{bytemuck, Simd, WithSimd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Outputs of a panel: a multiple of every vector length.
pub const PANEL: usize = 32;
/// Rows of one task.
const ROWS: usize = 96;
/// Up to this many rows it does not pay to widen a panel first.
const DIRECT_ROWS: usize = 8;
/// Inputs of the piece of a panel that is widened at a time; it stays in the first-level cache.
const DEPTH: usize = 128;

/// Weight matrices of one shape, `[n, k]` each, laid out for [`multiply`].
pub struct Weights {
    data: Data,
    count: usize,
    n: usize,
    k: usize,
}

pub enum Data {
    F32(Vec<f32>),
    BF16(Vec<bf16>),
    F16(Vec<f16>),
}

/// bf16 or f16.
pub trait Half: Element {
    fn data(packed: Vec<Self>) -> Data;
}

impl Half for bf16 {
    fn data(packed: Vec<Self>) -> Data {
        Data::BF16(packed)
    }
}

impl Half for f16 {
    fn data(packed: Vec<Self>) -> Data {
        Data::F16(packed)
    }
}

impl Weights {
    /// Packs `count` matrices `[n, k]`. Those in f32 are kept in bf16 or f16 if that holds every one of their values
    /// exactly, as it does in most checkpoints: the products are the same to the bit, and half as much is read.
    pub fn pack_f32(from: &[f32], count: usize, n: usize, k: usize) -> Self {
        let data = if all_exact::<bf16>(from) {
            Data::BF16(pack(from, count, n, k))
        } else if all_exact::<f16>(from) {
            Data::F16(pack(from, count, n, k))
        } else {
            Data::F32(pack(from, count, n, k))
        };
        Self { data, count, n, k }
    }

    /// Packs `count` matrices `[n, k]` as they are.
    pub fn pack_half<W: Half>(from: &[W], count: usize, n: usize, k: usize) -> Self {
        Self { data: W::data(pack(from, count, n, k)), count, n, k }
    }

    /// Outputs of a matrix.
    pub fn outputs(&self) -> usize {
        self.n
    }

    /// Inputs of a matrix.
    pub fn inputs(&self) -> usize {
        self.k
    }

    /// What a product with one of the matrices costs, in the terms of [`parallel`]: few rows wait for the memory, many for
    /// the arithmetic.
    fn work(&self, rows: usize) -> usize {
        let bytes = match self.data {
            Data::F32(_) => 4,
            Data::BF16(_) | Data::F16(_) => 2,
        };
        self.n * self.k * (2 * bytes * rows.min(1) + rows) / 32
    }

    /// Writes row `row` of matrix 0.
    pub fn read_row(&self, row: usize, to: &mut [f32]) {
        fn read<W: Element>(data: &[W], k: usize, row: usize, to: &mut [f32]) {
            let panel = &data[row / PANEL * PANEL * k..][..PANEL * k];
            to.iter_mut().zip(panel.chunks_exact(PANEL)).for_each(|(to, x)| *to = x[row % PANEL].to_f32());
        }
        assert!(row < self.n && to.len() == self.k);
        match &self.data {
            Data::F32(data) => read(data, self.k, row, to),
            Data::BF16(data) => read(data, self.k, row, to),
            Data::F16(data) => read(data, self.k, row, to),
        }
    }
}

impl std::fmt::Debug for Weights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let dtype = match self.data {
            Data::F32(_) => "f32",
            Data::BF16(_) => "bf16",
            Data::F16(_) => "f16",
        };
        write!(f, "Weights({} of [{}, {}] in {dtype})", self.count, self.n, self.k)
    }
}

/// Whether every value of `from` survives the way through `H`.
fn all_exact<H: Element>(from: &[f32]) -> bool {
    const PIECE: usize = 1 << 14;
    let exact = AtomicBool::new(true);
    parallel(from.len().div_ceil(PIECE), PIECE, |task| {
        if exact.load(Ordering::Relaxed) {
            let piece = &from[task * PIECE..from.len().min((task + 1) * PIECE)];
            if !piece.iter().all(|&x| H::from_f32(x).to_f32().to_bits() == x.to_bits()) {
                exact.store(false, Ordering::Relaxed);
            }
        }
    });
    exact.into_inner()
}

/// `[count, n, k]` to `[count, n / PANEL, k, PANEL]`, the last panel of a matrix filled up with zeros.
fn pack<F: Element, W: Element>(from: &[F], count: usize, n: usize, k: usize) -> Vec<W> {
    assert_eq!(from.len(), count * n * k);
    let panels = n.div_ceil(PANEL);
    let mut data = vec![W::ZERO; count * panels * k * PANEL];
    let to = Shared::new(&mut data);
    parallel(count * panels, k * PANEL, |task| {
        let (matrix, first) = (task / panels, task % panels * PANEL);
        // SAFETY: each task owns its panel.
        let to = unsafe { to.part(task * k * PANEL, k * PANEL) };
        for row in first..n.min(first + PANEL) {
            let from = &from[(matrix * n + row) * k..][..k];
            to.iter_mut().skip(row - first).step_by(PANEL).zip(from).for_each(|(to, x)| *to = W::from_f32(x.to_f32()));
        }
    });
    data
}

/// One product of a call.
pub struct Product<'a> {
    /// `[.., k]`
    pub x: &'a [f32],
    /// Which rows of x to take, in this order; all of them if absent.
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
            let piece = &self.panel[start * PANEL..(start + DEPTH).min(k) * PANEL];
            let wide = &mut wide[..piece.len()];
            wide.iter_mut().zip(piece).for_each(|(wide, x)| *wide = x.to_f32());
            self.tiles::<S, f32, M, N>(simd, start, wide);
        }
        if k == 0 {
            self.tiles::<S, W, M, N>(simd, 0, &[]);
        }
    }

    /// All rows times a piece of the panel that begins at input `start`; adds to what the earlier pieces gave.
    #[inline(always)]
    fn tiles<S: Simd, P: Element, const M: usize, const N: usize>(&self, simd: S, start: usize, piece: &[P]) {
        let mut row = self.rows.start;
        while self.rows.end - row >= M {
            self.tile::<S, P, M, N, 1>(simd, row, start, piece);
            row += M;
        }
        while self.rows.end - row >= 3 {
            self.tile::<S, P, 3, N, 1>(simd, row, start, piece);
            row += 3;
        }
        match self.rows.end - row {
            2 => self.tile::<S, P, 2, N, 2>(simd, row, start, piece),
            1 => self.tile::<S, P, 1, N, 4>(simd, row, start, piece),
            _ => {}
        }
    }

    #[inline(always)]
    fn tile<S: Simd, P: Element, const M: usize, const N: usize, const U: usize>(
        &self,
        simd: S,
        row: usize,
        start: usize,
        piece: &[P],
    ) {
        let n = self.job.weights.n;
        let mut x = [&[][..]; M];
        for (m, x) in x.iter_mut().enumerate() {
            *x = &self.job.row(row + m)[start..][..piece.len() / PANEL];
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
            add_products::<S, P, M, N, U>(simd, x, piece, (PANEL, at), &mut sums);
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
pub fn load_row<S: Simd, const N: usize>(simd: S, from: &[f32]) -> [S::f32s; N] {
    let mut row = [simd.splat_f32s(0.0); N];
    let to: &mut [f32] = bytemuck::cast_slice_mut(&mut row);
    to[..from.len()].copy_from_slice(from);
    row
}

/// As much of `N` vectors as `to` takes.
#[inline(always)]
pub fn store_row<S: Simd, const N: usize>(to: &mut [f32], row: &[S::f32s; N]) {
    let row: &[f32] = bytemuck::cast_slice(row);
    if to.len() == row.len() {
        to.copy_from_slice(row); // of constant length: no call
    } else {
        to.copy_from_slice(&row[..to.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(n: usize, a: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * a + a).sin()).collect()
    }

    fn check(x: &[f32], rows: Option<&[u32]>, w: &[f32], (n, k): (usize, usize), got: &[f32]) {
        let count = rows.map_or(x.len() / k.max(1), |rows| rows.len());
        assert_eq!(got.len(), count * n);
        for (i, got) in got.chunks_exact(n.max(1)).enumerate() {
            let row = rows.map_or(i, |rows| rows[i] as usize);
            for (j, &got) in got.iter().enumerate() {
                let products = (0..k).map(|c| f64::from(x[row * k + c]) * f64::from(w[j * k + c]));
                let (want, size) = products.fold((0.0, 1.0), |(sum, size), p| (sum + p, size + p.abs()));
                assert!((f64::from(got) - want).abs() <= 1e-6 * size, "[{i}, {j}] of k {k}: {got} {want}");
            }
        }
    }

    #[test]
    fn every_size_and_dtype_is_the_definition() {
        for rows in [0, 1, 2, 3, 5, 8, 9, 12, 23, 97, 200] {
            for (n, k) in [(1, 1), (7, 5), (32, 16), (33, 129), (70, 300), (5, 0), (0, 5)] {
                let x = wave(rows * k, 0.37);
                let exact: Vec<f32> = wave(n * k, 0.61).iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
                let halves: Vec<f16> = wave(n * k, 0.83).into_iter().map(f16::from_f32).collect();
                let bf16s: Vec<bf16> = exact.iter().map(|&x| bf16::from_f32(x)).collect();
                let halves_wide: Vec<f32> = halves.iter().map(|x| x.to_f32()).collect();
                let full = wave(n * k, 0.29);
                for (weights, w) in [
                    (Weights::pack_f32(&full, 1, n, k), &full),
                    (Weights::pack_f32(&exact, 1, n, k), &exact),
                    (Weights::pack_f32(&halves_wide, 1, n, k), &halves_wide),
                    (Weights::pack_half(&bf16s, 1, n, k), &exact),
                    (Weights::pack_half(&halves, 1, n, k), &halves_wide),
                ] {
                    if k == 0 {
                        continue; // the number of rows cannot be told from x
                    }
                    let mut out = vec![f32::NAN; rows * n];
                    multiply(&mut [Product { x: &x, rows: None, weights: &weights, matrix: 0, out: &mut out }]);
                    check(&x, None, w, (n, k), &out);
                }
            }
        }
    }

    #[test]
    fn products_of_several_sizes_in_one_call() {
        let (k, count) = (40, 3);
        let x = wave(6 * k, 0.37);
        let (w, v) = (wave(count * 50 * k, 0.29), wave(20 * k, 0.91));
        let (experts, other) = (Weights::pack_f32(&w, count, 50, k), Weights::pack_f32(&v, 1, 20, k));
        let rows: [&[u32]; 3] = [&[5, 0, 2, 2], &[], &[1]];
        let mut outs = [vec![f32::NAN; 4 * 50], vec![], vec![f32::NAN; 50], vec![f32::NAN; 6 * 20]];
        let [a, b, c, d] = &mut outs;
        multiply(&mut [
            Product { x: &x, rows: Some(rows[0]), weights: &experts, matrix: 2, out: a },
            Product { x: &x, rows: Some(rows[1]), weights: &experts, matrix: 0, out: b },
            Product { x: &x, rows: Some(rows[2]), weights: &experts, matrix: 1, out: c },
            Product { x: &x, rows: None, weights: &other, matrix: 0, out: d },
        ]);
        check(&x, Some(rows[0]), &w[2 * 50 * k..], (50, k), a);
        check(&x, Some(rows[2]), &w[50 * k..2 * 50 * k], (50, k), c);
        check(&x, None, &v, (20, k), d);
        multiply(&mut []);
    }

    #[test]
    fn f32_is_narrowed_only_where_that_is_exact() {
        let kept = |values: &[f32]| match Weights::pack_f32(values, 1, values.len(), 1).data {
            Data::F32(_) => "f32",
            Data::BF16(_) => "bf16",
            Data::F16(_) => "f16",
        };
        assert_eq!(kept(&[1.0, -0.0, 2f32.powi(120), 2f32.powi(-120)]), "bf16");
        assert_eq!(kept(&[1.0 + 1.0 / 1024.0]), "f16");
        assert_eq!(kept(&[1.0 + 1.0 / 1024.0, 1e6]), "f32");
        assert_eq!(kept(&[0.1]), "f32");
        assert_eq!(kept(&[f32::INFINITY, f32::NEG_INFINITY]), "bf16");
    }

    #[test]
    fn rows_are_read_back() {
        let (n, k) = (45, 7);
        let w = wave(n * k, 0.29);
        let weights = Weights::pack_f32(&w, 1, n, k);
        let mut row = vec![0.0; k];
        for i in 0..n {
            weights.read_row(i, &mut row);
            assert_eq!(row, w[i * k..][..k]);
        }
    }

    /// The tiles differ between instruction sets, and a machine picks only one of them.
    #[test]
    fn every_instruction_set_gives_the_same() {
        let (rows, n, k) = (29, 45, 150);
        let (x, w) = (wave(rows * k, 0.37), wave(n * k, 0.29));
        let weights = Weights::pack_f32(&w, 1, n, k);
        let run = |run: &dyn Fn(PanelTask<'_, '_, f32>)| {
            let mut out = vec![f32::NAN; rows * n];
            let panels = n.div_ceil(PANEL);
            let out_shared = Shared::new(&mut out);
            let job = Job {
                first: 0,
                x: &x,
                rows: None,
                row_count: rows,
                weights: &weights,
                matrix: 0,
                panels,
                out: out_shared,
            };
            let Data::F32(data) = &weights.data else { panic!("narrowed") };
            for panel in 0..panels {
                for rows in [0..7, 7..rows] {
                    run(PanelTask {
                        job: &job,
                        panel: &data[panel * k * PANEL..][..k * PANEL],
                        column: panel * PANEL,
                        rows,
                    });
                }
            }
            check(&x, None, &w, (n, k), &out);
        };
        run(&|task| Simd::vectorize(pulp::Scalar::new(), task));
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(simd) = pulp::x86::V3::try_new() {
                run(&|task| Simd::vectorize(simd, task));
            }
            if let Some(simd) = pulp::x86::V4::try_new() {
                run(&|task| Simd::vectorize(simd, task));
            }
        }
        #[cfg(target_arch = "aarch64")]
        if let Some(simd) = pulp::aarch64::Neon::try_new() {
            run(&|task| Simd::vectorize(simd, task));
        }
    }
}
