//! One pass of the model over packed tokens of some sequences.

use super::kept::Recent;
use super::kv::{KvRows, KvSlots};
use super::pool::{LayerSlots, SequencePool};
use crate::blocks::decoder::{Mixer, Residual};
use crate::blocks::rotary::Angles;
use crate::causal_lm::CausalLm;
use candle_core::{bail, Device, Result, Tensor};
use candle_gdn::plumbing::{Arena, Launch, Working};
use candle_gdn::{CuSeqlens, Drafted, GatedDeltaNet, Slots, StatePool};

/// What all layers of a pass share.
#[derive(Debug)]
pub(super) struct Pass {
    /// New tokens of each sequence.
    pub lengths: Vec<usize>,
    /// `None` where each has one token.
    pub cu_seqlens: Option<CuSeqlens>,
    /// Of the Gated DeltaNet layers.
    pub states: Slots,
    pub kv: KvRows,
    /// How its kernels are launched: none of them writes a weight.
    pub launch: Launch,
    /// No other thread captures a graph meanwhile. `None` in a graph's own pass.
    pub _working: Option<Working>,
}

/// What becomes of the states of the Gated DeltaNet layers.
pub(super) enum Mode<'a> {
    /// They advance.
    Feed,
    /// They stay, and the drafts' are in other slots.
    Verify(&'a mut Vec<Drafted>),
}

/// Whether the tokens of a pass are drafts.
#[derive(Clone, Copy)]
pub(super) enum Draft<'a> {
    No,
    /// They wait in the rings of their sequences.
    InPlace,
    /// Their states go to these slots.
    To(&'a [u32]),
}

impl Pass {
    /// Of the sequences in `slots`, with `lengths` new tokens.
    pub fn new(
        model: &CausalLm,
        pool: &mut SequencePool,
        slots: &[usize],
        lengths: Vec<usize>,
        drafts: Draft<'_>,
    ) -> Result<Self> {
        let working = Some(pool.take()?);
        let (device, launch) = (pool.device.clone(), Launch::default().overlapping());
        let (ones, write) = match drafts {
            Draft::No => (lengths.iter().all(|&n| n == 1), None),
            Draft::InPlace => (false, None),
            Draft::To(write) => (false, Some(write)),
        };
        let cu_seqlens = if ones { None } else { Some(CuSeqlens::from_lengths(&lengths, &device)?) };
        let state = |slot: &usize| pool.entries[*slot].state;
        let read: Vec<u32> = slots.iter().map(state).collect();
        if pool.uses_panels() {
            let states = match write {
                Some(write) => Slots::from_to(&read, write, &device)?,
                None => Slots::new(&read, &device)?,
            };
            let rows: Vec<_> = slots.iter().map(|&slot| (slot, pool.entries[slot].len)).collect();
            let mut angles = Angles::default();
            for ((_, position), tokens) in rows.iter().zip(&lengths) {
                model.rotary.append(*position, *tokens, &mut angles);
            }
            return Ok(Self {
                lengths,
                cu_seqlens,
                states,
                kv: KvRows::Host { rows, angles },
                launch,
                _working: working,
            });
        }
        let before: Vec<u32> = slots.iter().map(|&slot| pool.entries[slot].len as u32).collect();
        let max_len = before.iter().zip(&lengths).map(|(&len, new)| len as usize + new).max().unwrap_or(0);
        let held = [read, slots.iter().map(|&slot| slot as u32).collect(), before];
        let (states, slots, positions) = match (write, pool.recent.take()) {
            (Some(write), _) => {
                let kv = Slots::new(&held[1], &device)?;
                (Slots::from_to(&held[0], write, &device)?, kv, Tensor::new(&held[2][..], &device)?)
            }
            (None, Some(recent)) if recent.held == held => (recent.states, recent.slots, recent.positions),
            (None, _) => {
                let [states, kv] = [0, 1].map(|i| Slots::new(&held[i], &device));
                (states?, kv?, Tensor::new(&held[2][..], &device)?)
            }
        };
        let kv = KvRows::Device { slots, positions, max_len };
        Ok(Self { lengths, cu_seqlens, states, kv, launch, _working: working })
    }

    /// What the next pass of the same sequences finds on the device already; `slots` are this one's.
    pub fn keep_for_next(self, pool: &mut SequencePool, slots: &[usize]) {
        // A draft's slots have changed, or it may still be refused.
        if let (KvRows::Device { slots: kv, positions, .. }, true) = (self.kv, self.states.in_place()) {
            let states = slots.iter().map(|&slot| pool.entries[slot].state).collect();
            let after = slots.iter().map(|&slot| pool.entries[slot].len as u32).collect();
            let held = [states, slots.iter().map(|&slot| slot as u32).collect(), after];
            pool.recent = Some(Recent { states: self.states, slots: kv, positions, held });
        }
    }

    /// [`last_rows`](Self::last_rows) of a tensor.
    pub fn last_rows_of(&self, x: &Tensor) -> Result<Tensor> {
        match (&self.cu_seqlens, self.lengths.as_slice()) {
            (None, _) => Ok(x.clone()),
            // A copy, which may outlive all other rows.
            (Some(_), [one]) => x.narrow(0, one - 1, 1)?.force_contiguous(),
            (Some(cu), _) => {
                let last: Vec<u32> = cu.as_slice()[1..].iter().map(|end| end - 1).collect();
                x.index_select(&Tensor::new(last, cu.device())?, 0)
            }
        }
    }

