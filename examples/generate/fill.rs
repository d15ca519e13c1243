//! Prompts go in: several in one packed pass, in pieces, common beginnings once.

use super::common::tell;
use super::engine::Feed;
use super::generation::Generation;
use super::greedy::Logits;
use super::row::Row;
use super::sampler::Sampler;
use super::stream::TextStream;
use anyhow::Result;
use candle_gdn_models::Sequence;
use std::time::Instant;

/// A prompt that is being fed.
pub struct Filling<'a> {
    /// Its number, from 0.
    prompt: usize,
    tokens: &'a [u32],
    sequence: Sequence,
    /// Tokens fed, or taken from the cache.
    done: usize,
    /// Where the state is to be kept for other prompts.
    cuts: Vec<usize>,
}

impl Filling<'_> {
    /// Where a piece has to end.
    fn end(&self) -> usize {
        self.cuts.iter().copied().find(|cut| *cut > self.done).unwrap_or(self.tokens.len())
    }

    fn is_done(&self) -> bool {
        self.done == self.tokens.len()
    }
}

impl Generation<'_> {
    /// Takes in waiting prompts as far as there is room. One that shares its beginning with a prompt being fed waits
    /// until that is in the cache; others may go before it.
    pub(super) fn admit(&mut self) -> Result<()> {
        let mut i = 0;
        while i < self.waiting.len() && self.filling.len() + self.rows.len() < self.batch {
            let prompt = self.waiting[i];
            let tokens = &self.job.prompts[prompt];
            if self.prefixes.coming(tokens, self.filling.iter().map(|f| (f.tokens, f.done))) {
                i += 1;
                continue;
            }
            self.waiting.remove(i);
            let (done, snapshot) = self.prefixes.find(tokens).map_or((0, None), |(done, s)| (done, Some(s)));
            let sequence = self.engine.begin(snapshot)?;
            let others = self.waiting.iter().map(|other| self.job.prompts[*other].as_slice());
            let cuts = self.prefixes.cuts(tokens, done, others);
            self.bar.inc(done as u64);
            self.filling.push(Filling { prompt, tokens, sequence, done, cuts });
        }
        Ok(())
    }

    /// One pass: up to `prefill_chunk` tokens of as many prompts as that takes in, and one of each completion under
    /// way, so that none waits for long prompts.
    pub(super) fn fill(&mut self) -> Result<()> {
        let start = Instant::now();
        let mut room = self.job.prefill_chunk;
        let mut batch: Vec<Feed> = Vec::new();
        let mut wanted = Vec::new();
        for filling in &mut self.filling {
            if room == 0 {
                break;
            }
            let to = filling.end().min(filling.done.saturating_add(room));
            let piece = &filling.tokens[filling.done..to];
            (filling.done, room) = (to, room - piece.len());
            if filling.is_done() {
                wanted.push(batch.len());
            }
            batch.push((filling.sequence, piece));
        }
        let (pieces, fed) = (batch.len(), self.job.prefill_chunk - room);
        let last: Vec<u32> = self.rows.iter().map(Row::last).collect();
        wanted.extend(pieces..pieces + last.len());
        batch.extend(self.rows.iter().zip(last.chunks(1)).map(|(row, last)| (row.sequence, last)));
        let mut logits = self.engine.feed(&batch, &wanted)?;
        let steps = logits.split_off(logits.len() - last.len());
        self.keep(pieces)?;
        // A token takes what a token takes, whosever it is.
        let share = fed as f64 / (fed + last.len()) as f64;
        self.figures.prompt.add(fed, start.elapsed().mul_f64(share));
        self.figures.decode.add(last.len(), start.elapsed().mul_f64(1. - share));
        self.bar.inc(fed as u64);

        let start = Instant::now();
        for (row, logits) in self.rows.iter_mut().zip(steps) {
            row.draw(vec![logits], &[], &self.limits, &mut self.output)?;
        }
        self.begin(logits)?;
        // No step of its own, but part of the time that a completion takes.
        self.figures.decode.add(0, start.elapsed());
        self.retire()
    }

    /// Keeps the states that other prompts begin with, of the first `pieces` prompts.
    fn keep(&mut self, pieces: usize) -> Result<()> {
        for filling in self.filling[..pieces].iter().filter(|f| f.cuts.contains(&f.done)) {
            let snapshot = self.engine.snapshot(filling.sequence)?;
            let bytes = snapshot.size_in_bytes();
            if let Some(line) = self.prefixes.keep(&filling.tokens[..filling.done], snapshot, bytes)? {
                self.output.say(&line);
            }
        }
        Ok(())
    }

    /// The completions of prompts that are fed, from the logits after each.
    fn begin(&mut self, logits: Vec<Logits>) -> Result<()> {
        let all = std::mem::take(&mut self.filling);
        let (done, filling): (Vec<_>, Vec<_>) = all.into_iter().partition(Filling::is_done);
        self.filling = filling;
        if self.filling.is_empty() && self.waiting.is_empty() {
            self.bar.finish_and_clear();
            if !self.output.several() {
                tell!("prompt: {}", self.figures.prompt);
            }
        }
        for (filling, logits) in done.into_iter().zip(logits) {
            let sampler = Sampler::new(self.job.settings.sampling.clone(), self.job.seed, filling.prompt);
            let text = TextStream::new(self.job.tokenizer);
            let mut row = Row::new(filling.prompt, filling.tokens, filling.sequence, sampler, text);
            row.draw(vec![logits], &[], &self.limits, &mut self.output)?;
            self.rows.push(row);
        }
        Ok(())
    }
}
