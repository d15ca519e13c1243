//! Sequences copied: to another slot, out of the pool, and back.

mod host;

use super::fingerprint::hash_tokens;
use super::kv_segment::KvSegment;
use super::pool::{Entry, LayerSlots, Sequence, SequencePool};
use crate::drafting::head_state::HeadState;
use candle_core::{bail, Result, Tensor};
use candle_gdn::GdnState;
use candle_gdn_core::LastThread;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

const OP: &str = "SequencePool";

/// A copy of a sequence outside of any pool: made by [`SequencePool::snapshot`], put back by [`SequencePool::restore`] into
/// any pool of the model, any number of times.
///
/// The states of the Gated DeltaNet layers are its own. Keys and values lie in segments that snapshots of one sequence share:
/// a further snapshot copies only the tokens after the last segment that still exists. One that comes from the host stays there.
#[derive(Debug)]
pub struct SequenceSnapshot {
    model: usize,
    /// Of the model's configuration and dtype.
    model_hash: u64,
    len: usize,
    /// Of its tokens.
    hash: u64,
    /// One a Gated DeltaNet layer.
    states: Vec<GdnState>,
    /// That of the draft head, whose keys and values lie in the segments too.
    head: Option<HeadState>,
    segments: Vec<Arc<KvSegment>>,
    /// That of each softmax layer.
    windows: Vec<Option<usize>>,
    /// In the place of states and segments: what [`to_host`](Self::to_host) returns.
    host: Option<HashMap<String, Tensor>>,
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

    /// Whether `tokens` begin with the tokens that the sequence had seen, by a hash of 64 bits.
    pub fn is_prefix_of(&self, tokens: &[u32]) -> bool {
        tokens.get(..self.len).is_some_and(|first| hash_tokens(0, first) == self.hash)
    }

    /// Bytes of device memory that it keeps, those it shares with others included.
    pub fn size_in_bytes(&self) -> usize {
        self.parts().map(|(_, bytes)| bytes).sum()
    }

    /// These by part: its address, which no other part has, and its bytes. Each segment is a part, and the snapshot has the states.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let segments = self.segments.iter().map(|segment| (Arc::as_ptr(segment).addr(), segment.size_in_bytes()));
        std::iter::once((std::ptr::from_ref(self).addr(), self.states_bytes())).chain(segments)
    }

    /// Bytes that it adds to a shorter snapshot of the same sequence: its states and the last segment.
    pub fn bytes_added(&self) -> usize {
        self.states_bytes() + self.segments.last().map_or(0, |segment| segment.size_in_bytes())
    }

    fn states_bytes(&self) -> usize {
        let head = self.head.iter().map(HeadState::size_in_bytes);
        self.states.iter().map(GdnState::size_in_bytes).chain(head).sum()
    }
}

impl SequencePool {
    /// A copy of the sequence that later passes do not touch.
    ///
    /// # Errors
    /// When the handle is none of a sequence of this pool, a pass failed on it, or the device is out of memory.
    pub fn snapshot(&self, s: Sequence) -> Result<SequenceSnapshot> {
        let slot = self.usable_slot("snapshot", s)?;
        let Entry { state, len, hash, .. } = self.entries[slot];
        let states = self.layers.iter().filter_map(|layer| match layer {
            LayerSlots::Linear(states) => Some(states.snapshot(state)),
            LayerSlots::Full(_) => None,
        });
        let states = states.collect::<Result<Vec<_>>>()?;
        let head = self.head.as_ref().map(|head| &head.slots[slot]);
        let head = self.thread.reading(&self.device, || head.map(HeadState::own).transpose())?;
        let mut known = self.entries[slot].segments.lock().unwrap_or_else(PoisonError::into_inner);
        let mut segments: Vec<Arc<KvSegment>> = known.iter().map_while(Weak::upgrade).collect();
        let start = segments.last().map_or(0, |segment| segment.end);
        let kv = self.layers.iter().filter_map(|layer| match layer {
            LayerSlots::Full(kv) if start < len => Some(kv.read(slot, start..len)),
            _ => None,
        });
        let layers = self.thread.reading(&self.device, || kv.collect::<Result<Vec<_>>>())?;
        let (head_start, head_end) =
            (segments.last().map_or(0, |segment| segment.head_end), head.as_ref().map_or(0, |head| head.len));
        let kv = self.head.as_ref().filter(|_| head_start < head_end).map(|head| &head.kv);
        let read = || kv.map(|kv| kv.read(slot, head_start..head_end)).transpose();
        let head_kv = self.thread.reading(&self.device, read)?;
        if !layers.is_empty() || head_kv.is_some() {
            let thread = LastThread::default();
            segments.push(Arc::new(KvSegment { end: len, layers, head_end, head: head_kv, thread }));
        }
        *known = segments.iter().map(Arc::downgrade).collect();
        let (model, model_hash) = (self.model, self.model_hash);
        let windows = self.layers.iter().filter_map(|layer| match layer {
            LayerSlots::Full(kv) => Some(kv.window()),
            LayerSlots::Linear(_) => None,
        });
        let windows = windows.collect();
        Ok(SequenceSnapshot { model, model_hash, len, hash, states, head, segments, windows, host: None })
    }

