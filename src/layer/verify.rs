//! Several drafted tokens at once, of which only some may stay.

use super::forward::Call;
use super::projection::Projected;
use super::{GatedDeltaNet, OP};
use crate::plan::FUSED_TOKENS;
use crate::state::{PoolRing, RingSpans, StatePool, RING_TOKENS};
use candle_core::{bail, DType, Device, Result, Tensor};
use candle_gdn_core::device::Working;
use candle_gdn_core::{CuSeqlens, Slots, NO_SLOT};
use std::sync::atomic::AtomicBool;
use std::sync::Arc;

/// What a layer keeps of a verify pass until [`GatedDeltaNet::commit`]: its slots and boundaries, and the projections of the
/// drafted tokens, no state; in place on a ring no projections either.
#[derive(Debug)]
pub struct Drafted {
    /// `None` where there were no tokens, or where they are in a ring.
    projected: Option<Projected>,
    cu_seqlens: CuSeqlens,
    slots: Slots,
    in_place: bool,
    /// That of the layer, by which it is known.
    launched: Arc<AtomicBool>,
}

impl Drafted {
    /// Bytes of device memory held.
    pub fn size_in_bytes(&self) -> usize {
        self.projected.as_ref().map_or(0, Projected::size_in_bytes)
    }
}

/// How many drafted tokens of each sequence stay. Made once a batch, from what any layer drafted, and used for every layer.
#[derive(Debug)]
pub struct Accepted {
    /// Those of the verify pass.
    cu_seqlens: CuSeqlens,
    slots: Slots,
    update: Update,
}

/// How states become those after the accepted tokens.
#[derive(Debug)]
enum Update {
    /// The sequences that are fed again, and between them, as padding, all other tokens; none where all tokens stay.
    Feed(Option<(CuSeqlens, Slots)>),
    /// In place, entries of rings begin to count: how many.
    Count(Tensor),
}

impl Accepted {
    /// `accepted[n]` of the tokens of sequence `n` stay.
    ///
    /// # Errors
    /// When there are not as many counts as sequences, one is larger than its sequence's tokens, or the slots were not
    /// made from host values.
    pub fn new(drafted: &Drafted, accepted: &[usize]) -> Result<Self> {
        let Drafted { cu_seqlens, slots, in_place, .. } = drafted;
        let Some((read, write)) = slots.on_host() else {
            bail!("Accepted: slots: expected them made from host values, got tensors");
        };
        let (sequences, device) = (cu_seqlens.num_sequences(), slots.read().device());
        if accepted.len() != sequences {
            bail!("Accepted: accepted: expected {sequences} (one for each sequence), got {}", accepted.len());
        }
        for (n, (drafted, stay)) in cu_seqlens.lengths().zip(accepted).enumerate() {
            if *stay > drafted {
                bail!("Accepted: accepted: expected at most {drafted} (the tokens of sequence {n}), got {stay}");
            }
        }
        let update = match in_place {
            true => Update::Count(counts(accepted, device)?),
            false => Update::Feed(fed_again(cu_seqlens, (read, write), accepted, device)?),
        };
        Ok(Self { cu_seqlens: cu_seqlens.clone(), slots: slots.clone(), update })
    }

    /// Moves spans that the pools of several layers share, after [`GatedDeltaNet::commit`] in all of them.
    ///
    /// # Errors
    /// When the slots do not fit the spans, or the device refuses.
    pub fn advance_rings(&self, layer: &GatedDeltaNet, spans: &RingSpans) -> Result<()> {
        match &self.update {
            Update::Feed(None) => Ok(()),
            Update::Feed(Some((cu_seqlens, slots))) => {
                layer.advance_rings(spans, slots, Some(cu_seqlens), cu_seqlens.max_len())
            }
            Update::Count(accepted) => spans.accept(&self.slots, &self.cu_seqlens, accepted),
        }
    }
}

fn counts(accepted: &[usize], device: &Device) -> Result<Tensor> {
    let accepted: Vec<u32> = accepted.iter().map(|&stay| stay as u32).collect();
    let _working = Working::new(device);
    match accepted.is_empty() {
        true => Tensor::zeros(1, DType::U32, device)?.narrow(0, 0, 0),
        false => Tensor::new(&accepted[..], device),
    }
}

/// The call that feeds accepted tokens again: the tokens of each sequence and its slots, padding for those that are not fed.
fn fed_again(
    cu_seqlens: &CuSeqlens,
    (read, write): (&[u32], &[u32]),
    accepted: &[usize],
    device: &Device,
) -> Result<Option<(CuSeqlens, Slots)>> {
    let (mut lengths, mut src, mut to) = (vec![], vec![], vec![]);
    let mut any = false;
    for (n, (drafted, &stay)) in cu_seqlens.lengths().zip(accepted).enumerate() {
        let mut rest = drafted;
        if stay < drafted && read[n] != NO_SLOT && write[n] != NO_SLOT {
            any = true;
            rest -= stay;
            lengths.push(stay);
            src.push(read[n]);
            to.push(write[n]);
        }
        // Padding as short as a step, so that only what is fed decides how it is fed.
        while rest > 0 {
            lengths.push(rest.min(FUSED_TOKENS));
            src.push(NO_SLOT);
            to.push(NO_SLOT);
            rest -= rest.min(FUSED_TOKENS);
        }
    }
    Ok(match any {
        true => Some((CuSeqlens::from_lengths(&lengths, device)?, Slots::from_to(&src, &to, device)?)),
        false => None,
    })
}

