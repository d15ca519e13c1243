//! Who has which slot, and how far each sequence is.

use super::head::{HeadSlots, HeadState};
use super::kept::{Piece, Recent};
use super::kv::KvSlots;
use crate::blocks::decoder::Mixer;
use crate::causal_lm::CausalLm;
use crate::config::ModelConfig;
use crate::slot_allocator::SlotAllocator;
use candle_core::{bail, Device, Result};
use candle_gdn::plumbing::{LastThread, Working};
use candle_gdn::{PoolOptions, RingSpans, StatePool};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

const OP: &str = "SequencePool";

/// Whether the states of the Gated DeltaNet layers have rings beside them
/// ([`PoolOptions::ring`](candle_gdn::PoolOptions::ring)): a decode step then reads a state and writes it with
/// every sixteenth token, and drafts of up to 16 tokens need no second state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rings {
    /// On CUDA, where the kernels take the model's heads: measured to be faster from one sequence on (cuda/ring/README.md).
    #[default]
    Auto,
    /// Always: for tests.
    Always,
    /// Never.
    Never,
}

impl Rings {
    /// Whether states of such a model have rings.
    pub fn of(self, config: &ModelConfig, device: &Device) -> bool {
        let c = &config.gdn;
        let takes = (c.key_head_dim, c.value_head_dim, c.conv_kernel) == (128, 128, 4);
        match self {
            Rings::Always => true,
            Rings::Never => false,
            Rings::Auto => takes && device.is_cuda(),
        }
    }
}

/// A sequence of a [`SequencePool`]: a handle, which is small and copied freely. It is of the pool that began it, and
/// of nothing once the sequence has ended: used elsewhere or later it is an error, also when its slot has a new owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sequence {
    pub(super) slot: u32,
    /// Of all sequences of the process, so that one of another pool is not taken for one's own.
    pub(super) generation: u64,
}

/// Room for a number of sequences of one model, each of up to a number of tokens. Made by
/// [`CausalLm::new_sequences`] and used with that model only.
///
/// A Gated DeltaNet layer holds a state of fixed size for each sequence, a softmax layer keys and values. On CUDA all
/// of it is allocated when the pool is made, for the greatest length, and stays where it is. On the CPU keys and
/// values grow with each sequence, and their memory is used again by the next one in the slot.
///
/// A pass that fails half-way, when a device refuses or is out of memory, leaves the layers of its sequences at
/// different tokens: those refuse everything then but [`SequencePool::restore`] and [`SequencePool::end`]. All other
/// sequences go on.
///
/// ```no_run
/// # fn demo(model: &candle_gdn_models::CausalLm) -> candle_core::Result<()> {
/// let mut pool = model.new_sequences(8, 4096)?;
/// let (a, b) = (pool.begin()?, pool.begin()?);
/// model.feed(&mut pool, &[(a, &[11, 22, 33]), (b, &[44])])?; // logits [2, vocab_size]
/// let c = pool.fork(a)?; // goes on from [11, 22, 33]
/// model.feed(&mut pool, &[(a, &[1]), (b, &[2]), (c, &[3])])?;
///
/// let (logits, drafts) = model.verify(&mut pool, &[(a, &[5, 6, 7])])?; // [3, vocab_size]
/// model.accept(&mut pool, drafts, &[2])?; // as if 5 and 6 had been fed
/// pool.end(b)?;
/// # let _ = logits;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SequencePool {
    pub(super) model: usize,
    pub(super) layers: Vec<LayerSlots>,
    /// Of the draft head, where the model has one.
    pub(super) head: Option<HeadSlots>,
    /// Of the rings beside the states of all Gated DeltaNet layers, where they have them.
    pub(super) cursors: Option<RingSpans>,
    pub(super) entries: Vec<Entry>,
    slots: SlotAllocator,
    /// Slots of the state pools that no sequence has.
    spares: Arc<Mutex<Vec<u32>>>,
    /// Slots of the state pools in all.
    states: usize,
    pub(super) max_len: usize,
    pub(super) device: Device,
    /// Another number where the layers' memory has moved.
    pub(super) memory: u64,
    pub(super) recent: Option<Recent>,
    pub(super) thread: LastThread,
}

