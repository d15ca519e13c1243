//! A talk: lines in, answers out, and only what is new is fed.

use super::completion::{Completion, Stop};
use super::job::Job;
use super::output::Output;
use super::prompt;
use super::talk::{common, Talk};
use anyhow::{Context, Result};
use candle_gdn_cli::plan::SNAPSHOTS;
use candle_gdn_cli::status;
use candle_gdn_models::{CausalLm, Engine, Event, Request, RequestId, SequenceSnapshot};
use indicatif::ProgressBar;
use std::io::{BufRead, IsTerminal, Write};
use std::sync::atomic::Ordering;
use std::sync::Arc;

pub struct Interactive<'a> {
    job: &'a Job<'a>,
    engine: Engine<&'a CausalLm>,
    talk: Talk<'a>,
    memory: Memory,
    /// Answers so far, each of which draws from a generator of its own.
    answers: usize,
}

/// What the model has seen of the talk.
#[derive(Default)]
struct Memory {
    tokens: Vec<u32>,
    /// After all of them.
    last: Option<Arc<SequenceSnapshot>>,
    /// Of beginnings of the tokens, the longest last.
    snapshots: Vec<Arc<SequenceSnapshot>>,
}

/// What a line asks for.
enum Line {
    Message(String),
    Reset,
    Quit,
}

impl<'a> Interactive<'a> {
    pub fn new(job: &'a Job<'a>, talk: Talk<'a>) -> Result<Self> {
        Ok(Self { job, engine: job.engine()?, talk, memory: Memory::default(), answers: 0 })
    }

    /// Until the input ends, or somebody ends it.
    pub fn run(mut self) -> Result<Stop> {
        if !self.talk.is_chat() {
            status!("no chat template: your lines and what the model makes of them are one text");
        }
        let stop = loop {
            match self.read()? {
                Line::Quit => break Stop::EndOfText,
                Line::Reset => {
                    self.talk.clear();
                    self.memory = Memory::default();
                }
                Line::Message(message) => {
                    self.job.interrupt.store(false, Ordering::SeqCst);
                    if self.answer(&message)? == Some(Stop::ClosedOutput) {
                        break Stop::ClosedOutput;
                    }
                }
            }
        };
        status!("prompt: {}", self.engine.stats().prompt);
        self.job.tell_decode(&self.engine);
        Ok(stop)
    }

    /// The next line that asks for something.
    fn read(&self) -> Result<Line> {
        let mut stdin = std::io::stdin().lock();
        loop {
            if stdin.is_terminal() {
                let _ = write!(std::io::stderr(), "> ");
            }
            let mut line = Vec::new();
            if stdin.read_until(b'\n', &mut line).context("cannot read the input")? == 0 {
                return Ok(Line::Quit);
            }
            let Ok(line) = String::from_utf8(line) else {
                status!("skipped: a line that is not UTF-8");
                continue;
            };
            // Of a file that Windows saved and a pipe brings.
            let line = line.trim_start_matches('\u{FEFF}');
            match line.trim() {
                "" => {}
                "/quit" => return Ok(Line::Quit),
                "/reset" => return Ok(Line::Reset),
                _ => return Ok(Line::Message(line.trim_end_matches(['\r', '\n']).to_string())),
            }
        }
    }

