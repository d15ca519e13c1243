//! Drafted tokens: through the model at once, and then only some of them stay.

use super::pass::{Draft, Mode, Pass};
use super::pool::{unique, Lease, Sequence, SequencePool};
use crate::causal_lm::CausalLm;
use candle_core::{bail, Result, Tensor};
use candle_gdn::{Accepted, CuSeqlens, Drafted, RingSpans};

const VERIFY: &str = "verify";
const ACCEPT: &str = "accept";

/// Drafted tokens that went through the model and of which none is part of a sequence yet: made by
/// [`CausalLm::verify`], for [`CausalLm::accept`]. Dropped without it they leave no trace.
///
/// It keeps one more state of every Gated DeltaNet layer for each of its sequences, and a projection of each token; where
/// states have rings ([`Rings`](super::Rings)) and no draft has more than 16 tokens, neither.
#[derive(Debug)]
pub struct Drafts {
    sequences: Vec<Sequence>,
    /// Of the sequences when they were verified.
    versions: Vec<u64>,
    cu_seqlens: CuSeqlens,
    /// One a Gated DeltaNet layer.
    layers: Vec<Drafted>,
    /// `None` in place, in rings.
    lease: Option<Lease>,
    /// The tokens and their hidden states, where there is a draft head.
    heard: Option<(Vec<Vec<u32>>, Tensor)>,
}

impl Drafts {
    /// Tokens of each draft, in the order of the batch.
    pub fn lengths(&self) -> Vec<usize> {
        self.cu_seqlens.lengths().collect()
    }

    /// Bytes of device memory held, without the states, which are the pool's.
    pub fn size_in_bytes(&self) -> usize {
        self.layers.iter().map(Drafted::size_in_bytes).sum()
    }
}

impl CausalLm {
    /// Feeds each sequence a draft, tokens that it may be about to have, and returns the logits of every one of them,
    /// packed in the order of the batch: `[tokens of all, vocab_size]` in f32. The sequences stay as they are until
    /// [`accept`](Self::accept); feeding one before voids the drafts.
    ///
    /// Usually the first token of a draft is one that is certain, the last one sampled: row `i` then judges token `i +
    /// 1`.
    ///
    /// The first time, and when more sequences than ever before have drafts, each Gated DeltaNet layer's states are
    /// moved to a larger allocation, one state more for each sequence of the batch.
    ///
    /// # Errors
    /// As [`feed`](Self::feed); the sequences are unchanged by any, but for what fails half-way where states have rings.
    pub fn verify(&self, pool: &mut SequencePool, batch: &[(Sequence, &[u32])]) -> Result<(Tensor, Drafts)> {
        let slots = pool.batch_slots(VERIFY, self.id, batch.iter().map(|(s, tokens)| (*s, tokens.len())))?;
        let ids = self.packed_ids(VERIFY, batch.iter().map(|(_, tokens)| *tokens))?;
        let _working = pool.take()?;
        let lengths: Vec<usize> = batch.iter().map(|(_, tokens)| tokens.len()).collect();
        let in_place = pool.cursors.is_some() && lengths.iter().all(|len| *len <= RingSpans::MAX_TOKENS);
        let lease = if in_place { None } else { Some(self.lend_states(pool, slots.len())?) };
        let drafts = lease.as_ref().map_or(Draft::InPlace, |lease| Draft::To(&lease.slots));
        let pass = Pass::new(self, pool, &slots, lengths, drafts)?;
        // Keys and values of an earlier draft are overwritten: that one is void.
        for &slot in &slots {
            pool.entries[slot].version = unique();
        }
        if in_place {
            pool.about_to_write(&slots); // rings that are full are folded
        }
        let mut layers = vec![];
        let x = self.through_layers(&ids, &pass, pool, Mode::Verify(&mut layers))?;
        let (_, hidden) = x.norm(&self.norm, &pass.launch)?;
        let logits = self.logits_launched(&hidden, &pass.launch)?;
        self.settle()?;
        if in_place {
            pool.written(&slots, &vec![0; slots.len()]);
        }
        let versions = slots.iter().map(|&slot| pool.entries[slot].version).collect();
        let Pass { cu_seqlens: Some(cu_seqlens), .. } = pass else {
            bail!("{VERIFY}: expected boundaries of packed tokens")
        };
        let sequences = batch.iter().map(|(sequence, _)| *sequence).collect();
        let tokens = batch.iter().map(|(_, tokens)| tokens.to_vec()).collect();
        let heard = pool.head.is_some().then_some((tokens, hidden));
        Ok((logits, Drafts { sequences, versions, cu_seqlens, layers, lease, heard }))
    }

