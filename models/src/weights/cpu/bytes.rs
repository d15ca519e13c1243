//! Products with matrices in q8_0, by the dot products of bytes that AVX-512 has (VNNI).
//!
//! Sixteen rows of the matrix lie side by side, four columns of each in turn, so that one instruction multiplies four columns of
//! sixteen rows with four numbers of x. Such a panel stays in a core's cache while all rows of x are multiplied with it, where
//! candle reads the whole matrix for each of them. The instruction's first operand is unsigned: weights are kept with 128 added,
//! and what that adds to the sum of a block, 128 times the sum of x's numbers, is taken off where the sum begins.

#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

use candle_gdn_core::cpu::{parallel, Pages, Shared};
use half::f16;
use pulp::bytemuck::Zeroable;

/// Numbers of a block; its bytes as ggml stores it: a scale in f16, then a byte each.
const BLOCK: usize = 32;
const STORED: usize = 2 + BLOCK;
/// Rows of a panel; lines that one of its blocks takes, and two of them with their scales, which are a line.
const PANEL: usize = 16;
const LINES: usize = PANEL * BLOCK / 64;
const PAIR: usize = 2 * LINES + 1;
/// Rows of x that are multiplied at a time.
const ROWS: usize = 8;

/// Fewer rows wait for memory.
const FEW: usize = 4;

/// Bytes of the matrix that those ask for ahead of what they multiply.
const AHEAD: usize = 2048;

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u8; 64]);

// SAFETY: bytes.
unsafe impl Zeroable for Line {}

/// A matrix `[rows, columns]`; its last panel is filled up with zeros.
pub(crate) struct Bytes {
    pub rows: usize,
    blocks: usize,
    /// `[panel, pair of blocks]`, of each two times `[four columns, row]`, and `[block, row]` scales in f16: one stream, as few rows
    /// of x wait for memory.
    lines: Pages<Line>,
}

/// Rows of x in whole numbers of 8 bits.
struct Rounded {
    /// `[row, block]`, four numbers a word
    words: Vec<[i32; BLOCK / 4]>,
    /// `[row, block]`: scale, and where the sum of the block begins
    blocks: Vec<(f32, i32)>,
}

impl Bytes {
    /// Of rows of q8_0 blocks. Nothing where the processor lacks the instructions.
    pub(crate) fn new(rows: usize, columns: usize, stored: &[u8]) -> Option<Self> {
        if !supported() {
            return None;
        }
        let (blocks, panels) = (columns / BLOCK, rows.div_ceil(PANEL));
        assert_eq!(stored.len(), rows * blocks * STORED);
        let panel_lines = blocks.div_ceil(2) * PAIR;
        // What is not there has a scale of zero.
        let mut made = Self { rows, blocks, lines: Pages::zeroed(panels * panel_lines) };
        let lines = Shared::new(&mut made.lines);
        parallel(panels, PANEL * columns, |panel| {
            // SAFETY: a task has a panel of its own.
            let lines = unsafe { lines.part(panel * panel_lines, panel_lines) };
            for row in 0..PANEL.min(rows - panel * PANEL) {
                let src = &stored[(panel * PANEL + row) * blocks * STORED..][..blocks * STORED];
                for (b, block) in src.chunks_exact(STORED).enumerate() {
                    let pair = &mut lines[b / 2 * PAIR..][..PAIR];
                    pair[2 * LINES].0[b % 2 * 2 * PANEL + 2 * row..][..2].copy_from_slice(&block[..2]);
                    for (line, four) in pair[b % 2 * LINES..][..LINES].iter_mut().zip(block[2..].chunks_exact(4)) {
                        let dst = &mut line.0[4 * row..][..4];
                        dst.iter_mut().zip(four).for_each(|(dst, byte)| *dst = byte.wrapping_add(128));
                    }
                }
            }
        });
        Some(made)
    }

    pub(crate) fn columns(&self) -> usize {
        self.blocks * BLOCK
    }

    /// The numbers of a row.
    pub(crate) fn read_row(&self, row: usize, dst: &mut [f32]) {
        assert!(row < self.rows && dst.len() == self.blocks * BLOCK);
        let (panel, row) = (row / PANEL, row % PANEL);
        let panel_lines = self.blocks.div_ceil(2) * PAIR;
        for (b, dst) in dst.chunks_exact_mut(BLOCK).enumerate() {
            let pair = &self.lines[panel * panel_lines + b / 2 * PAIR..][..PAIR];
            let scale = &pair[2 * LINES].0[b % 2 * 2 * PANEL + 2 * row..][..2];
            let scale = f16::from_le_bytes([scale[0], scale[1]]).to_f32();
            for (line, dst) in pair[b % 2 * LINES..][..LINES].iter().zip(dst.chunks_exact_mut(4)) {
                let four = &line.0[4 * row..][..4];
                dst.iter_mut().zip(four).for_each(|(dst, byte)| *dst = scale * f32::from(byte.wrapping_sub(128) as i8));
            }
        }
    }

    /// `x [n, columns]` times the transposed matrix, `[n, rows]`. x is rounded to 8 bits, 32 numbers by one scale.
    pub(crate) fn product(&self, x: &[f32], n: usize) -> Vec<f32> {
        assert_eq!(x.len(), n * self.blocks * BLOCK);
        let x = Rounded::new(x, n, self.blocks);
        let mut y = vec![0f32; n * self.rows];
        let dst = Shared::new(&mut y);
        parallel(self.rows.div_ceil(PANEL), 8 * n * PANEL * self.blocks, |panel| {
            let mut first = 0;
            while first < n {
                // SAFETY: `new` has asked for the instructions; a task writes columns of its own.
                first += unsafe {
                    match n - first {
                        ROWS.. => self.tile::<ROWS>(&x, panel, first, &dst),
                        4.. => self.tile::<4>(&x, panel, first, &dst),
                        2.. => self.tile::<2>(&x, panel, first, &dst),
                        _ => self.tile::<1>(&x, panel, first, &dst),
                    }
                };
            }
        });
        y
    }

