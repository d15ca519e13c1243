//! Prefill and decode, with the text going to stdout and the figures to stderr.

use super::common::bar;
use super::sampler::Sampler;
use super::settings::Settings;
use super::stream::TextStream;
use anyhow::{Context, Result};
use candle_core::Tensor;
use candle_gdn::models::{CausalLm, ModelState};
use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokenizers::Tokenizer;

/// Why a generation came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// A token that ends a text.
    EndOfText,
    /// As many tokens as were asked for.
    SampleLen,
    /// The model has no further position.
    PositionLimit,
    /// Ctrl-C.
    Interrupted,
    /// Nobody reads stdout any more.
    ClosedOutput,
}

pub struct Generation<'a> {
    pub model: &'a CausalLm,
    pub tokenizer: &'a Tokenizer,
    pub settings: &'a Settings,
    pub prefill_chunk: usize,
    pub sample_len: usize,
    pub seed: u64,
    pub interrupt: &'a AtomicBool,
}

impl Generation<'_> {
    pub fn run(&self, prompt: &[u32]) -> Result<Stop> {
        let mut state = self.model.new_state(1)?;
        let start = Instant::now();
        let Some(logits) = self.prefill(prompt, &mut state)? else {
            eprintln!("prompt: {} of {} tokens, interrupted", state.position(), prompt.len());
            return Ok(Stop::Interrupted);
        };
        report("prompt", prompt.len(), start.elapsed());

        let start = Instant::now();
        let (stop, sampled, steps) = self.decode(prompt, logits, &mut state)?;
        let time = start.elapsed();
        if sampled > 0 && std::io::stdout().is_terminal() {
            eprintln!();
        }
        // The first token comes from the prompt's logits: only the others took a step.
        report("decode", steps, time);
        let limit = self.model.config().max_position_embeddings;
        match stop {
            Stop::EndOfText => eprintln!("stopped: end of text after {sampled} tokens"),
            Stop::SampleLen => eprintln!("stopped: {sampled} tokens (-n)"),
            Stop::PositionLimit => eprintln!("stopped: {sampled} tokens, the model has {limit} positions"),
            Stop::Interrupted => eprintln!("stopped: interrupted after {sampled} tokens"),
            Stop::ClosedOutput => eprintln!("stopped: output closed after {sampled} tokens"),
        }
        Ok(stop)
    }

    /// The logits after the prompt; none if Ctrl-C came before.
    fn prefill(&self, prompt: &[u32], state: &mut ModelState) -> Result<Option<Vec<f32>>> {
        let bar = bar("prompt", prompt.len(), "tokens");
        let mut chunks = prompt.chunks(self.prefill_chunk).peekable();
        let mut logits = None;
        while let Some(chunk) = chunks.next() {
            if self.interrupted() {
                bar.finish_and_clear();
                return Ok(None);
            }
            match chunks.peek() {
                Some(_) => drop(self.model.forward_hidden(&self.ids(chunk)?, state)?),
                None => logits = Some(self.last_logits(chunk, state)?),
            }
            bar.inc(chunk.len() as u64);
        }
        bar.finish_and_clear();
        logits.context("prompt: expected at least 1 token, got none").map(Some)
    }

    /// Why it stopped, how many tokens it took, and for how many it ran the model.
    fn decode(&self, prompt: &[u32], mut logits: Vec<f32>, state: &mut ModelState) -> Result<(Stop, usize, usize)> {
        let limit = self.model.config().max_position_embeddings;
        let mut sampler = Sampler::new(self.settings.sampling.clone(), self.seed);
        let mut text = TextStream::new(self.tokenizer);
        let mut tokens = prompt.to_vec();
        let mut steps = 0;
        let stop = loop {
            let sampled = tokens.len() - prompt.len();
            if self.interrupted() {
                break Stop::Interrupted;
            }
            if sampled == self.sample_len {
                break Stop::SampleLen;
            }
            if sampled > 0 {
                if state.position() == limit {
                    break Stop::PositionLimit;
                }
                logits = self.last_logits(&tokens[tokens.len() - 1..], state)?;
                steps += 1;
            }
            let id = sampler.next(std::mem::take(&mut logits), &tokens)?;
            if self.settings.eos.contains(&id) {
                break Stop::EndOfText;
            }
            tokens.push(id);
            if !print(&text.push(id)?)? {
                break Stop::ClosedOutput;
            }
        };
        let rest = text.finish()?;
        if stop != Stop::ClosedOutput {
            print(&rest)?;
        }
        Ok((stop, tokens.len() - prompt.len(), steps))
    }

    fn last_logits(&self, ids: &[u32], state: &mut ModelState) -> Result<Vec<f32>> {
        Ok(self.model.forward_last(&self.ids(ids)?, state)?.squeeze(0)?.to_vec1()?)
    }

    fn ids(&self, ids: &[u32]) -> Result<Tensor> {
        Ok(Tensor::from_slice(ids, (1, ids.len()), &candle_core::Device::Cpu)?)
    }

    fn interrupted(&self) -> bool {
        self.interrupt.load(Ordering::SeqCst)
    }
}

/// Whether somebody still reads it.
fn print(text: &str) -> Result<bool> {
    if text.is_empty() {
        return Ok(true);
    }
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|_| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(e).context("cannot write to stdout"),
    }
}

fn report(what: &str, tokens: usize, time: Duration) {
    let seconds = time.as_secs_f64();
    let rate = if seconds > 0. { tokens as f64 / seconds } else { 0. };
    eprintln!("{what}: {tokens} tokens in {seconds:.3} s, {rate:.1} tokens/s");
}
