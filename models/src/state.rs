//! What a model remembers of a batch of sequences.

use crate::blocks::decoder::LayerState;
use candle_core::{bail, Result};

/// The state of every layer and the number of tokens seen. Made by
/// [`CausalLm::new_state`](super::CausalLm::new_state) and used with that model only.
///
/// Gated DeltaNet layers hold a state of fixed size, softmax layers keys and values that grow with
/// the sequence. All sequences of the batch have the same length.
#[derive(Debug)]
pub struct ModelState {
    pub(crate) layers: Vec<LayerState>,
    batch: usize,
    position: usize,
    /// Which model made it.
    model: usize,
    /// Set while a forward pass runs: one that fails half-way leaves layers at different tokens.
    broken: bool,
}

impl ModelState {
    pub(crate) fn new(layers: Vec<LayerState>, batch: usize, model: usize) -> Self {
        Self { layers, batch, position: 0, model, broken: false }
    }

    /// Sequences in the batch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Tokens each sequence has seen, which is the position of the next one.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Back to the state before the first token; memory is kept for reuse.
    pub fn reset(&mut self) -> Result<()> {
        self.broken = true;
        for layer in &mut self.layers {
            layer.reset()?;
        }
        self.position = 0;
        self.broken = false;
        Ok(())
    }

    /// Checks that `tokens` more tokens of `batch` sequences may follow in the model `model`.
    pub(crate) fn check(&self, model: usize, batch: usize, tokens: usize, max_positions: usize) -> Result<()> {
        if model != self.model {
            bail!("state: expected a state that this model made, got one of another model")
        }
        if batch != self.batch {
            bail!("ids: expected the batch of the state ({}), got {batch}", self.batch)
        }
        if self.broken {
            bail!("state: an earlier forward pass failed half-way; call reset() first")
        }
        if tokens > max_positions - self.position {
            bail!(
                "ids: expected at most max_position_embeddings ({max_positions}) tokens in a sequence, got {} after {}",
                tokens,
                self.position
            )
        }
        Ok(())
    }

    /// Runs `f` over the layer states and counts its tokens if it succeeds.
    pub(crate) fn advance<T>(&mut self, tokens: usize, f: impl FnOnce(&mut [LayerState]) -> Result<T>) -> Result<T> {
        self.broken = true;
        let out = f(&mut self.layers)?;
        self.broken = false;
        self.position += tokens;
        Ok(out)
    }
}
