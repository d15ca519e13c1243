//! Sequences copied: to another slot, out of the pool, and back.

use super::kept::Piece;
use super::pool::{LayerSlots, Sequence, SequencePool};
use candle_core::{bail, Result};
use candle_gdn::plumbing::LastThread;
use candle_gdn::GdnState;
use std::sync::{Arc, Mutex, PoisonError, Weak};

const OP: &str = "SequencePool";

/// A sequence as it was, apart from any pool: made by [`SequencePool::snapshot`] and
/// [`CausalLm::feed_with_checkpoints`](super::super::CausalLm::feed_with_checkpoints), put back by
/// [`SequencePool::restore`] into any pool of the model, as often as wanted.
///
/// The states of the Gated DeltaNet layers are its own. Keys and values lie in pieces, each from where the one before
/// ends, which snapshots of one sequence share: a further one copies only the tokens since the last that still lives.
#[derive(Debug)]
pub struct SequenceSnapshot {
    model: usize,
    len: usize,
    /// One a Gated DeltaNet layer.
    states: Vec<GdnState>,
    pieces: Vec<Arc<Piece>>,
}

impl SequenceSnapshot {
    /// Tokens that the sequence had seen.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it had seen none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of device memory that it keeps, those it shares with others included.
    pub fn size_in_bytes(&self) -> usize {
        self.states_bytes() + self.pieces.iter().map(|piece| piece.size_in_bytes()).sum::<usize>()
    }

    /// Bytes that it adds to a shorter snapshot of the same sequence: its states and the last piece. The budget of a
    /// [`PrefixCache`](candle_gdn::PrefixCache) that holds all of a prompt's checkpoints is kept by this number.
    pub fn bytes_added(&self) -> usize {
        self.states_bytes() + self.pieces.last().map_or(0, |piece| piece.size_in_bytes())
    }

    fn states_bytes(&self) -> usize {
        self.states.iter().map(GdnState::size_in_bytes).sum()
    }
}

impl SequencePool {
    /// A copy of the sequence that later passes do not touch.
    ///
    /// # Errors
    /// When the handle is none of a sequence of this pool, a pass failed on it, or the device is out of memory.
    pub fn snapshot(&self, s: Sequence) -> Result<SequenceSnapshot> {
        let slot = self.sound_slot("snapshot", s)?;
        let (state, len) = (self.entries[slot].state, self.entries[slot].len);
        let states = self.layers.iter().filter_map(|layer| match layer {
            LayerSlots::Linear(states) => Some(states.snapshot(state)),
            LayerSlots::Full(_) => None,
        });
        let states = states.collect::<Result<Vec<_>>>()?;
        self.snapshot_of(slot, len, states)
    }

    /// With the states that the slot's sequence had after `len` tokens, no fewer than in its last snapshot.
    pub(super) fn snapshot_of(&self, slot: usize, len: usize, states: Vec<GdnState>) -> Result<SequenceSnapshot> {
        let mut known = self.entries[slot].pieces.lock().unwrap_or_else(PoisonError::into_inner);
        let mut pieces: Vec<Arc<Piece>> = known.iter().map_while(Weak::upgrade).collect();
        pieces.truncate(pieces.partition_point(|piece| piece.end <= len));
        let start = pieces.last().map_or(0, |piece| piece.end);
        let kv = self.layers.iter().filter_map(|layer| match layer {
            LayerSlots::Full(kv) if start < len => Some(kv.read(slot, start..len)),
            _ => None,
        });
        let layers = self.thread.reading(&self.device, || kv.collect::<Result<Vec<_>>>())?;
        if !layers.is_empty() {
            pieces.push(Arc::new(Piece { end: len, layers, thread: LastThread::default() }));
        }
        *known = pieces.iter().map(Arc::downgrade).collect();
        Ok(SequenceSnapshot { model: self.model, len, states, pieces })
    }

    /// The sequence goes on from the snapshot, whatever it was fed before and also where a pass failed on it. The
    /// snapshot stays as it is.
    ///
    /// # Errors
    /// When the handle is none of a sequence of this pool, the snapshot is of another model or longer than sequences
    /// here can be, or the device refuses.
    pub fn restore(&mut self, s: Sequence, snapshot: &SequenceSnapshot) -> Result<()> {
        let slot = self.slot("restore", s)?;
        if snapshot.model != self.model {
            bail!("{OP}: restore: snapshot: expected one of the pool's model, got one of another")
        }
        if snapshot.len > self.max_len {
            let (max_len, len) = (self.max_len, snapshot.len);
            bail!("{OP}: restore: snapshot: expected at most {max_len} tokens, got {len}")
        }
        let _working = self.take()?;
        self.about_to_write(&[slot]);
        let state = self.entries[slot].state;
        let mut states = snapshot.states.iter();
        for layer in &mut self.layers {
            let LayerSlots::Linear(to) = layer else { continue };
            let Some(from) = states.next() else { bail!("{OP}: restore: snapshot: expected all layers") };
            to.restore(state, from)?;
        }
        let mut at = 0;
        for piece in &snapshot.pieces {
            let mut from = piece.layers.iter();
            piece.thread.reading(&self.device, || {
                for layer in &mut self.layers {
                    let LayerSlots::Full(kv) = layer else { continue };
                    let Some([k, v]) = from.next() else { bail!("{OP}: restore: snapshot: expected all layers") };
                    kv.write(slot, at, [k, v])?;
                }
                Ok(())
            })?;
            at = piece.end;
        }
        let entry = &mut self.entries[slot];
        entry.len = snapshot.len;
        entry.pieces = Mutex::new(snapshot.pieces.iter().map(Arc::downgrade).collect());
        self.written(&[slot], &[0]);
        Ok(())
    }

    /// A new sequence that has seen the same tokens.
    ///
    /// # Errors
    /// When the handle is none of a sequence of this pool, a pass failed on it, all slots are in use, or the device
    /// refuses.
    pub fn fork(&mut self, s: Sequence) -> Result<Sequence> {
        let from = self.sound_slot("fork", s)?;
        let slot = self.take_slot()?;
        match self.copy(from, slot as usize) {
            Ok(()) => {
                let entry = &self.entries[from];
                let pieces = entry.pieces.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let fork = self.begun(slot, entry.len);
                self.entries[slot as usize].pieces = Mutex::new(pieces);
                Ok(fork)
            }
            Err(error) => {
                self.return_slot(slot)?;
                Err(error)
            }
        }
    }

    fn copy(&mut self, from: usize, to: usize) -> Result<()> {
        let _working = self.take()?;
        let (len, states) = (self.entries[from].len, [from, to].map(|slot| self.entries[slot].state));
        for layer in &mut self.layers {
            match layer {
                LayerSlots::Linear(pool) => pool.copy(states[0], states[1])?,
                LayerSlots::Full(_) if len == 0 => {}
                LayerSlots::Full(kv) => {
                    let [k, v] = kv.read(from, 0..len)?;
                    kv.write(to, 0, [&k, &v])?;
                }
            }
        }
        Ok(())
    }
}
