//! What goes to stdout, and when.

use anyhow::{Context, Result};
use candle_gdn_cli::{is_first, status};
use indicatif::ProgressBar;
use std::io::{ErrorKind, IsTerminal, Write};

/// The completions: a single one as it comes; several whole, in the order of their prompts, under a header each.
pub struct Output {
    texts: Vec<Text>,
    /// Whether there is text at all.
    shown: bool,
    /// The first one that is not printed yet.
    next: usize,
    /// Those that will never be.
    missing: usize,
    /// Drawn on the same terminal, so out of the way while a text is printed.
    bar: ProgressBar,
    /// Whether anything was printed.
    any: bool,
    closed: bool,
}

#[derive(Clone, Default)]
struct Text {
    text: String,
    /// Why it ended.
    stop: Option<String>,
}

impl Output {
    pub fn new(prompts: usize, shown: bool, bar: ProgressBar) -> Self {
        Self { texts: vec![Text::default(); prompts], shown, next: 0, missing: 0, bar, any: false, closed: false }
    }

    /// Whether there are several completions.
    pub fn several(&self) -> bool {
        self.texts.len() > 1
    }

    /// Whether nobody reads them any more.
    pub fn closed(&self) -> bool {
        self.closed
    }

    /// The next part of the completion of `prompt`.
    pub fn push(&mut self, prompt: usize, text: &str) -> Result<()> {
        if self.several() {
            self.texts[prompt].text.push_str(text);
            return Ok(());
        }
        self.print(text)
    }

    /// The completion of `prompt` has come to its end; `stop` says why.
    pub fn finish(&mut self, prompt: usize, stop: String) -> Result<()> {
        self.texts[prompt].stop = Some(stop);
        while self.several() && self.texts.get(self.next).is_some_and(|text| text.stop.is_some()) {
            self.print_next()?;
        }
        Ok(())
    }

    /// Prints what had to wait for a prompt before it, which will not end any more.
    pub fn flush(&mut self) -> Result<()> {
        while self.several() && self.next < self.texts.len() {
            self.print_next()?;
        }
        Ok(())
    }

    /// Why it ended: of a single completion its own reason, of several what befell them all.
    pub fn last_line(&self) {
        match self.texts.as_slice() {
            [Text { stop: Some(stop), .. }] => self.say(stop),
            [_] => {}
            _ if self.closed => self.say("stopped: output closed"),
            texts if self.missing > 0 => {
                self.say(&format!("stopped: {} of {} prompts have no completion", self.missing, texts.len()));
            }
            _ => {}
        }
    }

    /// A line on stderr.
    pub fn say(&self, line: &str) {
        self.bar.suspend(|| status!("{line}"));
    }

    fn print_next(&mut self) -> Result<()> {
        let (number, text) = (self.next + 1, std::mem::take(&mut self.texts[self.next]));
        self.next += 1;
        let Some(stop) = text.stop else {
            self.missing += 1;
            return Ok(());
        };
        if self.shown {
            self.print(&format!("==> prompt {number} <==\n{}\n", text.text))?;
            self.say(&format!("prompt {number}: {stop}"));
        }
        Ok(())
    }

    fn print(&mut self, text: &str) -> Result<()> {
        if text.is_empty() || self.closed || !is_first() {
            return Ok(());
        }
        let print = || {
            let mut stdout = std::io::stdout().lock();
            stdout.write_all(text.as_bytes()).and_then(|_| stdout.flush())
        };
        match self.bar.suspend(print) {
            Ok(()) => self.any = true,
            Err(e) if e.kind() == ErrorKind::BrokenPipe => self.closed = true,
            Err(e) => return Err(e).context("cannot write to stdout"),
        }
        Ok(())
    }

    /// Ends the last line of a single completion, where it and the figures share a terminal.
    pub fn end_line(&self) {
        if !self.several() && self.any && std::io::stdout().is_terminal() {
            status!();
        }
    }
}
