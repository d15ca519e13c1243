//! Rows of x in whole numbers of 8 bits.

use super::isa::Instructions;
use super::layout::BLOCK;
use candle_gdn_core::cpu::{parallel, Shared};

/// Four numbers a word.
pub(super) type Words = [i32; BLOCK / 4];

/// x, 32 numbers by one scale. Rows that are multiplied together are a tile, in which they lie side by side.
pub(super) struct Rounded {
    pub rows: usize,
    pub blocks: usize,
    /// Rows of a tile, at most.
    most: usize,
    /// `[tile, block, row]`
    pub words: Vec<Words>,
    /// `[tile, block, row]`
    pub of: Vec<Block>,
}

/// What belongs to 32 numbers of x, by half where the weight has a scale for each half.
#[derive(Clone, Copy, Default)]
pub(super) struct Block {
    pub scale: f32,
    /// Where the sum of products begins: it takes off what the weight's offset adds.
    pub begins: [i32; 2],
    /// Sums of the rounded numbers, which the weight's mins are multiplied with.
    pub sums: [f32; 2],
}

impl Rounded {
    /// Of `x [rows, 32 * blocks]`, for a weight with an offset and with scales for `halves` of 32 columns.
    pub(super) fn new(x: &[f32], rows: usize, weight: (i32, usize), instructions: Instructions) -> Self {
        let blocks = x.len() / BLOCK / rows.max(1);
        let (words, of) = (vec![Words::default(); rows * blocks], vec![Block::default(); rows * blocks]);
        let mut made = Self { rows, blocks, most: instructions.rows(), words, of };
        let tiles: Vec<_> = made.tiles().collect();
        let (words, of) = (Shared::new(&mut made.words), Shared::new(&mut made.of));
        parallel(tiles.len(), 4 * made.most * blocks * BLOCK, |tile| {
            let (first, count) = tiles[tile];
            // SAFETY: a task has a tile of its own.
            let (words, of) =
                unsafe { (words.part(first * blocks, count * blocks), of.part(first * blocks, count * blocks)) };
            for row in 0..count {
                let x = &x[(first + row) * blocks * BLOCK..][..blocks * BLOCK];
                instructions.round(x, &mut words[row..], &mut of[row..], count, weight);
            }
        });
        made
    }

    /// The first row of each tile, and how many it has: a power of two.
    pub(super) fn tiles(&self) -> impl Iterator<Item = (usize, usize)> {
        let (rows, most) = (self.rows, self.most);
        let mut first = 0;
        std::iter::from_fn(move || {
            let left = rows - first;
            let count = if left >= most { most } else { (1 << left.checked_ilog2()?) as usize };
            first += count;
            Some((first - count, count))
        })
    }
}

/// Rounds a row to every `stride`-th element. With a number that is not finite the scale is NaN, and so are the products; the whole numbers mean nothing then.
#[inline(always)]
pub(super) fn round(x: &[f32], words: &mut [Words], of: &mut [Block], stride: usize, weight: (i32, usize)) {
    let (offset, halves) = weight;
    // Adding it leaves the nearest whole number in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let (x, _) = x.as_chunks::<BLOCK>();
    for ((x, words), of) in x.iter().zip(words.iter_mut().step_by(stride)).zip(of.iter_mut().step_by(stride)) {
        let mut most = [0f32; BLOCK / 2];
        let mut zeros = [0f32; BLOCK / 2];
        for i in 0..BLOCK / 2 {
            let [a, b] = [x[i].abs(), x[i + BLOCK / 2].abs()];
            let larger = if a > b { a } else { b };
            most[i] = larger;
            zeros[i] = (a + b) * 0.;
        }
        let most = largest(most);
        let inverse = if most > 0. { 127. / most } else { 0. };
        let mut bytes = [0i8; BLOCK];
        for i in 0..BLOCK {
            bytes[i] = ((x[i] * inverse + ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32) as i8;
        }
        let mut sums = [0i32; 2];
        for (half, sum) in sums.iter_mut().enumerate() {
            *sum = bytes[half * BLOCK / 2..][..BLOCK / 2].iter().map(|x| i32::from(*x)).sum();
        }
        if halves == 1 {
            sums = [sums[0] + sums[1], 0];
        }
        *words = pulp::bytemuck::cast(bytes);
        of.scale = most / 127. + zeros.iter().sum::<f32>();
        of.begins = sums.map(|sum| sum.wrapping_mul(-offset));
        of.sums = sums.map(|sum| sum as f32 * of.scale);
    }
}

/// By halves, as vectors do it.
#[inline(always)]
fn largest(mut x: [f32; BLOCK / 2]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            x[i] = if x[i] > x[i + half] { x[i] } else { x[i + half] };
        }
    }
    x[0]
}