impl Drop for SequencePool {
    fn drop(&mut self) {
        // A device that fails here fails the next call too.
        let _ = self.thread.wait(&self.device);
    }
}

/// What a layer remembers of all sequences.
#[derive(Debug)]
pub(super) enum LayerSlots {
    Linear(StatePool),
    Full(KvSlots),
}

/// A slot, and the sequence in it.
#[derive(Debug, Default)]
pub(super) struct Entry {
    /// That of the handle; 0 for nobody's.
    generation: u64,
    /// Where its states of the Gated DeltaNet layers are. Accepting a draft moves them.
    pub state: u32,
    /// Tokens seen.
    pub len: usize,
    /// Another number after everything that changes the sequence.
    pub version: u64,
    /// Since a pass failed half-way, or while the device is at a round whose tokens the host does not know.
    pub broken: bool,
    /// Copies of its keys and values in snapshots, from the first token on.
    pub pieces: Mutex<Vec<Weak<Piece>>>,
}

/// Slots of the state pools, lent until this goes.
#[derive(Debug)]
pub(super) struct Lease {
    pub slots: Vec<u32>,
    home: Arc<Mutex<Vec<u32>>>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.home.lock().unwrap_or_else(PoisonError::into_inner).append(&mut self.slots);
    }
}

/// A number that nothing else of the process has, from 1 on.
pub(super) fn unique() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl CausalLm {
    /// Room for `sequences` sequences at once, each of at most `max_len` tokens or `max_position_embeddings`, if that
    /// is less. See [`SequencePool::bytes_per_sequence`] for what that takes.
    ///
    /// # Errors
    /// When either is 0, or the device is out of memory.
    pub fn new_sequences(&self, sequences: usize, max_len: usize) -> Result<SequencePool> {
        self.new_sequences_with(sequences, max_len, Rings::Auto)
    }

    /// [`new_sequences`](Self::new_sequences) with a say in whether states have rings.
    ///
    /// # Errors
    /// As [`new_sequences`](Self::new_sequences), or when rings are asked for that a layer has no kernels for.
    pub fn new_sequences_with(&self, sequences: usize, max_len: usize, rings: Rings) -> Result<SequencePool> {
        self.new_sequences_as(sequences, max_len, rings, false)
    }

    /// With `tensors` keys and values lie as on CUDA whatever the device: for tests.
    pub(super) fn new_sequences_as(
        &self,
        sequences: usize,
        max_len: usize,
        rings: Rings,
        tensors: bool,
    ) -> Result<SequencePool> {
        for (arg, value) in [("sequences", sequences), ("max_len", max_len)] {
            if value == 0 {
                bail!("new_sequences: {arg}: expected at least 1, got 0")
            }
        }
        let max_len = max_len.min(self.config.max_position_embeddings);
        let shape = self.cache_shape(max_len);
        let slots = SlotAllocator::new(sequences)?;
        // A layer whose kernel was chosen takes none.
        let takes = rings == Rings::Always || self.gated_delta_nets().all(|gdn| gdn.supports_ring());
        let cursors = match takes && rings.of(&self.config, &self.device) {
            true => Some(RingSpans::new(sequences, &self.device)?),
            false => None,
        };
        let layers = self.layers.iter().map(|layer| {
            Ok(match (&layer.mixer, &cursors) {
                (Mixer::Linear(gdn), Some(cursors)) => {
                    LayerSlots::Linear(gdn.new_pool_with(sequences, &PoolOptions::default().shared_ring(cursors))?)
                }
                (Mixer::Linear(gdn), None) => LayerSlots::Linear(gdn.new_pool(sequences)?),
                (Mixer::Full(_), _) => LayerSlots::Full(KvSlots::new(&shape, sequences, tensors)?),
            })
        });
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let head = match self.has_draft_head() {
            true => Some(HeadSlots {
                kv: KvSlots::new(&shape, sequences, tensors)?,
                idle: false,
                slots: vec![HeadState::default(); sequences],
            }),
            false => None,
        };
        let entries = (0..sequences as u32).map(|state| Entry { state, ..Entry::default() }).collect();
        Ok(SequencePool {
            model: self.id,
            layers,
            head,
            cursors,
            entries,
            slots,
            spares: Arc::default(),
            states: sequences,
            max_len,
            device: self.device.clone(),
            memory: unique(),
            recent: None,
            thread: LastThread::default(),
        })
    }

    /// Makes room for drafts of `count` sequences in every Gated DeltaNet layer. Memory grows, and moves, at most to
    /// the most that were ever asked for at once.
    pub(super) fn lend_states(&self, pool: &mut SequencePool, count: usize) -> Result<Lease> {
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
        let Some(from) = free.len().checked_sub(count) else { bail!("{OP}: expected {count} spare states") };
        let slots = free.split_off(from);
        drop(free);
        Ok(Lease { slots, home: spares })
    }
}

