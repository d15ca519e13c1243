//! Completions go on: one token of every row, or more where guesses were right.

use super::draft::{guess, Tally};
use super::engine::{Engine, Feed};
use super::figures::Figures;
use super::output::Output;
use super::row::{Limits, Row};
use anyhow::Result;
use std::time::Instant;

/// One pass over all rows, each with up to `draft` guesses.
pub fn decode(
    engine: &mut Engine,
    rows: &mut [Row],
    draft: usize,
    limits: &Limits,
    output: &mut Output,
    figures: &mut Figures,
) -> Result<()> {
    let start = Instant::now();
    let guesses: Vec<Vec<u32>> =
        rows.iter().map(|row| guess(&row.tokens, draft.min(row.worth).min(row.room(limits)))).collect();
    let drawn = match guesses.iter().all(Vec::is_empty) {
        true => step(engine, rows, limits, output)?,
        false => verify(engine, rows, &guesses, limits, output)?,
    };
    figures.decode.add(drawn.iter().sum(), start.elapsed());
    count(rows, &guesses, &drawn, &mut figures.drafts);
    Ok(())
}

/// How many tokens each row drew: one.
fn step(engine: &mut Engine, rows: &mut [Row], limits: &Limits, output: &mut Output) -> Result<Vec<usize>> {
    let batch: Vec<_> = rows.iter().map(|row| (row.sequence, row.last())).collect();
    let logits = engine.step(&batch)?;
    rows.iter_mut().zip(logits).map(|(row, logits)| row.draw(vec![logits], &[], limits, output)).collect()
}

/// How many tokens each row drew: as many of its guesses as were right, and the one after them.
fn verify(
    engine: &mut Engine,
    rows: &mut [Row],
    guesses: &[Vec<u32>],
    limits: &Limits,
    output: &mut Output,
) -> Result<Vec<usize>> {
    let tokens: Vec<Vec<u32>> =
        rows.iter().zip(guesses).map(|(row, guess)| [&[row.last()], &guess[..]].concat()).collect();
    let batch: Vec<Feed> = rows.iter().zip(&tokens).map(|(row, t)| (row.sequence, t.as_slice())).collect();
    let (logits, drafts) = engine.verify(&batch)?;
    let mut logits = logits.into_iter();
    let mut drawn = Vec::with_capacity(guesses.len());
    for (row, guess) in rows.iter_mut().zip(guesses) {
        let logits = logits.by_ref().take(guess.len() + 1).collect();
        drawn.push(row.draw(logits, guess, limits, output)?);
    }
    // The last one drawn takes the place of the token that the row began with: the next pass is fed it.
    engine.accept(drafts, &drawn)?;
    Ok(drawn)
}

/// How the guesses did, and how many the next pass is worth.
fn count(rows: &mut [Row], guesses: &[Vec<u32>], drawn: &[usize], drafts: &mut Tally) {
    drafts.steps += drawn.len();
    for ((drawn, guess), row) in drawn.iter().zip(guesses).zip(rows) {
        if !guess.is_empty() {
            row.worth = 2 * drawn - 1;
        }
        drafts.guessed += guess.len();
        // The last one drawn was not among the guesses.
        drafts.right += drawn - 1;
        drafts.tokens += drawn;
    }
}
