//! From prompts to completions, and the summary at the end.

use super::completion::{Completion, Stop};
use super::job::{Job, MIB};
use super::output::Output;
use anyhow::{bail, Result};
use candle_gdn_cli::{bar, is_first, status};
use candle_gdn_models::{CausalLm, Engine, Event, RequestId};
use indicatif::ProgressBar;
use std::sync::atomic::Ordering;

/// All prompts are requests of an engine from the start.
pub struct Generation<'a> {
    job: &'a Job<'a>,
    engine: Engine<&'a CausalLm>,
    /// In the order of the prompts; None where it has ended.
    completions: Vec<(RequestId, Option<Completion<'a>>)>,
    output: Output,
    bar: ProgressBar,
    /// Whether all prompts were fed.
    fed: bool,
    last_stop: Stop,
    /// Why completions failed. The others went on.
    failed: Vec<String>,
}

impl<'a> Generation<'a> {
    pub fn new(job: &'a Job<'a>) -> Result<Self> {
        let mut engine = job.engine()?;
        let bar = bar("prompt", job.prompts.iter().map(Vec::len).sum(), "tokens");
        let mut completions = Vec::with_capacity(job.prompts.len());
        for (n, prompt) in job.prompts.iter().enumerate() {
            let id = engine.submit(job.request(n, prompt.clone()))?;
            completions.push((id, Some(Completion::new(n, job))));
        }
        let output = Output::new(job.prompts.len(), job.tokenizer.is_some(), bar.clone());
        Ok(Self { job, engine, completions, output, bar, fed: false, last_stop: Stop::SampleLen, failed: Vec::new() })
    }

    /// Completes all prompts, or as far as it comes.
    ///
    /// # Errors
    /// Where a completion failed too, once all others have ended.
    pub fn run(mut self) -> Result<Stop> {
        let stop = self.advance();
        self.bar.finish_and_clear();
        // What is ready is not lost by an error.
        let flushed = self.output.flush();
        let stop = stop?;
        flushed?;
        self.report(stop);
        match self.failed.first() {
            // An error of another rank would end the program while the first one still prints.
            Some(why) if is_first() && stop != Stop::Interrupted => {
                bail!("{} of {} prompts failed: {why}", self.failed.len(), self.job.prompts.len())
            }
            _ => Ok(stop),
        }
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
            if self.engine.is_idle() {
                break self.last_stop;
            }
            let events = self.engine.step()?;
            self.show_progress();
            for event in events {
                self.take(event)?;
            }
        };
        // One without a token has not begun.
        let taken = self.completions.iter_mut().filter_map(|(_, completion)| completion.take());
        for mut completion in taken.filter(|completion| !completion.tokens.is_empty()) {
            let stop = completion.rest(stop, &mut self.output)?;
            completion.finish(Ok(stop), self.job.plan, &mut self.output)?;
        }
        Ok(stop)
    }

    fn show_progress(&mut self) {
        let stats = self.engine.stats();
        self.bar.set_position((stats.prompt.tokens + stats.prefixes.reused) as u64);
        if self.engine.unfed() == 0 && !self.fed {
            self.fed = true;
            self.bar.finish_and_clear();
            if !self.output.several() {
                status!("prompt: {}", stats.prompt);
            }
        }
    }

    fn take(&mut self, event: Event) -> Result<()> {
        if let Some(line) = self.job.line(&event) {
            self.output.say(&line);
        }
        let (Event::Token { id, .. } | Event::Finished { id, .. }) = event else { return Ok(()) };
        let Some((_, completion)) = self.completions.iter_mut().find(|(other, _)| *other == id) else { return Ok(()) };
        match event {
            Event::Token { token, .. } => {
                let Some(completion) = completion else { return Ok(()) };
                if completion.push(token, &mut self.output)? {
                    self.engine.cancel(id)?;
                }
                Ok(())
            }
            Event::Finished { reason, .. } => {
                let Some(mut completion) = completion.take() else { return Ok(()) };
                let closed = self.output.closed().then_some(Stop::ClosedOutput);
                let stop = match Stop::by_itself(reason) {
                    Ok(stop) => {
                        // Nobody reads the rest: that is why it ends.
                        self.last_stop = completion.rest(closed.unwrap_or(stop), &mut self.output)?;
                        Ok(self.last_stop)
                    }
                    Err(e) => {
                        completion.rest(Stop::Interrupted, &mut self.output)?;
                        self.failed.push(format!("{e:#}"));
                        Err(e)
                    }
                };
                completion.finish(stop, self.job.plan, &mut self.output)
            }
            _ => Ok(()),
        }
    }

    fn report(&self, stop: Stop) {
        let several = self.output.several();
        if several {
            status!("prompt: {}", self.engine.stats().prompt);
        } else if stop == Stop::Interrupted && self.engine.unfed() > 0 {
            status!("prompt: {} of {} tokens, interrupted", self.bar.position(), self.job.prompts[0].len());
            return;
        }
        self.output.end_line();
        self.job.tell_decode(&self.engine);
        if self.job.run.show_cache {
            let prefixes = self.engine.stats().prefixes;
            let rest = match self.job.plan.cache {
                0 => "--prefix-cache is 0".to_string(),
                _ => {
                    let (hits, held) = (prefixes.hits, prefixes.bytes as f64 / MIB);
                    format!("{hits} of {} prompts hit, {held:.1} MiB held", hits + prefixes.misses)
                }
            };
            status!("cache: {} of {} prompt tokens reused, {rest}", prefixes.reused, prefixes.asked);
        }
        self.output.last_line();
    }
}
