//! What comes out of an engine.

use super::request::RequestId;
use crate::sampling::Logprobs;
use crate::sequences::SequenceSnapshot;
use candle_core::Error;
use std::sync::Arc;

/// A result of a step.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The next token of a completion.
    Token {
        /// The request.
        id: RequestId,
        /// Its number in the vocabulary.
        token: u32,
        /// Where [`Request::logprobs`](super::Request::logprobs) requests them.
        logprobs: Option<Box<Logprobs>>,
    },
    /// A copy of the sequence that the request asked for.
    Snapshot {
        /// The request.
        id: RequestId,
        /// The copy.
        snapshot: Arc<SequenceSnapshot>,
    },
    /// Nothing more comes for this request.
    Finished {
        /// The request.
        id: RequestId,
        /// Why it ended.
        reason: FinishReason,
    },
    /// The state after these tokens is in the prefix cache from now on.
    PrefixKept {
        /// The prefix, whole blocks.
        tokens: Vec<u32>,
    },
    /// The state after these tokens is no longer in the prefix cache.
    PrefixDropped {
        /// The prefix.
        tokens: Vec<u32>,
    },
    /// A state takes more than [`EngineOptions::prefix_cache`](super::EngineOptions::prefix_cache) and was not kept. Reported once.
    PrefixTooLarge {
        /// Tokens of the prefix.
        tokens: usize,
        /// Bytes of its state, keys and values included.
        bytes: usize,
    },
    /// Decode steps of this many sequences and more, or speculative ones, run without a CUDA graph. Reported once for each of
    /// the two.
    NoGraph {
        /// The sequences.
        sequences: usize,
        /// The error.
        why: String,
    },
}

/// Why a completion ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A token of [`Request::stop`](super::Request::stop) came.
    Stop,
    /// The completion has [`Request::max_new_tokens`](super::Request::max_new_tokens).
    MaxNewTokens,
    /// Prompt and completion have [`EngineOptions::max_len`](super::EngineOptions::max_len) tokens.
    MaxLen,
    /// [`Engine::cancel`](super::Engine::cancel).
    Cancelled,
    /// No token could be chosen, or a pass failed: the error.
    Failed(String),
}

impl FinishReason {
    pub(crate) fn failed(error: &Error) -> Self {
        Self::Failed(first_line(error))
    }
}

/// What clients may see of an error: what follows is a backtrace.
pub(crate) fn first_line(error: &Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_string()
}
