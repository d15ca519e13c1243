//! Gradients of the convolution: one task per tile of channels, which walks the tokens of all sequences, so that sums over
//! tokens have a fixed order.

use crate::conv::cpu::{of_width, Conv, OfWidth};
use candle_gdn_core::cpu::simd::{dispatch, sigmoid};
use candle_gdn_core::cpu::{parallel, Element, Heads, Shared};
use pulp::{Simd, WithSimd};

/// Channels of one task.
const TILE: usize = 64;
/// Tokens whose share of the weight's gradient is summed in f32 before it goes to the sum in f64.
const BLOCK: usize = 64;

/// Everything but the results. `d_y` has one head of the channels.
pub struct ConvBackward<'a, T> {
    pub conv: Conv<'a, T, f32>,
    pub d_y: Heads<'a, T>,
    /// `[sequences, width - 1, channels]`, or zeros.
    pub window: Option<&'a [T]>,
}

/// What is written: `[tokens, channels]`, `[channels, width]` and `[sequences, width - 1, channels]`.
pub struct Gradients<'a, T> {
    pub x: &'a mut [T],
    pub weight: &'a mut [f32],
    pub window: &'a mut [T],
}

impl<T: Element> ConvBackward<'_, T> {
    pub fn run(&self, gradients: Gradients<'_, T>) {
        let (channels, tokens) = (self.conv.channels, self.conv.seqs.total_tokens());
        let (x, weight) = (Shared::new(gradients.x), Shared::new(gradients.weight));
        let window = Shared::new(gradients.window);
        let out = &Out { x, weight, window };
        parallel(channels.div_ceil(TILE), 12 * tokens * TILE.min(channels), |task| {
            let channel = task * TILE;
            let tile = Tile { backward: self, channel, channels: TILE.min(channels - channel), out };
            of_width!(self.conv.width, tile);
        });
    }
}

/// The results, of which each task owns its channels.
struct Out<'a, T> {
    x: Shared<'a, T>,
    weight: Shared<'a, f32>,
    window: Shared<'a, T>,
}

struct Tile<'a, 'b, T> {
    backward: &'a ConvBackward<'b, T>,
    channel: usize,
    channels: usize,
    out: &'a Out<'a, T>,
}

/// Values by tap.
type Taps<const WIDTH: usize> = [[f32; TILE]; WIDTH];

impl<const WIDTH: usize, T: Element> WithSimd for OfWidth<WIDTH, Tile<'_, '_, T>> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let tile = self.0;
        let mut taps: Taps<WIDTH> = [[0.0; TILE]; WIDTH];
        for c in 0..tile.channels {
            for (j, taps) in taps.iter_mut().enumerate() {
                taps[c] = tile.backward.conv.weight[(tile.channel + c) * WIDTH + j];
            }
        }
        let mut sums = [[0f64; TILE]; WIDTH];
        for n in 0..tile.backward.conv.seqs.count {
            tile.sequence(n, &taps, &mut sums);
        }
        // SAFETY: a task owns its channels.
        let weight = unsafe { tile.out.weight.part(tile.channel * WIDTH, tile.channels * WIDTH) };
        for (c, weight) in weight.chunks_exact_mut(WIDTH).enumerate() {
            weight.iter_mut().zip(&sums).for_each(|(w, sums)| *w = sums[c] as f32);
        }
    }
}

impl<T: Element> Tile<'_, '_, T> {
    #[inline(always)]
    fn sequence<const WIDTH: usize>(&self, n: usize, taps: &Taps<WIDTH>, sums: &mut [[f64; TILE]; WIDTH]) {
        let (first, tokens) = self.backward.conv.seqs.range(n);
        let mut block: Taps<WIDTH> = [[0.0; TILE]; WIDTH];
        // Gradients of the last inputs, to which later tokens still add, oldest first.
        let mut open: Taps<WIDTH> = [[0.0; TILE]; WIDTH];
        for t in 0..tokens {
            let mut inputs: Taps<WIDTH> = [[0.0; TILE]; WIDTH];
            for (j, input) in inputs.iter_mut().enumerate() {
                self.input(n, first, t + j, WIDTH - 1, input);
            }
            let mut d_p = [0f32; TILE];
            let d_y =
                &self.backward.d_y.row(n, first + t, 0, self.backward.conv.channels)[self.channel..][..self.channels];
            d_p.iter_mut().zip(d_y).for_each(|(d_p, d_y)| *d_p = d_y.to_f32());
            if self.backward.conv.silu {
                for c in 0..TILE {
                    let p: f32 = (0..WIDTH).map(|j| inputs[j][c] * taps[j][c]).sum();
                    let s = sigmoid(p);
                    d_p[c] *= s * (1.0 + p * (1.0 - s));
                }
            }
            for j in 0..WIDTH {
                for c in 0..TILE {
                    block[j][c] += d_p[c] * inputs[j][c];
                    open[j][c] += d_p[c] * taps[j][c];
                }
            }
            self.store(n, t, WIDTH - 1, &open[0]);
            open.copy_within(1.., 0);
            open[WIDTH - 1] = [0.0; TILE];
            if t % BLOCK == BLOCK - 1 || t == tokens - 1 {
                for (sums, block) in sums.iter_mut().zip(&mut block) {
                    sums.iter_mut().zip(&*block).for_each(|(sum, x)| *sum += f64::from(*x));
                    *block = [0.0; TILE];
                }
            }
        }
        for (j, open) in open[..WIDTH - 1].iter().enumerate() {
            self.store(n, tokens + j, WIDTH - 1, open);
        }
    }

    /// Input `i`, of which the first `history` lie in the window.
    #[inline(always)]
    fn input(&self, n: usize, first: usize, i: usize, history: usize, dst: &mut [f32; TILE]) {
        let all = self.backward.conv.channels;
        let row = match (i.checked_sub(history), self.backward.window) {
            (Some(token), _) => self.backward.conv.x.row(n, first + token, 0, all),
            (None, Some(window)) => &window[(n * history + i) * all..][..all],
            (None, None) => return,
        };
        dst.iter_mut().zip(&row[self.channel..][..self.channels]).for_each(|(dst, x)| *dst = x.to_f32());
    }

    /// The gradient of input `i`.
    #[inline(always)]
    fn store(&self, n: usize, i: usize, history: usize, gradient: &[f32; TILE]) {
        let all = self.backward.conv.channels;
        let (out, row) = match i.checked_sub(history) {
            Some(token) => (&self.out.x, self.backward.conv.seqs.out_token(n) + token),
            None => (&self.out.window, n * history + i),
        };
        // SAFETY: a task owns its channels.
        let dst = unsafe { out.part(row * all + self.channel, self.channels) };
        dst.iter_mut().zip(gradient).for_each(|(dst, x)| *dst = T::from_f32(*x));
    }
}
