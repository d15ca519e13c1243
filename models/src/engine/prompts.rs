//! Prompts are fed: several in one packed pass, in chunks, common prefixes once. So are the tokens of completions that a failed pass
//! broke.

use super::batch::{Batch, Row};
use super::core::Context;
use super::drafter::Drafter;
use super::event::{Event, FinishReason};
use super::options::EngineOptions;
use super::prefixes::Prefixes;
use super::queue::Queue;
use super::recovery::Recovery;
use super::request::RequestId;
use super::stats::PrefixTally;
use crate::sampling::{Sampler, Token};
use crate::sequences::{Sequence, SequenceSnapshot};
use candle_core::{Error, Result, Tensor};
use std::sync::Arc;
use std::time::Instant;

/// A prompt that is being fed, or the tokens of a broken completion.
#[derive(Debug)]
struct Filling {
    row: Row,
    /// Tokens fed, or restored from a snapshot.
    done: usize,
    /// The positions where the state is to be kept for other prompts.
    cuts: Vec<usize>,
}

impl Filling {
    /// The next position where a chunk must end.
    fn end(&self) -> usize {
        let cuts = self.cuts.iter().copied().chain(self.row.request.snapshot_at);
        cuts.filter(|cut| *cut > self.done).min().unwrap_or(usize::MAX).min(self.row.to_feed())
    }

    fn is_done(&self) -> bool {
        self.done == self.row.to_feed()
    }

    /// Whether the first token of the completion is drawn once this is fed.
    fn draws(&self) -> bool {
        self.is_done() && self.row.drawn() == 0
    }
}

/// The prompts that are being fed, and the prefixes kept for others.
#[derive(Debug)]
pub(super) struct Prompts {
    filling: Vec<Filling>,
    prefixes: Prefixes<Arc<SequenceSnapshot>>,
}

impl Prompts {
    pub fn new(options: &EngineOptions) -> Result<Self> {
        let prefixes = Prefixes::new(options.prefix_block, options.prefix_cache, options.prefix_recent)?;
        Ok(Self { filling: Vec::new(), prefixes })
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
        let index = self.filling.iter().position(|filling| filling.row.id == id)?;
        Some(self.filling.remove(index).row.sequence)
    }

    /// A prompt begins to wait: what it shares with those being fed will be kept for it.
    pub fn expect(&mut self, prompt: &[u32]) {
        for Filling { row, done, cuts } in &mut self.filling {
            let common = self.prefixes.common(&row.tokens[..row.to_feed()], prompt);
            if common > *done && !cuts.contains(&common) {
                cuts.push(common);
            }
        }
    }

    /// Admits waiting requests as far as there is room. A request that shares a prefix with a prompt being fed waits until that
    /// is in the cache; others may overtake it.
    pub fn admit(&mut self, queue: &mut Queue, cx: &mut Context) -> Result<()> {
        let mut index = 0;
        while let Some(request) = queue.get(index).filter(|_| cx.pool.available() > 0) {
            let fed = self.filling.iter().map(|f| (&f.row.tokens[..f.row.to_feed()], f.cuts.as_slice()));
            if request.resume.is_none() && self.prefixes.will_keep(&request.tokens, fed) {
                index += 1;
                continue;
            }
            let Some((id, mut request)) = queue.take(index) else { break };
            // Taken, which frees it: where a pass breaks the sequence, the prompt is fed from its first token.
            let snapshot = match request.resume.take() {
                Some(snapshot) => Some(snapshot),
                None => self.prefixes.find(&request.tokens).map(|(_, snapshot)| snapshot.clone()),
            };
            let sequence = match cx.begin(snapshot.as_deref()) {
                Ok(sequence) => sequence,
                Err(e) if cx.model.has_lost_a_rank() => return Err(e),
                // A snapshot of another model, say: the others go on.
                Err(e) => {
                    cx.fail(id, &e);
                    continue;
                }
            };
            let done = snapshot.map_or(0, |snapshot| snapshot.len());
            let cuts = self.prefixes.cuts(&request.tokens, done, queue.prompts());
            let row = Row::new(id, request, sequence, cx.pool.max_len());
            self.filling.push(Filling { row, done, cuts });
        }
        Ok(())
    }

