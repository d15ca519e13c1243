//! What the draft head remembers of each sequence.
//!
//! Position `j` of the draft head takes the model's hidden state at `j` and the embedding of token `j + 1`. So a sequence of
//! `n` tokens has `n - 1` head positions, and its last hidden state waits for the token that comes next. Hidden states
//! of prompts enter the head's cache with each pass. Those of single tokens and of accepted drafts wait for the next draft.

use crate::sequences::kv::KvSlots;
use candle_core::{bail, Result, Tensor};
use std::ops::Range;

/// The most ranges of hidden states that are concatenated; more are gathered by their rows.
const CONCATENATED: usize = 4;

/// The draft head's state of all sequences of a pool.
#[derive(Debug)]
pub(crate) struct HeadSlots {
    pub kv: KvSlots,
    /// Whether hidden states are not worth a pass of the head: then most that wait are dropped. Later drafts know less
    /// of the sequence.
    pub idle: bool,
    /// How many wait then, besides the last one.
    pub idle_waiting: usize,
    pub slots: Vec<HeadState>,
}

/// The draft head's state of one sequence.
#[derive(Debug, Default, Clone)]
pub(crate) struct HeadState {
    /// Tokens in the head's cache.
    pub len: usize,
    /// The model's hidden states from there on, one of each token.
    pub(super) waiting: Vec<Rows>,
    /// The tokens after these: of all but the last.
    pub(super) tokens: Vec<u32>,
    /// The cache holds one more position, valid if the sequence is fed this token next.
    pub next: Option<u32>,
}

/// Some rows of a tensor.
#[derive(Debug, Clone)]
pub(super) struct Rows {
    pub tensor: Tensor,
    pub range: Range<usize>,
}

impl Rows {
    fn view(&self) -> Result<Tensor> {
        self.tensor.narrow(0, self.range.start, self.range.len())
    }
}

impl HeadState {
    /// Copies the hidden states that wait to a tensor, from `row` on.
    #[cfg(feature = "cuda")]
    pub fn copy_waiting(&self, dst: &Tensor, mut row: usize) -> Result<()> {
        for rows in &self.waiting {
            dst.slice_set(&rows.view()?, 0, row)?;
            row += rows.range.len();
        }
        Ok(())
    }

    /// The model was fed `tokens` and gave these hidden states.
    pub(super) fn push(&mut self, tokens: &[u32], rows: impl IntoIterator<Item = Rows>) {
        match (self.waiting.is_empty(), self.next.take()) {
            // Before the first token there is no hidden state.
            (true, _) => self.tokens = tokens[1..].to_vec(),
            (false, Some(next)) if next == tokens[0] => {
                self.len += 1;
                self.waiting.clear();
                self.tokens = tokens[1..].to_vec();
            }
            (false, _) => self.tokens.extend(tokens),
        }
        self.waiting.extend(rows);
    }

    /// The first `count` that wait are in the cache now.
    pub(super) fn cached(&mut self, count: usize) {
        self.len += count;
        self.drop_waiting(count);
    }

    /// The first `count` no longer wait.
    pub(super) fn drop_waiting(&mut self, mut count: usize) {
        self.tokens.drain(..count);
        self.waiting.retain_mut(|rows| {
            let gone = count.min(rows.range.len());
            (rows.range.start, count) = (rows.range.start + gone, count - gone);
            !rows.range.is_empty()
        });
    }

    /// A copy with memory of its own.
    pub fn own(&self) -> Result<Self> {
        let own = |rows: &Rows| Ok(Rows { range: 0..rows.range.len(), tensor: rows.view()?.force_contiguous()? });
        let waiting = self.waiting.iter().map(own).collect::<Result<_>>()?;
        Ok(Self { waiting, next: None, ..self.clone() })
    }

    pub fn size_in_bytes(&self) -> usize {
        self.waiting.iter().map(|rows| rows.tensor.elem_count() * rows.tensor.dtype().size_in_bytes()).sum()
    }
}

impl HeadSlots {
    /// The first `counts` hidden states that wait in the slots, packed.
    pub(super) fn hidden(&self, slots: &[usize], counts: &[usize]) -> Result<Tensor> {
        let mut ranges: Vec<Rows> = Vec::new();
        for (&slot, &count) in slots.iter().zip(counts) {
            let mut missing = count;
            for rows in &self.slots[slot].waiting {
                let range = rows.range.start..rows.range.start + missing.min(rows.range.len());
                missing -= range.len();
                match ranges.last_mut() {
                    _ if range.is_empty() => {}
                    Some(last) if last.tensor.id() == rows.tensor.id() && last.range.end == range.start => {
                        last.range.end = range.end;
                    }
                    _ => ranges.push(Rows { tensor: rows.tensor.clone(), range }),
                }
            }
            if missing > 0 {
                bail!("draft: expected {count} hidden states in slot {slot}, got {}", count - missing)
            }
        }
        if let [one] = ranges.as_slice() {
            return one.view();
        }
        if ranges.len() <= CONCATENATED {
            return Tensor::cat(&ranges.iter().map(Rows::view).collect::<Result<Vec<_>>>()?, 0);
        }
        let (mut sources, mut rows): (Vec<(Tensor, usize)>, Vec<u32>) = (Vec::new(), Vec::new());
        let mut end = 0;
        for part in &ranges {
            let known = sources.iter().find(|(tensor, _)| tensor.id() == part.tensor.id());
            let first = known.map_or(end, |(_, first)| *first);
            if first == end {
                end += part.tensor.dim(0)?;
                sources.push((part.tensor.clone(), first));
            }
            rows.extend(part.range.clone().map(|row| (first + row) as u32));
        }
        let sources: Vec<Tensor> = sources.into_iter().map(|(tensor, _)| tensor).collect();
        let rows = Tensor::new(rows, sources[0].device())?;
        match sources.as_slice() {
            [one] => one.index_select(&rows, 0),
            all => Tensor::cat(all, 0)?.index_select(&rows, 0),
        }
    }
}
