//! Softmax attention over caches `[slot, kv_head, position, dim]` whose sequences have lengths of their own: what
//! `cuda/attention` does, to the letter, and the reference for it. Models on the CPU run [`crate::cpu::attention`].

use super::attention::mark_unfinite;
use super::rms_norm::norm_row;
use candle_gdn::plumbing::cpu::{parallel, Element, Heads, Sequences, Shared, Slots};

/// Where a row of a cache lies after the first of its slot, in elements.
#[derive(Clone, Copy)]
pub(crate) struct CacheRows {
    pub head_stride: usize,
    pub token_stride: usize,
    /// Positions of a slot.
    pub capacity: usize,
}

/// Sequences, their slots, and how many tokens each has in the cache before the call.
#[derive(Clone, Copy)]
pub(crate) struct Cached<'a> {
    pub seqs: Sequences<'a>,
    pub slots: Slots<'a>,
    pub positions: &'a [u32],
    pub rows: CacheRows,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
}

impl Cached<'_> {
    /// Position 0 of a head of sequence `n`, or `None` where that is padding.
    fn head(&self, n: usize, head: usize) -> Option<usize> {
        let (slot, _) = self.slots.offsets(n)?;
        Some(slot + head * self.rows.head_stride)
    }

    /// Sequence and number in it of every token, in the order of a contiguous output.
    fn tokens(&self) -> Vec<(usize, usize)> {
        (0..self.seqs.count).flat_map(|n| (0..self.seqs.range(n).1).map(move |t| (n, t))).collect()
    }
}

/// Norm and rotary position of queries and keys; keys and values go to the caches.
pub(crate) struct Prepare<'a, T> {
    pub cached: Cached<'a>,
    pub q: Heads<'a, T>,
    pub k: Heads<'a, T>,
    pub v: Heads<'a, T>,
    /// What multiplies the normalised rows, `[dim]`.
    pub q_scale: &'a [f32],
    pub k_scale: &'a [f32],
    pub eps: f32,
    /// Radians a position of value `i` and value `i + inv_freq.len()`.
    pub inv_freq: &'a [f64],
}

impl<T: Element> Prepare<'_, T> {
    /// Writes `out`, contiguous `[tokens, heads, dim]`: the queries.
    pub fn run(&self, keys: &mut [T], values: &mut [T], out: &mut [T]) {
        let Cached { seqs, positions, rows, heads, kv_heads, dim, .. } = self.cached;
        let tokens = self.cached.tokens();
        let (keys, values, out) = (Shared::new(keys), Shared::new(values), Shared::new(out));
        parallel(tokens.len(), (heads + 2 * kv_heads) * 8 * dim, |task| {
            let (n, t) = tokens[task];
            let (token, position) = (seqs.range(n).0 + t, positions[n] as usize + t);
            let angles: Vec<(f32, f32)> = self.inv_freq.iter().map(|f| angle(position, *f)).collect();
            let mut row = vec![0f32; dim];
            for h in 0..heads {
                // SAFETY: each token has one task, and its row of the output.
                let to = unsafe { out.part((task * heads + h) * dim, dim) };
                match self.cached.head(n, 0) {
                    Some(_) => {
                        self.place(self.q.row(n, token, h, dim), self.q_scale, &angles, &mut row);
                        round(&row, to);
                    }
                    None => to.fill(T::ZERO),
                }
            }
            for h in 0..kv_heads {
                let Some(head) = self.cached.head(n, h).filter(|_| position < rows.capacity) else { continue };
                let at = head + position * rows.token_stride;
                // SAFETY: slots are distinct, so that each token has its own rows of the caches.
                let (key, value) = unsafe { (keys.part(at, dim), values.part(at, dim)) };
                self.place(self.k.row(n, token, h, dim), self.k_scale, &angles, &mut row);
                round(&row, key);
                value.copy_from_slice(self.v.row(n, token, h, dim));
                mark_unfinite(key, value);
            }
        });
    }

    /// Norm of a row, then its rotation.
    fn place(&self, from: &[T], scale: &[f32], angles: &[(f32, f32)], to: &mut [f32]) {
        let x: Vec<f32> = from.iter().map(|x| x.to_f32()).collect();
        norm_row(&x, scale, self.eps, to);
        let (first, rest) = to.split_at_mut(angles.len());
        for ((a, b), (cos, sin)) in first.iter_mut().zip(rest).zip(angles) {
            (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
        }
    }
}

/// cos and sin in f64: at position 200,000 an angle in f32 is wrong in its second decimal.
fn angle(position: usize, inv_freq: f64) -> (f32, f32) {
    let (sin, cos) = (position as f64 * inv_freq).sin_cos();
    (cos as f32, sin as f32)
}

fn round<T: Element>(from: &[f32], to: &mut [T]) {
    to.iter_mut().zip(from).for_each(|(to, &x)| *to = T::from_f32(x));
}

/// Attention of the new tokens, which are in the caches already.
pub(crate) struct Decode<'a, T> {
    pub cached: Cached<'a>,
    pub q: Heads<'a, T>,
    pub gate: Option<Heads<'a, T>>,
    pub keys: &'a [T],
    pub values: &'a [T],
    pub scale: f32,
}

impl<T: Element> Decode<'_, T> {
    /// Writes `out`, contiguous `[tokens, heads, dim]`.
    pub fn run(&self, out: &mut [T]) {
        let Cached { seqs, positions, rows, heads, kv_heads, dim, .. } = self.cached;
        let tokens = self.cached.tokens();
        let longest = positions.iter().map(|&p| p as usize).max().unwrap_or(0).min(rows.capacity) + 1;
        let out = Shared::new(out);
        parallel(tokens.len() * heads, 4 * longest * dim, |task| {
            let ((n, t), h) = (tokens[task / heads], task % heads);
            // SAFETY: each task owns its row.
            let to = unsafe { out.part(task * dim, dim) };
            let Some(head) = self.cached.head(n, h / (heads / kv_heads)) else { return to.fill(T::ZERO) };
            let (token, seen) = (seqs.range(n).0 + t, (positions[n] as usize + t + 1).min(rows.capacity));
            let q: Vec<f32> = self.q.row(n, token, h, dim).iter().map(|x| x.to_f32()).collect();
            let row = |j: usize| head + j * rows.token_stride..head + j * rows.token_stride + dim;
            let mut weights: Vec<f32> = (0..seen).map(|j| self.scale * dot(&q, &self.keys[row(j)])).collect();
            let largest = weights.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
            let mut o = vec![0f32; dim];
            let mut total = 0f32;
            for (j, weight) in weights.iter_mut().enumerate() {
                *weight = (*weight - largest).exp();
                total += *weight;
                let value = &self.values[row(j)];
                o.iter_mut().zip(value).for_each(|(o, v)| *o += *weight * v.to_f32());
            }
            let gate = self.gate.map(|gate| gate.row(n, token, h, dim));
            for (i, o) in o.iter_mut().enumerate() {
                let open = gate.map_or(1.0, |gate| 1.0 / (1.0 + (-gate[i].to_f32()).exp()));
                *o = if total == 0.0 { 0.0 } else { *o / total * open };
            }
            round(&o, to);
        });
    }
}

/// In eight parts, so that the loop vectorises.
fn dot<T: Element>(x: &[f32], y: &[T]) -> f32 {
    let mut parts = [0f32; 8];
    for (x, y) in x.chunks(8).zip(y.chunks(8)) {
        for (part, (x, y)) in parts.iter_mut().zip(x.iter().zip(y)) {
            *part += x * y.to_f32();
        }
    }
    parts.iter().sum()
}
