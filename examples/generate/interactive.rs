//! A talk: lines in, answers out, and only what is new is fed.

use super::decode::decode;
use super::engine::{Engine, Feed};
use super::figures::Figures;
use super::generation::Job;
use super::greedy::Logits;
use super::output::Output;
use super::plan::SNAPSHOTS;
use super::prompt;
use super::row::{Limits, Row, Stop};
use super::sampler::Sampler;
use super::stream::TextStream;
use super::talk::{common, Prompt, Talk};
use anyhow::{Context, Result};
use candle_gdn_models::{Sequence, SequenceSnapshot};
use indicatif::ProgressBar;
use std::io::{BufRead, IsTerminal, Write};
use std::sync::atomic::Ordering;
use std::time::Instant;

pub struct Interactive<'a> {
    job: &'a Job<'a>,
    engine: Engine<'a>,
    limits: Limits<'a>,
    talk: Talk<'a>,
    memory: Memory,
    figures: Figures,
    /// Answers so far, each of which draws from a generator of its own.
    answers: usize,
}

/// What the model has seen of the talk.
struct Memory {
    sequence: Sequence,
    tokens: Vec<u32>,
    /// Of beginnings of the tokens, the longest last.
    snapshots: Vec<SequenceSnapshot>,
}

/// What a line asks for.
enum Line {
    Message(String),
    Reset,
    Quit,
}

impl<'a> Interactive<'a> {
    pub fn new(job: &'a Job<'a>, talk: Talk<'a>) -> Result<Self> {
        let mut engine = Engine::new(job)?;
        let memory = Memory { sequence: engine.begin(None)?, tokens: Vec::new(), snapshots: Vec::new() };
        let limits = job.limits();
        Ok(Self { job, engine, limits, talk, memory, figures: Figures::default(), answers: 0 })
    }

    /// Until the input ends, or somebody ends it.
    pub fn run(mut self) -> Result<Stop> {
        if !self.talk.is_chat() {
            eprintln!("no chat template: your lines and what the model makes of them are one text");
        }
        let mut stop = Stop::EndOfText;
        loop {
            match self.read()? {
                Line::Quit => break,
                Line::Reset => {
                    self.talk.clear();
                    self.forget()?;
                }
                Line::Message(message) => {
                    self.job.interrupt.store(false, Ordering::SeqCst);
                    if self.answer(&message)? == Some(Stop::ClosedOutput) {
                        stop = Stop::ClosedOutput;
                        break;
                    }
                }
            }
        }
        eprintln!("prompt: {}", self.figures.prompt);
        eprintln!("decode: {}", self.figures.decode);
        if self.job.run.draft > 0 {
            eprintln!("{}", self.figures.drafts);
        }
        Ok(stop)
    }

    /// The next line that asks for something.
    fn read(&self) -> Result<Line> {
        let mut stdin = std::io::stdin().lock();
        loop {
            if stdin.is_terminal() {
                eprint!("> ");
                std::io::stderr().flush()?;
            }
            let mut line = Vec::new();
            if stdin.read_until(b'\n', &mut line).context("cannot read the input")? == 0 {
                return Ok(Line::Quit);
            }
            let Ok(line) = String::from_utf8(line) else {
                eprintln!("left out: a line that is not UTF-8");
                continue;
            };
            match line.trim_end_matches(['\r', '\n']) {
                line if line.trim().is_empty() => {}
                line => match line.trim() {
                    "/quit" => return Ok(Line::Quit),
                    "/reset" => return Ok(Line::Reset),
                    _ => return Ok(Line::Message(line.to_string())),
                },
            }
        }
    }

