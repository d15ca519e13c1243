//! How a matrix lies in memory, by type: panels of sixteen rows, each a stream of units.
//!
//! A unit begins with the scales of its columns; then come, for each 32 columns, as many lines as a number has bits. In eight
//! lines of bytes the columns would lie four by four, line `i` having columns `4 i ..` of all rows; lines of numbers
//! with fewer bits have their planes one upon the other: of 4 bits two in a byte, of 2 bits four, of 1 bit eight.

use super::blocks::Block;
use super::isa::{Isa, LINE};
use super::Line;
use half::f16;
use pulp::bytemuck::{cast_slice, cast_slice_mut};

/// Columns that x has one scale for.
pub(super) const BLOCK: usize = 32;
/// Rows of a panel.
pub(super) const PANEL: usize = 16;

/// Numbers are `scale * (q - OFFSET) + min`, where q has no sign.
pub(super) trait Layout {
    const BITS: usize;
    /// Columns of a unit.
    const COLUMNS: usize;
    /// Scales of a row for 32 columns.
    const HALVES: usize;
    const MINS: bool;
    /// How many products of two pairs 16 bits hold the sum of; with 0 bytes are multiplied as signed ones.
    const ROOM: usize;
    const OFFSET: i32 = if Self::MINS { 0 } else { 1 << (Self::BITS - 1) };
    /// Lines before the numbers.
    const HEADER: usize;
    /// Lines of a unit.
    const LINES: usize = Self::HEADER + Self::COLUMNS / BLOCK * Self::BITS;

    /// The scales of vector `part` of the rows for the group `group` of columns, and their mins.
    unsafe fn scales<S: Isa>(unit: *const u8, group: usize, part: usize) -> (S::Floats, S::Floats);

    /// The planes that the bits of a number are divided into: how many, and from which on.
    const PLANES: [(usize, usize); 2] = match Self::BITS {
        8 => [(8, 0), (0, 0)],
        4.. => [(4, 0), (Self::BITS - 4, 4)],
        _ => [(2, 0), (Self::BITS - 2, 2)],
    };

    /// Line `i` of the eight of 32 columns, from those at `lines`.
    #[inline(always)]
    unsafe fn line<S: Isa>(lines: *const u8, i: usize, part: usize) -> S::Bytes {
        let [(bits, _), (others, first)] = Self::PLANES;
        match (Self::BITS, others) {
            (8, _) => S::load(lines.add(offset::<S>(i, part))),
            (_, 0) => plane::<S>(lines, i, part, bits, 0),
            _ => S::or(plane::<S>(lines, i, part, bits, 0), plane::<S>(lines.add(bits * LINE), i, part, others, first)),
        }
    }
}

/// A layout in which weights are kept.
pub(super) trait Packed: Layout {
    /// The scale and the min of one row.
    fn scale(unit: &[u8], group: usize, row: usize) -> (f32, f32);

    /// Writes the scales of a block that begins with the group `group`.
    fn write_scales(block: &Block, unit: &mut [u8], group: usize, row: usize);

    /// Writes the first `count` numbers of a block as those from `column` on of a row.
    fn write(block: &Block, unit: &mut [Line], row: usize, column: usize, count: usize) {
        Self::write_scales(block, cast_slice_mut(unit), column / BLOCK * Self::HALVES, row);
        for (b, q) in block.q[..count].chunks_exact(BLOCK).enumerate() {
            let mut lines = &mut unit[Self::HEADER + (column / BLOCK + b) * Self::BITS..][..Self::BITS];
            for (bits, first) in Self::PLANES.into_iter().filter(|(bits, _)| *bits > 0) {
                let (plane, rest) = lines.split_at_mut(bits);
                for (i, four) in q.as_chunks().0.iter().enumerate() {
                    plane[i % bits].0[row] |= (u32::from_le_bytes(*four) >> first & ones(bits)) << (i / bits * bits);
                }
                lines = rest;
            }
        }
    }

    /// The numbers of a row, as many as `dst` holds.
    fn read(unit: &[Line], row: usize, dst: &mut [f32]) {
        for (b, dst) in dst.chunks_exact_mut(BLOCK).enumerate() {
            let mut lines = &unit[Self::HEADER + b * Self::BITS..][..Self::BITS];
            let mut q = [0u32; BLOCK / 4];
            for (bits, first) in Self::PLANES.into_iter().filter(|(bits, _)| *bits > 0) {
                let (plane, rest) = lines.split_at(bits);
                for (i, four) in q.iter_mut().enumerate() {
                    *four |= (plane[i % bits].0[row] >> (i / bits * bits) & ones(bits)) << first;
                }
                lines = rest;
            }
            for (i, dst) in dst.iter_mut().enumerate() {
                let half = i / (BLOCK / Self::HALVES);
                let (scale, min) = Self::scale(cast_slice(unit), b * Self::HALVES + half, row);
                let q = i32::from(q[i / 4].to_le_bytes()[i % 4]);
                *dst = scale * (q - Self::OFFSET) as f32 + if Self::MINS { min } else { 0. };
            }
        }
    }
}

