//! The product of a panel with rows of x.

use super::isa::{Isa, LINE};
use super::layout::{offset, Layout, BLOCK, PANEL};
use super::rounded::Rounded;
use super::Line;
use candle_gdn_core::cpu::{prefetch_line, Shared};
use std::cell::Cell;

thread_local! {
    /// A panel in bytes, of the thread's last product of many rows.
    static BYTES: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

/// Fewer rows of x wait for memory; they ask for so many bytes ahead of what they multiply.
const FEW: usize = 4;
const AHEAD: usize = 384;
/// A panel is unpacked once for more tiles than this; for fewer each tile unpacks it in registers.
const TILES: usize = 2;

/// A panel and what it is multiplied with.
pub(super) struct Task<'a, 'b> {
    pub lines: &'a [Line],
    pub x: &'a Rounded,
    /// `[n, outputs]`
    pub y: &'a Shared<'b, f32>,
    pub outputs: usize,
    /// First row of the panel.
    pub first: usize,
}

/// # Safety
/// The processor must have the instructions, the caller enable them. No other task may write the columns of the panel.
#[inline(always)]
pub(super) unsafe fn multiply<S: Isa, F: Layout>(task: &Task<'_, '_>) {
    assert!(task.lines.len() * F::COLUMNS >= task.x.blocks * BLOCK * F::LINES);
    if F::BITS == 8 || task.x.tiles().nth(TILES).is_none() {
        tiles::<S, F, false>(task, std::ptr::null());
        return;
    }
    let mut bytes = BYTES.take();
    bytes.resize(task.x.blocks * (BLOCK / 4), Line([0; PANEL]));
    unpack::<S, F>(task, bytes.as_mut_ptr().cast());
    tiles::<S, F, true>(task, bytes.as_ptr().cast());
    BYTES.set(bytes);
}

#[inline(always)]
unsafe fn tiles<S: Isa, F: Layout, const UNPACKED: bool>(task: &Task<'_, '_>, bytes: *const u8) {
    for (first, count) in task.x.tiles() {
        match count {
            8 => tile::<S, F, 8, UNPACKED>(task, bytes, first),
            4 => tile::<S, F, 4, UNPACKED>(task, bytes, first),
            2 => tile::<S, F, 2, UNPACKED>(task, bytes, first),
            _ => tile::<S, F, 1, UNPACKED>(task, bytes, first),
        }
    }
}

/// Writes the panel's numbers as bytes, eight lines a block.
#[inline(always)]
unsafe fn unpack<S: Isa, F: Layout>(task: &Task<'_, '_>, bytes: *mut u8) {
    for b in 0..task.x.blocks {
        let lines = block::<F>(task.lines.as_ptr().cast(), b).1;
        let bytes = bytes.add(b * (BLOCK / 4) * LINE);
        for part in 0..S::PARTS {
            macro_rules! lines {
                ($($i:literal)*) => {$(S::store(bytes.add(offset::<S>($i, part)), F::line::<S>(lines, $i, part));)*};
            }
            lines!(0 1 2 3 4 5 6 7);
        }
    }
}

/// The unit of block `b`, and the block's lines.
#[inline(always)]
unsafe fn block<F: Layout>(panel: *const u8, b: usize) -> (*const u8, *const u8) {
    let per_unit = F::COLUMNS / BLOCK;
    let unit = panel.add(b / per_unit * F::LINES * LINE);
    (unit, unit.add((F::HEADER + b % per_unit * F::BITS) * LINE))
}

/// N rows of x from `first` on times the panel, whose numbers also lie in `bytes` where it is `UNPACKED`.
///
/// NOTES: loops, not closures: these are not always inlined, and then lose the instruction set. The eight lines of a block are
/// written out, as their number says how they are unpacked.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn tile<S: Isa, F: Layout, const N: usize, const UNPACKED: bool>(
    task: &Task<'_, '_>,
    bytes: *const u8,
    first: usize,
) {
    let (x, panel) = (task.x, task.lines.as_ptr().cast::<u8>());
    let words = x.words[first * x.blocks..][..N * x.blocks].as_ptr();
    let of = x.of[first * x.blocks..][..N * x.blocks].as_ptr();
    // Many rows compute for long: the last of them ask for the next panel meanwhile.
    let asks = x.rows < FEW || first + N == x.rows;
    let ahead = if x.rows < FEW { AHEAD } else { size_of_val(task.lines) };
    let per_unit = F::COLUMNS / BLOCK;
    let mut acc = [[S::splat(0.); N]; 2];
    for b in 0..x.blocks {
        let (unit, lines) = block::<F>(panel, b);
        if asks {
            for line in 0..F::BITS {
                prefetch_line(lines.wrapping_add(line * LINE + ahead));
            }
        }
        for part in 0..S::PARTS {
            for half in 0..F::HALVES {
                let mut sums = [S::begin(0); N];
                for r in 0..N {
                    if F::OFFSET != 0 && !(S::SIGNED && F::ROOM == 0) {
                        sums[r] = S::begin((*of.add(b * N + r)).begins[half]);
                    }
                }
                macro_rules! lines {
                    ($first:expr; $($i:literal)*) => {$(
                        let w = match UNPACKED {
                            true => S::load(bytes.add(offset::<S>(b * (BLOCK / 4) + $first + $i, part))),
                            false => F::line::<S>(lines, $first + $i, part),
                        };
                        for r in 0..N {
                            sums[r] = S::dot(sums[r], $i, F::ROOM, w, (*words.add(b * N + r))[$first + $i]);
                        }
                    )*};
                }
                match (F::HALVES, half) {
                    (1, _) => {
                        lines!(0; 0 1 2 3 4 5 6 7);
                    }
                    (_, 0) => {
                        lines!(0; 0 1 2 3);
                    }
                    _ => {
                        lines!(4; 0 1 2 3);
                    }
                }
                let (scale, min) = F::scales::<S>(unit, b % per_unit * F::HALVES + half, part);
                for r in 0..N {
                    let of = &*of.add(b * N + r);
                    acc[part][r] = S::mul_add(S::total(sums[r]), S::mul(scale, S::splat(of.scale)), acc[part][r]);
                    if F::MINS {
                        acc[part][r] = S::mul_add(min, S::splat(of.sums[half]), acc[part][r]);
                    }
                }
            }
        }
    }
    let count = PANEL.min(task.outputs - task.first);
    for r in 0..N {
        let mut row = [0f32; PANEL];
        for part in 0..S::PARTS {
            S::store_f32(row.as_mut_ptr().cast::<u8>().add(offset::<S>(0, part)).cast(), acc[part][r]);
        }
        let dst = task.y.part((first + r) * task.outputs + task.first, count);
        match <&mut [f32; PANEL]>::try_from(&mut *dst) {
            Ok(dst) => *dst = row,
            Err(_) => dst.copy_from_slice(&row[..count]),
        }
    }
}
