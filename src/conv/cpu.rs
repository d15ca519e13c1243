//! Depthwise causal convolution over time, then SiLU: `y[t, c] = silu(sum_j w[c, j] x[t - width + 1 + j, c])`. The
//! inputs before the sequence come from the state, which then holds the last `width - 1` inputs of this call.

use candle_gdn_core::cpu::simd::{dispatch, silu};
use candle_gdn_core::cpu::{parallel, Element, Heads, Sequences, Shared, Slots};
use pulp::{Simd, WithSimd};

/// Tokens and channels of one task.
const TOKEN_TILE: usize = 32;
const CHANNEL_TILE: usize = 512;

/// Everything but the output and the state. `x` has one head of `channels`.
pub struct Conv<'a, T, W> {
    pub x: Heads<'a, T>,
    /// `[channels, width]`, contiguous.
    pub weight: &'a [W],
    pub channels: usize,
    pub width: usize,
    pub seqs: Sequences<'a>,
    pub slots: Slots<'a>,
    /// The longest sequence.
    pub max_tokens: usize,
    pub silu: bool,
}

impl<T: Element, W: Element> Conv<'_, T, W> {
    /// Writes y, contiguous `[tokens, channels]`, and updates `state`, `[slot, width - 1, channels]` with contiguous
    /// slots.
    pub fn run(&self, out: &mut [T], state: &mut [T]) {
        let token_tiles = self.max_tokens.div_ceil(TOKEN_TILE);
        let channel_tiles = self.channels.div_ceil(CHANNEL_TILE);
        let per_seq = token_tiles * channel_tiles;
        let out = Shared::new(out);
        let work = 4 * self.max_tokens.min(TOKEN_TILE) * self.channels.min(CHANNEL_TILE);
        parallel(self.seqs.count * per_seq, work, |task| {
            let n = task / per_seq;
            let first = task % per_seq / channel_tiles * TOKEN_TILE;
            let channel = task % channel_tiles * CHANNEL_TILE;
            let tokens = self.seqs.range(n).1.saturating_sub(first).min(TOKEN_TILE);
            let channels = CHANNEL_TILE.min(self.channels - channel);
            let tile = Tile { conv: self, n, first, tokens, channel, channels, state, out: &out };
            of_width!(self.width, tile);
        });
        // Only after every task has read the old inputs.
        for n in 0..self.seqs.count {
            if let Some(offsets) = self.slots.offsets(n) {
                self.shift(n, offsets, state);
            }
        }
    }

    /// The last `width - 1` inputs of the state at `src` and the new tokens together, to the state at `dst`.
    fn shift(&self, n: usize, (src, dst): (usize, usize), state: &mut [T]) {
        let (first, tokens) = self.seqs.range(n);
        let (history, channels) = (self.width - 1, self.channels);
        let kept = history.saturating_sub(tokens);
        state.copy_within(src + (history - kept) * channels..src + history * channels, dst);
        for i in kept..history {
            let row = self.x.row(n, first + tokens + i - history, 0, channels);
            state[dst + i * channels..][..channels].copy_from_slice(row);
        }
    }
}

struct Tile<'a, 'b, T, W> {
    conv: &'a Conv<'b, T, W>,
    n: usize,
    first: usize,
    tokens: usize,
    channel: usize,
    channels: usize,
    state: &'a [T],
    out: &'a Shared<'a, T>,
}

/// A tile of a convolution whose width the compiler knows, so that the loop over the weights vectorises.
pub struct OfWidth<const WIDTH: usize, X>(pub X);

/// Runs a tile of this width.
macro_rules! of_width {
    ($width:expr, $tile:expr) => {
        match $width {
            2 => dispatch(OfWidth::<2, _>($tile)),
            3 => dispatch(OfWidth::<3, _>($tile)),
            4 => dispatch(OfWidth::<4, _>($tile)),
            5 => dispatch(OfWidth::<5, _>($tile)),
            6 => dispatch(OfWidth::<6, _>($tile)),
            7 => dispatch(OfWidth::<7, _>($tile)),
            8 => dispatch(OfWidth::<8, _>($tile)),
            width => unreachable!("a width of {width} was let in"),
        }
    };
}
pub(super) use of_width;

impl<const WIDTH: usize, T: Element, W: Element> WithSimd for OfWidth<WIDTH, Tile<'_, '_, T, W>> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Tile { conv, n, first, tokens, channel, channels, state, out } = self.0;
        let (seq_first, _) = conv.seqs.range(n);
        let out_first = conv.seqs.out_token(n);
        let slot = conv.slots.offsets(n).map(|(read, _)| read);

        // Weights by tap, so that the inner loop runs over channels.
        let mut taps = [[0f32; CHANNEL_TILE]; WIDTH];
        let (weights, _) = conv.weight[channel * WIDTH..][..channels * WIDTH].as_chunks::<WIDTH>();
        for (j, taps) in taps.iter_mut().enumerate() {
            taps.iter_mut().zip(weights).for_each(|(tap, w)| *tap = w[j].to_f32());
        }
        let mut sums = [0f32; CHANNEL_TILE];
        for t in first..first + tokens {
            // SAFETY: a token's channels belong to one task.
            let dst = unsafe { out.part((out_first + t) * conv.channels + channel, channels) };
            let Some(slot) = slot else {
                dst.fill(T::ZERO);
                continue;
            };
            let sums = &mut sums[..channels];
            sums.fill(0.0);
            for (j, taps) in taps.iter().enumerate() {
                // Input t - (WIDTH - 1) + j; before the sequence it lies in the state.
                let x = match (t + j).checked_sub(WIDTH - 1) {
                    Some(token) => &conv.x.row(n, seq_first + token, 0, conv.channels)[channel..][..channels],
                    None => &state[slot + (t + j) * conv.channels + channel..][..channels],
                };
                let taps = &taps[..channels];
                sums.iter_mut().zip(x).zip(taps).for_each(|((s, x), w)| *s += x.to_f32() * w);
            }
            if conv.silu {
                dst.iter_mut().zip(&*sums).for_each(|(dst, &s)| *dst = T::from_f32(silu(s)));
            } else {
                dst.iter_mut().zip(&*sums).for_each(|(dst, &s)| *dst = T::from_f32(s));
            }
        }
    }
}
