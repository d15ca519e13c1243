//! Makes a [`SequencePool`], and grows its states for drafts.

use super::fingerprint::hash_model;
use super::kv::KvSlots;
use super::pool::{unique, Entry, LayerSlots, SequencePool};
use crate::blocks::attention::CacheShape;
use crate::blocks::decoder::Mixer;
use crate::causal_lm::CausalLm;
use crate::config::ModelConfig;
use crate::drafting::head_state::{HeadSlots, HeadState};
use candle_core::{bail, DeviceLocation, Result};
use candle_gdn::{PoolOptions, RingSpans};
use candle_gdn_core::{LastThread, Working};
use std::sync::{Arc, Mutex, PoisonError};

/// How the states of the Gated DeltaNet layers lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StateLayout {
    /// With rings on CUDA, where the kernels support the model's heads; else plain.
    #[default]
    Auto,
    /// With a ring of the latest tokens beside each state: a decode step reads the state and writes it with every sixteenth token,
    /// and drafts of up to 16 tokens need no second state.
    Ring,
    /// States alone.
    Plain,
}

impl StateLayout {
    /// Whether states of such a model have rings on such a device.
    pub fn has_ring(self, config: &ModelConfig, device: DeviceLocation) -> bool {
        match self {
            StateLayout::Ring => true,
            StateLayout::Plain => false,
            StateLayout::Auto => config.gdn.has_fused_step() && matches!(device, DeviceLocation::Cuda { .. }),
        }
    }
}

/// Slots of the state pools for the states of drafts, until this is dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    pub slots: Vec<u32>,
    home: Arc<Mutex<Vec<u32>>>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.home.lock().unwrap_or_else(PoisonError::into_inner).append(&mut self.slots);
    }
}

impl CausalLm {
    /// Room for `sequences` sequences at once, each of at most `max_len` tokens. See [`SequencePool::bytes_per_sequence`] for what that takes.
    ///
    /// # Errors
    /// When either is 0, `max_len` is more than `max_position_embeddings`, or the device is out of memory.
    pub fn new_sequences(&self, sequences: usize, max_len: usize) -> Result<SequencePool> {
        self.new_sequences_with(sequences, max_len, StateLayout::Auto)
    }

    /// [`new_sequences`](Self::new_sequences) with another layout of the states than [`StateLayout::Auto`].
    ///
    /// # Errors
    /// As [`new_sequences`](Self::new_sequences), or when a layer has no kernels for rings.
    pub fn new_sequences_with(&self, sequences: usize, max_len: usize, layout: StateLayout) -> Result<SequencePool> {
        for (arg, value) in [("sequences", sequences), ("max_len", max_len)] {
            if value == 0 {
                bail!("new_sequences: {arg}: expected at least 1, got 0")
            }
        }
        if sequences > i32::MAX as usize {
            bail!("new_sequences: sequences: expected at most {}, got {sequences}", i32::MAX)
        }
        let positions = self.config.max_position_embeddings;
        if max_len > positions {
            bail!("new_sequences: max_len: expected at most max_position_embeddings ({positions}), got {max_len}")
        }
        let _working = Working::new(&self.device);
        let shape = self.cache_shape(max_len);
        // A layer whose kernel was chosen supports no ring.
        let supported = layout == StateLayout::Ring || self.gated_delta_nets().all(|gdn| gdn.supports_ring());
        let spans = match supported && layout.has_ring(&self.config, self.device.location()) {
            true => Some(RingSpans::new(sequences, &self.device)?),
            false => None,
        };
        let layers = self.layers.iter().map(|layer| {
            Ok(match (&layer.mixer, &spans) {
                (Mixer::Linear(gdn), Some(spans)) => {
                    LayerSlots::Linear(gdn.new_pool_with(sequences, &PoolOptions::default().shared_ring(spans))?)
                }
                (Mixer::Linear(gdn), None) => LayerSlots::Linear(gdn.new_pool(sequences)?),
                (Mixer::Full(attention), _) => {
                    let shape = CacheShape { window: attention.window, ..shape.clone() };
                    LayerSlots::Full(KvSlots::new(&shape, sequences)?)
                }
            })
        });
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let head = match self.has_draft_head() {
            true => Some(HeadSlots {
                kv: KvSlots::new(&shape, sequences)?,
                idle: false,
                idle_waiting: SequencePool::idle_waiting(&self.device),
                slots: vec![HeadState::default(); sequences],
            }),
            false => None,
        };
        let entries = (0..sequences as u32).map(|state| Entry { state, ..Entry::default() }).collect();
        Ok(SequencePool {
            model: self.id,
            model_hash: hash_model(&self.config, self.dtype),
            layers,
            head,
            spans,
            entries,
            free: (0..sequences as u32).rev().collect(),
            spares: Arc::default(),
            states: sequences,
            max_len,
            device: self.device.clone(),
            memory: unique(),
            uploaded: None,
            thread: LastThread::default(),
        })
    }

    /// Makes room for drafts of `count` sequences in every Gated DeltaNet layer. Memory grows, and moves, at most to
    /// the most that were ever asked for at once.
    pub(crate) fn lease_states(&self, pool: &mut SequencePool, count: usize) -> Result<Lease> {
        let spares = pool.spares.clone();
        let missing = count.saturating_sub(spares.lock().unwrap_or_else(PoisonError::into_inner).len());
        if missing > 0 {
            pool.memory = unique();
            for layer in &mut pool.layers {
                if let LayerSlots::Linear(states) = layer {
                    states.grow(states.capacity().max(pool.states + missing))?;
                }
            }
            let new = pool.states as u32..(pool.states + missing) as u32;
            spares.lock().unwrap_or_else(PoisonError::into_inner).extend(new);
            pool.states += missing;
        }
        let mut free = spares.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(from) = free.len().checked_sub(count) else { bail!("SequencePool: expected {count} spare states") };
        let slots = free.split_off(from);
        drop(free);
        Ok(Lease { slots, home: spares })
    }
}