    /// The rows of the last token of each sequence.
    pub fn last_rows(&self, x: Residual) -> Result<Residual> {
        match (&self.cu_seqlens, self.lengths.as_slice()) {
            (None, _) => Ok(x),
            (Some(_), [one]) => x.rows(|x| x.narrow(0, one - 1, 1)),
            (Some(cu), _) => {
                let last: Vec<u32> = cu.as_slice()[1..].iter().map(|end| end - 1).collect();
                let last = Tensor::new(last, cu.device())?;
                x.rows(|x| x.index_select(&last, 0))
            }
        }
    }

    fn layer(&self, gdn: &GatedDeltaNet, x: &Tensor, pool: &mut StatePool, mode: &mut Mode<'_>) -> Result<Tensor> {
        pool.launch_with(&self.launch);
        match (mode, &self.cu_seqlens) {
            (Mode::Feed, None) => gdn.forward_slots(&x.unsqueeze(1)?, None, &self.states, pool)?.squeeze(1),
            (Mode::Feed, cu) => gdn.forward_slots(x, cu.as_ref(), &self.states, pool),
            (Mode::Verify(kept), Some(cu)) => {
                let (y, drafted) = gdn.verify(x, cu, &self.states, pool)?;
                kept.push(drafted);
                Ok(y)
            }
            (_, None) => bail!("sequences: expected boundaries of packed tokens"),
        }
    }
}

impl SequencePool {
    /// Whether keys and values are in the layout of the CPU's kernel; models without softmax layers count as such on
    /// the CPU.
    pub(super) fn uses_panels(&self) -> bool {
        let mut caches = self.layers.iter().filter_map(|layer| match layer {
            LayerSlots::Full(kv) => Some(matches!(kv, KvSlots::Panels(..))),
            LayerSlots::Linear(_) => None,
        });
        caches.next().unwrap_or(matches!(self.device, Device::Cpu))
    }
}

impl CausalLm {
    /// Packed ids `[tokens]` through all layers: `[tokens, hidden_size]`, before the last norm. Nothing is asked of the
    /// host; positions on the device advance at the end, unless the tokens are drafts.
    pub(super) fn through_layers(
        &self,
        ids: &Tensor,
        pass: &Pass,
        pool: &mut SequencePool,
        mut mode: Mode<'_>,
    ) -> Result<Residual> {
        let mut x = Residual::new(self.embed(ids)?);
        for (layer, slots) in self.layers.iter().zip(&mut pool.layers) {
            pass.launch.next_layer();
            x = layer.around(x, &pass.launch, |mixer, h| match (mixer, slots) {
                (Mixer::Linear(gdn), LayerSlots::Linear(states)) => pass.layer(gdn, h, states, &mut mode),
                (Mixer::Full(attention), LayerSlots::Full(kv)) => {
                    attention.forward_slots(h, pass.cu_seqlens.as_ref(), &pass.kv, kv, &pass.launch)
                }
                _ => bail!("sequences: the pool's layers are of other kinds than the model's"),
            })?;
        }
        pass.launch.next_layer();
        if let Some((cursors, gdn)) = pool.cursors.as_ref().zip(self.gated_delta_nets().next()) {
            let cu = pass.cu_seqlens.as_ref();
            match (&mode, cu) {
                (Mode::Verify(_), Some(cu)) if pass.states.in_place() => {
                    cursors.draft(&pass.states, cu)?;
                }
                _ => gdn.advance_rings(cursors, &pass.states, cu, cu.map_or(1, CuSeqlens::max_len))?,
            }
        }
        if !matches!(mode, Mode::Verify(_)) {
            let cache = pool.layers.iter().find_map(|layer| match layer {
                LayerSlots::Full(kv) => kv.attention_cache(&pass.kv).transpose(),
                LayerSlots::Linear(_) => None,
            });
            match (cache.transpose()?, &pass.cu_seqlens) {
                (Some(cache), Some(cu)) => cache.advance_packed(cu)?,
                (Some(cache), None) => cache.advance(1)?,
                (None, _) => {}
            }
        }
        Ok(x)
    }

    /// Last norm and head of some rows: `[rows, vocab_size]` in f32.
    pub(super) fn head_of(&self, x: Residual, launch: &Launch) -> Result<Tensor> {
        let (_, y) = x.norm(&self.norm, launch)?;
        self.logits_launched(&y, launch)
    }

    /// Whether all are in the vocabulary: an id outside the table would be undefined behaviour in a GPU gather.
    pub(super) fn check_ids<'a>(&self, what: &str, batch: impl Iterator<Item = &'a [u32]>) -> Result<()> {
        let vocab = self.config.vocab_size;
        for (n, tokens) in batch.enumerate() {
            if let Some(id) = tokens.iter().find(|&&id| id as usize >= vocab) {
                bail!("{what}: batch: expected token ids below vocab_size ({vocab}), got {id} at {n}")
            }
        }
        Ok(())
    }

    /// The ids in one row on the device, checked.
    pub(super) fn packed_ids<'a>(&self, what: &str, batch: impl Iterator<Item = &'a [u32]> + Clone) -> Result<Tensor> {
        self.check_ids(what, batch.clone())?;
        let ids: Vec<u32> = batch.flatten().copied().collect();
        let tokens = ids.len();
        Tensor::from_vec(ids, tokens, &self.device)
    }
}

/// Where the kernels of a pass that is captured write.
pub(super) fn arena(device: &Device) -> Result<Option<Arena>> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        return Arena::new(device).map(Some);
    }
    let _ = device;
    Ok(None)
}
