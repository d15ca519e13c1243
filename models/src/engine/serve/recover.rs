//! A pass that fails: what it broke is fed anew, and the next ones take fewer sequences.

use super::request::{FinishReason, RequestId};
use super::scheduler::Engine;
use crate::{CausalLm, Sequence, SequenceSnapshot};
use candle_core::{Error, Result};
use std::borrow::Borrow;

/// Passes that must go well before they take twice as many sequences again.
const SOUND: usize = 64;

/// How many sequences a pass may take: all, but after one failed fewer, since a device that is short of memory may have
/// enough for those.
#[derive(Debug)]
pub(super) struct Width {
    most: usize,
    sound: usize,
    /// The request that was alone in the last pass, if that failed.
    alone: Option<RequestId>,
}

impl Default for Width {
    fn default() -> Self {
        Self { most: usize::MAX, sound: 0, alone: None }
    }
}

impl Width {
    pub fn most(&self) -> usize {
        self.most
    }

    pub fn passed(&mut self) {
        (self.sound, self.alone) = (self.sound + 1, None);
        if self.sound == SOUND {
            *self = Self { most: self.most.saturating_mul(2), ..Self::default() };
        }
    }

    /// The request that has failed alone for the second time, one pass after the other.
    fn failed(&mut self, passing: &[RequestId]) -> Option<RequestId> {
        let alone = passing.first().copied().filter(|_| passing.len() == 1);
        let again = alone.filter(|_| self.alone == alone);
        *self = Self { most: (passing.len() / 2).max(1), sound: 0, alone };
        again
    }
}

impl<M: Borrow<CausalLm>> Engine<M> {
    /// After a pass failed with `error`. A request that was alone in it and in the one before ends so; of the others those
    /// that the pass broke get new sequences and are fed what they were fed before. Their tokens come out as without the
    /// fault.
    pub(super) fn recover(&mut self, error: &Error) -> Result<()> {
        let passing = std::mem::take(&mut self.passing);
        let lost = self.width.failed(&passing);
        for mut row in std::mem::take(&mut self.rows) {
            let fed = row.tokens.len() - 1;
            if lost == Some(row.id) {
                row.finished = Some(FinishReason::Failed(error.to_string()));
            } else if !self.is_sound(row.sequence, fed) {
                self.pool.end(row.sequence)?;
                match self.feed_anew(&row.tokens[..fed], row.request.resume.as_deref()) {
                    Ok(sequence) => row.sequence = sequence,
                    Err(e) => {
                        self.failed(row.id, &e);
                        continue;
                    }
                }
            }
            self.rows.push(row);
        }
        for mut filling in std::mem::take(&mut self.filling) {
            let sound = self.is_sound(filling.sequence, filling.done) && !filling.is_done();
            if sound && lost != Some(filling.id) {
                self.filling.push(filling);
                continue;
            }
            self.pool.end(filling.sequence)?;
            if lost == Some(filling.id) {
                self.failed(filling.id, error);
                continue;
            }
            let resume = filling.request.resume.clone();
            filling.done = resume.as_ref().map_or(0, |snapshot| snapshot.len());
            match self.begin(resume.as_deref()) {
                Ok(sequence) => self.filling.push({
                    filling.sequence = sequence;
                    filling
                }),
                Err(e) => self.failed(filling.id, &e),
            }
        }
        Ok(())
    }

    /// Whether no pass broke the sequence, and it has seen just so many tokens.
    fn is_sound(&self, sequence: Sequence, fed: usize) -> bool {
        self.pool.sound_slot("Engine", sequence).is_ok() && self.pool.len(sequence).is_ok_and(|len| len == fed)
    }

    /// A new sequence that has seen `tokens`, which begin as the snapshot does.
    fn feed_anew(&mut self, tokens: &[u32], snapshot: Option<&SequenceSnapshot>) -> Result<Sequence> {
        let sequence = self.begin(snapshot)?;
        let rest = &tokens[snapshot.map_or(0, SequenceSnapshot::len)..];
        for piece in rest.chunks(self.options.prefill_chunk) {
            if let Err(e) = self.model.borrow().feed_only(&mut self.pool, &[(sequence, piece)]) {
                self.pool.end(sequence)?;
                return Err(e);
            }
        }
        Ok(sequence)
    }
}
