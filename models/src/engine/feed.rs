//! Tokens of some sequences through the model.

use super::pass::{Draft, Mode, Pass};
use super::pool::{LayerSlots, Sequence, SequencePool};
use crate::blocks::decoder::Residual;
use crate::causal_lm::CausalLm;
use candle_core::{Result, Tensor};

const FEED: &str = "feed";

impl CausalLm {
    /// Feeds each sequence its next tokens, at least one, behind what it has seen, and returns the logits of the last
    /// token of each: `[batch, vocab_size]` in f32. All go through the model in one pass, prompts and single tokens
    /// mixed; a batch of single tokens is a decode step.
    ///
    /// A prompt fed in pieces gives what it gives whole, and a sequence what it gives alone, up to rounding.
    ///
    /// # Errors
    /// When the batch is empty, a handle is none of a sequence of this pool or comes twice, a sequence gets no tokens
    /// or more than it has room for, an id is outside the vocabulary, or the pool is another model's: the message says
    /// which, and the pool is unchanged. When a device fails half-way, the batch's sequences are broken; see
    /// [`SequencePool`].
    pub fn feed(&self, pool: &mut SequencePool, batch: &[(Sequence, &[u32])]) -> Result<Tensor> {
        let slots = pool.batch_slots(FEED, self.id, batch.iter().map(|(s, tokens)| (*s, tokens.len())))?;
        let (x, pass) = self.advance(FEED, pool, batch, &slots)?;
        let logits = match pool.head.is_some() {
            true => self.logits_launched(&self.heard(pool, &slots, batch, x, &pass)?.1, &pass.launch)?,
            false => self.head_of(pass.last_rows(x)?, &pass.launch)?,
        };
        self.advanced(pool, &slots, pass)?;
        Ok(logits)
    }

    /// [`feed`](Self::feed) without logits, for all pieces of a prompt but the last.
    ///
    /// # Errors
    /// As [`feed`](Self::feed).
    pub fn feed_only(&self, pool: &mut SequencePool, batch: &[(Sequence, &[u32])]) -> Result<()> {
        let slots = pool.batch_slots(FEED, self.id, batch.iter().map(|(s, tokens)| (*s, tokens.len())))?;
        let (x, pass) = self.advance(FEED, pool, batch, &slots)?;
        if pool.head.is_some() {
            self.heard(pool, &slots, batch, x, &pass)?;
        }
        self.advanced(pool, &slots, pass)
    }

    /// [`feed`](Self::feed), but what comes out are the hidden states of all new tokens behind the last norm, packed:
    /// `[tokens of all, hidden_size]` in the model's dtype, for [`logits`](Self::logits).
    ///
    /// # Errors
    /// As [`feed`](Self::feed).
    pub fn feed_hidden(&self, pool: &mut SequencePool, batch: &[(Sequence, &[u32])]) -> Result<Tensor> {
        let slots = pool.batch_slots(FEED, self.id, batch.iter().map(|(s, tokens)| (*s, tokens.len())))?;
        let (x, pass) = self.advance(FEED, pool, batch, &slots)?;
        let (hidden, _) = self.heard(pool, &slots, batch, x, &pass)?;
        self.advanced(pool, &slots, pass)?;
        Ok(hidden)
    }

    /// The last norm of a pass, of which the draft head takes note: hidden states of all tokens, and of the last ones.
    fn heard(
        &self,
        pool: &mut SequencePool,
        slots: &[usize],
        batch: &[(Sequence, &[u32])],
        x: Residual,
        pass: &Pass,
    ) -> Result<(Tensor, Tensor)> {
        let (_, hidden) = x.norm(&self.norm, &pass.launch)?;
        let last = pass.last_rows_of(&hidden)?;
        pool.heard(self, slots, batch.iter().map(|(_, tokens)| *tokens), &hidden, &last)?;
        Ok((hidden, last))
    }

    /// The layers of checked slots; [`Self::advanced`] is to follow.
    fn advance(
        &self,
        what: &str,
        pool: &mut SequencePool,
        batch: &[(Sequence, &[u32])],
        slots: &[usize],
    ) -> Result<(Residual, Pass)> {
        let ids = self.packed_ids(what, batch.iter().map(|(_, tokens)| *tokens))?;
        let lengths = batch.iter().map(|(_, tokens)| tokens.len()).collect();
        let pass = Pass::new(self, pool, slots, lengths, Draft::No)?;
        pool.about_to_write(slots);
        let x = self.through_layers(&ids, &pass, pool, Mode::Feed)?;
        Ok((x, pass))
    }

    fn advanced(&self, pool: &mut SequencePool, slots: &[usize], pass: Pass) -> Result<()> {
        self.settle()?;
        pool.written(slots, &pass.lengths);
        pass.keep_for_next(pool, slots);
        Ok(())
    }

    pub(super) fn gated_delta_nets(&self) -> impl Iterator<Item = &candle_gdn::GatedDeltaNet> {
        self.layers.iter().filter_map(|layer| match &layer.mixer {
            crate::blocks::decoder::Mixer::Linear(gdn) => Some(gdn),
            crate::blocks::decoder::Mixer::Full(_) => None,
        })
    }
}

impl SequencePool {
    /// The states of the Gated DeltaNet layers.
    pub(super) fn state_pools(&mut self) -> impl Iterator<Item = &mut candle_gdn::StatePool> {
        self.layers.iter_mut().filter_map(|layer| match layer {
            LayerSlots::Linear(states) => Some(states),
            LayerSlots::Full(_) => None,
        })
    }
}
