//! The kernels of a speculative step against the same in Rust, word for word.

use super::cuda::{speculate, Sizes};
use super::speculative_buffers::WORDS;
use crate::abi::sampling::{SamplingRow, ROW_WORDS};
use crate::abi::speculate::{gdn_speculate_begin, gdn_speculate_end};
use crate::sampling::rows::Rows;
use crate::sampling::Choice;
use crate::SplitMix64;
use candle_core::{Device, Result, Tensor};

/// What `gdn_speculate_params` points to, of all sequences.
struct Reference<'a> {
    pub tokens: usize,
    pub history: usize,
    pub ids: &'a mut [u32],
    pub rows: &'a mut [SamplingRow],
    pub chosen: &'a mut [u32],
    pub drawn: &'a mut [u32],
    pub recent: &'a mut [u32],
    pub accepted: &'a mut [u32],
    pub last: &'a mut [u32],
    pub positions: &'a mut [u32],
    pub head_len: &'a mut [u32],
    pub head_end: &'a mut [u32],
    pub out: &'a mut [u32],
    pub forced: Option<f32>,
}

impl Reference<'_> {
    /// `gdn_speculate_begin`
    pub fn begin(&mut self) {
        for n in 0..self.accepted.len() {
            let first = n * self.tokens;
            let from = first + self.accepted[n] as usize - 1;
            let row = self.rows[from];
            let penalised = row.scale >= 0. && row.window > 0;
            let known = if penalised { row.seen.min(row.window) as usize } else { 0 };
            let recent = self.recent[from * self.history..][..known].to_vec();
            for i in 0..self.tokens {
                let own = &mut self.rows[first + i];
                *own = row;
                if row.scale > 0. {
                    own.index += i as u64;
                }
                if penalised {
                    own.seen += i as u32;
                    let to = &mut self.recent[(first + i) * self.history..][..self.history];
                    to[..known].copy_from_slice(&recent);
                    for (j, id) in self.ids[first..first + i].iter().enumerate() {
                        to[(row.seen as usize + j) % row.window as usize] = *id;
                    }
                }
                self.chosen[first + i] = self.ids[first + i];
            }
        }
    }

    /// `gdn_speculate_end`
    pub fn end(&mut self) {
        for n in 0..self.accepted.len() {
            let first = n * self.tokens;
            if self.rows[first].scale < 0. {
                continue;
            }
            let mut count = 1;
            while count < self.tokens {
                let at = first + count;
                if let Some(forced) = self.forced {
                    if chance(n as u32, self.positions[n].wrapping_add(count as u32)) >= forced {
                        break;
                    }
                    (self.drawn[at - 1], self.chosen[at - 1]) = (self.ids[at], self.ids[at]);
                } else if self.drawn[at - 1] != self.ids[at] {
                    break;
                }
                count += 1;
            }
            let out = &mut self.out[n * (1 + self.tokens)..][..1 + self.tokens];
            out[0] = count as u32;
            out[1..].copy_from_slice(&self.drawn[first..first + self.tokens]);
            self.head_len[n] += self.accepted[n];
            self.head_end[n] = self.head_len[n] + count as u32;
            self.positions[n] += count as u32;
            self.accepted[n] = count as u32;
            self.last[n] = (first + count - 1) as u32;
            self.ids[first] = self.chosen[first + count - 1];
        }
    }
}

/// In [0, 1), the same for the same token of the same row.
fn chance(sequence: u32, position: u32) -> f32 {
    let mut x = position.wrapping_mul(0x9e37_79b1) ^ sequence.wrapping_add(1).wrapping_mul(0x85eb_ca77);
    x = (x ^ x >> 16).wrapping_mul(0x7feb_352d);
    x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
    ((x ^ x >> 16) >> 8) as f32 / (1 << 24) as f32
}

