//! Completions go on: one token of every row, or more where guesses were right.

use super::draft::guess;
use super::engine::Feed;
use super::generation::Generation;
use anyhow::Result;
use std::time::Instant;

impl Generation<'_> {
    /// One pass over all rows.
    pub(super) fn decode(&mut self) -> Result<()> {
        let start = Instant::now();
        let most = self.job.run.draft;
        let guesses: Vec<Vec<u32>> =
            self.rows.iter().map(|row| guess(&row.tokens, most.min(row.worth).min(row.room(&self.limits)))).collect();
        let drawn = if guesses.iter().all(Vec::is_empty) { self.step()? } else { self.verify(&guesses)? };
        self.figures.decode.add(drawn.iter().sum(), start.elapsed());

        let drafts = &mut self.figures.drafts;
        drafts.steps += drawn.len();
        for ((drawn, guess), row) in drawn.iter().zip(&guesses).zip(&mut self.rows) {
            if !guess.is_empty() {
                row.worth = 2 * drawn - 1;
            }
            drafts.guessed += guess.len();
            // The last one drawn was not among the guesses.
            drafts.right += drawn - 1;
            drafts.tokens += drawn;
        }
        self.retire()
    }

    /// How many tokens each row drew: one.
    fn step(&mut self) -> Result<Vec<usize>> {
        let batch: Vec<_> = self.rows.iter().map(|row| (row.sequence, row.last())).collect();
        let logits = self.engine.step(&batch)?;
        let rows = self.rows.iter_mut().zip(logits);
        rows.map(|(row, logits)| row.draw(vec![logits], &[], &self.limits, &mut self.output)).collect()
    }

    /// How many tokens each row drew: as many of its guesses as were right, and the one after them.
    fn verify(&mut self, guesses: &[Vec<u32>]) -> Result<Vec<usize>> {
        let rows = self.rows.iter().zip(guesses);
        let tokens: Vec<Vec<u32>> = rows.map(|(row, guess)| [&[row.last()], &guess[..]].concat()).collect();
        let batch: Vec<Feed> = self.rows.iter().zip(&tokens).map(|(row, t)| (row.sequence, t.as_slice())).collect();
        let (logits, drafts) = self.engine.verify(&batch)?;
        let mut logits = logits.into_iter();
        let mut drawn = Vec::with_capacity(guesses.len());
        for (row, guess) in self.rows.iter_mut().zip(guesses) {
            let logits = logits.by_ref().take(guess.len() + 1).collect();
            drawn.push(row.draw(logits, guess, &self.limits, &mut self.output)?);
        }
        // The last one drawn takes the place of the token that the row began with: the next pass is fed it.
        self.engine.accept(drafts, &drawn)?;
        Ok(drawn)
    }
}
