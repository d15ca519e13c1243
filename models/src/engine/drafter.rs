//! Drafts for the next step: of each row the better of a guess from its text and what the draft head says.

use super::depth::{Chances, MOST};
use super::guess::guess;
use super::row::Row;
use super::scheduler::Engine;
use crate::CausalLm;
use candle_core::{Device, Result, Tensor};
use std::borrow::Borrow;
use std::time::Duration;

/// Steps between two in which ranks agree on what these took.
const AGREE: usize = 16;
/// Draws of one sequence, and of all, that its chances remember.
const MEMORY: [u32; 2] = [32, 256];

/// How many tokens the model's draft head drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftDepth {
    /// As many as were worth their time, by what steps took and which drafts were right; none where none are.
    Auto,
    /// So many at each step, at most [`DraftDepth::MOST`]; 0 for none.
    Fixed(usize),
}

impl DraftDepth {
    /// The most that are drafted at a step.
    pub const MOST: usize = MOST;
}

/// How well the drafts of the draft head did, by depth: the first token drafted at a step, the second, and so on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeadTally {
    /// Tokens drafted.
    pub drafted: [usize; MOST],
    /// Those that were right, and all before them.
    pub accepted: [usize; MOST],
    /// Tokens that decode steps gave, summed over the sequences.
    pub tokens: usize,
    /// These steps, summed over the sequences.
    pub steps: usize,
}

impl std::fmt::Display for HeadTally {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Self { drafted, accepted, tokens, steps } = self;
        let depths = drafted.iter().take_while(|drafted| **drafted > 0).count();
        write!(f, "mtp: ")?;
        for depth in 0..depths {
            let percent = 100. * accepted[depth] as f64 / drafted[depth] as f64;
            write!(f, "{percent:.0} % of {} accepted at depth {}, ", drafted[depth], depth + 1)?;
        }
        if depths == 0 {
            write!(f, "nothing drafted, ")?;
        }
        write!(f, "{:.2} tokens a step", *tokens as f64 / (*steps).max(1) as f64)
    }
}

/// Tokens drafted for each row.
pub(super) struct Drafted {
    pub tokens: Vec<Vec<u32>>,
    pub tried: Vec<Tried>,
}

/// What was drafted for a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tried {
    /// Tokens.
    pub count: usize,
    /// Whether they are a guess from the text.
    pub guessed: bool,
}

impl<M: Borrow<CausalLm>> Engine<M> {
    /// How many tokens the head drafts for each row at the next step, if no guess is better.
    pub(super) fn plan(&mut self) -> Vec<usize> {
        match self.planned.take() {
            Some((planned, depths)) if self.rows.iter().map(|row| &row.id).eq(&planned) => depths,
            _ => {
                self.rest_head();
                self.depths_of_rows()
            }
        }
    }

    /// For all rows, up to as many tokens as are of use: those of the head, or of a guess.
    pub(super) fn drafts(&mut self, depths: &[usize]) -> Result<Drafted> {
        let draft = self.options.draft;
        let guess = |row: &Row| guess(&row.tokens, draft.min(row.worth).min(row.room()));
        let mut tokens: Vec<Vec<u32>> = self.rows.iter().map(guess).collect();
        let mut depths = depths.to_vec();
        for ((row, tokens), depth) in self.rows.iter().zip(&mut tokens).zip(&mut depths) {
            let head = row.chances.expected(*depth);
            match tokens.is_empty() || row.guesses.expected(tokens.len().min(MOST)) < head {
                true if *depth > 0 => tokens.clear(),
                _ => *depth = 0,
            }
        }
        let guessed: Vec<bool> = tokens.iter().map(|tokens| !tokens.is_empty()).collect();
        let asked = self.rows.iter().zip(&depths).filter(|(_, depth)| **depth > 0);
        let batch: Vec<_> = asked.map(|(row, depth)| (row.sequence, row.last(), *depth)).collect();
        if !batch.is_empty() {
            let (drafts, _) = self.model.borrow().draft(&mut self.pool, &batch)?;
            let empty = tokens.iter_mut().zip(&depths).filter(|(_, depth)| **depth > 0);
            empty.zip(drafts).for_each(|((to, _), draft)| *to = draft);
        }
        let tried = tokens.iter().zip(guessed).map(|(tokens, guessed)| Tried { count: tokens.len(), guessed });
        Ok(Drafted { tried: tried.collect(), tokens })
    }

