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
        let done = self.decode_all(waiting.is_empty());
        self.rows.splice(0..0, waiting);
        done
    }

    /// One pass over all completions, each with its drafts.
    fn decode_all(&mut self, may_go_ahead: bool) -> Result<()> {
        let start = Instant::now();
        if self.flight.is_none() {
            let depths = self.plan();
            match self.flight_depth(&depths)? {
                Some(depth) => self.flight = Some(self.launch(depth)?),
                None => return self.check_drafts(&depths, start),
            }
        }
        let took = self.take_flight(may_go_ahead)?;
        self.stats.decode.add(took, start.elapsed());
        Ok(())
    }

    /// Drafts that the host sees, and the pass that checks them.
    fn check_drafts(&mut self, depths: &[usize], start: Instant) -> Result<()> {
        let drafted = self.drafts(depths)?;
        if drafted.tokens.iter().all(Vec::is_empty) {
            self.flight = Some(self.launch(0)?);
            let took = self.take_flight(false)?;
            self.stats.decode.add(took, start.elapsed());
            return Ok(());
        }
        let drawn = self.verify(&drafted.tokens)?;
        let took = start.elapsed();
        self.stats.decode.add(drawn.iter().sum(), took);
        self.landed = Instant::now();
        self.count(&drafted.tried, &drawn);
        if !drafted.tried.iter().any(|tried| tried.guessed) {
            let depth = drafted.tried.iter().map(|tried| tried.count).max().unwrap_or(0);
            self.measured((drawn.len(), depth), took)?;
        }
        Ok(())
    }

    /// How many tokens each row drew: as many of its guesses as were right, and the one after them.
    fn verify(&mut self, guesses: &[Vec<u32>]) -> Result<Vec<usize>> {
        let rows = self.rows.iter().zip(guesses);
        let tokens: Vec<Vec<u32>> = rows.map(|(row, guess)| [&[row.last()], &guess[..]].concat()).collect();
        let rows = self.rows.iter().zip(&tokens);
        let batch: Vec<(Sequence, &[u32])> = rows.map(|(row, tokens)| (row.sequence, tokens.as_slice())).collect();
        let (logits, drafts) = self.model.borrow().verify(&mut self.pool, &batch)?;
        let rows = self.rows.iter().zip(guesses);
        let choices: Vec<_> =
            rows.flat_map(|(row, guess)| (0..=guess.len()).map(|n| row.choice(&guess[..n]))).collect();
        let drawn = self.sampler.draw(&logits, &choices)?;
        let (mut drawn, mut took) = (drawn.as_slice(), Vec::with_capacity(guesses.len()));
        for (row, guess) in self.rows.iter_mut().zip(guesses) {
            let (own, others) = drawn.split_at(guess.len() + 1);
            took.push(row.take(own, guess, &mut self.events));
            drawn = others;
        }
        // The last one drawn takes the place of the token that the row began with: the next pass is fed it.
        self.model.borrow().accept(&mut self.pool, drafts, &took)?;
        Ok(took)
    }
}
