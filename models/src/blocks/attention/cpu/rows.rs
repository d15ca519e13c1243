//! Copies of a cache's tokens as rows, and the removal of its last tokens: for snapshots, forks and drafts.

use super::super::kv_cache::capacity;
use super::{Cache, Shape};
use candle_gdn_core::cpu::matmul::PANEL;
use candle_gdn_core::cpu::Element;
use std::ops::Range;

impl<T: Element> Cache<T> {
    /// Keeps the first `tokens`.
    pub fn truncate(&mut self, tokens: usize) {
        self.len = self.len.min(tokens);
    }

    /// The next token is number `tokens`. With a window the rows before it may be appended later, or not at all.
    pub fn seek(&mut self, tokens: usize) {
        self.len = if self.shape.window.is_some() { tokens } else { self.len.min(tokens) };
    }

    /// Bytes held.
    pub fn size_in_bytes(&self) -> usize {
        (self.keys.len() + self.values.len()) * size_of::<T>()
    }

    /// Bytes of such a cache with room for `tokens` tokens.
    pub fn bytes_of(&self, tokens: usize) -> usize {
        let tokens = capacity(self.shape.window, tokens).next_multiple_of(PANEL);
        self.shape.kv_heads * tokens * (self.shape.dim + self.padded_dim()) * size_of::<T>()
    }

    /// Keys and values of a range of tokens, `[kv_heads, tokens, dim]`.
    pub fn read_rows(&self, tokens: Range<usize>) -> [Vec<T>; 2] {
        let Shape { kv_heads, dim, .. } = self.shape;
        let tokens = tokens.start..tokens.end.min(self.len);
        let mut out = [(); 2].map(|()| Vec::with_capacity(kv_heads * tokens.len() * dim));
        for head in 0..kv_heads {
            let (keys, values) = self.head(head);
            for token in tokens.clone().map(|token| token % self.capacity) {
                let column = token / PANEL * PANEL * dim + token % PANEL;
                out[0].extend(keys[column..].iter().step_by(PANEL).take(dim));
                out[1].extend_from_slice(&values[token * self.padded_dim()..][..dim]);
            }
        }
        out
    }

    /// Appends `tokens` tokens, rows in the layout of [`Cache::read_rows`].
    pub fn append_rows(&mut self, [keys, values]: [&[T]; 2], tokens: usize, max_tokens: usize) {
        let Shape { kv_heads, dim, .. } = self.shape;
        assert_eq!([keys.len(), values.len()], [kv_heads * tokens * dim; 2]);
        self.reserve(self.len + tokens, max_tokens);
        let (padded, capacity) = (self.padded_dim(), self.capacity);
        for (i, (key, value)) in keys.chunks_exact(dim).zip(values.chunks_exact(dim)).enumerate() {
            let (head, token) = (i / tokens, (self.len + i % tokens) % capacity);
            let first = (head * capacity + token / PANEL * PANEL) * dim + token % PANEL;
            self.keys[first..].iter_mut().step_by(PANEL).zip(key).for_each(|(dst, x)| *dst = *x);
            self.values[(head * capacity + token) * padded..][..dim].copy_from_slice(value);
        }
        self.len += tokens;
    }
}
