//! Causal softmax attention over a cache, with norms and rotary positions on queries and keys and a gate on the output.
//!
//! Keys and values are taken a block at a time with a running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867), so
//! that memory does not grow with the context. The cache holds the keys in panels of [`PANEL`] tokens, `[token / PANEL, dim,
//! PANEL]`: scores and outputs are then both products that add whole vectors, as in [`candle_gdn::plumbing::cpu::matmul`].

use crate::cpu::rms_norm::norm_row;
use candle_gdn::plumbing::cpu::matmul::{add_products, load_row, store_row, PANEL};
use candle_gdn::plumbing::cpu::simd::{dispatch, exp, sigmoid};
use candle_gdn::plumbing::cpu::{parallel, Element, Shared};
use pulp::{Simd, WithSimd};
use std::ops::Range;

mod rows;

/// Keys of a block: a multiple of [`PANEL`].
const BLOCK: usize = 128;
/// Queries (tokens times the heads of a key head) of one task, if there are that many.
const QUERIES: usize = 48;
/// With few queries, a task takes no more keys than this: a multiple of [`BLOCK`].
const SPLIT: usize = 1024;

/// Head counts and size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub batch: usize,
    pub heads: usize,
    /// Divides `heads`.
    pub kv_heads: usize,
    pub dim: usize,
}

/// Keys and values of the tokens so far, all sequences of one length.
#[derive(Debug)]
pub(crate) struct Cache<T> {
    /// `[batch, kv_heads, capacity / PANEL, dim, PANEL]`
    keys: Vec<T>,
    /// `[batch, kv_heads, capacity, padded dim]`
    values: Vec<T>,
    /// A multiple of [`PANEL`].
    capacity: usize,
    len: usize,
    shape: Shape,
}

impl<T: Element> Cache<T> {
    pub fn new(shape: Shape) -> Self {
        Self { keys: Vec::new(), values: Vec::new(), capacity: 0, len: 0, shape }
    }

    fn padded_dim(&self) -> usize {
        self.shape.dim.next_multiple_of(PANEL)
    }

    /// Makes room for `tokens` in all, at least by doubling but with no more than `max_tokens` in mind.
    fn reserve(&mut self, tokens: usize, max_tokens: usize) {
        const FIRST: usize = 256;
        if tokens <= self.capacity {
            return;
        }
        let capacity = tokens.next_power_of_two().max(FIRST).min(max_tokens.max(tokens)).next_multiple_of(PANEL);
        let heads = self.shape.batch * self.shape.kv_heads;
        let grow = |old: &[T], row: usize| {
            let mut new = vec![T::ZERO; heads * capacity * row];
            let used = self.len.next_multiple_of(PANEL) * row;
            for h in 0..heads {
                new[h * capacity * row..][..used].copy_from_slice(&old[h * self.capacity * row..][..used]);
            }
            new
        };
        (self.keys, self.values) = match self.len {
            0 => {
                (vec![T::ZERO; heads * capacity * self.shape.dim], vec![T::ZERO; heads * capacity * self.padded_dim()])
            }
            _ => (grow(&self.keys, self.shape.dim), grow(&self.values, self.padded_dim())),
        };
        self.capacity = capacity;
    }

    /// The keys and values of a head of a sequence.
    fn head(&self, index: usize) -> (&[T], &[T]) {
        let (keys, values) = (self.capacity * self.shape.dim, self.capacity * self.padded_dim());
        (&self.keys[index * keys..][..keys], &self.values[index * values..][..values])
    }
}

/// Norm and rotation of queries or keys.
#[derive(Clone, Copy)]
pub(crate) struct Positions<'a> {
    pub q_scale: &'a [f32],
    pub k_scale: &'a [f32],
    pub eps: f32,
    /// `[tokens, pairs]`: of value `i` and value `i + pairs` of each head.
    pub cos: &'a [f32],
    pub sin: &'a [f32],
    pub pairs: usize,
}

