//! One completion as text.

use super::output::Output;
use super::stream::TextStream;
use anyhow::{bail, Result};
use candle_gdn_cli::plan::Plan;
use candle_gdn_models::FinishReason;
use tokenizers::Tokenizer;

/// Why a completion came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// A token that ends a text.
    EndOfText,
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
    /// Of a completion that ended by itself; an error of the engine is one of the run.
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
    text: TextStream<'a>,
}

impl<'a> Completion<'a> {
    /// Of prompt number `prompt`. Without a tokenizer there is no text.
    pub fn new(prompt: usize, tokenizer: Option<&'a Tokenizer>) -> Self {
        Self { prompt, tokens: Vec::new(), text: TextStream::new(tokenizer) }
    }

    /// Hands out the text that the next token completes.
    pub fn push(&mut self, token: u32, output: &mut Output) -> Result<()> {
        self.tokens.push(token);
        output.push(self.prompt, &self.text.push(token)?)
    }

    /// Hands out the rest of the text and says why it ended.
    pub fn finish(self, stop: Stop, plan: &Plan, output: &mut Output) -> Result<()> {
        let drawn = self.tokens.len();
        output.push(self.prompt, &self.text.finish()?)?;
        let positions = format!("{} {} positions", plan.positions_of, plan.positions);
        let why = match stop {
            Stop::EndOfText => format!("end of text after {drawn} tokens"),
            Stop::SampleLen => format!("{drawn} tokens (-n)"),
            Stop::PositionLimit => format!("{drawn} tokens, {positions}"),
            Stop::Interrupted => format!("interrupted after {drawn} tokens"),
            Stop::ClosedOutput => format!("output closed after {drawn} tokens"),
        };
        output.finish(self.prompt, format!("stopped: {why}"))
    }
}
