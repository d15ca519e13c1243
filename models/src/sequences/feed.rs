//! Feeds tokens: prompts, and single tokens of a decode step.

use super::pass::{Draft, Mode, Pass};
use super::pool::{Sequence, SequencePool};
use crate::blocks::decoder::Residual;
use crate::causal_lm::CausalLm;
use candle_core::{Result, Tensor};

const FEED: &str = "feed";

impl CausalLm {
    /// Feeds each sequence its next tokens, at least one, and returns the logits of the last
    /// token of each: `[batch, vocab_size]` in f32. All go through the model in one pass, prompts and single tokens
    /// mixed; a batch of single tokens is a decode step.
    ///
    /// Up to rounding, a prompt gives the same whole or in chunks, and a sequence the same alone or in a batch.
    ///
    /// # Errors
    /// When the batch is empty, a handle is none of a sequence of this pool or comes twice, a sequence gets no tokens
    /// or more than it has room for, an id is outside the vocabulary, or the pool is another model's: the message says
    /// which, and the pool is unchanged. When a device fails half-way, the batch's sequences are broken; see
    /// [`SequencePool`].
    pub fn feed(&self, pool: &mut SequencePool, batch: &[(Sequence, &[u32])]) -> Result<Tensor> {
        let (slots, x, pass) = self.run_pass(pool, batch)?;
        let last = match pool.head.is_some() {
            true => self.final_norm(pool, &slots, batch, x, &pass)?.1,
            false => x.rows(|x| pass.last_rows(x))?.norm(&self.norm, &pass.launch)?.1,
        };
        let logits = self.logits_launched(&last, &pass.launch)?;
        self.end_pass(pool, &slots, batch, pass)?;
        Ok(logits)
    }

    /// [`feed`](Self::feed) without logits, for all chunks of a prompt but the last.
    ///
    /// # Errors
    /// As [`feed`](Self::feed).
    pub fn feed_only(&self, pool: &mut SequencePool, batch: &[(Sequence, &[u32])]) -> Result<()> {
        let (slots, x, pass) = self.run_pass(pool, batch)?;
        if pool.head.is_some() {
            self.final_norm(pool, &slots, batch, x, &pass)?;
        }
        self.end_pass(pool, &slots, batch, pass)
    }

    /// [`feed`](Self::feed), but returns the hidden states of all new tokens after the last norm, packed:
    /// `[tokens of all, hidden_size]` in the model's dtype, for [`logits`](Self::logits).
    ///
    /// # Errors
    /// As [`feed`](Self::feed).
    pub fn feed_hidden(&self, pool: &mut SequencePool, batch: &[(Sequence, &[u32])]) -> Result<Tensor> {
        let (slots, x, pass) = self.run_pass(pool, batch)?;
        let (hidden, _) = self.final_norm(pool, &slots, batch, x, &pass)?;
        self.end_pass(pool, &slots, batch, pass)?;
        Ok(hidden)
    }

    /// The last norm of a pass, whose output also goes to the draft head: hidden states of all tokens, and of the last ones.
    fn final_norm(
        &self,
        pool: &mut SequencePool,
        slots: &[usize],
        batch: &[(Sequence, &[u32])],
        x: Residual,
        pass: &Pass,
    ) -> Result<(Tensor, Tensor)> {
        let (_, hidden) = x.norm(&self.norm, &pass.launch)?;
        let last = pass.last_rows(&hidden)?;
        pool.feed_head(self, slots, batch.iter().map(|(_, tokens)| *tokens), &hidden, &last)?;
        Ok((hidden, last))
    }

    /// The layers over the slots of the batch, which it returns too; [`Self::end_pass`] follows.
    fn run_pass(&self, pool: &mut SequencePool, batch: &[(Sequence, &[u32])]) -> Result<(Vec<usize>, Residual, Pass)> {
        let slots = pool.batch_slots(FEED, self.id, batch.iter().map(|(s, tokens)| (*s, tokens.len())))?;
        let ids = self.packed_ids(FEED, batch.iter().map(|(_, tokens)| *tokens))?;
        let lengths = batch.iter().map(|(_, tokens)| tokens.len()).collect();
        let pass = Pass::new(self, pool, &slots, lengths, Draft::No)?;
        pool.begin_write(&slots);
        let x = self.through_layers(&ids, &pass, pool, Mode::Feed)?;
        Ok((slots, x, pass))
    }

    fn end_pass(
        &self,
        pool: &mut SequencePool,
        slots: &[usize],
        batch: &[(Sequence, &[u32])],
        pass: Pass,
    ) -> Result<()> {
        self.settle()?;
        pool.end_write(slots, &pass.lengths);
        slots.iter().zip(batch).for_each(|(slot, (_, tokens))| pool.record_tokens(*slot, tokens));
        pass.keep_uploads(pool, slots);
        Ok(())
    }
}
