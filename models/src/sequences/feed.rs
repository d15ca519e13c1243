//! Tokens of some sequences through the model.

use super::head::HeadState;
use super::pass::{Draft, Mode, Pass};
use super::pool::{LayerSlots, Sequence, SequencePool};
use super::snapshot::SequenceSnapshot;
use crate::blocks::decoder::Residual;
use crate::causal_lm::CausalLm;
use candle_core::{bail, Result, Tensor};
use candle_gdn::{Checkpoints, CuSeqlens, CHECKPOINT_MULTIPLE};

const FEED: &str = "feed";
const CHECKPOINTS: &str = "feed_with_checkpoints";

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

    /// [`feed`](Self::feed) of one sequence, and besides snapshots of it at every position that is a multiple of
    /// `block` tokens, in order, for a [`PrefixCache`](candle_gdn::PrefixCache). `block` is a multiple of
    /// [`CHECKPOINT_MULTIPLE`].
    /// The logits are `[1, vocab_size]`.
    ///
    /// The states along the way come out of the same pass; only where the sequence stands between two multiples, the
    /// tokens up to the next one are a pass of their own.
    ///
    /// # Errors
    /// As [`feed`](Self::feed), or when `block` is no such multiple.
    pub fn feed_with_checkpoints(
        &self,
        pool: &mut SequencePool,
        sequence: Sequence,
        tokens: &[u32],
        block: usize,
    ) -> Result<(Tensor, Vec<(usize, SequenceSnapshot)>)> {
        if block == 0 || !block.is_multiple_of(CHECKPOINT_MULTIPLE) {
            bail!("{CHECKPOINTS}: block: expected a positive multiple of {CHECKPOINT_MULTIPLE} tokens, got {block}")
        }
        let slots = pool.batch_slots(CHECKPOINTS, self.id, [(sequence, tokens.len())].into_iter())?;
        self.check_ids(CHECKPOINTS, [tokens].into_iter())?;
        let at = pool.entries[slots[0]].len;
        let (first, rest) = tokens.split_at((at.next_multiple_of(block) - at).min(tokens.len()));
        let mut snapshots = vec![];
        if !first.is_empty() {
            let logits = match rest {
                [] => Some(self.feed(pool, &[(sequence, first)])?),
                _ => {
                    self.feed_only(pool, &[(sequence, first)])?;
                    None
                }
            };
            if (at + first.len()).is_multiple_of(block) {
                snapshots.push((at + first.len(), pool.snapshot(sequence)?));
            }
            if let Some(logits) = logits {
                return Ok((logits, snapshots));
            }
        }
        let at = at + first.len();
        let ids = self.packed_ids(CHECKPOINTS, [rest].into_iter())?;
        let mut pass = Pass::new(self, pool, &slots, vec![rest.len()], Draft::No)?;
        let cu_seqlens = match pass.cu_seqlens.take() {
            Some(cu_seqlens) => cu_seqlens,
            None => CuSeqlens::from_lengths(&pass.lengths, &self.device)?,
        };
        let plan = self.gated_delta_nets().next().map(|gdn| gdn.checkpoint_plan(&cu_seqlens, block)).transpose()?;
        pass.cu_seqlens = Some(cu_seqlens);
        let mut kept: Vec<Checkpoints> = vec![];
        pool.about_to_write(&slots);
        let mode = plan.as_ref().map_or(Mode::Feed, |plan| Mode::Checkpoints(plan, &mut kept));
        let x = self.through_layers(&ids, &pass, pool, mode)?;
        let (hidden, last) = self.heard(pool, &slots, &[(sequence, rest)], x, &pass)?;
        let logits = self.logits_launched(&last, &pass.launch)?;
        self.advanced(pool, &slots, pass)?;
        for index in 0..rest.len() / block {
            let states = kept.iter().map(|checkpoints| checkpoints.snapshot(0, index));
            let row = (index + 1) * block;
            let head = match pool.head.is_some() {
                true => Some(HeadState::after(at + row, hidden.narrow(0, row - 1, 1)?.force_contiguous()?)),
                false => None,
            };
            let snapshot = pool.snapshot_of(slots[0], at + row, states.collect::<Result<_>>()?, head)?;
            snapshots.push((at + row, snapshot));
        }
        Ok((logits, snapshots))
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
