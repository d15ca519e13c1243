//! The sequences of a model: their slots, their lengths, and what the layers remember of them.

use super::fingerprint::hash_tokens;
use super::kv::KvSlots;
use super::kv_segment::KvSegment;
use crate::drafting::head_state::{HeadSlots, HeadState};
use candle_core::{bail, Device, Result, Tensor};
use candle_gdn::{RingSpans, Slots, StatePool};
use candle_gdn_core::{LastThread, Working};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

const OP: &str = "SequencePool";

/// A sequence of a [`SequencePool`]: a small handle, copied freely. It belongs to the pool that began it. Using it with another
/// pool, or after the sequence has ended, is an error, also when its slot has a new owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sequence {
    pub(crate) slot: u32,
    /// Unique in the process, so that a handle of another pool is noticed.
    pub(crate) generation: u64,
}

/// Room for a number of sequences of one model, each of up to a number of tokens. Made by
/// [`CausalLm::new_sequences`](crate::CausalLm::new_sequences) and used with that model only.
///
/// A Gated DeltaNet layer holds a state of fixed size for each sequence, a softmax layer keys and values. On CUDA all
/// of it is allocated when the pool is made, for the greatest length; only a verification without rings, or of more than 16 tokens,
/// moves the states, whenever more sequences than ever before have drafts, to make room for one more state of each. On the CPU keys and
/// values grow with each sequence, and their memory is used again by the next one in the slot.
///
/// A pass that fails half-way, when a device refuses or is out of memory, leaves the layers of its sequences at
/// different tokens. These sequences then refuse everything but [`SequencePool::restore`] and [`SequencePool::end`]. All
/// other sequences go on.
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
    pub(crate) model: usize,
    /// Of the model's configuration and dtype.
    pub(super) model_hash: u64,
    pub(crate) layers: Vec<LayerSlots>,
    /// That of the draft head, where the model has one.
    pub(crate) head: Option<HeadSlots>,
    /// Where the rings of all Gated DeltaNet layers begin, where they have rings.
    pub(crate) spans: Option<RingSpans>,
    pub(crate) entries: Vec<Entry>,
    /// Slots without a sequence; the last is the next.
    pub(super) free: Vec<u32>,
    /// Slots of the state pools that no sequence has.
    pub(super) spares: Arc<Mutex<Vec<u32>>>,
    /// Slots of the state pools in all.
    pub(super) states: usize,
    pub(crate) max_len: usize,
    pub(crate) device: Device,
    /// A new number each time the layers' memory moves.
    pub(crate) memory: u64,
    pub(crate) uploaded: Option<Uploaded>,
    pub(crate) thread: LastThread,
}

impl Drop for SequencePool {
    fn drop(&mut self) {
        // A device that fails here fails the next call too.
        let _ = self.thread.wait(&self.device);
    }
}

/// What a layer remembers of all sequences.
#[derive(Debug)]
pub(crate) enum LayerSlots {
    Linear(StatePool),
    Full(KvSlots),
}

/// A slot, and the sequence in it.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    /// That of the handle; 0 without a sequence.
    pub(super) generation: u64,
    /// Where its states of the Gated DeltaNet layers are. Accepting a draft moves them.
    pub state: u32,
    /// Tokens seen.
    pub len: usize,
    /// Their hash. A captured step adds its tokens when the host has read them.
    pub(super) hash: u64,
    /// A new number after every change of the sequence.
    pub version: u64,
    /// True after a failed pass, and while a speculative step runs whose tokens the host has not read.
    pub broken: bool,
    /// Copies of its keys and values in snapshots, from the first token on.
    pub segments: Mutex<Vec<Weak<KvSegment>>>,
}

/// What the last decode step uploaded, for the next step of the same sequences.
#[derive(Debug)]
pub(crate) struct Uploaded {
    pub states: Slots,
    pub slots: Slots,
    pub positions: Tensor,
    /// The values of the three.
    pub held: [Vec<u32>; 3],
}

