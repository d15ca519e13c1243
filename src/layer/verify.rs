//! Several drafted tokens at once, of which only some may stay.

use super::forward::{On, FUSED_TOKENS};
use super::projection::Projected;
use super::{GatedDeltaNet, OP};
use crate::ops::{CuSeqlens, Launch, Slots, NO_SLOT};
use crate::state::StatePool;
use candle_core::{bail, Result, Tensor};

/// What a layer keeps of a verify pass until [`GatedDeltaNet::commit`]: the projections of the drafted tokens, no state.
#[derive(Debug)]
pub struct Drafted {
    /// `None` where there were no tokens.
    projected: Option<Projected>,
    cu_seqlens: CuSeqlens,
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
    /// The sequences to be fed anew, and between them, as padding, all other tokens.
    replay: Option<(CuSeqlens, Slots)>,
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
        let device = slots.read().device();
        let replay = match any {
            true => Some((CuSeqlens::from_lengths(&lengths, device)?, Slots::from_to(&from, &to, device)?)),
            false => None,
        };
        Ok(Self { drafted, replay })
    }
}

impl GatedDeltaNet {
    /// Feeds drafted tokens so that any number of them can be taken back: as [`GatedDeltaNet::forward_slots`] of packed
    /// tokens, with every sequence writing another slot than it reads, and with what [`GatedDeltaNet::commit`] needs. The
    /// slot that a sequence reads stays as it is, so that it needs one more while its draft is verified, and no copy of a
    /// state a token.
    ///
    /// Up to 8 tokens a sequence (on the CPU 16) take the decode step, more the chunk forms.
    ///
    /// # Errors
    /// As [`GatedDeltaNet::forward_slots`], or where the host knows the slots and a sequence writes the slot it reads.
    pub fn verify(
        &self,
        x: &Tensor,
        cu_seqlens: &CuSeqlens,
        slots: &Slots,
        pool: &mut StatePool,
    ) -> Result<(Tensor, Drafted)> {
        if let Some((read, write)) = slots.on_host() {
            let same = |(_, (r, w)): &(usize, (&u32, &u32))| r == w && **r != NO_SLOT;
            if let Some((n, (slot, _))) = read.iter().zip(write).enumerate().find(same) {
                bail!("{OP}: slots: expected other slots to write than to read, got {slot} for both at {n}");
            }
        } else if slots.in_place() {
            bail!("{OP}: slots: expected other slots to write than to read, got one tensor for both");
        }
        let drafted = |projected| Drafted { projected, cu_seqlens: cu_seqlens.clone() };
        let Some((slots, _working)) = self.begin_slots(x, Some(cu_seqlens), slots, pool)? else {
            return Ok((x.clone(), drafted(None)));
        };
        let states = &*pool.states_mut();
        let on = On {
            states,
            slots: Some(&slots),
            cu_seqlens: Some(cu_seqlens),
            checkpoints: None,
            launch: &Launch::default(),
        };
        let (y, projected) = self.run_slots(x, on)?;
        Ok((y, drafted(Some(projected))))
    }

    /// Leaves in the slot that each sequence wrote in the verify pass the state, the convolution's included, as if only the
    /// accepted tokens had been fed. That slot is the sequence's from here on, and the one that it read is free for the
    /// next draft: the caller swaps the two numbers, whatever was accepted.
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
        let (Some((cu_seqlens, slots)), Some(p)) = (&accepted.replay, &drafted.projected) else { return Ok(()) };
        self.check_states("pool", pool.states_mut())?;
        slots.check(OP, slots.len(), pool.capacity(), self.conv_weight.device())?;
        let _working = pool.states_mut().take()?;
        let states = &*pool.states_mut();
        let on = On {
            states,
            slots: Some(slots),
            cu_seqlens: Some(cu_seqlens),
            checkpoints: None,
            launch: &Launch::default(),
        };
        if self.fuses(cu_seqlens.max_len()) {
            self.step(p, on)?.forward(&p.qkv, &p.z, &self.conv_weight)?;
        } else {
            self.rule(p, cu_seqlens.max_len(), on)?;
        }
        Ok(())
    }
}
