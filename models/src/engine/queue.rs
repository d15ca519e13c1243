//! Requests that wait for room.

use super::request::{Request, RequestId};
use crate::CausalLm;
use candle_core::{bail, Result};
use std::collections::VecDeque;

#[derive(Debug)]
pub(super) struct Queue {
    waiting: VecDeque<(RequestId, Request)>,
    max_waiting: usize,
    next: u64,
}

impl Queue {
    pub fn new(max_waiting: usize) -> Self {
        Self { waiting: VecDeque::new(), max_waiting, next: 0 }
    }

    /// See [`Engine::submit`](super::Engine::submit).
    pub fn submit(&mut self, request: Request, model: &CausalLm, max_len: usize) -> Result<RequestId> {
        let (len, vocab) = (request.tokens.len(), model.config().vocab_size);
        if len == 0 {
            bail!("Engine: request: expected at least 1 token, got none")
        }
        if len > max_len {
            bail!("Engine: request: expected at most {max_len} tokens, for which there is room, got {len}")
        }
        if let Some(token) = request.tokens.iter().find(|&&token| token as usize >= vocab) {
            bail!("Engine: request: expected token ids below vocab_size ({vocab}), got {token}")
        }
        if let Some(resume) = request.resume.as_ref().filter(|resume| resume.len() >= len) {
            bail!("Engine: request: expected more than the {} tokens that it resumes, got {len}", resume.len())
        }
        if let Some(count) = request.logprobs.filter(|count| *count > Request::MOST_LOGPROBS) {
            let most = Request::MOST_LOGPROBS;
            bail!("Engine: request: expected log-probabilities of at most {most} tokens, got {count}")
        }
        request.sampling.check()?;
        if self.waiting.len() >= self.max_waiting {
            bail!("Engine: request: expected at most {} that wait", self.max_waiting)
        }
        let id = RequestId(self.next);
        self.next += 1;
        self.waiting.push_back((id, request));
        Ok(id)
    }

    pub fn get(&self, index: usize) -> Option<&Request> {
        self.waiting.get(index).map(|(_, request)| request)
    }

    pub fn take(&mut self, index: usize) -> Option<(RequestId, Request)> {
        self.waiting.remove(index)
    }

    /// Whether the request waited.
    pub fn remove(&mut self, id: RequestId) -> bool {
        let index = self.waiting.iter().position(|(waiting, _)| *waiting == id);
        index.and_then(|index| self.waiting.remove(index)).is_some()
    }

    pub fn prompts(&self) -> impl Iterator<Item = &[u32]> {
        self.waiting.iter().map(|(_, request)| request.tokens.as_slice())
    }

    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}
