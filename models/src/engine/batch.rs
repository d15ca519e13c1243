//! One completion under way.

use super::depth::Chances;
use super::request::{Event, FinishReason, Request, RequestId};
use crate::engine::sampling::{Choice, Drawn, Token};
use crate::Sequence;

/// A prompt and what was drawn after it.
#[derive(Debug)]
pub(super) struct Row {
    pub id: RequestId,
    pub sequence: Sequence,
    /// Prompt and completion. All but the last have been fed once the completion has begun.
    pub tokens: Vec<u32>,
    /// How many guesses the next pass is worth: as many as were right, one more, and as many again.
    pub worth: usize,
    /// Of these guesses.
    pub guesses: Chances,
    /// Of the draft head's drafts.
    pub chances: Chances,
    pub finished: Option<FinishReason>,
    pub request: Request,
    prompt_len: usize,
    max_len: usize,
}

impl Row {
    /// Of a request whose prompt was fed.
    pub fn new(id: RequestId, mut request: Request, sequence: Sequence, max_len: usize, chances: Chances) -> Self {
        let tokens = std::mem::take(&mut request.tokens);
        let prompt_len = tokens.len();
        Self {
            id,
            sequence,
            tokens,
            worth: usize::MAX,
            guesses: Chances::default(),
            chances,
            finished: None,
            request,
            prompt_len,
            max_len,
        }
    }

    /// The token to be fed next.
    pub fn last(&self) -> u32 {
        self.tokens[self.tokens.len() - 1]
    }

    fn drawn(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// How many guessed tokens could be of use in the next step.
    pub fn room(&self) -> usize {
        (self.request.max_new_tokens - self.drawn()).saturating_sub(1).min(self.max_len - self.tokens.len())
    }

    /// How the token behind those so far and the `guessed` is chosen: as it would be without a guess.
    pub fn choice(&self, guessed: &[u32]) -> Choice {
        self.request.choice(self.drawn() + guessed.len(), self.max_len, &self.tokens, guessed)
    }

    /// Whether the token drawn next can be fed before it is known: it is the last one only if it is one of
    /// [`Request::stop`], and then nobody asks for the state.
    pub fn goes_on(&self) -> bool {
        self.room() > 0 && !self.request.snapshot_end
    }

    /// Takes the tokens `drawn` after the last token and after each of the tokens `guessed` behind it, as long as the guesses
    /// are right. Returns how many it took, the last of which no pass has been fed, or that ends the completion.
    pub fn take(&mut self, drawn: &[Token], guessed: &[u32], events: &mut Vec<Event>) -> usize {
        if self.drawn() == self.request.max_new_tokens {
            self.finished = Some(FinishReason::MaxNewTokens);
            return 0;
        }
        for (i, token) in drawn.iter().enumerate() {
            let Drawn { id: token, logprobs } = match token {
                Ok(drawn) => drawn.clone(),
                Err(what) => {
                    let why = format!("the model gave {what} after {} tokens", self.tokens.len());
                    self.finished = Some(FinishReason::Failed(why));
                    return i;
                }
            };
            if self.request.stop.contains(&token) {
                self.finished = Some(FinishReason::Stop);
                return i + 1;
            }
            self.tokens.push(token);
            events.push(Event::Token { id: self.id, token, logprobs });
            self.finished = match () {
                _ if self.drawn() == self.request.max_new_tokens => Some(FinishReason::MaxNewTokens),
                _ if self.tokens.len() > self.max_len => Some(FinishReason::MaxLen),
                _ => None,
            };
            if self.finished.is_some() || guessed.get(i) != Some(&token) {
                return i + 1;
            }
        }
        guessed.len() + 1
    }
}