    /// Of draft `n` the first `accepted[n]` tokens stay, 0 to all. Each sequence is then as if only those had been fed:
    /// the accepted tokens of a draft cut short are fed again in the Gated DeltaNet layers, in one call each and
    /// without their projections.
    ///
    /// # Errors
    /// When there are not as many counts as drafts or one is larger than its draft, the pool is not that of the
    /// drafts, or one of the sequences was changed since. The sequences are unchanged by any, and the drafts are gone.
    pub fn accept(&self, pool: &mut SequencePool, drafts: Drafts, accepted: &[usize]) -> Result<()> {
        if self.id != pool.model {
            bail!("{ACCEPT}: pool: expected one that this model made, got one of another model")
        }
        let mut slots = Vec::with_capacity(drafts.sequences.len());
        for (n, (sequence, version)) in drafts.sequences.iter().zip(&drafts.versions).enumerate() {
            let slot = pool.sound_slot(ACCEPT, *sequence)?;
            if pool.entries[slot].version != *version {
                bail!(
                    "{ACCEPT}: drafts: expected sequences as they were verified, got one that was changed since at {n}"
                )
            }
            slots.push(slot);
        }
        if accepted.len() != slots.len() {
            bail!("{ACCEPT}: accepted: expected {} counts (one a draft), got {}", slots.len(), accepted.len())
        }
        let lengths = drafts.lengths();
        for (n, (count, drafted)) in accepted.iter().zip(&lengths).enumerate() {
            if count > drafted {
                bail!("{ACCEPT}: accepted: expected at most {drafted} (the tokens of draft {n}), got {count}")
            }
        }
        if accepted.iter().all(|&count| count == 0) {
            return Ok(()); // all is as it was
        }
        let Drafts { cu_seqlens, layers, mut lease, heard, .. } = drafts;
        let _working = pool.take()?;
        let plan = layers.first().map(|drafted| Accepted::new(drafted, accepted)).transpose()?;
        let parts = self.gated_delta_nets().zip(&layers).zip(pool.state_pools());
        for ((gdn, drafted), states) in parts {
            if let Some(plan) = &plan {
                gdn.commit(drafted, plan, states)?;
            }
        }
        if let (Some(cursors), Some(plan), Some(gdn)) = (&pool.cursors, &plan, self.gated_delta_nets().next()) {
            plan.advance_rings(gdn, cursors)?;
        }
        if let Some((tokens, hidden)) = &heard {
            let first = cu_seqlens.as_slice().iter().map(|first| *first as usize);
            let tokens = tokens.iter().zip(accepted).map(|(tokens, count)| &tokens[..*count]);
            pool.heard_later(&slots, tokens.zip(first), hidden);
        }
        // Nothing fails from here on: each sequence takes the slot that was written, if there is another, and gives its own.
        for (n, (&slot, count)) in slots.iter().zip(accepted).enumerate() {
            let entry = &mut pool.entries[slot];
            if let Some(lease) = &mut lease {
                std::mem::swap(&mut entry.state, &mut lease.slots[n]);
            }
            entry.len += count;
            entry.version = unique();
        }
        Ok(())
    }
}
