//! From prompts to completions: whose turn it is, and what is told at the end.

use super::args::RunArgs;
use super::common::ranks::Pace;
use super::common::{bar, tell};
use super::decode::decode;
use super::engine::Engine;
use super::figures::Figures;
use super::fill::Filling;
use super::output::Output;
use super::plan::Plan;
use super::prefixes::Prefixes;
use super::row::{Limits, Row, Stop};
use super::settings::Settings;
use anyhow::Result;
use candle_gdn_models::{CausalLm, SequenceSnapshot};
use indicatif::ProgressBar;
use std::sync::atomic::{AtomicBool, Ordering};
use tokenizers::Tokenizer;

/// What to do.
pub struct Job<'a> {
    pub model: &'a CausalLm,
    /// Without one nothing is printed but figures.
    pub tokenizer: Option<&'a Tokenizer>,
    pub settings: &'a Settings,
    pub run: &'a RunArgs,
    pub plan: &'a Plan,
    pub prompts: &'a [Vec<u32>],
    pub prefill_chunk: usize,
    pub sample_len: usize,
    pub seed: u64,
    pub interrupt: &'a AtomicBool,
    pub pace: &'a Pace,
}

impl Job<'_> {
    /// What ends every completion.
    pub fn limits(&self) -> Limits<'_> {
        let &Plan { positions, positions_of, .. } = self.plan;
        Limits { eos: &self.settings.eos, sample_len: self.sample_len, positions, positions_of }
    }
}

/// How far it is. A prompt waits, then is fed (`fill.rs`), then completed (`decode.rs`). While there are prompts to be
/// fed, those passes take the running completions along, a token each.
pub struct Generation<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) engine: Engine<'a>,
    pub(super) limits: Limits<'a>,
    /// Sequences at once.
    pub(super) batch: usize,
    pub(super) prefixes: Prefixes<SequenceSnapshot>,
    /// Numbers of the prompts that have not begun.
    pub(super) waiting: Vec<usize>,
    pub(super) filling: Vec<Filling<'a>>,
    pub(super) rows: Vec<Row<'a>>,
    pub(super) output: Output,
    pub(super) figures: Figures,
    pub(super) bar: ProgressBar,
    last_stop: Stop,
}

impl<'a> Generation<'a> {
    pub fn new(job: &'a Job<'a>) -> Result<Self> {
        let (run, prompts) = (job.run, job.prompts.len());
        let &Plan { batch, cache, .. } = job.plan;
        let engine = Engine::new(job)?;
        let bar = bar("prompt", job.prompts.iter().map(Vec::len).sum(), "tokens");
        Ok(Self {
            job,
            engine,
            limits: job.limits(),
            batch,
            prefixes: Prefixes::new(run.prefix_block, cache)?,
            waiting: (0..prompts).collect(),
            filling: Vec::new(),
            rows: Vec::new(),
            output: Output::new(prompts, job.tokenizer.is_some(), bar.clone()),
            figures: Figures::default(),
            bar,
            last_stop: Stop::SampleLen,
        })
    }

    /// Completes all prompts, or as far as it comes.
    pub fn run(mut self) -> Result<Stop> {
        let stop = self.advance();
        self.bar.finish_and_clear();
        // What is ready is not lost by an error.
        let flushed = self.output.flush();
        let stop = stop?;
        flushed?;
        self.report(stop);
        Ok(stop)
    }

    /// Ctrl-C and a closed output end it between two passes of the model.
    fn advance(&mut self) -> Result<Stop> {
        let stop = loop {
            let (interrupted, closed) = (self.job.interrupt.load(Ordering::SeqCst), self.output.closed());
            match self.job.pace.agree(u8::from(interrupted) + 2 * u8::from(closed && !interrupted)) {
                0 => {}
                1 => break Stop::Interrupted,
                _ => break Stop::ClosedOutput,
            }
            self.admit()?;
            if !self.filling.is_empty() {
                self.fill()?;
            } else if !self.rows.is_empty() {
                let draft = self.job.run.draft;
                decode(&mut self.engine, &mut self.rows, draft, &self.limits, &mut self.output, &mut self.figures)?;
                self.retire()?;
            } else {
                break self.last_stop;
            }
        };
        for row in std::mem::take(&mut self.rows) {
            row.finish(stop, &self.limits, &mut self.output)?;
        }
        Ok(stop)
    }

    /// Rows that have ended make room.
    pub(super) fn retire(&mut self) -> Result<()> {
        for row in std::mem::take(&mut self.rows) {
            let Some(stop) = row.stop() else {
                self.rows.push(row);
                continue;
            };
            self.last_stop = stop;
            self.engine.end(row.sequence)?;
            row.finish(stop, &self.limits, &mut self.output)?;
        }
        Ok(())
    }

    fn report(&self, stop: Stop) {
        let (several, unfed) = (self.output.several(), self.waiting.len() + self.filling.len());
        if several {
            tell!("prompt: {}", self.figures.prompt);
        } else if stop == Stop::Interrupted && unfed > 0 {
            tell!("prompt: {} of {} tokens, interrupted", self.bar.position(), self.job.prompts[0].len());
            return;
        }
        self.output.end_line();
        tell!("decode: {}", self.figures.decode);
        if self.job.run.draft > 0 {
            tell!("{}", self.figures.drafts);
        }
        if self.job.run.show_cache {
            tell!("{}", self.prefixes);
        }
        self.output.last_line();
    }
}
