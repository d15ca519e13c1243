//! Some queries of a key head over a range of keys.

use super::{Attention, Cache, BLOCK};
use candle_gdn_core::cpu::matmul::{add_products, load_row, store_row, PANEL};
use candle_gdn_core::cpu::simd::{exp, sigmoid};
use candle_gdn_core::cpu::{Element, Shared};
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// The queries of one key head in a range of the call's tokens, over a range of the keys.
pub(super) struct Queries<'a, 'b, T> {
    pub attention: &'a Attention<'b>,
    pub cache: &'a Cache<T>,
    /// Key head.
    pub head: usize,
    pub tokens: Range<usize>,
    pub keys: Range<usize>,
}

impl<T: Element> Queries<'_, '_, T> {
    fn group(&self) -> usize {
        self.cache.shape.heads / self.cache.shape.kv_heads
    }

    fn count(&self) -> usize {
        self.tokens.len() * self.group()
    }

    /// Token and, over all tokens of the call, head of query `i`.
    fn place(&self, i: usize) -> (usize, usize) {
        let t = self.tokens.start + i / self.group();
        (t, t * self.cache.shape.heads + self.head * self.group() + i % self.group())
    }

    /// The end of the keys that query `i` sees: after its own.
    fn seen(&self, i: usize) -> usize {
        self.cache.len - self.attention.tokens + self.place(i).0 + 1
    }

    /// The first key that query `i` sees.
    fn first_seen(&self, i: usize) -> usize {
        self.cache.first_seen(self.seen(i) - 1)
    }

    /// Writes query `i`, divided by `total` and gated.
    #[inline(always)]
    fn store(&self, i: usize, o: &[f32], total: f32, out: &Shared<'_, f32>) {
        let (dim, (_, head)) = (self.cache.shape.dim, self.place(i));
        let factor = 1.0 / total;
        // SAFETY: each query has one task.
        let out = unsafe { out.part(head * dim, dim) };
        if !self.attention.gated {
            return out.iter_mut().zip(o).for_each(|(out, o)| *out = o * factor);
        }
        let gate = &self.attention.q_gate[(2 * head + 1) * dim..][..dim];
        out.iter_mut().zip(o).zip(gate).for_each(|((out, o), g)| *out = o * factor * sigmoid(*g));
    }
}

/// Where the outputs of a task go.
pub(super) enum Destination<'a, 'b> {
    /// All keys are in the task's range: its outputs are divided, gated and final.
    Final(&'a Shared<'b, f32>),
    /// `[queries, dim + 2]`: the weighted sum, the maximum and the total of the weights.
    Partial(&'a mut [f32]),
}

pub(super) struct QueriesTask<'a, 'b, 'c, T> {
    pub queries: Queries<'a, 'b, T>,
    pub out: Destination<'a, 'c>,
}

/// What a task works on: all `[queries, ..]`.
struct Workspace {
    q: Vec<f32>,
    scores: Vec<f32>,
    o: Vec<f32>,
    /// Largest score and sum of the weights relative to it.
    running: Vec<(f32, f32)>,
}

impl<T: Element> WithSimd for QueriesTask<'_, '_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match S::F32_LANES {
            16 => self.run::<S, 12, 2>(simd),
            8 => self.run::<S, 6, 2>(simd),
            4 => self.run::<S, 6, 4>(simd),
            _ => self.run::<S, 4, 4>(simd),
        }
    }
}

impl<T: Element> QueriesTask<'_, '_, '_, T> {
    #[inline(always)]
    fn run<S: Simd, const M: usize, const N: usize>(self, simd: S) {
        let Self { queries, out } = self;
        let (count, dim, padded) = (queries.count(), queries.cache.shape.dim, queries.cache.padded_dim());
        let mut ws = Workspace {
            q: vec![0.0; count * dim],
            scores: vec![0.0; count * BLOCK],
            o: vec![0.0; count * padded],
            running: vec![(f32::NEG_INFINITY, 0.0); count],
        };
        let (attention, scale) = (queries.attention, (dim as f32).powf(-0.5));
        for (i, q) in ws.q.chunks_exact_mut(dim).enumerate() {
            let (t, head) = queries.place(i);
            let columns = if attention.gated { 2 * dim } else { dim };
            attention.positions.apply(&attention.q_gate[head * columns..][..dim], 0, t, q);
            q.iter_mut().for_each(|q| *q *= scale);
        }
        let (capacity, end) = (queries.cache.capacity, queries.keys.end.min(queries.seen(count - 1)));
        let mut start = queries.keys.start.max(queries.first_seen(0) / PANEL * PANEL);
        while start < end {
            // Whole panels, none past the end of a ring.
            let keys = start..end.min(start + BLOCK).min((start / capacity + 1) * capacity);
            start = keys.end;
            let mut i = 0;
            while count - i >= M {
                tile::<S, T, M, N, 1>(simd, &queries, &mut ws, i, keys.clone());
                i += M;
            }
            while count - i >= 3 {
                tile::<S, T, 3, N, 1>(simd, &queries, &mut ws, i, keys.clone());
                i += 3;
            }
            match count - i {
                2 => tile::<S, T, 2, N, 2>(simd, &queries, &mut ws, i, keys),
                1 => tile::<S, T, 1, N, 4>(simd, &queries, &mut ws, i, keys),
                _ => {}
            }
        }
        match out {
            Destination::Final(out) => {
                for (i, (o, (_, total))) in ws.o.chunks_exact(padded).zip(&ws.running).enumerate() {
                    queries.store(i, &o[..dim], *total, out);
                }
            }
            Destination::Partial(out) => {
                let rows = out.chunks_exact_mut(dim + 2).zip(ws.o.chunks_exact(padded));
                for ((out, o), (max, total)) in rows.zip(&ws.running) {
                    out[..dim].copy_from_slice(&o[..dim]);
                    (out[dim], out[dim + 1]) = (*max, *total);
                }
            }
        }
    }
}