    /// Where drafts save no time the head takes none for what it is not asked about either.
    pub(super) fn rest_head(&mut self) {
        let idle = match self.options.draft_depth {
            DraftDepth::Auto => !self.depths.pays(self.filling.len() + self.rows.len()),
            DraftDepth::Fixed(_) => false,
        };
        self.pool.set_head_idle(idle);
    }

    fn depths_of_rows(&mut self) -> Vec<usize> {
        if !self.pool.has_head() {
            return vec![0; self.rows.len()];
        }
        match self.options.draft_depth {
            DraftDepth::Fixed(depth) => self.rows.iter().map(|row| depth.min(MOST).min(row.room())).collect(),
            DraftDepth::Auto => {
                let rows: Vec<(Chances, usize)> = self.rows.iter().map(|row| (row.chances, row.room())).collect();
                self.depths.choose(&rows)
            }
        }
    }

    /// How the drafts did.
    pub(super) fn count(&mut self, tried: &[Tried], drawn: &[usize]) {
        let (drafts, head) = (&mut self.stats.drafts, &mut self.stats.head);
        for ((row, tried), &drawn) in self.rows.iter_mut().zip(tried).zip(drawn) {
            // The last one drawn was not among the drafts.
            let (count, right) = (tried.count, drawn.saturating_sub(1));
            for (steps, tokens) in [(&mut drafts.steps, &mut drafts.tokens), (&mut head.steps, &mut head.tokens)] {
                (*steps, *tokens) = (*steps + 1, *tokens + drawn);
            }
            // What came behind the end of a completion says nothing.
            let judged = if row.finished.is_some() { count.min(right) } else { count };
            if tried.guessed {
                row.worth = 2 * right + 1;
                row.guesses.learn(judged.min(MOST), right.min(MOST), MEMORY[0]);
                (drafts.guessed, drafts.right) = (drafts.guessed + count, drafts.right + right);
            } else {
                row.chances.learn(judged, right, MEMORY[0]);
                self.depths.chances.learn(judged, right, MEMORY[1]);
                head.drafted[..count].iter_mut().for_each(|n| *n += 1);
                head.accepted[..right.min(MOST)].iter_mut().for_each(|n| *n += 1);
            }
        }
    }

    /// What a step of so many sequences and up to so many drafts each took.
    pub(super) fn measured(&mut self, (sequences, depth): (usize, usize), took: Duration) -> Result<()> {
        if self.pool.has_head() && self.options.draft_depth == DraftDepth::Auto {
            self.took.push((sequences, depth, took));
        }
        self.agree()
    }

    /// Steps of several ranks take what they take together: all of them must choose alike.
    fn agree(&mut self) -> Result<()> {
        let group = self.model.borrow().vocabulary.as_ref().map(|vocabulary| vocabulary.group());
        let mut took = match group {
            Some(_) if self.took.len() < AGREE => return Ok(()),
            _ => std::mem::take(&mut self.took),
        };
        if let Some(group) = group {
            let seconds: Vec<f32> = took.iter().map(|(_, _, took)| took.as_secs_f32()).collect();
            let sum = group.all_reduce(&Tensor::new(seconds, self.model.borrow().device())?)?;
            let sum = sum.to_device(&Device::Cpu)?.to_vec1::<f32>()?;
            took.iter_mut().zip(sum).for_each(|(took, sum)| took.2 = Duration::from_secs_f32(sum.max(0.)));
        }
        took.into_iter().for_each(|(batch, depth, took)| self.depths.measured(batch, depth, took));
        Ok(())
    }
}