    /// N rows of x from `first` on times a panel; N.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn tile<const N: usize>(&self, x: &Rounded, panel: usize, first: usize, y: &Shared<'_, f32>) -> usize {
        use std::arch::x86_64::*;
        let blocks = self.blocks;
        let panel_lines = blocks.div_ceil(2) * PAIR;
        let lines = &self.lines[panel * panel_lines..][..panel_lines];
        // Loops, not `array::from_fn`: its closures are not always inlined.
        let (mut words, mut of_x) = ([&[][..]; N], [&[][..]; N]);
        for r in 0..N {
            words[r] = &x.words[(first + r) * blocks..][..blocks];
            of_x[r] = &x.blocks[(first + r) * blocks..][..blocks];
        }
        // Many rows compute for long: the last of them ask for the next panel meanwhile.
        let asks = N < FEW || first + N == x.blocks.len() / blocks;
        let ahead = if N < FEW { AHEAD } else { panel_lines * 64 };
        let mut acc = [_mm512_setzero_ps(); N];
        for b in 0..blocks {
            // Two sums for few rows, as one would wait for itself.
            let mut sums = [[_mm512_setzero_si512(); 2]; N];
            for r in 0..N {
                sums[r][0] = _mm512_set1_epi32(of_x[r][b].1);
            }
            let pair: &[Line; PAIR] = lines[b / 2 * PAIR..][..PAIR].try_into().expect("a pair");
            for (i, line) in pair[b % 2 * LINES..][..LINES].iter().enumerate() {
                let w = _mm512_load_si512(line.0.as_ptr().cast());
                if asks {
                    _mm_prefetch::<_MM_HINT_T0>(line.0.as_ptr().wrapping_add(ahead).cast());
                }
                for r in 0..N {
                    let sum = &mut sums[r][if N < FEW { i % 2 } else { 0 }];
                    *sum = _mm512_dpbusd_epi32(*sum, w, _mm512_set1_epi32(words[r][b][i]));
                }
            }
            let scale = _mm512_cvtph_ps(_mm256_load_si256(pair[2 * LINES].0[b % 2 * 2 * PANEL..].as_ptr().cast()));
            for r in 0..N {
                let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(sums[r][0], sums[r][1]));
                acc[r] = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale, _mm512_set1_ps(of_x[r][b].0)), acc[r]);
            }
        }
        let count = PANEL.min(self.rows - panel * PANEL);
        for (r, acc) in acc.into_iter().enumerate() {
            let dst = y.part((first + r) * self.rows + panel * PANEL, count);
            _mm512_mask_storeu_ps(dst.as_mut_ptr(), ((1u32 << count) - 1) as __mmask16, acc);
        }
        N
    }

    #[cfg(not(target_arch = "x86_64"))]
    unsafe fn tile<const N: usize>(&self, _: &Rounded, _: usize, _: usize, _: &Shared<'_, f32>) -> usize {
        unreachable!("not supported")
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bytes([{}, {}])", self.rows, self.blocks * BLOCK)
    }
}

impl Rounded {
    fn new(x: &[f32], n: usize, blocks: usize) -> Self {
        let mut made = Self { words: vec![[0; BLOCK / 4]; n * blocks], blocks: vec![(0., 0); n * blocks] };
        let (words, of) = (Shared::new(&mut made.words), Shared::new(&mut made.blocks));
        parallel(n, 4 * blocks * BLOCK, |row| {
            // SAFETY: a task has a row of its own.
            let (words, of) = unsafe { (words.part(row * blocks, blocks), of.part(row * blocks, blocks)) };
            for (b, x) in x[row * blocks * BLOCK..][..blocks * BLOCK].chunks_exact(BLOCK).enumerate() {
                // SAFETY: there is no matrix without the instructions.
                unsafe { round(x.try_into().expect("a block"), &mut words[b], &mut of[b]) };
            }
        });
        made
    }
}

/// A block of x. With a number that is not finite the scale is NaN, and so are the products; the whole numbers mean nothing then.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn round(x: &[f32; BLOCK], words: &mut [i32; BLOCK / 4], of: &mut (f32, i32)) {
    use std::arch::x86_64::*;
    let x = [_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x[BLOCK / 2..].as_ptr())];
    let most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(x[0]), _mm512_abs_ps(x[1])));
    let finite = _mm512_reduce_add_ps(_mm512_mul_ps(_mm512_add_ps(x[0], x[1]), _mm512_setzero_ps()));
    let inverse = _mm512_set1_ps(if most > 0. { 127. / most } else { 0. });
    let whole = x.map(|x| _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)));
    for (half, whole) in whole.into_iter().enumerate() {
        _mm_storeu_si128(words[half * BLOCK / 8..].as_mut_ptr().cast(), _mm512_cvtsepi32_epi8(whole));
    }
    *of = (most / 127. + finite, (-128i32).wrapping_mul(_mm512_reduce_add_epi32(_mm512_add_epi32(whole[0], whole[1]))));
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn round(_: &[f32; BLOCK], _: &mut [i32; BLOCK / 4], _: &mut (f32, i32)) {
    unreachable!("not supported")
}

fn supported() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vnni");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(test)]
mod tests;
