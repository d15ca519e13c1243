//! Several drafted tokens at once, of which only some may stay.

use super::forward::{On, FUSED_TOKENS};
use super::projection::Projected;
use super::{GatedDeltaNet, OP};
use crate::ops::ring::{Cursors, Move, RING_TOKENS};
use crate::ops::{CuSeqlens, Launch, Slots, NO_SLOT};
use crate::state::{PoolRing, StatePool};
use candle_core::{bail, Result, Tensor};

/// What a layer keeps of a verify pass until [`GatedDeltaNet::commit`]: the projections of the drafted tokens, no state; in place on
/// a ring nothing.
#[derive(Debug)]
pub struct Drafted {
    /// `None` where there were no tokens, or where they are in a ring.
    projected: Option<Projected>,
    cu_seqlens: CuSeqlens,
    in_place: bool,
}

impl Drafted {
    /// Bytes of device memory held.
    pub fn size_in_bytes(&self) -> usize {
        self.projected.as_ref().map_or(0, Projected::size_in_bytes)
    }
}

/// How many drafted tokens of each sequence stay. Made once a batch and used for every layer.
#[derive(Debug)]
pub struct Accepted {
    /// Tokens of each sequence that were drafted.
    drafted: Vec<usize>,
    how: How,
}

#[derive(Debug)]
enum How {
    /// The sequences to be fed anew, and between them, as padding, all other tokens; none where all tokens stay.
    Anew(Option<(CuSeqlens, Slots)>),
    /// In place, entries of rings begin to count.
    InPlace { cu_seqlens: CuSeqlens, slots: Slots, accepted: Tensor },
}

impl Accepted {
    /// `accepted[n]` of the tokens of sequence `n` stay, of a verify pass with these boundaries and slots.
    ///
    /// # Errors
    /// When there are not as many counts as sequences, one is larger than its sequence's tokens, or the slots were not
    /// made from host values.
    pub fn new(cu_seqlens: &CuSeqlens, slots: &Slots, accepted: &[usize]) -> Result<Self> {
        let Some((read, write)) = slots.on_host() else {
            bail!("Accepted: slots: expected them made from host values, got tensors");
        };
        let sequences = cu_seqlens.num_sequences();
        for (arg, len) in [("accepted", accepted.len()), ("slots", slots.len())] {
            if len != sequences {
                bail!("Accepted: {arg}: expected {sequences} (one for each sequence), got {len}");
            }
        }
        let device = slots.read().device();
        if slots.in_place() {
            return Self::in_place(cu_seqlens, slots, accepted);
        }
        // Of the calls that feed anew: the tokens of each sequence and its slots, padding for those that are not fed.
        let (mut lengths, mut from, mut to) = (vec![], vec![], vec![]);
        let drafted: Vec<usize> = cu_seqlens.lengths().collect();
        let mut any = false;
        for (n, (&drafted, &stay)) in drafted.iter().zip(accepted).enumerate() {
            if stay > drafted {
                bail!("Accepted: accepted: expected at most {drafted} (the tokens of sequence {n}), got {stay}");
            }
            let mut rest = drafted;
            if stay < drafted && read[n] != NO_SLOT && write[n] != NO_SLOT {
                any = true;
                rest -= stay;
                lengths.push(stay);
                from.push(read[n]);
                to.push(write[n]);
            }
            // Pieces as short as a step, so that only what is fed decides how it is fed.
            while rest > 0 {
                lengths.push(rest.min(FUSED_TOKENS));
                from.push(NO_SLOT);
                to.push(NO_SLOT);
                rest -= rest.min(FUSED_TOKENS);
            }
        }
        let replay = match any {
            true => Some((CuSeqlens::from_lengths(&lengths, device)?, Slots::from_to(&from, &to, device)?)),
            false => None,
        };
        Ok(Self { drafted, how: How::Anew(replay) })
    }

    fn in_place(cu_seqlens: &CuSeqlens, slots: &Slots, accepted: &[usize]) -> Result<Self> {
        let drafted: Vec<usize> = cu_seqlens.lengths().collect();
        for (n, (drafted, stay)) in drafted.iter().zip(accepted).enumerate() {
            if stay > drafted {
                bail!("Accepted: accepted: expected at most {drafted} (the tokens of sequence {n}), got {stay}");
            }
        }
        let accepted: Vec<u32> = accepted.iter().map(|&stay| stay as u32).collect();
        let accepted = match accepted.is_empty() {
            true => Tensor::zeros(1, candle_core::DType::U32, slots.read().device())?.narrow(0, 0, 0)?,
            false => Tensor::new(&accepted[..], slots.read().device())?,
        };
        Ok(Self { drafted, how: How::InPlace { cu_seqlens: cu_seqlens.clone(), slots: slots.clone(), accepted } })
    }

    /// Moves the cursors of rings behind [`GatedDeltaNet::commit`] in all layers that share them.
    #[doc(hidden)]
    pub fn advance(&self, layer: &GatedDeltaNet, cursors: &Cursors) -> Result<()> {
        match &self.how {
            How::Anew(None) => Ok(()),
            How::Anew(Some((cu_seqlens, slots))) => {
                cursors.advance(slots, layer.ring_move(Some(cu_seqlens), cu_seqlens.max_len()))
            }
            How::InPlace { cu_seqlens, slots, accepted } => cursors.advance(slots, Move::accept(cu_seqlens, accepted)),
        }
    }
}

