//! Before and after the tokens of a round are drawn, as `models/cuda/round` does it.

use crate::abi::sampling::SamplingRow;

/// What `gdn_round_params` points to, of all sequences.
pub(crate) struct Round<'a> {
    pub tokens: usize,
    pub history: usize,
    pub ids: &'a mut [u32],
    pub rows: &'a mut [SamplingRow],
    pub chosen: &'a mut [u32],
    pub drawn: &'a mut [u32],
    pub recent: &'a mut [u32],
    pub stayed: &'a mut [u32],
    pub last: &'a mut [u32],
    pub positions: &'a mut [u32],
    pub head: &'a mut [u32],
    pub behind: &'a mut [u32],
    pub out: &'a mut [u32],
    pub forced: f32,
}

impl Round<'_> {
    /// `gdn_round_begin`
    pub fn begin(&mut self) {
        for n in 0..self.stayed.len() {
            let first = n * self.tokens;
            let from = first + self.stayed[n] as usize - 1;
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

    /// `gdn_round_end`
    pub fn end(&mut self) {
        for n in 0..self.stayed.len() {
            let first = n * self.tokens;
            if self.rows[first].scale < 0. {
                continue;
            }
            let mut stays = 1;
            while stays < self.tokens {
                let at = first + stays;
                if self.forced >= 0. {
                    if chance(n as u32, self.positions[n].wrapping_add(stays as u32)) >= self.forced {
                        break;
                    }
                    (self.drawn[at - 1], self.chosen[at - 1]) = (self.ids[at], self.ids[at]);
                } else if self.drawn[at - 1] != self.ids[at] {
                    break;
                }
                stays += 1;
            }
            let out = &mut self.out[n * (1 + self.tokens)..][..1 + self.tokens];
            out[0] = stays as u32;
            out[1..].copy_from_slice(&self.drawn[first..first + self.tokens]);
            self.head[n] += self.stayed[n];
            self.behind[n] = self.head[n] + stays as u32;
            self.positions[n] += stays as u32;
            self.stayed[n] = stays as u32;
            self.last[n] = (first + stays - 1) as u32;
            self.ids[first] = self.chosen[first + stays - 1];
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
