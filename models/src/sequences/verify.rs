//! Drafts: verified in one pass, then accepted in part.

use super::new_pool::Lease;
use super::pass::{Draft, Mode, Pass};
use super::pool::{unique, Sequence, SequencePool};
use crate::causal_lm::CausalLm;
use candle_core::{bail, Result, Tensor};
use candle_gdn::{Accepted, CuSeqlens, Drafted, RingSpans};

const VERIFY: &str = "verify";
const ACCEPT: &str = "accept";

/// Drafted tokens that went through the model and are not part of a sequence yet: made by [`CausalLm::verify`], for
/// [`CausalLm::accept`]. When they are dropped, the sequences are as before.
///
/// They keep a second state of every Gated DeltaNet layer for each of their sequences, and a projection of each token. Where
/// states have rings ([`StateLayout`](super::StateLayout)) and no draft has more than 16 tokens, they keep neither.
#[derive(Debug)]
pub struct Drafts {
    sequences: Vec<Sequence>,
    /// The sequences' versions when they were verified.
    versions: Vec<u64>,
    cu_seqlens: CuSeqlens,
    /// One a Gated DeltaNet layer.
    layers: Vec<Drafted>,
    /// `None` in place, in rings.
    lease: Option<Lease>,
    tokens: Vec<Vec<u32>>,
    /// The tokens' hidden states, where there is a draft head.
    hidden: Option<Tensor>,
}

impl Drafts {
    /// Tokens of each draft, in the order of the batch.
    pub fn lengths(&self) -> Vec<usize> {
        self.cu_seqlens.lengths().collect()
    }

    /// Bytes of device memory held, without the states, which belong to the pool.
    pub fn size_in_bytes(&self) -> usize {
        self.layers.iter().map(Drafted::size_in_bytes).sum()
    }
}

impl CausalLm {
    /// Feeds each sequence a draft and returns the logits of all its tokens, packed in the order of the batch:
    /// `[tokens of all, vocab_size]` in f32. The sequences stay as they are until [`accept`](Self::accept); feeding one
    /// before invalidates the drafts.
    ///
    /// Usually the first token of a draft is certain, the last one sampled: row `i` then verifies token `i + 1`.
    ///
    /// Without rings, each Gated DeltaNet layer's states move to a larger allocation when more sequences than ever before
    /// have drafts: one more state for each.
    ///
    /// # Errors
    /// As [`feed`](Self::feed), or when a layer has a window and a draft more tokens than its ring has room for. Errors leave the
    /// sequences unchanged, except for a pass that fails half-way where states have rings.
    pub fn verify(&self, pool: &mut SequencePool, batch: &[(Sequence, &[u32])]) -> Result<(Tensor, Drafts)> {
        let slots = pool.batch_slots(VERIFY, self.id, batch.iter().map(|(s, tokens)| (*s, tokens.len())))?;
        if let (Some(room), Some(most)) = (pool.room(), batch.iter().map(|(_, tokens)| tokens.len()).max()) {
            if most > room {
                bail!("{VERIFY}: batch: expected drafts of at most {room} tokens (a layer's window has room for), got {most}")
            }
        }
        let ids = self.packed_ids(VERIFY, batch.iter().map(|(_, tokens)| *tokens))?;
        let _working = pool.working()?;
        let lengths: Vec<usize> = batch.iter().map(|(_, tokens)| tokens.len()).collect();
        let in_place = pool.spans.is_some() && lengths.iter().all(|len| *len <= RingSpans::MAX_TOKENS);
        let lease = if in_place { None } else { Some(self.lease_states(pool, slots.len())?) };
        let drafts = lease.as_ref().map_or(Draft::InPlace, |lease| Draft::To(&lease.slots));
        let pass = Pass::new(self, pool, &slots, lengths, drafts)?;
        // Keys and values of an earlier draft are overwritten: it is invalid.
        for &slot in &slots {
            pool.entries[slot].version = unique();
        }
        if in_place {
            pool.begin_write(&slots); // full rings are flushed
        }
        let mut layers = vec![];
        let x = self.through_layers(&ids, &pass, pool, Mode::Verify(&mut layers))?;
        let (_, hidden) = x.norm(&self.norm, &pass.launch)?;
        let logits = self.logits_launched(&hidden, &pass.launch)?;
        self.settle()?;
        if in_place {
            pool.end_write(&slots, &vec![0; slots.len()]);
        }
        let versions = slots.iter().map(|&slot| pool.entries[slot].version).collect();
        let Pass { cu_seqlens: Some(cu_seqlens), .. } = pass else {
            bail!("{VERIFY}: expected boundaries of packed tokens")
        };
        let sequences = batch.iter().map(|(sequence, _)| *sequence).collect();
        let tokens = batch.iter().map(|(_, tokens)| tokens.to_vec()).collect();
        let hidden = pool.head.is_some().then_some(hidden);
        Ok((logits, Drafts { sequences, versions, cu_seqlens, layers, lease, tokens, hidden }))
    }

    /// Accepts the first `accepted[n]` tokens of draft `n`, 0 to all. Each sequence is then as if only those had been fed. Without
    /// rings the Gated DeltaNet layers are fed the accepted tokens of a partly rejected draft again, in one call each and
    /// without the projections.
    ///
    /// # Errors
    /// When there are not as many counts as drafts or one is larger than its draft, the pool is not that of the
    /// drafts, or one of the sequences was changed since. Errors leave the sequences unchanged; the drafts are dropped.
    pub fn accept(&self, pool: &mut SequencePool, drafts: Drafts, accepted: &[usize]) -> Result<()> {
        if self.id != pool.model {
            bail!("{ACCEPT}: pool: expected one that this model made, got one of another model")
        }
        let mut slots = Vec::with_capacity(drafts.sequences.len());
        for (n, (sequence, version)) in drafts.sequences.iter().zip(&drafts.versions).enumerate() {
            let slot = pool.usable_slot(ACCEPT, *sequence)?;
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
            return Ok(()); // nothing changes
        }
        let Drafts { cu_seqlens, layers, mut lease, tokens, hidden, .. } = drafts;
        let _working = pool.working()?;
        let plan = layers.first().map(|drafted| Accepted::new(drafted, accepted)).transpose()?;
        let layers = self.gated_delta_nets().zip(&layers).zip(pool.state_pools());
        for ((gdn, drafted), states) in layers {
            if let Some(plan) = &plan {
                gdn.commit(drafted, plan, states)?;
            }
        }
        if let (Some(spans), Some(plan), Some(gdn)) = (&pool.spans, &plan, self.gated_delta_nets().next()) {
            plan.advance_rings(gdn, spans)?;
        }
        let tokens = tokens.iter().zip(accepted).map(|(tokens, count)| &tokens[..*count]);
        if let Some(hidden) = &hidden {
            let first = cu_seqlens.as_slice().iter().map(|first| *first as usize);
            pool.feed_head_later(&slots, tokens.clone().zip(first), hidden);
        }
        // Nothing fails from here on. Without rings each sequence swaps its slot for the one that was written.
        for (n, (&slot, tokens)) in slots.iter().zip(tokens).enumerate() {
            pool.record_tokens(slot, tokens);
            let entry = &mut pool.entries[slot];
            if let Some(lease) = &mut lease {
                std::mem::swap(&mut entry.state, &mut lease.slots[n]);
            }
            entry.len += tokens.len();
            entry.version = unique();
        }
        Ok(())
    }
}
