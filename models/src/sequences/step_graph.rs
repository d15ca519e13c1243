//! Decode steps that run without the host.

use super::pool::{Sequence, SequencePool};
use crate::causal_lm::CausalLm;
use crate::sampling::{Choice, Token};
use candle_core::Result;
use std::cell::RefCell;
use std::fmt::Debug;
use std::rc::Rc;

/// A decode step that draws the next tokens on the device. What the next step of the same sequences reads lies there too, so that it
/// can be launched before the host reads these tokens.
pub(crate) trait StepGraph: Debug {
    /// Whether what the step reads lies where it lay when the step was captured.
    fn is_valid(&self, model: &CausalLm, pool: &SequencePool) -> bool {
        let _ = (model, pool);
        true
    }

    /// Whether a step of just these sequences, launched now, needs nothing of the host.
    fn is_ready(&self, model: &CausalLm, pool: &SequencePool, sequences: &[Sequence]) -> bool;

    /// Launches a step and returns before it has run. `choices` say how the sequences choose; None for the sequences of the step
    /// before, after the tokens that it draws. Until [`end`](Self::end) nothing else may use the sequences.
    ///
    /// # Errors
    /// When a sequence is none of the pool or has no room, there is no step before, or the device refuses.
    fn launch(
        &mut self,
        model: &CausalLm,
        pool: &mut SequencePool,
        sequences: &[Sequence],
        choices: Option<&[Choice]>,
    ) -> Result<Box<dyn Pending>>;

    /// Updates the pool after a step whose tokens were read. Sequences that have ended since are skipped.
    fn end(&self, model: &CausalLm, pool: &mut SequencePool, step: &Step<'_>) -> Result<()>;
}

/// A graph that a step in flight holds too.
pub(crate) type SharedGraph = Rc<RefCell<dyn StepGraph>>;

/// A step that has run. Only CUDA graphs read it.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct Step<'a> {
    pub sequences: &'a [Sequence],
    /// The token that each was fed first; None for one that has ended.
    pub fed: &'a [Option<u32>],
    /// The tokens that each drew: the accepted drafts and the token after them.
    pub drawn: &'a [Vec<Token>],
    /// Whether no other step was launched after it.
    pub is_last: bool,
}

/// Tokens of a step that was launched.
pub(crate) trait Pending: Debug {
    /// Waits for the tokens of each sequence. They are overwritten when the step after the next is launched.
    fn read(&self) -> Result<Vec<Vec<Token>>>;
}