impl Positions<'_> {
    /// Norm of a head, then rotation to the position of the call's token `t`.
    #[inline(always)]
    fn apply(&self, x: &[f32], scale: &[f32], t: usize, to: &mut [f32]) {
        norm_row(x, scale, self.eps, to);
        let (cos, sin) = (&self.cos[t * self.pairs..][..self.pairs], &self.sin[t * self.pairs..][..self.pairs]);
        let (first, rest) = to.split_at_mut(self.pairs);
        for (((a, b), c), s) in first.iter_mut().zip(rest).zip(cos).zip(sin) {
            (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
        }
    }
}

/// The next tokens of every sequence.
pub(crate) struct Attention<'a> {
    /// `[batch * tokens, heads, q and gate]`
    pub q_gate: &'a [f32],
    /// `[batch * tokens, kv_heads, dim]`
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub positions: Positions<'a>,
    pub tokens: usize,
    pub max_tokens: usize,
}

/// Next tokens, the cache that they follow, and where their outputs go.
pub(crate) struct OnCache<'a, T> {
    pub attention: Attention<'a>,
    pub cache: &'a mut Cache<T>,
    pub out: &'a mut [f32],
}

/// How a call's work is shared out.
struct Plan<'a, T> {
    attention: &'a Attention<'a>,
    cache: &'a Cache<T>,
    out: Shared<'a, f32>,
    /// Tokens of a block of queries, and how many blocks there are.
    block: usize,
    blocks: usize,
    /// Keys of a part, and how many parts there are.
    split: usize,
    splits: usize,
    /// Tasks of the plans before.
    first: usize,
}

impl<'a, T: Element> Plan<'a, T> {
    fn new(attention: &'a Attention<'a>, cache: &'a Cache<T>, out: &'a mut [f32], first: usize) -> Self {
        let block = QUERIES.div_ceil(cache.shape.heads / cache.shape.kv_heads).min(attention.tokens).max(1);
        let blocks = attention.tokens.div_ceil(block);
        // A single block of queries would leave a long context to as many threads as there are key heads.
        let splits = if blocks == 1 { cache.len.div_ceil(SPLIT) } else { 1 };
        let split = if splits == 1 { cache.len } else { SPLIT };
        Self { attention, cache, out: Shared::new(out), block, blocks, split, splits, first }
    }

    fn tasks(&self) -> usize {
        self.cache.shape.batch * self.cache.shape.kv_heads * self.blocks * self.splits
    }

    /// Elementary steps of a task.
    fn work(&self) -> usize {
        let Shape { heads, kv_heads, dim, .. } = self.cache.shape;
        2 * self.block * (heads / kv_heads) * dim * self.split.min(self.cache.len - self.attention.tokens / 2)
    }

    /// Values of a partial output.
    fn partial(&self) -> usize {
        let Shape { heads, kv_heads, dim, .. } = self.cache.shape;
        self.block * (heads / kv_heads) * (dim + 2)
    }

    fn partials(&self) -> Vec<f32> {
        vec![0f32; if self.splits == 1 { 0 } else { self.tasks() * self.partial() }]
    }

    fn run(&self, task: usize, partials: &Shared<'_, f32>) {
        let (task, part) = (task / self.splits, task % self.splits);
        // The last queries see the most: they come first.
        let first = (self.blocks - 1 - task % self.blocks) * self.block;
        let head = task / self.blocks;
        let queries = Queries {
            attention: self.attention,
            cache: self.cache,
            head,
            tokens: first..self.attention.tokens.min(first + self.block),
            keys: part * self.split..self.cache.len.min((part + 1) * self.split),
        };
        let to = match self.splits {
            1 => To::Out(&self.out),
            // SAFETY: each task owns its part.
            _ => To::Partial(unsafe { partials.part((head * self.splits + part) * self.partial(), self.partial()) }),
        };
        dispatch(QueriesTask { queries, to });
    }

    fn merge(&self, partials: &[f32]) {
        if self.splits == 1 {
            return;
        }
        for (head, parts) in partials.chunks_exact(self.splits * self.partial()).enumerate() {
            let (tokens, keys) = (0..self.attention.tokens, 0..self.cache.len);
            let queries = Queries { attention: self.attention, cache: self.cache, head, tokens, keys };
            dispatch(Merge { queries, parts, splits: self.splits, out: &self.out });
        }
    }
}

