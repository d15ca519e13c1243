//! One completion as text.

use super::job::Job;
use super::output::Output;
use anyhow::{bail, Result};
use candle_gdn_cli::plan::Plan;
use candle_gdn_cli::stream::{StopTexts, TextStream};
use candle_gdn_models::FinishReason;

/// Why a completion came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// A token that ends a text.
    EndOfText,
    /// A text of --stop.
    TextFound,
    /// As many tokens as were asked for.
    SampleLen,
    /// There is no further position.
    PositionLimit,
    /// Ctrl-C.
    Interrupted,
    /// Nobody reads stdout any more.
    ClosedOutput,
}

impl Stop {
    /// Of a completion that ended by itself; an error where the engine gave it up.
    pub fn by_itself(reason: FinishReason) -> Result<Self> {
        Ok(match reason {
            FinishReason::Stop => Self::EndOfText,
            FinishReason::MaxNewTokens => Self::SampleLen,
            FinishReason::MaxLen => Self::PositionLimit,
            FinishReason::Cancelled => Self::Interrupted,
            FinishReason::Failed(error) => bail!("{error}"),
        })
    }
}

/// The tokens drawn after a prompt.
pub struct Completion<'a> {
    /// The prompt's number, from 0.
    prompt: usize,
    pub tokens: Vec<u32>,
    /// What was handed out of their text.
    pub said: String,
    text: TextStream<'a>,
    stops: StopTexts<'a>,
}

impl<'a> Completion<'a> {
    /// Of prompt number `prompt`. Without a tokenizer there is no text.
    pub fn new(prompt: usize, job: &Job<'a>) -> Self {
        let (text, stops) = (TextStream::new(job.tokenizer), StopTexts::new(job.stop));
        Self { prompt, tokens: Vec::new(), said: String::new(), text, stops }
    }

    /// Hands out the text that the next token completes; whether a text of --stop ended it with this token.
    pub fn push(&mut self, token: u32, output: &mut Output) -> Result<bool> {
        self.tokens.push(token);
        let before = self.stops.found();
        let text = self.stops.push(&self.text.push(token)?);
        self.hand_out(&text, output)?;
        Ok(self.stops.found() && !before)
    }

    /// Hands out the rest of the text. Why it ended: a text of --stop counts before `stop`.
    pub fn rest(&mut self, stop: Stop, output: &mut Output) -> Result<Stop> {
        let text = self.stops.push(&self.text.finish()?) + &self.stops.finish();
        self.hand_out(&text, output)?;
        Ok(if self.stops.found() { Stop::TextFound } else { stop })
    }

    fn hand_out(&mut self, text: &str, output: &mut Output) -> Result<()> {
        self.said.push_str(text);
        output.push(self.prompt, text)
    }

    /// Says why it ended; an error is why it failed.
    pub fn finish(self, stop: Result<Stop>, plan: &Plan, output: &mut Output) -> Result<()> {
        let drawn = self.tokens.len();
        let positions = format!("{} {} positions", plan.positions_of, plan.positions);
        let why = match stop {
            Ok(Stop::EndOfText) => format!("end of text after {drawn} tokens"),
            Ok(Stop::TextFound) => format!("--stop after {drawn} tokens"),
            Ok(Stop::SampleLen) => format!("{drawn} tokens (-n)"),
            Ok(Stop::PositionLimit) => format!("{drawn} tokens, {positions}"),
            Ok(Stop::Interrupted) => format!("interrupted after {drawn} tokens"),
            Ok(Stop::ClosedOutput) => format!("output closed after {drawn} tokens"),
            Err(e) => format!("failed: {e:#}"),
        };
        output.finish(self.prompt, format!("stopped: {why}"))
    }
}
