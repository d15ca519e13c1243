//! Weight matrices in panels, as [`multiply`](super::multiply) walks them.

use crate::cpu::element::Element;
use crate::cpu::pages::Pages;
use crate::cpu::view::{parallel, Shared};
use half::{bf16, f16};
use pulp::bytemuck::Zeroable;
use std::sync::atomic::{AtomicBool, Ordering};

/// Outputs of a panel: a multiple of every vector length.
pub const PANEL: usize = 32;

/// Weight matrices of one shape, `[n, k]` each, laid out for [`multiply`](super::multiply).
pub struct Weights {
    pub(super) data: Data,
    pub(super) count: usize,
    pub(super) n: usize,
    pub(super) k: usize,
}

pub enum Data {
    F32(Pages<f32>),
    BF16(Pages<bf16>),
    F16(Pages<f16>),
}

/// bf16 or f16.
pub trait Half: Element + Zeroable {
    fn data(packed: Pages<Self>) -> Data;
}

impl Half for bf16 {
    fn data(packed: Pages<Self>) -> Data {
        Data::BF16(packed)
    }
}

impl Half for f16 {
    fn data(packed: Pages<Self>) -> Data {
        Data::F16(packed)
    }
}

impl Weights {
    /// Packs `count` matrices `[n, k]`. Those in f32 are kept in bf16 or f16 if that holds every one of their values
    /// exactly, as it does in most checkpoints: the products are the same to the bit, and half as much is read.
    pub fn pack_f32(src: &[f32], count: usize, n: usize, k: usize) -> Self {
        let data = if all_exact::<bf16>(src) {
            Data::BF16(pack(src, count, n, k))
        } else if all_exact::<f16>(src) {
            Data::F16(pack(src, count, n, k))
        } else {
            Data::F32(pack(src, count, n, k))
        };
        Self { data, count, n, k }
    }

    /// Packs `count` matrices `[n, k]` as they are.
    pub fn pack_half<W: Half>(src: &[W], count: usize, n: usize, k: usize) -> Self {
        Self { data: W::data(pack(src, count, n, k)), count, n, k }
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
    pub(super) fn work(&self, rows: usize) -> usize {
        let bytes = match self.data {
            Data::F32(_) => 4,
            Data::BF16(_) | Data::F16(_) => 2,
        };
        self.n * self.k * (2 * bytes * rows.min(1) + rows) / 32
    }

    /// Writes row `row` of matrix 0.
    pub fn read_row(&self, row: usize, dst: &mut [f32]) {
        fn read<W: Element>(data: &[W], k: usize, row: usize, dst: &mut [f32]) {
            let panel = &data[row / PANEL * PANEL * k..][..PANEL * k];
            dst.iter_mut().zip(panel.chunks_exact(PANEL)).for_each(|(dst, x)| *dst = x[row % PANEL].to_f32());
        }
        assert!(row < self.n && dst.len() == self.k);
        match &self.data {
            Data::F32(data) => read(data, self.k, row, dst),
            Data::BF16(data) => read(data, self.k, row, dst),
            Data::F16(data) => read(data, self.k, row, dst),
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

/// Whether every value of `src` survives the way through `H`.
fn all_exact<H: Element>(src: &[f32]) -> bool {
    const PART: usize = 1 << 14;
    let exact = AtomicBool::new(true);
    parallel(src.len().div_ceil(PART), PART, |task| {
        if exact.load(Ordering::Relaxed) {
            let part = &src[task * PART..src.len().min((task + 1) * PART)];
            if !part.iter().all(|&x| H::from_f32(x).to_f32().to_bits() == x.to_bits()) {
                exact.store(false, Ordering::Relaxed);
            }
        }
    });
    exact.into_inner()
}

/// `[count, n, k]` to `[count, n / PANEL, k, PANEL]`, the last panel of a matrix filled up with zeros.
fn pack<F: Element, W: Element + Zeroable>(src: &[F], count: usize, n: usize, k: usize) -> Pages<W> {
    assert_eq!(src.len(), count * n * k);
    let panels = n.div_ceil(PANEL);
    let mut data = Pages::zeroed(count * panels * k * PANEL);
    let dst = Shared::new(&mut data);
    parallel(count * panels, k * PANEL, |task| {
        let (matrix, first) = (task / panels, task % panels * PANEL);
        // SAFETY: each task owns its panel.
        let dst = unsafe { dst.part(task * k * PANEL, k * PANEL) };
        for row in first..n.min(first + PANEL) {
            let src = &src[(matrix * n + row) * k..][..k];
            dst.iter_mut()
                .skip(row - first)
                .step_by(PANEL)
                .zip(src)
                .for_each(|(dst, x)| *dst = W::from_f32(x.to_f32()));
        }
    });
    data
}
