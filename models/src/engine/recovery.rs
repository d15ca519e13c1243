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
    /// Requests that failed alone, and were in no good pass since.
    alone: Vec<RequestId>,
}

impl Default for Width {
    fn default() -> Self {
        Self { most: usize::MAX, sound: 0, alone: Vec::new() }
    }
}

impl Width {
    pub fn most(&self) -> usize {
        self.most
    }

    pub fn passed(&mut self, passing: &[RequestId]) {
        self.alone.retain(|id| !passing.contains(id));
        self.sound += 1;
        if self.sound == SOUND {
            (self.most, self.sound) = (self.most.saturating_mul(2), 0);
        }
    }

    /// The request that has failed alone for the second time, if there is one: it ends, so that all come to an end even
    /// where every pass fails.
    fn failed(&mut self, passing: &[RequestId]) -> Option<RequestId> {
        (self.most, self.sound) = ((passing.len() / 2).max(1), 0);
        let &[alone] = passing else { return None };
        if self.alone.contains(&alone) {
            return Some(alone);
        }
        self.alone.push(alone);
        None
    }
}

impl<M: Borrow<CausalLm>> Engine<M> {
    /// After a pass failed with `error`. A request that failed alone for the second time ends so; of the others those that
    /// the pass broke get new sequences and are fed what they were fed before. Their tokens come out as without the fault.
    pub(super) fn recover(&mut self, error: &Error) -> Result<()> {
        let passing = std::mem::take(&mut self.passing);
        // What it drew comes out again, by the same random numbers.
        self.flight = None;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests that take turns in failing alone, with their sequences unbroken, end all the same.
    #[test]
    fn who_fails_alone_twice_ends() {
        let [a, b] = [0, 1].map(RequestId);
        let mut width = Width::default();
        assert_eq!((width.failed(&[a, b]), width.most()), (None, 1));
        assert_eq!((width.failed(&[a]), width.failed(&[b])), (None, None));
        width.passed(&[b]);
        assert_eq!((width.failed(&[b]), width.failed(&[a])), (None, Some(a)));
        assert_eq!(width.failed(&[b]), Some(b));
        (0..SOUND).for_each(|_| width.passed(&[]));
        assert_eq!(width.most(), 2);
    }
}
