//! The completions under way.

use super::core::Context;
use super::event::{Event, FinishReason};
use super::request::{Request, RequestId};
use crate::drafting::depth::Chances;
use crate::sampling::{Choice, Drawn, Token};
use crate::sequences::Sequence;
use candle_core::{Error, Result};

/// Completions in the order in which passes serve them.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub rows: Vec<Row>,
}

impl Batch {
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub fn ids(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.rows.iter().map(|row| row.id)
    }

    pub fn sequences(&self) -> impl Iterator<Item = Sequence> + '_ {
        self.rows.iter().map(|row| row.sequence)
    }

    /// Whether a request needs log-probabilities.
    pub fn logprobs(&self) -> bool {
        self.rows.iter().any(|row| row.request.logprobs.is_some())
    }

    /// Whether each row has room for this many more tokens in a sequence of up to `max_len`.
    pub fn has_room(&self, tokens: usize, max_len: usize) -> bool {
        self.rows.iter().all(|row| row.tokens.len() - 1 + tokens <= max_len)
    }

    /// Ends the completions that have finished.
    pub fn retire(&mut self, cx: &mut Context) -> Result<()> {
        for row in std::mem::take(&mut self.rows) {
            let Some(reason) = row.finished.clone() else {
                self.rows.push(row);
                continue;
            };
            if !matches!(reason, FinishReason::Failed(_)) {
                row.final_snapshot(cx);
            }
            cx.pool.end(row.sequence)?;
            cx.events.push(Event::Finished { id: row.id, reason });
        }
        Ok(())
    }

    /// After a failed pass: the request `lost` ends with its error. Returns the others that the pass broke.
    pub fn recover(&mut self, lost: Option<RequestId>, error: &Error, cx: &Context) -> Vec<Row> {
        if let Some(row) = self.rows.iter_mut().find(|row| lost == Some(row.id)) {
            row.finished = Some(FinishReason::failed(error));
        }
        let is_well = |row: &Row| row.finished.is_some() || cx.is_intact(row.sequence, row.to_feed());
        let (well, broken) = std::mem::take(&mut self.rows).into_iter().partition(is_well);
        self.rows = well;
        broken
    }

    /// The sequence of the request, if it is being completed, after its snapshot.
    pub fn remove(&mut self, id: RequestId, cx: &mut Context) -> Option<Sequence> {
        let index = self.rows.iter().position(|row| row.id == id)?;
        let row = self.rows.remove(index);
        row.final_snapshot(cx);
        Some(row.sequence)
    }
}

/// A prompt and what was drawn after it, nothing while the prompt is fed.
#[derive(Debug)]
pub(super) struct Row {
    pub id: RequestId,
    pub sequence: Sequence,
    /// Prompt and completion. All but the last have been fed once the completion has begun.
    pub tokens: Vec<u32>,
    /// The look-up depth of the next pass: 2 times the last accepted drafts, plus 1.
    pub lookup_depth: usize,
    /// Acceptance of drafts by look-up.
    pub lookup_chances: Chances,
    /// Acceptance of drafts of the draft head.
    pub head_chances: Chances,
    pub finished: Option<FinishReason>,
    pub request: Request,
    prompt_len: usize,
    max_len: usize,
}

impl Row {
    pub fn new(id: RequestId, mut request: Request, sequence: Sequence, max_len: usize) -> Self {
        let tokens = std::mem::take(&mut request.tokens);
        let prompt_len = tokens.len();
        Self {
            id,
            sequence,
            tokens,
            lookup_depth: usize::MAX,
            lookup_chances: Chances::default(),
            head_chances: Chances::default(),
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

    /// Tokens of the completion.
    pub fn drawn(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Tokens to be fed before the next one is drawn in a decode step: the prompt, and all but the last of the completion.
    pub fn to_feed(&self) -> usize {
        self.tokens.len() - usize::from(self.drawn() > 0)
    }

    /// The most drafts that can be of use in the next step.
    pub fn room(&self) -> usize {
        let most = self.request.max_new_tokens - self.drawn();
        most.min(self.max_len - self.tokens.len()).saturating_sub(1)
    }

    /// How the token after those so far and the `drafted` is chosen: as it would be without drafts.
    pub fn choice(&self, drafted: &[u32]) -> Choice {
        self.request.choice(self.drawn() + drafted.len(), self.max_len, &self.tokens, drafted)
    }

    /// Whether the token drawn next can be fed before it is known: it ends the completion only if it is one of
    /// [`Request::stop`], and then the state is not needed.
    pub fn can_run_ahead(&self) -> bool {
        self.room() > 0 && !self.request.snapshot_end
    }

    /// The snapshot at the end of a completion, where it was requested.
    fn final_snapshot(&self, cx: &mut Context) {
        // Without memory for a snapshot there is none: the completion is whole.
        if let Some(snapshot) = self.request.snapshot_end.then(|| cx.snapshot(self.sequence).ok()).flatten() {
            cx.events.push(Event::Snapshot { id: self.id, snapshot });
        }
    }

    /// Accepts the tokens `drawn` after the last token and after each token of `drafted`, as long as the drafts equal
    /// them. Returns how many it accepted; the last of them has not been fed yet, or ends the completion.
    pub fn accept(&mut self, drawn: &[Token], drafted: &[u32], events: &mut Vec<Event>) -> usize {
        if self.drawn() == self.request.max_new_tokens {
            self.finished = Some(FinishReason::MaxNewTokens);
            return 0;
        }
        if self.tokens.len() >= self.max_len {
            self.finished = Some(FinishReason::MaxLen);
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
                _ if self.tokens.len() == self.max_len => Some(FinishReason::MaxLen),
                _ => None,
            };
            if self.finished.is_some() || drafted.get(i) != Some(&token) {
                return i + 1;
            }
        }
        drafted.len() + 1
    }
}
