//! Prompts go in: several in one packed pass, in pieces, common beginnings once.

use super::filling::Filling;
use super::request::Event;
use super::row::Row;
use super::scheduler::Engine;
use crate::engine::sampling::Token;
use crate::{CausalLm, Sequence};
use candle_core::{Result, Tensor};
use std::borrow::Borrow;
use std::sync::Arc;
use std::time::Instant;

impl<M: Borrow<CausalLm>> Engine<M> {
    /// Takes in waiting requests as far as there is room. One that shares its beginning with a prompt being fed waits
    /// until that is in the cache; others may go before it.
    pub(super) fn admit(&mut self) -> Result<()> {
        let mut i = 0;
        while i < self.waiting.len() && self.pool.available() > 0 {
            let (_, request) = &self.waiting[i];
            let fed = self.filling.iter().map(|f| (f.request.tokens.as_slice(), f.done));
            if request.resume.is_none() && self.prefixes.coming(&request.tokens, fed) {
                i += 1;
                continue;
            }
            let Some((id, request)) = self.waiting.remove(i) else { break };
            let snapshot = match &request.resume {
                Some(snapshot) => Some(snapshot.clone()),
                None => self.prefixes.find(&request.tokens).map(|(_, snapshot)| snapshot.clone()),
            };
            let sequence = match self.begin(snapshot.as_deref()) {
                Ok(sequence) => sequence,
                // A snapshot of another model, say: the others go on.
                Err(e) => {
                    self.failed(id, &e);
                    continue;
                }
            };
            let done = snapshot.map_or(0, |snapshot| snapshot.len());
            let others = self.waiting.iter().map(|(_, other)| other.tokens.as_slice());
            let cuts = self.prefixes.cuts(&request.tokens, done, others);
            self.filling.push(Filling { id, request, sequence, done, cuts });
        }
        Ok(())
    }

    /// One pass: up to `prefill_chunk` tokens of as many prompts as that takes in, and one of each completion under
    /// way, so that none waits for long prompts; of fewer after a pass failed.
    pub(super) fn fill(&mut self) -> Result<()> {
        let start = Instant::now();
        self.rest_head();
        let mut room = self.options.prefill_chunk;
        let mut batch: Vec<(Sequence, &[u32])> = Vec::new();
        let (mut wanted, mut choices) = (Vec::new(), Vec::new());
        let max_len = self.pool.max_len();
        let (width, mut passing) = (self.width.most(), Vec::new());
        for filling in &mut self.filling {
            if room == 0 || batch.len() == width {
                break;
            }
            let (from, to) = (filling.done, filling.end().min(filling.done.saturating_add(room)));
            (filling.done, room) = (to, room - (to - from));
            if filling.is_done() {
                wanted.push(batch.len());
                choices.push(filling.request.choice(0, max_len, &filling.request.tokens, &[]));
            }
            batch.push((filling.sequence, &filling.request.tokens[from..to]));
            passing.push(filling.id);
        }
        let (pieces, fed) = (batch.len(), self.options.prefill_chunk - room);
        let last: Vec<u32> = self.rows.iter().take(width - pieces).map(Row::last).collect();
        passing.extend(self.rows[..last.len()].iter().map(|row| row.id));
        self.passing = passing;
        wanted.extend(pieces..pieces + last.len());
        choices.extend(self.rows[..last.len()].iter().map(|row| row.choice(&[])));
        batch.extend(self.rows.iter().zip(last.chunks(1)).map(|(row, last)| (row.sequence, last)));
        let model = self.model.borrow();
        let logits = feed(&wanted, batch.len(), |head| match head {
            true => model.feed(&mut self.pool, &batch).map(Some),
            false => model.feed_only(&mut self.pool, &batch).map(|()| None),
        })?;
        let mut drawn = logits.map_or(Ok(Vec::new()), |logits| self.sampler.draw(&logits, &choices))?;
        let steps = drawn.split_off(drawn.len() - last.len());
        self.keep(pieces)?;
        // A token takes what a token takes, whosever it is.
        let share = fed as f64 / (fed + last.len()) as f64;
        self.stats.prompt.add(fed, start.elapsed().mul_f64(share));
        self.stats.decode.add(last.len(), start.elapsed().mul_f64(1. - share));

        let start = Instant::now();
        for (row, token) in self.rows.iter_mut().zip(steps) {
            row.take(&[token], &[], &mut self.events);
        }
        // Those that had to wait come first.
        self.rows.rotate_left(last.len());
        self.complete(&drawn);
        // No step of its own, but part of the time that a completion takes.
        self.stats.decode.add(0, start.elapsed());
        Ok(())
    }

    /// Keeps the states that other prompts begin with, of the first `pieces` prompts, and gives out those asked for.
    fn keep(&mut self, pieces: usize) -> Result<()> {
        for filling in &self.filling[..pieces] {
            if filling.request.snapshot_at == Some(filling.done) {
                let snapshot = Arc::new(self.pool.snapshot(filling.sequence)?);
                self.events.push(Event::Snapshot { id: filling.id, snapshot });
            }
            if filling.cuts.contains(&filling.done) {
                let snapshot = Arc::new(self.pool.snapshot(filling.sequence)?);
                let (tokens, bytes) = (filling.done, snapshot.size_in_bytes());
                let kept = self.prefixes.keep(&filling.request.tokens[..tokens], snapshot, bytes, &mut self.events)?;
                if !kept && !std::mem::replace(&mut self.told_too_large, true) {
                    self.events.push(Event::PrefixTooLarge { tokens, bytes });
                }
            }
        }
        Ok(())
    }

    /// The completions of prompts that are fed, from the token drawn after each.
    fn complete(&mut self, drawn: &[Token]) {
        let all = std::mem::take(&mut self.filling);
        let (done, filling): (Vec<_>, Vec<_>) = all.into_iter().partition(Filling::is_done);
        self.filling = filling;
        for (filling, token) in done.into_iter().zip(drawn) {
            let chances = self.depths.chances.of_a_sequence();
            let mut row = Row::new(filling.id, filling.request, filling.sequence, self.pool.max_len(), chances);
            row.take(std::slice::from_ref(token), &[], &mut self.events);
            self.rows.push(row);
        }
    }
}

/// The logits of the pieces `wanted` of `pieces`, from a pass that gives those of all, or none.
fn feed(wanted: &[usize], pieces: usize, pass: impl FnOnce(bool) -> Result<Option<Tensor>>) -> Result<Option<Tensor>> {
    let logits = pass(!wanted.is_empty())?;
    match logits {
        Some(logits) if wanted.len() < pieces => {
            let rows: Vec<_> = wanted.iter().map(|&i| logits.narrow(0, i, 1)).collect::<Result<_>>()?;
            Tensor::cat(&rows, 0).map(Some)
        }
        logits => Ok(logits),
    }
}
