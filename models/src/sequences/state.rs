//! A batch of sequences of one length: the model as a function of ids, on a pool of its own.

use super::pool::{Sequence, SequencePool};
use crate::causal_lm::CausalLm;
use candle_core::{bail, DType, Result, Tensor};

const OP: &str = "forward";

/// Tokens that there is room for at first.
const FIRST_LEN: usize = 256;

/// What a model remembers of a batch of sequences of one length. Made by [`CausalLm::new_state`] and used with that
/// model only.
///
/// The sequences are those of a [`SequencePool`] of its own, which grows with them by doubling: Gated DeltaNet layers
/// hold a state of fixed size, softmax layers keys and values.
#[derive(Debug)]
pub struct ModelState {
    pool: SequencePool,
    sequences: Vec<Sequence>,
    position: usize,
}

impl ModelState {
    /// Sequences in the batch.
    pub fn batch(&self) -> usize {
        self.sequences.len()
    }

    /// Tokens each sequence has seen, which is the position of the next one.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Back to the state before the first token; memory is kept for reuse.
    pub fn reset(&mut self) -> Result<()> {
        for sequence in &mut self.sequences {
            self.pool.end(*sequence)?;
            *sequence = self.pool.begin()?;
        }
        self.position = 0;
        Ok(())
    }

    /// Checks that `tokens` more tokens of `batch` sequences may follow in `model`, and makes room for them.
    fn make_room(&mut self, model: &CausalLm, batch: usize, tokens: usize) -> Result<()> {
        if self.pool.model != model.id {
            bail!("state: expected a state that this model made, got one of another model")
        }
        if batch != self.batch() {
            bail!("ids: expected the batch of the state ({}), got {batch}", self.batch())
        }
        if self.sequences.iter().any(|sequence| self.pool.usable_slot(OP, *sequence).is_err()) {
            bail!("state: an earlier forward pass failed half-way; call reset() first")
        }
        let (seen, most) = (self.position, model.config.max_position_embeddings);
        if tokens > most - seen {
            bail!("ids: expected at most max_position_embeddings ({most}) tokens in a sequence, got {tokens} after {seen}")
        }
        let len = seen + tokens;
        if len > self.pool.max_len() {
            self.pool.grow_to(len.next_power_of_two().min(most))?;
        }
        Ok(())
    }
}

impl CausalLm {
    /// The state of `batch` (at least 1) sequences before their first token.
    pub fn new_state(&self, batch: usize) -> Result<ModelState> {
        if batch == 0 {
            bail!("batch: expected at least 1, got 0")
        }
        let mut pool = self.new_sequences(batch, FIRST_LEN.min(self.config.max_position_embeddings))?;
        pool.drop_head();
        let sequences = (0..batch).map(|_| pool.begin()).collect::<Result<_>>()?;
        Ok(ModelState { pool, sequences, position: 0 })
    }

    /// Runs `ids [batch, tokens]` (u32, u8 or i64) after the tokens that `state` has seen and
    /// returns the logits of every position, `[batch, tokens, vocab_size]` in f32. `tokens` may
    /// be any number; feeding a prompt in parts gives what feeding it whole gives.
    ///
    /// # Errors
    /// Another rank or dtype, an id outside the vocabulary, another batch than the state's, a
    /// state of another model, more than `max_position_embeddings` tokens. `state` is unchanged
    /// by these; after a failure inside a layer it refuses to go on until it is reset.
    pub fn forward(&self, ids: &Tensor, state: &mut ModelState) -> Result<Tensor> {
        let hidden = self.forward_hidden(ids, state)?;
        self.logits(&hidden)
    }

    /// [`forward`](Self::forward), but the head runs for the last position only:
    /// `[batch, vocab_size]` in f32. No tokens at all are an error.
    pub fn forward_last(&self, ids: &Tensor, state: &mut ModelState) -> Result<Tensor> {
        let (batch, tokens) = dims(ids)?;
        if tokens == 0 {
            bail!("ids: expected at least 1 token, got 0")
        }
        state.make_room(self, batch, tokens)?;
        let ids = self.host_ids(ids)?;
        let logits = self.feed(&mut state.pool, &rows(&state.sequences, &ids, tokens))?;
        state.position += tokens;
        Ok(logits)
    }

    /// [`forward`](Self::forward) up to the last norm: `[batch, tokens, hidden_size]` in the
    /// model's dtype, for [`logits`](Self::logits).
    pub fn forward_hidden(&self, ids: &Tensor, state: &mut ModelState) -> Result<Tensor> {
        let (batch, tokens) = dims(ids)?;
        state.make_room(self, batch, tokens)?;
        let hidden = self.config.hidden_size;
        if tokens == 0 {
            return Tensor::zeros((batch, 0, hidden), self.dtype, &self.device);
        }
        let ids = self.host_ids(ids)?;
        let x = self.feed_hidden(&mut state.pool, &rows(&state.sequences, &ids, tokens))?;
        state.position += tokens;
        x.reshape((batch, tokens, hidden))
    }

    /// On the host, where they are looked at before anything is fed.
    fn host_ids(&self, ids: &Tensor) -> Result<Vec<u32>> {
        if !matches!(ids.dtype(), DType::U32 | DType::U8 | DType::I64) {
            bail!("ids: expected dtype U32, U8 or I64, got {:?}", ids.dtype())
        }
        let vocab = self.config.vocab_size;
        let checked = |id: i64| match u32::try_from(id) {
            Ok(small) if (small as usize) < vocab => Ok(small),
            _ => bail!("ids: expected token ids below vocab_size ({vocab}), got {id}"),
        };
        ids.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?.into_iter().map(checked).collect()
    }
}

fn dims(ids: &Tensor) -> Result<(usize, usize)> {
    match ids.dims() {
        &[batch, tokens] => Ok((batch, tokens)),
        dims => bail!("ids: expected [batch, tokens], got {dims:?}"),
    }
}

/// Each sequence and its tokens.
fn rows<'a>(sequences: &[Sequence], ids: &'a [u32], tokens: usize) -> Vec<(Sequence, &'a [u32])> {
    sequences.iter().copied().zip(ids.chunks_exact(tokens)).collect()
}
