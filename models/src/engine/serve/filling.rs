//! How far a prompt is.

use super::request::{Request, RequestId};
use crate::engine::pool::Sequence;

/// A prompt that is being fed.
#[derive(Debug)]
pub(super) struct Filling {
    pub id: RequestId,
    pub request: Request,
    pub sequence: Sequence,
    /// Tokens fed, or taken from a snapshot.
    pub done: usize,
    /// Where the state is to be kept for other prompts.
    pub cuts: Vec<usize>,
}

impl Filling {
    /// Where a piece has to end.
    pub fn end(&self) -> usize {
        let cuts = self.cuts.iter().copied().chain(self.request.snapshot_at);
        cuts.filter(|cut| *cut > self.done).min().unwrap_or(usize::MAX).min(self.request.tokens.len())
    }

    pub fn is_done(&self) -> bool {
        self.done == self.request.tokens.len()
    }
}
