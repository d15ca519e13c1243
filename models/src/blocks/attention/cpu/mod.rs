//! Causal softmax attention over a cache, with norms and rotary positions on queries and keys and a gate on the output, each where the
//! model has it.
//!
//! Keys and values are taken a block at a time with a running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867), so
//! that memory does not grow with the context. The cache holds the keys in panels of [`PANEL`] tokens, `[token / PANEL, dim,
//! PANEL]`: scores and outputs are then both products that add whole vectors, as in [`candle_gdn_core::cpu::matmul`].

use super::kv_cache::{capacity, new_tokens};
use crate::blocks::norm::cpu::norm_row;
use candle_gdn_core::cpu::matmul::PANEL;
use candle_gdn_core::cpu::simd::dispatch;
use candle_gdn_core::cpu::{parallel, Element, Shared};
use pulp::{Simd, WithSimd};
use std::ops::Range;

mod queries;
mod rows;

use queries::{Destination, Merge, Queries, QueriesTask};

/// Keys of a block: a multiple of [`PANEL`].
const BLOCK: usize = 128;
/// Queries (tokens times the heads of a key head) of one task, if there are that many.
const QUERIES: usize = 48;
/// With few queries, a task takes no more keys than this: a multiple of [`BLOCK`].
const SPLIT: usize = 1024;
/// Tasks of several blocks of queries, at most, where their keys are divided.
const TASKS: usize = 128;

/// Head counts and size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub heads: usize,
    /// Divides `heads`.
    pub kv_heads: usize,
    pub dim: usize,
    /// Tokens that a token sees, itself included; `None`: all before it.
    pub window: Option<usize>,
}

/// Keys and values of one sequence's tokens so far; with a window, of the last ones: token `t` is in row `t % capacity`.
#[derive(Debug)]
pub(crate) struct Cache<T> {
    /// `[kv_heads, capacity / PANEL, dim, PANEL]`
    keys: Vec<T>,
    /// `[kv_heads, capacity, padded dim]`
    values: Vec<T>,
    /// A multiple of [`PANEL`].
    capacity: usize,
    /// Tokens held.
    pub len: usize,
    pub shape: Shape,
}

impl<T: Element> Cache<T> {
    pub fn new(shape: Shape) -> Self {
        Self { keys: Vec::new(), values: Vec::new(), capacity: 0, len: 0, shape }
    }

    fn padded_dim(&self) -> usize {
        self.shape.dim.next_multiple_of(PANEL)
    }

    /// Makes room for `tokens` in all, at least by doubling but with no more than `max_tokens` in mind. No row moves: a ring
    /// wraps at its greatest capacity only.
    fn reserve(&mut self, tokens: usize, max_tokens: usize) {
        const FIRST: usize = 256;
        let most = capacity(self.shape.window, max_tokens.max(tokens));
        let tokens = tokens.min(most);
        if tokens <= self.capacity {
            return;
        }
        let capacity = tokens.next_power_of_two().max(FIRST).min(most).next_multiple_of(PANEL);
        let heads = self.shape.kv_heads;
        let grow = |old: &[T], row: usize| {
            let mut new = vec![T::ZERO; heads * capacity * row];
            let used = self.len.next_multiple_of(PANEL).min(self.capacity) * row;
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

    /// The first token that token `token` sees.
    fn first_seen(&self, token: usize) -> usize {
        self.shape.window.map_or(0, |window| (token + 1).saturating_sub(window))
    }

    /// The keys and values of a head.
    fn head(&self, index: usize) -> (&[T], &[T]) {
        let (keys, values) = (self.capacity * self.shape.dim, self.capacity * self.padded_dim());
        (&self.keys[index * keys..][..keys], &self.values[index * values..][..values])
    }
}

/// Norm and rotation of queries or keys.
#[derive(Clone, Copy)]
pub(crate) struct Positions<'a> {
    /// Of queries and of keys; none where these come normed.
    pub scales: Option<[&'a [f32]; 2]>,
    pub eps: f32,
    /// `[tokens, pairs]`: of value `i` and value `i + pairs` of each head.
    pub cos: &'a [f32],
    pub sin: &'a [f32],
    pub pairs: usize,
}

impl Positions<'_> {
    /// Norm of a head of the queries (0) or keys (1), then rotation to the position of the call's token `t`.
    #[inline(always)]
    fn apply(&self, x: &[f32], which: usize, t: usize, out: &mut [f32]) {
        match self.scales {
            Some(scales) => norm_row(x, scales[which], self.eps, out),
            None => out.copy_from_slice(x),
        }
        let (cos, sin) = (&self.cos[t * self.pairs..][..self.pairs], &self.sin[t * self.pairs..][..self.pairs]);
        let (first, rest) = out.split_at_mut(self.pairs);
        for (((a, b), c), s) in first.iter_mut().zip(rest).zip(cos).zip(sin) {
            (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
        }
    }
}

/// The next tokens of a sequence.
pub(crate) struct Attention<'a> {
    /// `[tokens, heads, q and gate]`, or without gates `[tokens, heads, q]`; empty where the tokens are only appended.
    pub q_gate: &'a [f32],
    pub gated: bool,
    /// `[tokens, kv_heads, dim]`
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub positions: Positions<'a>,
    pub tokens: usize,
    /// The cache grows to no more than this in advance.
    pub max_tokens: usize,
}

/// The next tokens of a sequence, the cache that they follow, and where their outputs go.
pub(crate) struct Call<'a, T> {
    pub attention: Attention<'a>,
    pub cache: &'a mut Cache<T>,
    /// `sigmoid(gate) * attention`, or attention, `[tokens, heads, dim]`; empty where the tokens are only appended.
    pub out: &'a mut [f32],
}

