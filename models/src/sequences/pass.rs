//! One pass of the model over packed tokens of some sequences.

use super::kv::{KvPiece, KvRows, KvSlots};
use super::pool::{LayerSlots, SequencePool, Uploaded};
use crate::causal_lm::CausalLm;
use candle_core::{Device, Result, Tensor};
use candle_gdn::{CuSeqlens, Drafted, Slots};
#[cfg(feature = "cuda")]
use candle_gdn_core::Arena;
use candle_gdn_core::{Launch, Working};

/// What all layers of a pass share.
#[derive(Debug)]
pub(crate) struct Pass {
    /// New tokens of each sequence.
    pub lengths: Vec<usize>,
    /// `None` where each has one token.
    pub cu_seqlens: Option<CuSeqlens>,
    /// Slots of the Gated DeltaNet layers.
    pub states: Slots,
    pub kv: KvRows,
    /// How its kernels are launched. None of them writes a weight, so launches may overlap.
    pub launch: Launch,
    /// Keeps other threads from capturing a graph. `None` in a graph's own pass.
    pub _working: Option<Working>,
}

/// What becomes of the states of the Gated DeltaNet layers.
pub(crate) enum Mode<'a> {
    /// They advance.
    Feed,
    /// They stay; what [`CausalLm::accept`] needs goes here, one a layer.
    Verify(&'a mut Vec<Drafted>),
}

/// Whether the tokens of a pass are drafts.
#[derive(Clone, Copy)]
pub(crate) enum Draft<'a> {
    No,
    /// They stay in the rings of their sequences.
    InPlace,
    /// Their states go to these slots.
    To(&'a [u32]),
}

impl Pass {
    /// A pass of the sequences in `slots` with `lengths` new tokens.
    pub fn new(
        model: &CausalLm,
        pool: &mut SequencePool,
        slots: &[usize],
        lengths: Vec<usize>,
        drafts: Draft<'_>,
    ) -> Result<Self> {
        let working = Some(pool.working()?);
        let (device, launch) = (pool.device.clone(), Launch::default().overlapping());
        let (cu_seqlens, write) = match drafts {
            Draft::No => (boundaries(&lengths, &device)?, None),
            Draft::InPlace => (Some(CuSeqlens::from_lengths(&lengths, &device)?), None),
            Draft::To(write) => (Some(CuSeqlens::from_lengths(&lengths, &device)?), Some(write)),
        };
        let state = |slot: &usize| pool.entries[*slot].state;
        let read: Vec<u32> = slots.iter().map(state).collect();
        if pool.uses_panels() {
            let states = match write {
                Some(write) => Slots::from_to(&read, write, &device)?,
                None => Slots::new(&read, &device)?,
            };
            let rows: Vec<_> = slots.iter().map(|&slot| (slot, pool.entries[slot].len)).collect();
            let kv = KvRows::on_host(model, rows, &lengths);
            return Ok(Self { lengths, cu_seqlens, states, kv, launch, _working: working });
        }
        let before: Vec<u32> = slots.iter().map(|&slot| pool.entries[slot].len as u32).collect();
        let max_len = before.iter().zip(&lengths).map(|(&len, new)| len as usize + new).max().unwrap_or(0);
        let rows: Vec<_> = slots.iter().map(|&slot| (slot, pool.entries[slot].len)).collect();
        let pieces = match pool.room() {
            Some(room) => KvPiece::cut(&rows, &lengths, room, &device)?,
            None => Vec::new(),
        };
        let held = [read, slots.iter().map(|&slot| slot as u32).collect(), before];
        let (states, slots, positions) = match (write, pool.uploaded.take()) {
            (Some(write), _) => {
                let kv = Slots::new(&held[1], &device)?;
                (Slots::from_to(&held[0], write, &device)?, kv, Tensor::new(&held[2][..], &device)?)
            }
            (None, Some(last)) if last.held == held => (last.states, last.slots, last.positions),
            (None, _) => {
                let [states, kv] = [0, 1].map(|i| Slots::new(&held[i], &device));
                (states?, kv?, Tensor::new(&held[2][..], &device)?)
            }
        };
        let kv = KvRows::Device { slots, positions, max_len, pieces };
        Ok(Self { lengths, cu_seqlens, states, kv, launch, _working: working })
    }

    /// Keeps what is on the device for the next pass of the same sequences, those in `slots`.
    pub fn keep_uploads(self, pool: &mut SequencePool, slots: &[usize]) {
        // The slots of a draft have changed, or it may be rejected.
        if let (KvRows::Device { slots: kv, positions, .. }, true) = (self.kv, self.states.in_place()) {
            let states = slots.iter().map(|&slot| pool.entries[slot].state).collect();
            let after = slots.iter().map(|&slot| pool.entries[slot].len as u32).collect();
            let held = [states, slots.iter().map(|&slot| slot as u32).collect(), after];
            pool.uploaded = Some(Uploaded { states: self.states, slots: kv, positions, held });
        }
    }

    /// The rows of the last token of each sequence.
    pub fn last_rows(&self, x: &Tensor) -> Result<Tensor> {
        match (&self.cu_seqlens, self.lengths.as_slice()) {
            (None, _) => Ok(x.clone()),
            // A copy, which may outlive all other rows.
            (Some(_), [one]) => x.narrow(0, one - 1, 1)?.force_contiguous(),
            (Some(cu), _) => x.index_select(&last_tokens(cu)?, 0),
        }
    }
}

/// Boundaries of packed tokens; `None` where each sequence has one.
pub(crate) fn boundaries(lengths: &[usize], device: &Device) -> Result<Option<CuSeqlens>> {
    match lengths.iter().all(|&n| n == 1) {
        true => Ok(None),
        false => CuSeqlens::from_lengths(lengths, device).map(Some),
    }
}

/// The row of the last token of each sequence.
pub(crate) fn last_tokens(cu_seqlens: &CuSeqlens) -> Result<Tensor> {
    let last: Vec<u32> = cu_seqlens.as_slice()[1..].iter().map(|end| end - 1).collect();
    Tensor::new(last, cu_seqlens.device())
}

impl SequencePool {
    /// Whether keys and values are in the layout of the CPU's kernel; on the CPU also for models without softmax layers.
    pub(crate) fn uses_panels(&self) -> bool {
        let mut caches = self.layers.iter().filter_map(|layer| match layer {
            LayerSlots::Full(kv) => Some(matches!(kv, KvSlots::Panels(..))),
            LayerSlots::Linear(_) => None,
        });
        caches.next().unwrap_or(matches!(self.device, Device::Cpu))
    }

    /// New tokens of a sequence that all layers have room for at once, in one append or a draft; `None`: any number.
    pub(crate) fn room(&self) -> Option<usize> {
        let rooms = self.layers.iter().filter_map(|layer| match layer {
            LayerSlots::Full(kv) => kv.room(),
            LayerSlots::Linear(_) => None,
        });
        rooms.min()
    }
}

/// The memory that the kernels of a captured pass write.
#[cfg(feature = "cuda")]
pub(crate) fn arena(device: &Device) -> Result<Option<Arena>> {
    Arena::new(device).map(Some)
}