impl SequencePool {
    /// A new sequence, before its first token.
    ///
    /// # Errors
    /// When all slots are in use, or the device refuses.
    pub fn begin(&mut self) -> Result<Sequence> {
        let slot = self.take_slot()?;
        let state = self.entries[slot as usize].state;
        for layer in &mut self.layers {
            let LayerSlots::Linear(states) = layer else { continue };
            if let Err(error) = states.zero(state) {
                self.slots.free(slot)?;
                return Err(error);
            }
        }
        Ok(self.begun(slot, 0))
    }

    /// A slot whose states hold anything.
    pub(super) fn take_slot(&mut self) -> Result<u32> {
        match self.slots.available() {
            0 => bail!("{OP}: begin: expected a free slot, all {} are in use: end a sequence first", self.capacity()),
            _ => self.slots.allocate_unset(),
        }
    }

    /// Gives back what [`SequencePool::take_slot`] gave.
    pub(super) fn return_slot(&mut self, slot: u32) -> Result<()> {
        self.slots.free(slot)
    }

    /// The slot has a sequence of `len` tokens.
    pub(super) fn begun(&mut self, slot: u32, len: usize) -> Sequence {
        self.forget_in_head(slot as usize);
        let entry = &mut self.entries[slot as usize];
        let generation = unique();
        *entry = Entry { generation, state: entry.state, len, version: generation, ..Entry::default() };
        Sequence { slot, generation }
    }

    /// Frees the sequence's slot. Its handle is void from here on.
    ///
    /// # Errors
    /// When the handle is none of a sequence of this pool.
    pub fn end(&mut self, s: Sequence) -> Result<()> {
        let slot = self.slot("end", s)?;
        self.forget_in_head(slot);
        let entry = &mut self.entries[slot];
        *entry = Entry { state: entry.state, ..Entry::default() };
        self.slots.free(s.slot)
    }

    fn forget_in_head(&mut self, slot: usize) {
        if let Some(head) = &mut self.head {
            head.slots[slot] = HeadState::default();
        }
    }

    /// Tokens that the sequence has seen.
    ///
    /// # Errors
    /// When the handle is none of a sequence of this pool.
    pub fn len(&self, s: Sequence) -> Result<usize> {
        Ok(self.entries[self.slot("len", s)?].len)
    }

    /// Whether no sequence is in use.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Sequences that can begin still.
    pub fn available(&self) -> usize {
        self.slots.available()
    }

    /// Sequences at once.
    pub fn capacity(&self) -> usize {
        self.entries.len()
    }

    /// The most tokens that a sequence can have.
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// Bytes of device memory that one sequence takes, with keys and values for its greatest length:
    ///
    /// * a Gated DeltaNet layer: `4 * HV * V * K` for the state and `(width - 1) * channels * size` for the
    ///   convolution;
    /// * a softmax layer: `2 * kv_heads * max_len * head_dim * size`; on the CPU `max_len`, and for the values also
    ///   `head_dim`, are rounded up to multiples of 32;
    /// * the draft head, where the model has one: what a softmax layer does.
    ///
    /// * with rings a Gated DeltaNet layer has more: `ring` of
    ///   [`sequence_bytes`](crate::ModelConfig::sequence_bytes).
    ///
    /// Without rings a sequence whose draft is being verified has its states of the Gated DeltaNet layers twice.
    pub fn bytes_per_sequence(&self) -> usize {
        let bytes = |layer: &LayerSlots| match layer {
            LayerSlots::Linear(states) => states.size_in_bytes() / states.capacity(),
            LayerSlots::Full(kv) => kv.bytes_per_sequence(),
        };
        let head = self.head.iter().map(|head| head.kv.bytes_per_sequence());
        self.layers.iter().map(bytes).chain(head).sum()
    }