/// Runs calls on caches of their own, their tasks shared out together: a batch of short ones wakes the threads once.
pub(crate) fn run_all<T: Element>(mut calls: Vec<OnCache<'_, T>>) {
    calls.retain(|call| call.attention.tokens * call.cache.shape.batch > 0);
    for OnCache { attention, cache, out } in &mut calls {
        attention.check(cache.shape, out);
        attention.append(cache);
    }
    let mut plans: Vec<Plan<'_, T>> = Vec::with_capacity(calls.len());
    for OnCache { attention, cache, out } in &mut calls {
        let first = plans.last().map_or(0, |plan| plan.first + plan.tasks());
        plans.push(Plan::new(attention, cache, out, first));
    }
    let Some(tasks) = plans.last().map(|plan| plan.first + plan.tasks()) else { return };
    let mut partials: Vec<Vec<f32>> = plans.iter().map(Plan::partials).collect();
    let shared: Vec<Shared<'_, f32>> = partials.iter_mut().map(|partials| Shared::new(partials)).collect();
    let work: usize = plans.iter().map(|plan| plan.tasks().saturating_mul(plan.work())).fold(0, usize::saturating_add);
    parallel(tasks, work / tasks, |task| {
        let n = plans.partition_point(|plan| plan.first <= task) - 1;
        plans[n].run(task - plans[n].first, &shared[n]);
    });
    drop(shared);
    plans.iter().zip(&partials).for_each(|(plan, partials)| plan.merge(partials));
}

impl Attention<'_> {
    /// Appends to the cache and writes `sigmoid(gate) * attention`, `[batch * tokens, heads, dim]`.
    #[cfg(test)]
    pub fn run<T: Element>(self, cache: &mut Cache<T>, out: &mut [f32]) {
        run_all(vec![OnCache { attention: self, cache, out }]);
    }

    fn check(&self, shape: Shape, out: &[f32]) {
        let Shape { batch, heads, kv_heads, dim } = shape;
        let rows = batch * self.tokens;
        assert_eq!(self.q_gate.len(), rows * heads * 2 * dim);
        assert_eq!((self.k.len(), self.v.len()), (rows * kv_heads * dim, rows * kv_heads * dim));
        assert_eq!(out.len(), rows * heads * dim);
    }

    fn append<T: Element>(&self, cache: &mut Cache<T>) {
        cache.reserve(cache.len + self.tokens, self.max_tokens);
        let Cache { capacity, len, shape: Shape { batch, kv_heads, dim, .. }, .. } = *cache;
        let padded = cache.padded_dim();
        let (keys, values) = (Shared::new(&mut cache.keys), Shared::new(&mut cache.values));
        // A panel of keys belongs to one task.
        let panels = len / PANEL..(len + self.tokens).div_ceil(PANEL);
        parallel(batch * kv_heads * panels.len(), 4 * self.tokens.min(PANEL) * dim, |task| {
            let (head, panel) = (task / panels.len(), panels.start + task % panels.len());
            let first = len.max(panel * PANEL);
            let tokens = first..(len + self.tokens).min((panel + 1) * PANEL);
            // SAFETY: each task owns its panel of keys and the rows of its values.
            let (keys, values) = unsafe {
                (
                    keys.part((head * capacity + panel * PANEL) * dim, PANEL * dim),
                    values.part((head * capacity + first) * padded, tokens.len() * padded),
                )
            };
            let new = tokens.start - len..tokens.end - len;
            dispatch(Append { attention: self, kv_heads, head, new, column: first % PANEL, keys, values, padded });
        });
        cache.len += self.tokens;
    }
}

struct Append<'a, 'b, T> {
    attention: &'a Attention<'b>,
    kv_heads: usize,
    /// Of all sequences.
    head: usize,
    /// Tokens of the call.
    new: Range<usize>,
    /// Of the first of them in the panel.
    column: usize,
    keys: &'a mut [T],
    values: &'a mut [T],
    padded: usize,
}