    /// Why the answer ended; None where there was none, and the message does not count.
    fn answer(&mut self, message: &str) -> Result<Option<Stop>> {
        let config = self.job.model.config();
        let prompt = self.talk.ask(message).and_then(|prompt| {
            prompt::check(&prompt.tokens, config, Some(self.job.plan.positions))?;
            Ok(prompt)
        });
        let prompt = match prompt {
            Ok(prompt) => prompt,
            Err(e) => {
                status!("skipped: {e:#}; /reset starts again");
                return Ok(None);
            }
        };
        // The last token is fed in any case: logits come from nowhere else.
        let most = prompt.tokens.len() - 1;
        self.keep_common(common(&prompt.tokens[..most], &self.memory.tokens), prompt.tokens.len());
        let id = self.engine.submit(Request {
            resume: self.memory.last.clone(),
            snapshot_at: Some(prompt.lasting.min(most)),
            snapshot_end: true,
            ..self.job.request(self.answers, prompt.tokens.clone())
        })?;
        let mut output = Output::new(1, true, ProgressBar::hidden());
        let mut completion = Completion::new(0, self.job);
        let stop = self.complete(id, &mut completion, &mut output)?;
        // A Ctrl-C that stopped an answer is none of the two that end the program.
        self.job.interrupt.store(false, Ordering::SeqCst);
        let stop = match stop {
            Ok(stop) => stop,
            Err(e) => {
                if !completion.said.is_empty() {
                    output.push(0, "\n")?;
                }
                status!("failed: {e:#}; the message is skipped, /reset starts again");
                return Ok(None);
            }
        };
        if completion.tokens.is_empty() && stop == Stop::Interrupted {
            status!("stopped: interrupted before the answer, the message is skipped");
            return Ok(None);
        }
        self.answers += 1;
        let stop = completion.rest(stop, &mut output)?;
        let mut all = [&prompt.tokens[..], &completion.tokens].concat();
        let seen = self.memory.last.as_ref().map_or(0, |last| last.len());
        self.memory.tokens = all[..seen].to_vec();
        if stop == Stop::TextFound {
            // The talk goes on behind what was printed.
            all = [&prompt.tokens[..], &self.talk.encode(&completion.said, false)?].concat();
        }
        self.talk.answered(message, completion.said.clone(), all);
        completion.finish(Ok(stop), self.job.plan, &mut output)?;
        output.push(0, "\n")?;
        if stop != Stop::EndOfText {
            output.last_line();
        }
        Ok(Some(if output.closed() { Stop::ClosedOutput } else { stop }))
    }

    /// Goes back to what the model has seen and the prompt says too: the first `same` tokens, or fewer whose state is
    /// known.
    fn keep_common(&mut self, same: usize, prompt: usize) {
        let memory = &mut self.memory;
        let rewritten = same < memory.tokens.len();
        if rewritten {
            memory.snapshots.retain(|snapshot| snapshot.len() <= same);
            memory.last = memory.snapshots.last().cloned();
            memory.tokens.truncate(memory.last.as_ref().map_or(0, |last| last.len()));
        }
        if self.job.run.show_cache {
            let why = if rewritten { ", as it is not what was fed before" } else { "" };
            status!("cache: {} of {prompt} tokens kept{why}", self.memory.tokens.len());
        }
    }

    /// Until the request ends; an error inside where the answer failed. Ctrl-C and a closed output end it between two passes of the
    /// model.
    fn complete(&mut self, id: RequestId, completion: &mut Completion, output: &mut Output) -> Result<Result<Stop>> {
        let (mut ended_by, mut snapshots) = (None, Vec::new());
        loop {
            let interrupted = self.job.interrupt.load(Ordering::SeqCst);
            if ended_by.is_none() && (output.closed() || interrupted) {
                ended_by = Some(if output.closed() { Stop::ClosedOutput } else { Stop::Interrupted });
                self.engine.cancel(id)?;
            }
            for event in self.engine.step()? {
                if let Some(line) = self.job.line(&event) {
                    output.say(&line);
                }
                match event {
                    Event::Token { token, .. } => {
                        let found = completion.push(token, output)?;
                        if found && ended_by.is_none() {
                            ended_by = Some(Stop::TextFound);
                            self.engine.cancel(id)?;
                        }
                    }
                    Event::Snapshot { snapshot, .. } => snapshots.push(snapshot),
                    Event::Finished { reason, .. } => {
                        let stop = ended_by.map_or_else(|| Stop::by_itself(reason), Ok);
                        if stop.is_err() {
                            return Ok(stop);
                        }
                        // Without an answer the message does not count. With one, the snapshot of its end comes last.
                        if !completion.tokens.is_empty() || ended_by.is_none() {
                            self.memory.last = snapshots.pop();
                            let kept = &mut self.memory.snapshots;
                            kept.extend(snapshots);
                            kept.drain(..kept.len().saturating_sub(SNAPSHOTS));
                        }
                        return Ok(stop);
                    }
                    _ => {}
                }
            }
        }
    }
}