    /// Bytes of device memory held now, spare states included.
    pub fn size_in_bytes(&self) -> usize {
        let bytes = |layer: &LayerSlots| match layer {
            LayerSlots::Linear(states) => states.size_in_bytes(),
            LayerSlots::Full(kv) => kv.size_in_bytes(),
        };
        let head = self.head.iter().map(|head| head.kv.size_in_bytes());
        self.layers.iter().map(bytes).chain(head).sum()
    }

    /// Whether `model` made it.
    pub(crate) fn is_from(&self, model: &CausalLm) -> bool {
        self.model == model.id
    }

    /// Sequences may have up to `max_len` tokens from now on. Keys and values on a device move.
    pub(crate) fn grow_to(&mut self, max_len: usize) -> Result<()> {
        let _working = self.take()?;
        self.memory = unique();
        for layer in &mut self.layers {
            if let LayerSlots::Full(kv) = layer {
                kv.grow(max_len)?;
            }
        }
        if let Some(head) = &mut self.head {
            head.kv.grow(max_len)?;
        }
        self.max_len = max_len;
        Ok(())
    }

    /// The slot of a sequence in use.
    pub(super) fn slot(&self, what: &str, s: Sequence) -> Result<usize> {
        match self.entries.get(s.slot as usize) {
            Some(entry) if entry.generation == s.generation => Ok(s.slot as usize),
            _ => {
                bail!("{OP}: {what}: expected a sequence in use of this pool, got one that ended or is another pool's")
            }
        }
    }

    /// The slot of a sequence in use that no pass has failed on.
    pub(crate) fn sound_slot(&self, what: &str, s: Sequence) -> Result<usize> {
        let slot = self.slot(what, s)?;
        if self.entries[slot].broken {
            bail!("{OP}: {what}: an earlier pass of the sequence failed half-way; restore a snapshot or end it")
        }
        Ok(slot)
    }

    /// The slots of a batch of sequences and their new tokens, each checked.
    pub(super) fn batch_slots(
        &self,
        what: &str,
        model: usize,
        batch: impl ExactSizeIterator<Item = (Sequence, usize)>,
    ) -> Result<Vec<usize>> {
        if model != self.model {
            bail!("{what}: pool: expected one that this model made, got one of another model")
        }
        if batch.len() == 0 {
            bail!("{what}: batch: expected at least 1 sequence, got none")
        }
        let mut slots = Vec::with_capacity(batch.len());
        let mut seen = vec![false; self.entries.len()];
        for (n, (sequence, tokens)) in batch.enumerate() {
            let slot = self.sound_slot(what, sequence)?;
            if std::mem::replace(&mut seen[slot], true) {
                bail!("{what}: batch: expected each sequence once, got one a second time at {n}")
            }
            if tokens == 0 {
                bail!("{what}: batch: expected at least 1 token of each sequence, got none at {n}")
            }
            let len = self.entries[slot].len;
            if tokens > self.max_len - len {
                bail!("{what}: batch: expected at most {} tokens in a sequence, got {tokens} after {len} at {n}", {
                    self.max_len
                })
            }
            slots.push(slot);
        }
        Ok(slots)
    }

    /// Before anything is done to what these slots hold: if it fails half-way, they stay broken.
    pub(super) fn about_to_write(&mut self, slots: &[usize]) {
        for &slot in slots {
            let entry = &mut self.entries[slot];
            (entry.broken, entry.version) = (true, unique());
        }
    }

    /// All went well: the sequences have so many more tokens.
    pub(super) fn written(&mut self, slots: &[usize], lengths: &[usize]) {
        for (&slot, length) in slots.iter().zip(lengths) {
            let entry = &mut self.entries[slot];
            entry.broken = false;
            entry.len += length;
        }
    }

    /// This thread goes on with the pool: its stream waits for what another one did.
    pub(super) fn take(&mut self) -> Result<Working> {
        self.thread.take(&self.device)
    }
}