/// `M` queries from `i` on, over a block of keys that the last of them sees to its end or beyond.
#[inline(always)]
fn tile<S: Simd, T: Element, const M: usize, const N: usize, const U: usize>(
    simd: S,
    queries: &Queries<'_, '_, T>,
    ws: &mut Workspace,
    i: usize,
    keys: Range<usize>,
) {
    let (dim, padded) = (queries.cache.shape.dim, queries.cache.padded_dim());
    let (key_panels, values) = queries.cache.head(queries.head);
    let keys = keys.start..keys.end.min(queries.seen(i + M - 1));
    if keys.is_empty() || keys.end <= queries.first_seen(i) {
        return;
    }
    let row = keys.start % queries.cache.capacity;
    let zero = [[simd.splat_f32s(0.0); N]; M];
    let lanes = N * S::F32_LANES;

    let mut q = [&[][..]; M];
    for (m, q) in q.iter_mut().enumerate() {
        *q = &ws.q[(i + m) * dim..][..dim];
    }
    let scores = &mut ws.scores[i * BLOCK..(i + M) * BLOCK];
    for column in (0..keys.len()).step_by(lanes) {
        let token = row + column;
        let panel = &key_panels[token / PANEL * PANEL * dim..][..PANEL * dim];
        let mut sums = zero;
        add_products::<S, T, M, N, U>(simd, q, panel, (PANEL, token % PANEL), &mut sums);
        for (m, sums) in sums.iter().enumerate() {
            store_row::<S, N>(&mut scores[m * BLOCK + column..][..lanes], sums);
        }
    }
    for m in 0..M {
        let (max, total) = &mut ws.running[i + m];
        let scores = &mut scores[m * BLOCK..][..keys.len()];
        let column = |key: usize| key.saturating_sub(keys.start).min(keys.len());
        let (scores, later) = scores.split_at_mut(column(queries.seen(i + m)));
        let (earlier, scores) = scores.split_at_mut(column(queries.first_seen(i + m)));
        earlier.fill(0.0);
        later.fill(0.0);
        if scores.is_empty() {
            continue;
        }
        let new = largest(scores).max(*max);
        let kept = exp(*max - new);
        let sum = weigh(scores, new);
        (*max, *total) = (new, *total * kept + sum);
        if kept != 1.0 {
            ws.o[(i + m) * padded..][..padded].iter_mut().for_each(|o| *o *= kept);
        }
    }
    let mut p = [&[][..]; M];
    for (m, p) in p.iter_mut().enumerate() {
        *p = &scores[m * BLOCK..][..keys.len()];
    }
    let values = &values[row * padded..][..keys.len() * padded];
    for column in (0..padded).step_by(lanes) {
        let mut sums = zero;
        for (m, sums) in sums.iter_mut().enumerate() {
            *sums = load_row::<S, N>(simd, &ws.o[(i + m) * padded + column..][..lanes]);
        }
        add_products::<S, T, M, N, U>(simd, p, values, (padded, column), &mut sums);
        for (m, sums) in sums.iter().enumerate() {
            store_row::<S, N>(&mut ws.o[(i + m) * padded + column..][..lanes], sums);
        }
    }
}

/// In sixteen parts, so that the loop vectorises.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    let greater = |a: f32, b: f32| if b > a { b } else { a };
    let mut parts = [f32::NEG_INFINITY; 16];
    let (blocks, tail) = x.as_chunks::<16>();
    for block in blocks {
        parts.iter_mut().zip(block).for_each(|(p, &x)| *p = greater(*p, x));
    }
    parts.iter().chain(tail).fold(f32::NEG_INFINITY, |a, &b| greater(a, b))
}

/// `x <- e^(x - max)`; the sum of it.
#[inline(always)]
fn weigh(x: &mut [f32], max: f32) -> f32 {
    let mut parts = [0f32; 16];
    let (blocks, tail) = x.as_chunks_mut::<16>();
    for block in blocks {
        for (p, x) in parts.iter_mut().zip(block) {
            *x = exp(*x - max);
            *p += *x;
        }
    }
    let mut sum = parts.iter().sum::<f32>();
    for x in tail {
        *x = exp(*x - max);
        sum += *x;
    }
    sum
}

/// Puts the parts of a context together.
pub(super) struct Merge<'a, 'b, 'c, T> {
    pub queries: Queries<'a, 'b, T>,
    /// `[splits, queries, dim + 2]`
    pub parts: &'a [f32],
    pub splits: usize,
    pub out: &'a Shared<'c, f32>,
}

impl<T: Element> WithSimd for Merge<'_, '_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self { queries, parts, splits, out } = self;
        let dim = queries.cache.shape.dim;
        let size = parts.len() / splits;
        let mut o = vec![0f32; dim];
        for i in 0..queries.count() {
            let parts = || parts.chunks_exact(size).map(|part| part[i * (dim + 2)..][..dim + 2].split_at(dim));
            let max = parts().fold(f32::NEG_INFINITY, |max, (_, end)| max.max(end[0]));
            let mut total = 0.0;
            o.fill(0.0);
            for (part, end) in parts() {
                let factor = exp(end[0] - max);
                total += factor * end[1];
                o.iter_mut().zip(part).for_each(|(o, x)| *o += factor * x);
            }
            queries.store(i, &o, total, out);
        }
    }
}
