//! Prompts are fed: several in one packed pass, in chunks, common prefixes once.

use super::batch::{Batch, Row};
use super::core::Context;
use super::drafter::Drafter;
use super::event::Event;
use super::options::EngineOptions;
use super::prefixes::Prefixes;
use super::queue::Queue;
use super::recovery::Recovery;
use super::request::{Request, RequestId};
use super::stats::PrefixTally;
use crate::sampling::{Sampler, Token};
use crate::sequences::{Sequence, SequenceSnapshot};
use candle_core::{Error, Result, Tensor};
use std::sync::Arc;
use std::time::Instant;

/// A prompt that is being fed.
#[derive(Debug)]
struct Filling {
    id: RequestId,
    request: Request,
    sequence: Sequence,
    /// Tokens fed, or restored from a snapshot.
    done: usize,
    /// The positions where the state is kept for other prompts.
    cuts: Vec<usize>,
}

impl Filling {
    /// The next position where a chunk must end.
    fn end(&self) -> usize {
        let cuts = self.cuts.iter().copied().chain(self.request.snapshot_at);
        cuts.filter(|cut| *cut > self.done).min().unwrap_or(usize::MAX).min(self.request.tokens.len())
    }

    fn is_done(&self) -> bool {
        self.done == self.request.tokens.len()
    }
}

/// The prompts that are being fed, and the prefixes kept for others.
#[derive(Debug)]
pub(super) struct Prompts {
    filling: Vec<Filling>,
    prefixes: Prefixes<Arc<SequenceSnapshot>>,
    /// The most prompt tokens of a pass.
    pub chunk: usize,
    warned_too_large: bool,
}

impl Prompts {
    pub fn new(options: &EngineOptions) -> Result<Self> {
        let prefixes = Prefixes::new(options.prefix_block, options.prefix_cache, options.prefix_recent)?;
        Ok(Self { filling: Vec::new(), prefixes, chunk: options.prefill_chunk, warned_too_large: false })
    }

    pub fn len(&self) -> usize {
        self.filling.len()
    }

    pub fn is_empty(&self) -> bool {
        self.filling.is_empty()
    }

    pub fn tally(&self) -> PrefixTally {
        self.prefixes.tally()
    }

    /// The sequence of the request, if it is being fed.
    pub fn remove(&mut self, id: RequestId) -> Option<Sequence> {
        let index = self.filling.iter().position(|filling| filling.id == id)?;
        Some(self.filling.remove(index).sequence)
    }

    /// Admits waiting requests as far as there is room. A request that shares a prefix with a prompt being fed waits until that
    /// is in the cache; others may overtake it.
    pub fn admit(&mut self, queue: &mut Queue, cx: &mut Context) -> Result<()> {
        let mut index = 0;
        while let Some(request) = queue.get(index).filter(|_| cx.pool.available() > 0) {
            let fed = self.filling.iter().map(|f| (f.request.tokens.as_slice(), f.done));
            if request.resume.is_none() && self.prefixes.will_keep(&request.tokens, fed) {
                index += 1;
                continue;
            }
            let Some((id, request)) = queue.take(index) else { break };
            let snapshot = match &request.resume {
                Some(snapshot) => Some(snapshot.clone()),
                None => self.prefixes.find(&request.tokens).map(|(_, snapshot)| snapshot.clone()),
            };
            let sequence = match cx.begin(snapshot.as_deref()) {
                Ok(sequence) => sequence,
                // A snapshot of another model, say: the others go on.
                Err(e) => {
                    cx.fail(id, &e);
                    continue;
                }
            };
            let done = snapshot.map_or(0, |snapshot| snapshot.len());
            let cuts = self.prefixes.cuts(&request.tokens, done, queue.prompts());
            self.filling.push(Filling { id, request, sequence, done, cuts });
        }
        Ok(())
    }