    /// Why the answer ended; None where there was none, and the message does not count.
    fn answer(&mut self, message: &str) -> Result<Option<Stop>> {
        let prompt = self.talk.ask(message)?;
        if let Err(e) = prompt::check(&prompt.tokens, self.job.model.config(), Some(self.limits.positions)) {
            eprintln!("left out: {e:#}; /reset begins anew");
            return Ok(None);
        }
        let Some(logits) = self.take_in(&prompt)? else {
            eprintln!("stopped: interrupted before the answer, the message is left out");
            return Ok(None);
        };

        let start = Instant::now();
        let sampler = Sampler::new(self.job.settings.sampling.clone(), self.job.seed, self.answers);
        self.answers += 1;
        let mut output = Output::new(1, true, ProgressBar::hidden());
        let text = TextStream::new(self.job.tokenizer);
        let mut row = Row::new(0, &prompt.tokens, self.memory.sequence, sampler, text);
        row.draw(vec![logits], &[], &self.limits, &mut output)?;
        self.figures.decode.add(0, start.elapsed());
        let stop = loop {
            if let Some(stop) = row.stop() {
                break stop;
            }
            if self.job.interrupt.load(Ordering::SeqCst) {
                break Stop::Interrupted;
            }
            let rows = std::slice::from_mut(&mut row);
            decode(&mut self.engine, rows, self.job.run.draft, &self.limits, &mut output, &mut self.figures)?;
        };

        let seen = self.engine.len(self.memory.sequence)?;
        self.memory.tokens = row.tokens[..seen].to_vec();
        self.talk.answered(message, &row.tokens[prompt.tokens.len()..], &row.tokens)?;
        row.finish(stop, &self.limits, &mut output)?;
        output.push(0, "\n")?;
        if stop != Stop::EndOfText {
            output.last_line();
        }
        Ok(Some(if output.closed() { Stop::ClosedOutput } else { stop }))
    }

    /// Feeds what the model has not seen of the prompt, and returns the logits after it; None if it was interrupted.
    fn take_in(&mut self, prompt: &Prompt) -> Result<Option<Logits>> {
        let start = Instant::now();
        // The last token is fed in any case: logits come from nowhere else.
        let most = prompt.tokens.len() - 1;
        let same = common(&prompt.tokens[..most], &self.memory.tokens);
        let rewritten = same < self.memory.tokens.len();
        if rewritten {
            self.go_back(same)?;
        }
        let kept = self.memory.tokens.len();
        if self.job.run.show_cache {
            let why = if rewritten { ", as it is not what was fed before" } else { "" };
            eprintln!("cache: {kept} of {} tokens kept{why}", prompt.tokens.len());
        }
        let lasting = prompt.lasting.min(most);
        let mut logits = None;
        while self.memory.tokens.len() < prompt.tokens.len() {
            if self.job.interrupt.load(Ordering::SeqCst) {
                return Ok(None);
            }
            let from = self.memory.tokens.len();
            let end = if from < lasting { lasting } else { prompt.tokens.len() };
            let to = end.min(from.saturating_add(self.job.prefill_chunk));
            let piece: Feed = (self.memory.sequence, &prompt.tokens[from..to]);
            let wanted: &[usize] = if to == prompt.tokens.len() { &[0] } else { &[] };
            logits = self.engine.feed(&[piece], wanted)?.pop();
            self.memory.tokens.extend_from_slice(piece.1);
            if to == lasting {
                self.memory.keep(self.engine.snapshot(self.memory.sequence)?);
            }
        }
        self.figures.prompt.add(prompt.tokens.len() - kept, start.elapsed());
        Ok(logits)
    }

    /// To the longest beginning of at most `len` tokens whose state is known.
    fn go_back(&mut self, len: usize) -> Result<()> {
        self.memory.snapshots.retain(|snapshot| snapshot.len() <= len);
        match self.memory.snapshots.last() {
            Some(snapshot) => {
                self.engine.restore(self.memory.sequence, snapshot)?;
                self.memory.tokens.truncate(snapshot.len());
            }
            None => self.forget()?,
        }
        Ok(())
    }

    fn forget(&mut self) -> Result<()> {
        self.memory.snapshots.clear();
        self.memory.tokens.clear();
        self.engine.end(self.memory.sequence)?;
        self.memory.sequence = self.engine.begin(None)?;
        Ok(())
    }
}

impl Memory {
    fn keep(&mut self, snapshot: SequenceSnapshot) {
        if self.snapshots.len() == SNAPSHOTS {
            self.snapshots.remove(0);
        }
        self.snapshots.push(snapshot);
    }
}
