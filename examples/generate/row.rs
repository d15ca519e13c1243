//! One prompt under way.

use super::greedy::Logits;
use super::output::Output;
use super::sampler::Sampler;
use super::stream::TextStream;
use anyhow::Result;
use candle_gdn_models::Sequence;
use std::collections::BTreeSet;

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

/// What ends every completion of a run.
pub struct Limits<'a> {
    pub eos: &'a BTreeSet<u32>,
    pub sample_len: usize,
    /// Tokens that a sequence can be fed, and, to be read before that number, who says so.
    pub positions: usize,
    pub positions_of: &'static str,
}

/// A prompt and what was drawn after it.
pub struct Row<'a> {
    /// Its number, from 0.
    pub prompt: usize,
    pub sequence: Sequence,
    /// Prompt and completion. All but the last have been fed once the completion has begun.
    pub tokens: Vec<u32>,
    /// How many guesses the next pass is worth: as many as were right, one more, and as many again.
    pub worth: usize,
    prompt_len: usize,
    sampler: Sampler,
    text: TextStream<'a>,
    stop: Option<Stop>,
}

impl<'a> Row<'a> {
    pub fn new(prompt: usize, tokens: &[u32], sequence: Sequence, sampler: Sampler, text: TextStream<'a>) -> Self {
        let (tokens, prompt_len) = (tokens.to_vec(), tokens.len());
        Self { prompt, sequence, tokens, worth: usize::MAX, prompt_len, sampler, text, stop: None }
    }

    /// Why it has ended, if it has.
    pub fn stop(&self) -> Option<Stop> {
        self.stop
    }

    /// The token to be fed next.
    pub fn last(&self) -> u32 {
        self.tokens[self.tokens.len() - 1]
    }

    fn drawn(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// How many guessed tokens could be of use in the next step.
    pub fn room(&self, limits: &Limits) -> usize {
        (limits.sample_len - self.drawn()).saturating_sub(1).min(limits.positions - self.tokens.len())
    }

    /// Draws from `logits`, those after the last token and after each of the tokens `guessed` behind it, as long as the
    /// guesses are right: each token is drawn as it would be without a guess, and by the same random number. Returns
    /// how many tokens it drew, the last of which no pass has been fed, or that is an end of text.
    pub fn draw(
        &mut self,
        logits: Vec<Logits>,
        guessed: &[u32],
        limits: &Limits,
        output: &mut Output,
    ) -> Result<usize> {
        if self.drawn() == limits.sample_len {
            self.stop = Some(Stop::SampleLen);
            return Ok(0);
        }
        for (i, logits) in logits.into_iter().enumerate() {
            let id = self.sampler.next(logits, &self.tokens)?;
            if limits.eos.contains(&id) {
                self.stop = Some(Stop::EndOfText);
                return Ok(i + 1);
            }
            self.tokens.push(id);
            output.push(self.prompt, &self.text.push(id)?)?;
            self.stop = match () {
                _ if output.closed() => Some(Stop::ClosedOutput),
                _ if self.drawn() == limits.sample_len => Some(Stop::SampleLen),
                _ if self.tokens.len() > limits.positions => Some(Stop::PositionLimit),
                _ => None,
            };
            if self.stop.is_some() || guessed.get(i) != Some(&id) {
                return Ok(i + 1);
            }
        }
        Ok(guessed.len() + 1)
    }

    /// Hands out the rest of the text and says why it ended.
    pub fn finish(self, stop: Stop, limits: &Limits, output: &mut Output) -> Result<()> {
        let drawn = self.drawn();
        output.push(self.prompt, &self.text.finish()?)?;
        let positions = format!("{} {} positions", limits.positions_of, limits.positions);
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