/// Stores a value row that has an infinity or NaN as zeros, and its key row as NaN: every query that sees the token gets NaN.
/// Products of tiles multiply the rows of tokens that a query does not see by a weight of zero, and zero times NaN is NaN.
fn mark_unfinite<V: Element>(key: &mut [f32], value: &mut [V]) {
    if value.iter().any(|x| !x.to_f32().is_finite()) {
        value.fill(V::ZERO);
        key.fill(f32::NAN);
    }
}

/// How the work of a call is divided.
struct Plan<'a, T> {
    attention: &'a Attention<'a>,
    cache: &'a Cache<T>,
    out: Shared<'a, f32>,
    /// Tokens of a block of queries, and how many blocks there are.
    block: usize,
    blocks: usize,
    /// The first key that is read, keys of a part from there on, and how many parts there are.
    first_key: usize,
    split: usize,
    splits: usize,
    /// Tasks of the plans before.
    first: usize,
}

impl<'a, T: Element> Plan<'a, T> {
    fn new(attention: &'a Attention<'a>, cache: &'a Cache<T>, out: &'a mut [f32], first: usize) -> Self {
        let block = QUERIES.div_ceil(cache.shape.heads / cache.shape.kv_heads).min(attention.tokens).max(1);
        let blocks = attention.tokens.div_ceil(block);
        // Few blocks of queries would leave a long context to as few threads. The parts depend on sizes alone, and so do the bits.
        let first_key = cache.first_seen(cache.len - attention.tokens) / PANEL * PANEL;
        let (keys, whole) = (cache.len - first_key, cache.shape.kv_heads * blocks);
        let most = if blocks == 1 { usize::MAX } else { TASKS / whole };
        let (split, splits) = match keys.div_ceil(SPLIT).min(most) {
            0 | 1 => (keys, 1),
            splits => {
                let split = keys.div_ceil(splits).next_multiple_of(SPLIT);
                (split, keys.div_ceil(split))
            }
        };
        Self { attention, cache, out: Shared::new(out), block, blocks, first_key, split, splits, first }
    }

    fn tasks(&self) -> usize {
        self.cache.shape.kv_heads * self.blocks * self.splits
    }

    /// Elementary steps of a task.
    fn work(&self) -> usize {
        let Shape { heads, kv_heads, dim, window } = self.cache.shape;
        let seen = window.map_or(self.split, |window| self.split.min(window.saturating_add(self.block)));
        2 * self.block * (heads / kv_heads) * dim * seen.min(self.cache.len - self.attention.tokens / 2)
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
        let keys = self.first_key + part * self.split..self.cache.len.min(self.first_key + (part + 1) * self.split);
        let queries = self.queries(task, keys);
        let out = match self.splits {
            1 => Destination::Final(&self.out),
            // SAFETY: each task owns its part.
            _ => Destination::Partial(unsafe {
                partials.part((task * self.splits + part) * self.partial(), self.partial())
            }),
        };
        dispatch(QueriesTask { queries, out });
    }

    /// The queries of a block of a key head. The last ones see the most: they come first.
    fn queries(&self, block: usize, keys: Range<usize>) -> Queries<'_, '_, T> {
        let first = (self.blocks - 1 - block % self.blocks) * self.block;
        let tokens = first..self.attention.tokens.min(first + self.block);
        Queries { attention: self.attention, cache: self.cache, head: block / self.blocks, tokens, keys }
    }

    fn merge(&self, partials: &[f32]) {
        if self.splits == 1 {
            return;
        }
        let size = self.splits * self.partial();
        parallel(partials.len() / size, size, |block| {
            let (queries, parts) = (self.queries(block, 0..self.cache.len), &partials[block * size..][..size]);
            dispatch(Merge { queries, parts, splits: self.splits, out: &self.out });
        });
    }
}

impl<T: Element> Call<'_, T> {
    /// Tokens of a round: all, or as many as a ring has room for beside the window.
    fn round_tokens(&self) -> usize {
        self.cache.shape.window.map_or(self.attention.tokens, new_tokens).max(1)
    }

    fn rounds(&self) -> usize {
        self.attention.tokens.div_ceil(self.round_tokens())
    }

    fn round(&mut self, index: usize) -> Option<Call<'_, T>> {
        let start = index * self.round_tokens();
        let tokens = start..self.attention.tokens.min(start + self.round_tokens());
        let width = self.out.len() / self.attention.tokens.max(1);
        let out = self.out.get_mut(tokens.start * width..tokens.end * width).filter(|_| !tokens.is_empty())?;
        Some(Call { attention: self.attention.part(tokens), cache: self.cache, out })
    }
}