/// A number that nothing else of the process has, from 1 on.
pub(crate) fn unique() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
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
                self.free.push(slot);
                return Err(error);
            }
        }
        Ok(self.begun(slot, 0))
    }

    /// A slot whose states hold anything.
    pub(super) fn take_slot(&mut self) -> Result<u32> {
        match self.free.pop() {
            Some(slot) => Ok(slot),
            None => {
                bail!("{OP}: begin: expected a free slot, all {} are in use: end a sequence first", self.capacity())
            }
        }
    }

    /// The slot has a sequence of `len` tokens.
    pub(crate) fn begun(&mut self, slot: u32, len: usize) -> Sequence {
        self.clear_head(slot as usize);
        let entry = &mut self.entries[slot as usize];
        let generation = unique();
        *entry = Entry { generation, state: entry.state, len, version: generation, ..Entry::default() };
        Sequence { slot, generation }
    }

    /// Frees the sequence's slot. Its handle is invalid from here on.
    ///
    /// # Errors
    /// When the handle is none of a sequence of this pool.
    pub fn end(&mut self, s: Sequence) -> Result<()> {
        let slot = self.slot("end", s)?;
        self.clear_head(slot);
        let entry = &mut self.entries[slot];
        *entry = Entry { state: entry.state, ..Entry::default() };
        self.free.push(s.slot);
        Ok(())
    }

    fn clear_head(&mut self, slot: usize) {
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
        self.free.len() == self.capacity()
    }

    /// Sequences that can begin still.
    pub fn available(&self) -> usize {
        self.free.len()
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
    ///   `head_dim`, are rounded up to multiples of 32. With a window of `w` tokens (`sliding_window`) instead of `max_len` at most
    ///   `w` and room for new tokens, once more `w` but 64 to 512;
    /// * the draft head, where the model has one: what a softmax layer does.
    ///
    /// With rings a Gated DeltaNet layer takes more: `ring` of [`sequence_bytes`](crate::ModelConfig::sequence_bytes).
    /// Without rings, a sequence whose draft is being verified has its states of the Gated DeltaNet layers twice.
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

    /// Bytes of one sequence's states of the Gated DeltaNet layers, without rings.
    pub(crate) fn state_bytes(&self) -> usize {
        let bytes = |x: &Tensor| x.elem_count() / x.dims()[0] * x.dtype().size_in_bytes();
        let states = self.layers.iter().filter_map(|layer| match layer {
            LayerSlots::Linear(states) => Some(bytes(states.conv()) + bytes(states.recurrent())),
            LayerSlots::Full(_) => None,
        });
        states.sum()
    }

    /// Sequences may have up to `max_len` tokens from now on. Keys and values on a device move.
    pub(crate) fn grow_to(&mut self, max_len: usize) -> Result<()> {
        let _working = self.working()?;
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
    pub(crate) fn slot(&self, what: &str, s: Sequence) -> Result<usize> {
        match self.entries.get(s.slot as usize) {
            Some(entry) if entry.generation == s.generation => Ok(s.slot as usize),
            _ => {
                bail!("{OP}: {what}: expected a sequence in use of this pool, got one that ended or is another pool's")
            }
        }
    }

    /// The slot of a sequence in use that no failed pass has broken.
    pub(crate) fn usable_slot(&self, what: &str, s: Sequence) -> Result<usize> {
        let slot = self.slot(what, s)?;
        if self.entries[slot].broken {
            bail!("{OP}: {what}: an earlier pass of the sequence failed half-way; restore a snapshot or end it")
        }
        Ok(slot)
    }

    /// The slots of a batch of sequences and their new tokens, each checked.
    pub(crate) fn batch_slots(
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
            let slot = self.usable_slot(what, sequence)?;
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

    /// Before the slots are written: if that fails half-way, they stay broken.
    pub(crate) fn begin_write(&mut self, slots: &[usize]) {
        for &slot in slots {
            let entry = &mut self.entries[slot];
            (entry.broken, entry.version) = (true, unique());
        }
    }

    /// After a successful write: the sequences have so many more tokens.
    pub(crate) fn end_write(&mut self, slots: &[usize], lengths: &[usize]) {
        for (&slot, length) in slots.iter().zip(lengths) {
            let entry = &mut self.entries[slot];
            entry.broken = false;
            entry.len += length;
        }
    }

    /// The sequence in the slot was fed these tokens.
    pub(crate) fn record_tokens(&mut self, slot: usize, tokens: &[u32]) {
        let entry = &mut self.entries[slot];
        entry.hash = hash_tokens(entry.hash, tokens);
    }

    /// This thread uses the pool next: its stream waits for the thread that used it before.
    pub(crate) fn working(&mut self) -> Result<Working> {
        self.thread.take(&self.device)
    }

    /// The states of the Gated DeltaNet layers.
    pub(super) fn state_pools(&mut self) -> impl Iterator<Item = &mut StatePool> {
        self.layers.iter_mut().filter_map(|layer| match layer {
            LayerSlots::Linear(states) => Some(states),
            LayerSlots::Full(_) => None,
        })
    }
}
