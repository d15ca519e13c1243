//! What all parts of an engine work on.

use super::event::{Event, FinishReason};
use super::request::RequestId;
use super::stats::EngineStats;
use crate::blocks::attention::CacheShape;
use crate::sequences::{Sequence, SequencePool, SequenceSnapshot};
use crate::CausalLm;
use candle_core::{Error, Result};
use std::borrow::Borrow;
use std::sync::Arc;

/// The model, its sequences, and the results of the current step.
#[derive(Debug)]
pub(super) struct Core<M> {
    pub model: M,
    pub pool: SequencePool,
    pub events: Vec<Event>,
    pub stats: EngineStats,
}

/// A [`Core`] during a call.
pub(super) struct Context<'a> {
    pub model: &'a CausalLm,
    pub pool: &'a mut SequencePool,
    pub events: &'a mut Vec<Event>,
    pub stats: &'a mut EngineStats,
}

impl<M: Borrow<CausalLm>> Core<M> {
    pub fn context(&mut self) -> Context<'_> {
        let Self { model, pool, events, stats } = self;
        Context { model: M::borrow(model), pool, events, stats }
    }
}

impl Context<'_> {
    /// A new sequence, after the tokens of `snapshot` if there is one; an error on all ranks where one fails, which would go on
    /// otherwise than the others.
    pub fn begin(&mut self, snapshot: Option<&SequenceSnapshot>) -> Result<Sequence> {
        let begun = self.begin_here(snapshot);
        let sequence = begun.as_ref().ok().copied();
        match (self.model.agree(begun), sequence) {
            (Err(e), Some(sequence)) => self.pool.end(sequence).and(Err(e)),
            (agreed, _) => agreed,
        }
    }

    fn begin_here(&mut self, snapshot: Option<&SequenceSnapshot>) -> Result<Sequence> {
        #[cfg(test)]
        super::tests::fault(super::tests::BEGIN)?;
        let sequence = self.pool.begin()?;
        if let Some(snapshot) = snapshot {
            if let Err(e) = self.pool.restore(sequence, snapshot) {
                self.pool.end(sequence)?;
                return Err(e);
            }
        }
        Ok(sequence)
    }

    /// A copy of the sequence; an error on all ranks where one fails, which would go on otherwise than the others.
    pub fn snapshot(&self, sequence: Sequence) -> Result<Arc<SequenceSnapshot>> {
        let snapshot = self.pool.snapshot(sequence).map(Arc::new);
        #[cfg(test)]
        let snapshot = super::tests::fault(super::tests::SNAPSHOT).and(snapshot);
        self.model.agree(snapshot)
    }

    /// Bytes of the copy of a sequence of so many tokens, without what the draft head adds.
    pub fn bytes_of(&self, tokens: usize) -> usize {
        let CacheShape { kv_heads, head_dim, dtype, .. } = self.model.cache_shape(tokens);
        let rows: usize = self.model.attention_windows().map(|window| window.map_or(tokens, |n| n.min(tokens))).sum();
        self.pool.state_bytes() + rows * 2 * kv_heads * head_dim * dtype.size_in_bytes()
    }

    /// A request without a sequence ends.
    pub fn fail(&mut self, id: RequestId, error: &Error) {
        self.events.push(Event::Finished { id, reason: FinishReason::failed(error) });
    }

    /// Whether no pass broke the sequence, and it has just this many tokens.
    pub fn is_intact(&self, sequence: Sequence, fed: usize) -> bool {
        self.pool.usable_slot("Engine", sequence).is_ok() && self.pool.len(sequence).is_ok_and(|len| len == fed)
    }
}