/// Appends the tokens of each call to its cache and, where it has queries, computes their attention.
pub(crate) fn run_all<T: Element>(mut calls: Vec<Call<'_, T>>) {
    for Call { attention, cache, out } in &calls {
        attention.check(cache.shape, out);
    }
    for round in 0..calls.iter().map(Call::rounds).max().unwrap_or(0) {
        run_round(calls.iter_mut().filter_map(|call| call.round(round)).collect());
    }
}

/// The tasks of all calls are divided together: a batch of short ones wakes the threads once.
fn run_round<T: Element>(mut calls: Vec<Call<'_, T>>) {
    for Call { attention, cache, .. } in &mut calls {
        attention.append(cache);
    }
    calls.retain(|call| !call.out.is_empty());
    let mut plans: Vec<Plan<'_, T>> = Vec::with_capacity(calls.len());
    for Call { attention, cache, out } in &mut calls {
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

impl<'a> Attention<'a> {
    fn check(&self, Shape { heads, kv_heads, dim, .. }: Shape, out: &[f32]) {
        let (queries, keys) = (self.tokens * heads * dim, self.tokens * kv_heads * dim);
        let rows = if self.gated { 2 * queries } else { queries };
        assert!(out.is_empty() && self.q_gate.is_empty() || out.len() == queries && self.q_gate.len() == rows);
        assert_eq!((self.k.len(), self.v.len()), (keys, keys));
    }

    /// Some of its tokens.
    fn part(&self, tokens: Range<usize>) -> Self {
        let rows = |x: &'_ [f32]| -> Range<usize> {
            let width = x.len() / self.tokens;
            tokens.start * width..tokens.end * width
        };
        let Positions { cos, sin, .. } = self.positions;
        let positions = Positions { cos: &cos[rows(cos)], sin: &sin[rows(sin)], ..self.positions };
        let (q_gate, k, v) = (&self.q_gate[rows(self.q_gate)], &self.k[rows(self.k)], &self.v[rows(self.v)]);
        Self { q_gate, gated: self.gated, k, v, positions, tokens: tokens.len(), max_tokens: self.max_tokens }
    }

    fn append<T: Element>(&self, cache: &mut Cache<T>) {
        cache.reserve(cache.len + self.tokens, self.max_tokens);
        let Cache { capacity, len, shape: Shape { kv_heads, dim, .. }, .. } = *cache;
        let padded = cache.padded_dim();
        let (keys, values) = (Shared::new(&mut cache.keys), Shared::new(&mut cache.values));
        // A panel of keys belongs to one task. With a window the call has no more tokens than there is room for beside it, so that
        // no two of its panels are one in the ring.
        let panels = len / PANEL..(len + self.tokens).div_ceil(PANEL);
        parallel(kv_heads * panels.len(), 4 * self.tokens.min(PANEL) * dim, |task| {
            let (head, panel) = (task / panels.len(), panels.start + task % panels.len());
            let first = len.max(panel * PANEL);
            let tokens = first..(len + self.tokens).min((panel + 1) * PANEL);
            let row = first % capacity;
            // SAFETY: each task owns its panel of keys and the rows of its values.
            let (keys, values) = unsafe {
                (
                    keys.part((head * capacity + row / PANEL * PANEL) * dim, PANEL * dim),
                    values.part((head * capacity + row) * padded, tokens.len() * padded),
                )
            };
            let new = tokens.start - len..tokens.end - len;
            dispatch(Append { attention: self, kv_heads, head, new, column: first % PANEL, keys, values, dim, padded });
        });
        cache.len += self.tokens;
    }
}

struct Append<'a, 'b, T> {
    attention: &'a Attention<'b>,
    kv_heads: usize,
    head: usize,
    /// Tokens of the call.
    new: Range<usize>,
    /// The panel's column of the first of them.
    column: usize,
    keys: &'a mut [T],
    values: &'a mut [T],
    dim: usize,
    padded: usize,
}

impl<T: Element> WithSimd for Append<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Attention { k, v, positions, .. } = self.attention;
        let dim = self.dim;
        let mut key = vec![0f32; dim];
        for (i, t) in self.new.enumerate() {
            let row = (t * self.kv_heads + self.head) * dim;
            positions.apply(&k[row..][..dim], 1, t, &mut key);
            let value = &mut self.values[i * self.padded..][..dim];
            value.iter_mut().zip(&v[row..][..dim]).for_each(|(dst, &x)| *dst = T::from_f32(x));
            mark_unfinite(&mut key, value);
            let column = self.keys.iter_mut().skip(self.column + i).step_by(PANEL);
            column.zip(&key).for_each(|(dst, &x)| *dst = T::from_f32(x));
        }
    }
}

#[cfg(test)]
mod tests;