    /// One pass: up to `chunk` tokens of as many prompts as that holds, and one token of each completion under way, so that
    /// none waits for long prompts. After a failed pass it has fewer sequences.
    pub fn prefill(
        &mut self,
        batch: &mut Batch,
        sampler: &Sampler,
        drafter: &mut Drafter,
        recovery: &mut Recovery,
        cx: &mut Context,
    ) -> Result<()> {
        let start = Instant::now();
        drafter.rest_head(self.filling.len() + batch.rows.len(), cx.pool);
        let (limit, max_len) = (recovery.limit, cx.pool.max_len());
        let mut room = self.chunk;
        let mut pass: Vec<(Sequence, &[u32])> = Vec::new();
        let (mut drawing, mut choices, mut ids) = (Vec::new(), Vec::new(), Vec::new());
        for filling in &mut self.filling {
            if room == 0 || pass.len() == limit {
                break;
            }
            let (src, dst) = (filling.done, filling.end().min(filling.done.saturating_add(room)));
            (filling.done, room) = (dst, room - (dst - src));
            if filling.is_done() {
                drawing.push(pass.len());
                choices.push(filling.request.choice(0, max_len, &filling.request.tokens, &[]));
            }
            pass.push((filling.sequence, &filling.request.tokens[src..dst]));
            ids.push(filling.id);
        }
        let (chunks, fed) = (pass.len(), self.chunk - room);
        let rows = &batch.rows[..batch.rows.len().min(limit - chunks)];
        let last: Vec<u32> = rows.iter().map(Row::last).collect();
        ids.extend(rows.iter().map(|row| row.id));
        recovery.begin(ids);
        drawing.extend(chunks..chunks + rows.len());
        choices.extend(rows.iter().map(|row| row.choice(&[])));
        pass.extend(rows.iter().zip(last.chunks(1)).map(|(row, last)| (row.sequence, last)));
        let mut drawn = match drawing.is_empty() {
            true => cx.model.feed_only(cx.pool, &pass).map(|()| Vec::new())?,
            false => sampler.draw(&select(cx.model.feed(cx.pool, &pass)?, &drawing, pass.len())?, &choices)?,
        };
        let steps = drawn.split_off(drawn.len() - last.len());
        self.keep(chunks, cx)?;
        // All tokens of a pass count as equally long.
        let share = fed as f64 / (fed + last.len()) as f64;
        cx.stats.prompt.add(fed, start.elapsed().mul_f64(share));
        cx.stats.decode.add(last.len(), start.elapsed().mul_f64(1. - share));

        let start = Instant::now();
        for (row, token) in batch.rows.iter_mut().zip(steps) {
            row.accept(&[token], &[], cx.events);
        }
        // The rows that had to wait come first.
        batch.rows.rotate_left(last.len());
        self.complete(&drawn, batch, drafter, cx);
        // No step of its own, but part of the time of a completion.
        cx.stats.decode.add(0, start.elapsed());
        Ok(())
    }

    /// Keeps the states of the first `chunks` prompts that other prompts begin with, and makes the snapshots requested.
    fn keep(&mut self, chunks: usize, cx: &mut Context) -> Result<()> {
        for filling in &self.filling[..chunks] {
            if filling.request.snapshot_at == Some(filling.done) {
                let snapshot = Arc::new(cx.pool.snapshot(filling.sequence)?);
                cx.events.push(Event::Snapshot { id: filling.id, snapshot });
            }
            if filling.cuts.contains(&filling.done) {
                let snapshot = Arc::new(cx.pool.snapshot(filling.sequence)?);
                let (tokens, bytes) = (filling.done, snapshot.size_in_bytes());
                let kept = self.prefixes.keep(&filling.request.tokens[..tokens], snapshot, bytes, cx.events)?;
                if !kept && !std::mem::replace(&mut self.warned_too_large, true) {
                    cx.events.push(Event::PrefixTooLarge { tokens, bytes });
                }
            }
        }
        Ok(())
    }

    /// After a failed pass: the request `lost` ends with its error. The others that the pass broke start again.
    pub fn recover(&mut self, lost: Option<RequestId>, error: &Error, cx: &mut Context) -> Result<()> {
        for mut filling in std::mem::take(&mut self.filling) {
            let intact = cx.is_intact(filling.sequence, filling.done) && !filling.is_done();
            if intact && lost != Some(filling.id) {
                self.filling.push(filling);
                continue;
            }
            cx.pool.end(filling.sequence)?;
            if lost == Some(filling.id) {
                cx.fail(filling.id, error);
                continue;
            }
            let resume = filling.request.resume.clone();
            filling.done = resume.as_ref().map_or(0, |snapshot| snapshot.len());
            match cx.begin(resume.as_deref()) {
                Ok(sequence) => {
                    filling.sequence = sequence;
                    self.filling.push(filling);
                }
                Err(e) => cx.fail(filling.id, &e),
            }
        }
        Ok(())
    }

    /// Prompts that are fed become completions, from the token drawn after each.
    fn complete(&mut self, drawn: &[Token], batch: &mut Batch, drafter: &Drafter, cx: &mut Context) {
        let all = std::mem::take(&mut self.filling);
        let (done, filling): (Vec<_>, Vec<_>) = all.into_iter().partition(Filling::is_done);
        self.filling = filling;
        for (filling, token) in done.into_iter().zip(drawn) {
            let (max_len, chances) = (cx.pool.max_len(), drafter.chances_of_a_sequence());
            let mut row = Row::new(filling.id, filling.request, filling.sequence, max_len, chances);
            row.accept(std::slice::from_ref(token), &[], cx.events);
            batch.rows.push(row);
        }
    }
}

/// The logits of some rows.
fn select(logits: Tensor, rows: &[usize], count: usize) -> Result<Tensor> {
    if rows.len() == count {
        return Ok(logits);
    }
    Tensor::cat(&rows.iter().map(|&row| logits.narrow(0, row, 1)).collect::<Result<Vec<_>>>()?, 0)
}