impl<T: Element> WithSimd for Append<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Attention { k, v, positions, tokens, .. } = self.attention;
        let dim = positions.k_scale.len();
        let mut key = vec![0f32; dim];
        for (i, t) in self.new.enumerate() {
            let row = ((self.head / self.kv_heads * tokens + t) * self.kv_heads + self.head % self.kv_heads) * dim;
            positions.apply(&k[row..][..dim], positions.k_scale, t, &mut key);
            let column = self.keys.iter_mut().skip(self.column + i).step_by(PANEL);
            column.zip(&key).for_each(|(to, &x)| *to = T::from_f32(x));
            let value = &mut self.values[i * self.padded..][..dim];
            value.iter_mut().zip(&v[row..][..dim]).for_each(|(to, &x)| *to = T::from_f32(x));
        }
    }
}

/// The queries of one key head in a range of the call's tokens, over a range of the keys.
struct Queries<'a, 'b, T> {
    attention: &'a Attention<'b>,
    cache: &'a Cache<T>,
    /// Key head, of all sequences.
    head: usize,
    tokens: Range<usize>,
    keys: Range<usize>,
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
        let Shape { heads, kv_heads, .. } = self.cache.shape;
        let t = self.tokens.start + i / self.group();
        let head = self.head % kv_heads * self.group() + i % self.group();
        (t, (self.head / kv_heads * self.attention.tokens + t) * heads + head)
    }

    /// How many of the keys query `i` sees, itself included.
    fn seen(&self, i: usize) -> usize {
        self.cache.len - self.attention.tokens + self.place(i).0 + 1
    }

    /// Query `i` divided by `total` and gated.
    #[inline(always)]
    fn store(&self, i: usize, o: &[f32], total: f32, out: &Shared<'_, f32>) {
        let (dim, (_, head)) = (self.cache.shape.dim, self.place(i));
        let gate = &self.attention.q_gate[(2 * head + 1) * dim..][..dim];
        // SAFETY: each query has one task.
        let to = unsafe { out.part(head * dim, dim) };
        let factor = 1.0 / total;
        to.iter_mut().zip(o).zip(gate).for_each(|((to, o), g)| *to = o * factor * sigmoid(*g));
    }
}

enum To<'a, 'b> {
    /// The end: all keys are in the range.
    Out(&'a Shared<'b, f32>),
    /// `[queries, dim + 2]`: the weighted sum, the maximum and the total of the weights.
    Partial(&'a mut [f32]),
}

struct QueriesTask<'a, 'b, 'c, T> {
    queries: Queries<'a, 'b, T>,
    to: To<'a, 'c>,
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
        let Self { queries, to } = self;
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
            let from = &attention.q_gate[2 * head * dim..][..dim];
            attention.positions.apply(from, attention.positions.q_scale, t, q);
            q.iter_mut().for_each(|q| *q *= scale);
        }
        let end = queries.keys.end.min(queries.seen(count - 1));
        for start in (queries.keys.start..end).step_by(BLOCK) {
            let keys = start..end.min(start + BLOCK);
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
        match to {
            To::Out(out) => {
                for (i, (o, (_, total))) in ws.o.chunks_exact(padded).zip(&ws.running).enumerate() {
                    queries.store(i, &o[..dim], *total, out);
                }
            }
            To::Partial(to) => {
                let rows = to.chunks_exact_mut(dim + 2).zip(ws.o.chunks_exact(padded));
                for ((to, o), (max, total)) in rows.zip(&ws.running) {
                    to[..dim].copy_from_slice(&o[..dim]);
                    (to[dim], to[dim + 1]) = (*max, *total);
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
    if keys.is_empty() {
        return;
    }
    let zero = [[simd.splat_f32s(0.0); N]; M];
    let lanes = N * S::F32_LANES;

    let mut q = [&[][..]; M];
    for (m, q) in q.iter_mut().enumerate() {
        *q = &ws.q[(i + m) * dim..][..dim];
    }
    let scores = &mut ws.scores[i * BLOCK..(i + M) * BLOCK];
    for column in (0..keys.len()).step_by(lanes) {
        let token = keys.start + column;
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
        let (scores, later) = scores.split_at_mut(queries.seen(i + m).saturating_sub(keys.start).min(scores.len()));
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
    let values = &values[keys.start * padded..keys.end * padded];
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
struct Merge<'a, 'b, 'c, T> {
    queries: Queries<'a, 'b, T>,
    /// `[splits, queries, dim + 2]`
    parts: &'a [f32],
    splits: usize,
    out: &'a Shared<'c, f32>,
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

#[cfg(test)]
mod tests;