impl GatedDeltaNet {
    /// Feeds drafted tokens so that any number of them can be taken back: as [`GatedDeltaNet::forward_slots`] of packed
    /// tokens, with every sequence writing another slot than it reads, and with what [`GatedDeltaNet::commit`] needs. The
    /// slot that a sequence reads stays as it is, so that it needs one more while its draft is verified, and no copy of a
    /// state a token.
    ///
    /// On a pool with a ring ([`GatedDeltaNet::new_ring_pool`]) drafts of up to 16 tokens are verified in place: `slots` are
    /// made by [`Slots::new`], the tokens wait in the ring, and [`GatedDeltaNet::commit`] only says how many of them count. A
    /// draft without a commit leaves no trace.
    ///
    /// Up to 8 tokens a sequence (on the CPU 16) take the decode step, more the chunk forms.
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
        self.verify_launched(x, cu_seqlens, slots, pool, &Launch::default())
    }

    /// [`verify`](Self::verify) with a say in how its kernels are launched.
    ///
    /// # Errors
    /// As [`verify`](Self::verify).
    #[doc(hidden)]
    pub fn verify_launched(
        &self,
        x: &Tensor,
        cu_seqlens: &CuSeqlens,
        slots: &Slots,
        pool: &mut StatePool,
        launch: &Launch,
    ) -> Result<(Tensor, Drafted)> {
        let in_place = pool.has_ring() && slots.in_place() && cu_seqlens.max_len() <= RING_TOKENS;
        if !in_place {
            check_other_slots(slots, pool.has_ring())?;
        }
        let drafted = |projected| Drafted { projected, cu_seqlens: cu_seqlens.clone(), in_place };
        let Some((slots, _working)) = self.begin_slots(x, Some(cu_seqlens), slots, pool)? else {
            return Ok((x.clone(), drafted(None)));
        };
        let on = On { drafts: in_place, launch, ..On::pool(pool, &slots, Some(cu_seqlens)) };
        let (y, projected) = self.run_slots(x, on)?;
        if !in_place {
            return Ok((y, drafted(Some(projected))));
        }
        if let Some(PoolRing { ring, own: true }) = pool.ring() {
            ring.cursors.advance(&slots, Move::draft(cu_seqlens, &no_tokens(&slots)?))?;
        }
        Ok((y, drafted(None)))
    }

    /// Leaves in the slot that each sequence wrote in the verify pass the state, the convolution's included, as if only the
    /// accepted tokens had been fed. That slot is the sequence's from here on, and the one that it read is free for the
    /// next draft: the caller swaps the two numbers, whatever was accepted. In place on a ring there is but one slot: a draft is
    /// committed once, and before anything else is fed to its sequences.
    ///
    /// A sequence whose tokens all stay costs nothing. The others' accepted tokens are fed anew from the slot that was
    /// read, all in one call, and without the projections, which were kept. The state is what a call with that many tokens
    /// leaves: on the CPU bit for bit; on CUDA too where the same kernel runs, which may depend on the number of
    /// sequences.
    ///
    /// # Errors
    /// When the pass had other boundaries or the pool does not fit.
    pub fn commit(&self, drafted: &Drafted, accepted: &Accepted, pool: &mut StatePool) -> Result<()> {
        if !drafted.cu_seqlens.lengths().eq(accepted.drafted.iter().copied()) {
            bail!("{OP}: accepted: expected counts for the sequences that were drafted, got others");
        }
        if drafted.in_place != matches!(accepted.how, How::InPlace { .. }) || (drafted.in_place && !pool.has_ring()) {
            bail!("{OP}: accepted: expected the slots that were drafted on, got others");
        }
        self.check_pool(pool)?;
        let _working = pool.states_mut().take()?;
        if let (How::Anew(Some((cu_seqlens, slots))), Some(p)) = (&accepted.how, &drafted.projected) {
            slots.check(OP, slots.len(), pool.capacity(), self.conv_weight.device())?;
            self.feed_anew(p, cu_seqlens.max_len(), On::pool(pool, slots, Some(cu_seqlens)))?;
        }
        match pool.ring() {
            Some(PoolRing { ring, own: true }) => accepted.advance(self, &ring.cursors),
            _ => Ok(()),
        }
    }

    fn feed_anew(&self, p: &Projected, longest: usize, on: On<'_>) -> Result<()> {
        if self.fuses(longest) {
            self.step(p, on)?.forward(&p.qkv, &p.z, &self.conv_weight)?;
            return Ok(());
        }
        match (on.ring, on.slots) {
            (Some(PoolRing { ring, .. }), Some(slots)) => self.behind_ring(p, longest, on, (ring, slots))?,
            _ => self.rule(p, longest, on)?,
        };
        Ok(())
    }
}

/// Of a draft that is not in a ring.
fn check_other_slots(slots: &Slots, ring: bool) -> Result<()> {
    let more = if ring { format!("; in place a ring takes up to {RING_TOKENS} tokens") } else { String::new() };
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

/// None of the sequences' tokens stays yet.
#[doc(hidden)]
pub fn no_tokens(slots: &Slots) -> Result<Tensor> {
    Tensor::zeros(slots.len(), candle_core::DType::U32, slots.read().device())
}