/// The lowest bits of each of four bytes.
const fn ones(bits: usize) -> u32 {
    ((1 << bits) - 1) as u32 * 0x0101_0101
}

fn f16_at(bytes: &[u8], i: usize) -> f32 {
    f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32()
}

/// Where vector `part` of a line begins.
#[inline(always)]
pub(super) fn offset<S: Isa>(line: usize, part: usize) -> usize {
    line * LINE + part * (LINE / S::PARTS)
}

/// Line `i` of a plane of `bits` bits, moved to bit `dst`.
#[inline(always)]
unsafe fn plane<S: Isa>(lines: *const u8, i: usize, part: usize, bits: usize, dst: usize) -> S::Bytes {
    let line = S::load(lines.add(offset::<S>(i % bits, part)));
    S::moved(line, dst as i32 - (i / bits * bits) as i32, (((1 << bits) - 1) << dst) as u8)
}

/// Products of two pairs of numbers that 16 bits hold the sum of, x having 7 bits and a sign.
const fn room(bits: usize) -> usize {
    match bits {
        ..=4 => 8,
        5 => 4,
        6 => 2,
        _ => 0,
    }
}

/// ggml's K types: 256 columns with whole numbers of 8 bits that scale 32 / HALVES columns, by a factor for each row.
pub(super) struct Super<const BITS: usize, const HALVES: usize, const MINS: bool>;

impl<const BITS: usize, const HALVES: usize, const MINS: bool> Layout for Super<BITS, HALVES, MINS> {
    const BITS: usize = BITS;
    const COLUMNS: usize = 256;
    const HALVES: usize = HALVES;
    const MINS: bool = MINS;
    const ROOM: usize = room(BITS);
    /// A line of factors in f16, of the scales and the mins; then the scales `[group, row]`, then the mins.
    const HEADER: usize = 1 + 2 * HALVES * (1 + MINS as usize);

    #[inline(always)]
    unsafe fn scales<S: Isa>(unit: *const u8, group: usize, part: usize) -> (S::Floats, S::Floats) {
        let row = part * (PANEL / S::PARTS);
        let scales = unit.add(LINE + group * PANEL + row);
        let scale = S::mul(S::load_f16(unit.add(2 * row)), S::load_i8(scales));
        if !MINS {
            return (scale, scale);
        }
        let mins = scales.add(2 * HALVES * LINE);
        (scale, S::mul(S::load_f16(unit.add(2 * (PANEL + row))), S::load_i8(mins)))
    }
}

impl<const BITS: usize, const HALVES: usize, const MINS: bool> Packed for Super<BITS, HALVES, MINS> {
    fn scale(unit: &[u8], group: usize, row: usize) -> (f32, f32) {
        let of = |line: usize| f32::from(unit[line * LINE + group * PANEL + row] as i8);
        let min = if MINS { f16_at(unit, PANEL + row) * of(1 + 2 * HALVES) } else { 0. };
        (f16_at(unit, row) * of(1), min)
    }

    fn write_scales(block: &Block, unit: &mut [u8], group: usize, row: usize) {
        debug_assert_eq!(group, 0);
        for (factor, bytes) in block.factors.iter().enumerate() {
            unit[2 * (factor * PANEL + row)..][..2].copy_from_slice(bytes);
        }
        for (kind, values) in [block.scales, block.mins].iter().take(1 + usize::from(MINS)).enumerate() {
            for (group, value) in values[..8 * HALVES].iter().enumerate() {
                unit[(1 + 2 * HALVES * kind) * LINE + group * PANEL + row] = *value as u8;
            }
        }
    }
}

/// ggml's types with blocks of 32: two of them with their scales, `[block, row]` in f16, then their mins.
pub(super) struct Plain<const BITS: usize, const MINS: bool>;

impl<const BITS: usize, const MINS: bool> Layout for Plain<BITS, MINS> {
    const BITS: usize = BITS;
    const COLUMNS: usize = 64;
    const HALVES: usize = 1;
    const MINS: bool = MINS;
    const ROOM: usize = room(BITS);
    const HEADER: usize = 1 + MINS as usize;

    #[inline(always)]
    unsafe fn scales<S: Isa>(unit: *const u8, group: usize, part: usize) -> (S::Floats, S::Floats) {
        let scales = unit.add(2 * (group * PANEL + part * (PANEL / S::PARTS)));
        let scale = S::load_f16(scales);
        (scale, if MINS { S::load_f16(scales.add(LINE)) } else { scale })
    }
}

impl<const BITS: usize, const MINS: bool> Packed for Plain<BITS, MINS> {
    fn scale(unit: &[u8], group: usize, row: usize) -> (f32, f32) {
        let i = group * PANEL + row;
        (f16_at(unit, i), if MINS { f16_at(unit, LINE / 2 + i) } else { 0. })
    }

    fn write_scales(block: &Block, unit: &mut [u8], group: usize, row: usize) {
        for (line, bytes) in block.factors.iter().take(1 + usize::from(MINS)).enumerate() {
            unit[line * LINE + 2 * (group * PANEL + row)..][..2].copy_from_slice(bytes);
        }
    }
}
