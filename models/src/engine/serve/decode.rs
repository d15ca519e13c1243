//! Completions go on: one token of every row, or more where guesses were right.

use super::scheduler::Engine;
use crate::{CausalLm, Sequence};
use candle_core::Result;
use std::borrow::Borrow;
use std::time::Instant;

impl<M: Borrow<CausalLm>> Engine<M> {
    /// One pass over all completions, or over some after a pass failed: those that waited before come first.
    pub(super) fn decode(&mut self) -> Result<()> {
        let waiting = self.rows.split_off(self.width.most().min(self.rows.len()));
        self.passing = self.rows.iter().map(|row| row.id).collect();
        let done = self.decode_all();
        self.rows.splice(0..0, waiting);
        done
    }

    /// One pass over all completions, each with its drafts.
    fn decode_all(&mut self) -> Result<()> {
        let start = Instant::now();
        let drafted = self.drafts()?;
        let guesses = &drafted.tokens;
        let greedy = self.rows.iter().all(|row| row.request.sampling.is_greedy());
        let drawn = match guesses.iter().all(Vec::is_empty) {
            true => self.one_token(greedy)?,
            false => self.verify(guesses, greedy)?,
        };
        let took = start.elapsed();
        self.stats.decode.add(drawn.iter().sum(), took);
        self.count(&drafted, &drawn, took)
    }

    /// How many tokens each row drew: one.
    fn one_token(&mut self, greedy: bool) -> Result<Vec<usize>> {
        let batch: Vec<_> = self.rows.iter().map(|row| (row.sequence, row.last())).collect();
        let model = self.model.borrow();
        let logits = match self.graphs.find(batch.len(), model, &mut self.pool, &mut self.events)? {
            Some(graph) => graph.step(model, &mut self.pool, &batch)?,
            None => {
                let batch: Vec<_> = batch.iter().map(|(s, token)| (*s, std::slice::from_ref(token))).collect();
                model.feed(&mut self.pool, &batch)?
            }
        };
        let logits = self.read(&logits, greedy)?;
        let rows = self.rows.iter_mut().zip(logits);
        Ok(rows.map(|(row, logits)| row.draw(vec![logits], &[], &mut self.events)).collect())
    }

    /// How many tokens each row drew: as many of its guesses as were right, and the one after them.
    fn verify(&mut self, guesses: &[Vec<u32>], greedy: bool) -> Result<Vec<usize>> {
        let rows = self.rows.iter().zip(guesses);
        let tokens: Vec<Vec<u32>> = rows.map(|(row, guess)| [&[row.last()], &guess[..]].concat()).collect();
        let rows = self.rows.iter().zip(&tokens);
        let batch: Vec<(Sequence, &[u32])> = rows.map(|(row, tokens)| (row.sequence, tokens.as_slice())).collect();
        let (logits, drafts) = self.model.borrow().verify(&mut self.pool, &batch)?;
        let mut logits = self.read(&logits, greedy)?.into_iter();
        let mut drawn = Vec::with_capacity(guesses.len());
        for (row, guess) in self.rows.iter_mut().zip(guesses) {
            let logits = logits.by_ref().take(guess.len() + 1).collect();
            drawn.push(row.draw(logits, guess, &mut self.events));
        }
        // The last one drawn takes the place of the token that the row began with: the next pass is fed it.
        self.model.borrow().accept(&mut self.pool, drafts, &drawn)?;
        Ok(drawn)
    }
}