impl GatedDeltaNet {
    /// Feeds drafted tokens so that any number of them can be taken back: as [`GatedDeltaNet::forward_slots`] of packed
    /// tokens, with every sequence writing another slot than it reads, and with what [`GatedDeltaNet::commit`] needs. The
    /// slot that a sequence reads stays as it is, so that it needs one more while its draft is verified, and no copy of a
    /// state a token.
    ///
    /// On a pool with a ring ([`PoolOptions::ring`](crate::PoolOptions::ring)) drafts of up to 16 tokens are verified in place: `slots` are
    /// made by [`Slots::new`], the tokens wait in the ring, and [`GatedDeltaNet::commit`] only says how many of them count. A
    /// draft without a commit leaves no trace.
    ///
    /// Up to 8 tokens a sequence use the decode step, on the CPU and in place in a ring up to 16; more tokens use
    /// convolution, rule and norm one after the other.
    ///
    /// # Errors
    /// As [`GatedDeltaNet::forward_slots`], or where the host knows the slots and a sequence writes the slot it reads, unless
    /// in place.
    pub fn verify(
        &self,
        x: &Tensor,
        cu_seqlens: &CuSeqlens,
        slots: &Slots,
        pool: &mut StatePool,
    ) -> Result<(Tensor, Drafted)> {
        let in_place = pool.has_ring() && slots.in_place() && cu_seqlens.max_len() <= RING_TOKENS;
        if !in_place {
            check_other_slots(slots, pool.has_ring())?;
        }
        let drafted = |projected| Drafted {
            projected,
            cu_seqlens: cu_seqlens.clone(),
            slots: slots.clone(),
            in_place,
            launched: self.launched.clone(),
        };
        let Some((slots, _working)) = self.begin_slots(x, Some(cu_seqlens), slots, pool)? else {
            return Ok((x.clone(), drafted(None)));
        };
        let call = Call { drafts: in_place, ..Call::of_pool(pool, &slots, Some(cu_seqlens)) };
        let (y, projected) = self.run_slots(x, call)?;
        Ok((y, drafted(Some(projected).filter(|_| !in_place))))
    }

    /// Leaves in the slot that each sequence wrote in the verify pass the state, the convolution's included, as if only the
    /// accepted tokens had been fed. That slot is the sequence's from here on, and the one that it read is free for the
    /// next draft: the caller swaps the two numbers, whatever was accepted. In place on a ring there is but one slot: a draft is
    /// committed once, and before anything else is fed to its sequences.
    ///
    /// A sequence whose tokens all stay costs nothing. The others' accepted tokens are fed again from the slot that was
    /// read, all in one call, and without the projections, which were kept. The state is what a call with that many tokens
    /// leaves, up to the order of sums in the projections, which may depend on the number of rows; given the same projections bit for bit
    /// where the same kernel runs, which on CUDA may depend on the number of sequences.
    ///
    /// # Errors
    /// When `drafted` is of another layer or `accepted` of another pass, or the pool does not fit.
    pub fn commit(&self, drafted: &Drafted, accepted: &Accepted, pool: &mut StatePool) -> Result<()> {
        if !Arc::ptr_eq(&drafted.launched, &self.launched) {
            bail!("{OP}: drafted: expected what this layer's verify returned, got that of another layer");
        }
        if !drafted.cu_seqlens.is_same(&accepted.cu_seqlens) || !drafted.slots.is_same(&accepted.slots) {
            bail!("{OP}: accepted: expected counts for the sequences that were drafted, got those of another pass");
        }
        if drafted.in_place && !pool.has_ring() {
            bail!("{OP}: pool: expected the one that was drafted on, got one without a ring");
        }
        self.check_pool(pool)?;
        let _working = pool.states_mut().take()?;
        if let (Update::Feed(Some((cu_seqlens, slots))), Some(p)) = (&accepted.update, &drafted.projected) {
            slots.check(OP, slots.len(), pool.capacity(), self.conv_weight.device())?;
            self.feed_again(p, cu_seqlens.max_len(), Call::of_pool(pool, slots, Some(cu_seqlens)))?;
        }
        match pool.ring() {
            Some(PoolRing { ring, own: true }) => accepted.advance_rings(self, &ring.spans),
            _ => Ok(()),
        }
    }

    fn feed_again(&self, p: &Projected, longest: usize, call: Call<'_>) -> Result<()> {
        if self.fuses(longest) {
            self.step(p, call).forward(&p.qkv, &p.z, &self.conv_weight)?;
            return Ok(());
        }
        match (call.ring, call.slots) {
            (Some(PoolRing { ring, .. }), Some(slots)) => self.rule_after_flush(p, call, (ring, slots))?,
            _ => self.rule(p, call)?,
        };
        Ok(())
    }
}

/// A draft that is not in a ring needs other slots to write than to read.
fn check_other_slots(slots: &Slots, ring: bool) -> Result<()> {
    let more = if ring { format!("; in place a ring supports up to {RING_TOKENS} tokens") } else { String::new() };
    if let Some((read, write)) = slots.on_host() {
        let same = |(_, (r, w)): &(usize, (&u32, &u32))| r == w && **r != NO_SLOT;
        if let Some((n, (slot, _))) = read.iter().zip(write).enumerate().find(same) {
            bail!("{OP}: slots: expected other slots to write than to read, got {slot} for both at {n}{more}");
        }
    } else if slots.in_place() {
        bail!("{OP}: slots: expected other slots to write than to read, got one tensor for both{more}");
    }
    Ok(())
}