    /// One pass: as many prompt tokens as it may have, and one token of each completion under way, so that none waits for long
    /// prompts. After a failed pass it has fewer tokens and sequences.
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
        let (limit, mut room) = (recovery.limit, recovery.chunk);
        let mut pass: Vec<(Sequence, &[u32])> = Vec::new();
        let (mut drawing, mut choices, mut ids) = (Vec::new(), Vec::new(), Vec::new());
        for filling in &mut self.filling {
            if room == 0 || pass.len() == limit {
                break;
            }
            let (src, dst) = (filling.done, filling.end().min(filling.done.saturating_add(room)));
            (filling.done, room) = (dst, room - (dst - src));
            if filling.draws() {
                drawing.push(pass.len());
                choices.push(filling.row.choice(&[]));
            }
            pass.push((filling.row.sequence, &filling.row.tokens[src..dst]));
            ids.push(filling.row.id);
        }
        let (chunks, fed) = (pass.len(), recovery.chunk - room);
        let rows = &batch.rows[..batch.rows.len().min(limit - chunks)];
        let last: Vec<u32> = rows.iter().map(Row::last).collect();
        ids.extend(rows.iter().map(|row| row.id));
        recovery.begin(ids, fed);
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
        self.complete(drawn, batch, drafter, cx);
        // No step of its own, but part of the time of a completion.
        cx.stats.decode.add(0, start.elapsed());
        Ok(())
    }

    /// Keeps the states of the first `chunks` prompts that other prompts begin with, and makes the snapshots requested.
    fn keep(&mut self, chunks: usize, cx: &mut Context) -> Result<()> {
        for Filling { row, done, cuts } in &mut self.filling[..chunks] {
            if row.request.snapshot_at == Some(*done) {
                // Not again where the prompt has to be fed again.
                row.request.snapshot_at = None;
                match cx.snapshot(row.sequence) {
                    Ok(snapshot) => cx.events.push(Event::Snapshot { id: row.id, snapshot }),
                    Err(e) => row.finished = Some(FinishReason::failed(&e)),
                }
            }
            if cuts.contains(done) {
                cuts.retain(|cut| cut != done);
                if !self.prefixes.may_keep(*done, cx.bytes_of(*done), cx.events) {
                    continue;
                }
                // Without memory for it, the other prompts are fed whole.
                let Ok(snapshot) = cx.snapshot(row.sequence) else { continue };
                let parts = snapshot.parts().collect();
                self.prefixes.keep(&row.tokens[..*done], snapshot, parts, cx.events)?;
            }
        }
        Ok(())
    }

    /// After a failed pass: the request `lost` ends with its error. The others that the pass broke are fed the same tokens again,
    /// `broken` completions first, so that their next tokens are the same as without the failure.
    pub fn recover(
        &mut self,
        lost: Option<RequestId>,
        error: &Error,
        broken: Vec<Row>,
        cx: &mut Context,
    ) -> Result<()> {
        let broken = broken.into_iter().map(|row| Filling { row, done: 0, cuts: Vec::new() });
        for mut filling in broken.chain(std::mem::take(&mut self.filling)).collect::<Vec<_>>() {
            let (id, sequence) = (filling.row.id, filling.row.sequence);
            // What was to be drawn or copied after the last token was lost with the pass.
            let is_due = filling.is_done()
                || filling.row.request.snapshot_at == Some(filling.done)
                || filling.cuts.contains(&filling.done);
            if cx.is_intact(sequence, filling.done) && !is_due && lost != Some(id) {
                self.filling.push(filling);
                continue;
            }
            cx.pool.end(sequence)?;
            if lost == Some(id) {
                cx.fail(id, error);
                continue;
            }
            filling.done = 0;
            match cx.begin(None) {
                Ok(sequence) => {
                    filling.row.sequence = sequence;
                    self.filling.push(filling);
                }
                Err(e) => cx.fail(id, &e),
            }
        }
        Ok(())
    }

    /// Prompts that are fed become completions, from the token drawn after each; broken completions go on, and what has failed ends.
    fn complete(&mut self, drawn: Vec<Token>, batch: &mut Batch, drafter: &Drafter, cx: &mut Context) {
        let leaves = |filling: &Filling| filling.is_done() || filling.row.finished.is_some();
        let (done, filling): (Vec<_>, Vec<_>) = std::mem::take(&mut self.filling).into_iter().partition(leaves);
        self.filling = filling;
        let mut drawn = drawn.into_iter();
        for mut filling in done {
            let token = if filling.draws() { drawn.next() } else { None };
            let row = &mut filling.row;
            row.request.snapshot_at = None;
            if let (Some(token), None) = (token, &row.finished) {
                row.head_chances = drafter.chances_of_a_sequence();
                row.accept(&[token], &[], cx.events);
            }
            batch.rows.push(filling.row);
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
