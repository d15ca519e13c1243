//! Tokens of a cache out as rows, in again, and forgotten from the end: snapshots, forks and drafts.

use super::{Cache, Shape};
use candle_gdn::plumbing::cpu::matmul::PANEL;
use candle_gdn::plumbing::cpu::Element;
use std::ops::Range;

impl<T: Element> Cache<T> {
    /// Tokens of each sequence.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Forgets all but the first `tokens`.
    pub fn truncate(&mut self, tokens: usize) {
        self.len = self.len.min(tokens);
    }

    /// Bytes held.
    pub fn size_in_bytes(&self) -> usize {
        (self.keys.len() + self.values.len()) * size_of::<T>()
    }

    /// Bytes that room for so many tokens takes.
    pub fn bytes_of(shape: Shape, tokens: usize) -> usize {
        let rows = shape.batch * shape.kv_heads * tokens.next_multiple_of(PANEL);
        rows * (shape.dim + shape.dim.next_multiple_of(PANEL)) * size_of::<T>()
    }

    /// Keys and values of a range of tokens, `[batch, kv_heads, tokens, dim]`.
    pub fn read_rows(&self, tokens: Range<usize>) -> [Vec<T>; 2] {
        let Shape { batch, kv_heads, dim, .. } = self.shape;
        let tokens = tokens.start..tokens.end.min(self.len);
        let mut out = [(); 2].map(|()| Vec::with_capacity(batch * kv_heads * tokens.len() * dim));
        for head in 0..batch * kv_heads {
            let (keys, values) = self.head(head);
            for token in tokens.clone() {
                let column = token / PANEL * PANEL * dim + token % PANEL;
                out[0].extend(keys[column..].iter().step_by(PANEL).take(dim));
                out[1].extend_from_slice(&values[token * self.padded_dim()..][..dim]);
            }
        }
        out
    }

    /// Appends `tokens` tokens: rows as [`Cache::read_rows`] gives them.
    pub fn append_rows(&mut self, [keys, values]: [&[T]; 2], tokens: usize, max_tokens: usize) {
        let Shape { batch, kv_heads, dim, .. } = self.shape;
        assert_eq!((keys.len(), values.len()), (batch * kv_heads * tokens * dim, batch * kv_heads * tokens * dim));
        self.reserve(self.len + tokens, max_tokens);
        let (padded, capacity) = (self.padded_dim(), self.capacity);
        for (i, (key, value)) in keys.chunks_exact(dim).zip(values.chunks_exact(dim)).enumerate() {
            let (head, token) = (i / tokens, self.len + i % tokens);
            let first = (head * capacity + token / PANEL * PANEL) * dim + token % PANEL;
            self.keys[first..].iter_mut().step_by(PANEL).zip(key).for_each(|(to, x)| *to = *x);
            self.values[(head * capacity + token) * padded..][..dim].copy_from_slice(value);
        }
        self.len += tokens;
    }
}