    /// The sequence goes on from the snapshot, whatever it was fed before, also where a failed pass broke it.
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
        if self.head.is_some() && snapshot.head.is_none() {
            bail!("{OP}: restore: snapshot: expected one with the draft head's state, got one without")
        }
        let _working = self.working()?;
        self.begin_write(&[slot]);
        match &snapshot.host {
            Some(host) => self.upload(slot, snapshot.len, host)?,
            None => self.restore_states(slot, snapshot)?,
        }
        let mut place = 0;
        for segment in &snapshot.segments {
            let mut src = segment.layers.iter();
            segment.thread.reading(&self.device, || {
                for layer in &mut self.layers {
                    // A segment may have new tokens of the draft head alone.
                    let (LayerSlots::Full(kv), true) = (layer, place < segment.end) else { continue };
                    let Some([k, v]) = src.next() else { bail!("{OP}: restore: snapshot: expected all layers") };
                    kv.write(slot, segment.end, [k, v])?;
                }
                match (&mut self.head, &segment.head) {
                    (Some(head), Some([k, v])) => head.kv.write(slot, segment.head_end, [k, v]),
                    _ => Ok(()),
                }
            })?;
            place = segment.end;
        }
        if let (Some(head), Some(state)) = (&mut self.head, &snapshot.head) {
            head.slots[slot] = state.clone();
        }
        let entry = &mut self.entries[slot];
        (entry.len, entry.hash) = (snapshot.len, snapshot.hash);
        entry.segments = Mutex::new(snapshot.segments.iter().map(Arc::downgrade).collect());
        self.end_write(&[slot], &[0]);
        Ok(())
    }

    fn restore_states(&mut self, slot: usize, snapshot: &SequenceSnapshot) -> Result<()> {
        let (state, mut states) = (self.entries[slot].state, snapshot.states.iter());
        for layer in &mut self.layers {
            let LayerSlots::Linear(dst) = layer else { continue };
            let Some(src) = states.next() else { bail!("{OP}: restore: snapshot: expected all layers") };
            dst.restore(state, src)?;
        }
        Ok(())
    }

    /// A new sequence that has seen the same tokens.
    ///
    /// # Errors
    /// When the handle is none of a sequence of this pool, a pass failed on it, all slots are in use, or the device
    /// refuses.
    pub fn fork(&mut self, s: Sequence) -> Result<Sequence> {
        let src = self.usable_slot("fork", s)?;
        let slot = self.take_slot()?;
        match self.copy(src, slot as usize) {
            Ok(()) => {
                let entry = &self.entries[src];
                let segments = entry.segments.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let hash = entry.hash;
                let fork = self.begun(slot, entry.len);
                let entry = &mut self.entries[slot as usize];
                (entry.hash, entry.segments) = (hash, Mutex::new(segments));
                if let Some(head) = &mut self.head {
                    head.slots[slot as usize] = head.slots[src].clone();
                }
                Ok(fork)
            }
            Err(error) => {
                self.free.push(slot);
                Err(error)
            }
        }
    }

    fn copy(&mut self, src: usize, dst: usize) -> Result<()> {
        let _working = self.working()?;
        let (len, states) = (self.entries[src].len, [src, dst].map(|slot| self.entries[slot].state));
        for layer in &mut self.layers {
            match layer {
                LayerSlots::Linear(pool) => pool.copy(states[0], states[1])?,
                LayerSlots::Full(_) if len == 0 => {}
                LayerSlots::Full(kv) => {
                    let [k, v] = kv.read(src, 0..len)?;
                    kv.write(dst, len, [&k, &v])?;
                }
            }
        }
        if let Some(head) = &mut self.head {
            // With the token that is there in case it comes next.
            let state = &head.slots[src];
            let tokens = state.len + usize::from(state.next.is_some());
            if tokens > 0 {
                let [k, v] = head.kv.read(src, 0..tokens)?;
                head.kv.write(dst, tokens, [&k, &v])?;
            }
        }
        Ok(())
    }
}
