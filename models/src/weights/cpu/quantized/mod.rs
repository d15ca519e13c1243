//! Products with matrices in ggml's types, by the dot products of bytes that AVX-512 (VNNI) and AVX2 have.
//!
//! Sixteen rows of the matrix lie side by side, four columns of each in turn, so that one instruction multiplies four columns of
//! sixteen rows with four numbers of x, which is rounded to 8 bits. Numbers of fewer bits are unpacked in registers each time, for
//! up to 8 rows of x together; for many rows a panel is unpacked once, into bytes that stay in a core's cache while all rows are
//! multiplied with it.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, unreachable_code, unused_imports, unused_variables))]

mod blocks;
mod isa;
mod layout;
mod rounded;
mod tile;
#[cfg(target_arch = "x86_64")]
mod x86;

use blocks::Block;
use candle_core::quantized::GgmlDType;
use candle_gdn_core::cpu::{parallel, Pages, Shared};
use isa::{Instructions, LINE};
use layout::{Layout, Packed, Plain, Super, BLOCK, PANEL};
use pulp::bytemuck::{Pod, Zeroable};
use rounded::Rounded;
use tile::Task;

/// Four bytes for each row of a panel.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u32; PANEL]);

// SAFETY: whole numbers, without gaps.
unsafe impl Zeroable for Line {}
unsafe impl Pod for Line {}

/// Runs an expression with the type's layout as `F`.
macro_rules! with_layout {
    ($dtype:expr, $F:ident => $run:expr, else $other:expr) => {
        with_layout!(@ $dtype, $F, $run, $other;
            Q8_0 Plain<8, false>, Q4_0 Plain<4, false>, Q4_1 Plain<4, true>, Q5_0 Plain<5, false>, Q5_1 Plain<5, true>,
            Q2K Super<2, 2, true>, Q3K Super<3, 2, false>, Q4K Super<4, 1, true>, Q5K Super<5, 1, true>, Q6K Super<6, 2, false>)
    };
    (@ $dtype:expr, $F:ident, $run:expr, $other:expr; $($name:ident $layout:ty),*) => {
        match $dtype {
            $(GgmlDType::$name => { type $F = $layout; $run })*
            _ => $other,
        }
    };
}

/// A matrix `[rows, columns]`; its last panel is filled up with zeros.
pub(crate) struct Quantized {
    dtype: GgmlDType,
    pub rows: usize,
    blocks: usize,
    instructions: Instructions,
    /// `[panel, unit]`
    lines: Pages<Line>,
}

impl Quantized {
    /// Of rows of ggml's blocks. `None` where the type or the processor is not supported.
    pub(crate) fn new(dtype: GgmlDType, rows: usize, columns: usize, stored: &[u8]) -> Option<Self> {
        let instructions = *Instructions::all().first()?;
        with_layout!(dtype, F => Some(Self::pack::<F>(dtype, rows, columns, stored, instructions)), else None)
    }

    fn pack<F: Packed>(
        dtype: GgmlDType,
        rows: usize,
        columns: usize,
        stored: &[u8],
        instructions: Instructions,
    ) -> Self {
        let (of_block, bytes) = (dtype.block_size(), dtype.type_size());
        let (in_row, panels) = (columns / of_block, rows.div_ceil(PANEL));
        assert_eq!(stored.len(), rows * in_row * bytes);
        let panel_lines = columns.div_ceil(F::COLUMNS) * F::LINES;
        // What is not there has a scale of zero.
        let lines = Pages::zeroed(panels * panel_lines);
        let mut made = Self { dtype, rows, blocks: columns / BLOCK, instructions, lines };
        let lines = Shared::new(&mut made.lines);
        parallel(panels, PANEL * columns, |panel| {
            // SAFETY: a task has a panel of its own.
            let lines = unsafe { lines.part(panel * panel_lines, panel_lines) };
            let mut block = Block::new();
            for row in 0..PANEL.min(rows - panel * PANEL) {
                let src = &stored[(panel * PANEL + row) * in_row * bytes..][..in_row * bytes];
                for (i, src) in src.chunks_exact(bytes).enumerate() {
                    block.read(dtype, src);
                    let (unit, column) = (i * of_block / F::COLUMNS, i * of_block % F::COLUMNS);
                    F::write(&block, &mut lines[unit * F::LINES..][..F::LINES], row, column, of_block);
                }
            }
        });
        made
    }

    /// Bytes of so many numbers, without what fills up the last panel. `None` where the type or the processor is not supported.
    pub(crate) fn bytes(dtype: GgmlDType, numbers: u64) -> Option<u64> {
        Instructions::all().first()?;
        let size = |lines: usize, columns: usize| {
            numbers.div_ceil(columns as u64).saturating_mul((lines * LINE / PANEL) as u64)
        };
        with_layout!(dtype, F => Some(size(F::LINES, F::COLUMNS)), else None)
    }

    pub(crate) fn columns(&self) -> usize {
        self.blocks * BLOCK
    }

    fn panel(&self, panel: usize) -> &[Line] {
        let lines = self.lines.len() / self.rows.div_ceil(PANEL).max(1);
        &self.lines[panel * lines..][..lines]
    }

    /// The numbers of a row.
    pub(crate) fn read_row(&self, row: usize, dst: &mut [f32]) {
        assert!(row < self.rows && dst.len() == self.columns());
        let panel = self.panel(row / PANEL);
        with_layout!(self.dtype, F => {
            for (unit, dst) in panel.chunks_exact(F::LINES).zip(dst.chunks_mut(F::COLUMNS)) {
                F::read(unit, row % PANEL, dst);
            }
        }, else unreachable!("no layout"))
    }

    /// `x [n, columns]` times the transposed matrix, `[n, rows]`. x is rounded to 8 bits, 32 numbers by one scale.
    pub(crate) fn product(&self, x: &[f32], n: usize) -> Vec<f32> {
        assert_eq!(x.len(), n * self.columns());
        with_layout!(self.dtype, F => self.product_in::<F>(x, n), else unreachable!("no layout"))
    }

    fn product_in<F: Packed>(&self, x: &[f32], n: usize) -> Vec<f32> {
        let x = Rounded::new(x, n, (F::OFFSET, F::HALVES), self.instructions);
        let mut y = vec![0f32; n * self.rows];
        let dst = Shared::new(&mut y);
        parallel(self.rows.div_ceil(PANEL), 8 * n * PANEL * self.blocks, |panel| {
            let task = Task { lines: self.panel(panel), x: &x, y: &dst, outputs: self.rows, first: panel * PANEL };
            // SAFETY: a task writes columns of its own.
            unsafe { self.instructions.multiply::<F>(&task) };
        });
        y
    }
}

impl std::fmt::Debug for Quantized {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Quantized([{}, {}] in {:?})", self.rows, self.columns(), self.dtype)
    }
}

#[cfg(test)]
mod tests;