/// Applies one half of the bookkeeping to words on the CPU.
fn reference(
    words: &Tensor,
    rows: &Rows,
    Sizes { sequences, tokens, history }: Sizes,
    forced: Option<f32>,
    change: impl FnOnce(Reference<'_>),
) -> Result<()> {
    let (mut all, count) = (words.to_vec1::<u32>()?, rows.count);
    let mut state = rows.words.to_vec1::<u32>()?;
    let mut decoded: Vec<SamplingRow> =
        state[..count * ROW_WORDS].as_chunks().0.iter().map(SamplingRow::from_words).collect();
    let (chosen, rest) = state[count * ROW_WORDS..].split_at_mut(count);
    let (drawn, rest) = rest.split_at_mut(count);
    let (columns, step) = all.split_at_mut(WORDS * sequences);
    let (ids, out) = step.split_at_mut(sequences * tokens);
    let mut columns = columns.chunks_exact_mut(sequences);
    let mut next = || columns.next().unwrap_or_default();
    change(Reference {
        tokens,
        history,
        accepted: next(),
        last: next(),
        positions: next(),
        head_len: next(),
        head_end: next(),
        ids,
        out,
        rows: &mut decoded,
        chosen,
        drawn,
        recent: &mut rest[..count * history],
        forced,
    });
    let encoded: Vec<u32> = decoded.iter().flat_map(SamplingRow::words).collect();
    state[..count * ROW_WORDS].copy_from_slice(&encoded);
    words.slice_set(&Tensor::new(all, words.device())?, 0, 0)?;
    rows.words.slice_set(&Tensor::new(state, words.device())?, 0, 0)
}

#[test]
fn chances_are_even() {
    for sequence in [0, 1, 31] {
        let below = |p: f32| (0..10_000).filter(|position| chance(sequence, *position) < p).count() as f32 / 1e4;
        for p in [0.5, 0.65, 0.8] {
            assert!((below(p) - p).abs() < 0.015, "{sequence}: {} of {p}", below(p));
        }
        let both = (0..10_000).filter(|at| chance(sequence, *at) < 0.5 && chance(sequence, at + 1) < 0.5).count();
        assert!((2300..2700).contains(&both), "{sequence}: {both}");
    }
    assert_eq!((0..10_000).filter(|at| chance(3, *at) >= 1.).count(), 0);
}

/// The kernels write the same words, for steps of every kind.
#[test]
fn speculative_steps_are_the_same_in_rust() -> Result<()> {
    let Some(device) = candle_gdn_core::device::cuda::testing::device() else { return Ok(()) };
    let mut rng = SplitMix64::new(17);
    let mut below = |n: usize| (rng.next() % n as u64) as usize;
    for case in 0..40 {
        let (batch, tokens, history) = (1 + below(300), 1 + below(8), 1 + below(40));
        let forced = [None, None, Some(0.), Some(0.5), Some(1.)][below(5)];
        let sizes = Sizes { sequences: batch, tokens, history };
        let devices = [&Device::Cpu, &device];
        let rows = devices.map(|device| Rows::new(batch * tokens, history, None, device));
        let [here, there] = rows;
        let (here, there) = (here?, there?);
        let mut choices = vec![];
        let mut words = vec![0u32; batch * (WORDS + 2 * tokens + 1)];
        for n in 0..batch {
            let (padding, accepted) = (below(6) == 0, 1 + below(tokens));
            let window = [0, 1 + below(history)][below(2)] as u32;
            let row = SamplingRow {
                scale: [0., 1.5][below(2)],
                seed: n as u64,
                index: below(100) as u64,
                top_k: 7,
                penalty: 1.25,
                window,
                seen: below(60) as u32,
                ..SamplingRow::GREEDY
            };
            let recent = (0..history).map(|_| below(50) as u32).collect();
            let own = Choice { row, last: below(50) as u32, recent };
            for i in 0..tokens {
                let here = i + 1 == accepted && !padding;
                choices.push(if here { own.clone() } else { Choice::padding(below(50) as u32) });
            }
            for (i, value) in [accepted, n * tokens + accepted - 1, below(99), below(99), below(99)].iter().enumerate()
            {
                words[i * batch + n] = *value as u32;
            }
            // Of few ids, so that drafts are often what was drawn.
            (0..tokens).for_each(|i| words[WORDS * batch + n * tokens + i] = below(2) as u32);
        }
        here.load(&choices)?;
        there.load(&choices)?;
        let both = devices.map(|device| Tensor::new(&words[..], device));
        let [words, on_device] = both;
        let (words, on_device) = (words?, on_device?);
        for again in 0..3 {
            reference(&words, &here, sizes, forced, |mut step| step.begin())?;
            speculate(gdn_speculate_begin, &on_device, &there.words, sizes, forced)?;
            let drawn: Vec<u32> = (0..batch * tokens).map(|_| below(2) as u32).collect();
            for rows in [&here, &there] {
                // As gdn_sampling leaves them.
                let drawn = Tensor::new(&drawn[..], rows.words.device())?;
                rows.words.slice_set(&drawn, 0, batch * tokens * ROW_WORDS)?;
                rows.words.slice_set(&drawn, 0, batch * tokens * (ROW_WORDS + 1))?;
            }
            reference(&words, &here, sizes, forced, |mut step| step.end())?;
            speculate(gdn_speculate_end, &on_device, &there.words, sizes, forced)?;
            let what = format!("case {case}, {again}: {batch} of {tokens}, {history}, {forced:?}");
            assert_eq!(on_device.to_vec1::<u32>()?, words.to_vec1::<u32>()?, "{what}");
            assert_eq!(there.words.to_vec1::<u32>()?, here.words.to_vec1::<u32>()?, "{what}");
        }
    }
    Ok(())
}
