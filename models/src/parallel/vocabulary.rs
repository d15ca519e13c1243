//! A vocabulary whose rows, in the embedding and in the head, are divided among the ranks.

use super::{Collective, Shard};
use candle_core::{Device, Result, Tensor};
use std::sync::Arc;

/// The ranks' exchange of embeddings and logits.
#[derive(Debug, Clone)]
pub(crate) struct Vocabulary {
    pub group: Arc<dyn Collective>,
    /// The row of each token on this rank, `[vocab_size]` in u32; one past the last row for tokens of other ranks.
    row_of: Tensor,
}

impl Vocabulary {
    pub fn new(group: Arc<dyn Collective>, vocab_size: usize, device: &Device) -> Result<Self> {
        let own = Shard::of_rank(&*group)?.range(vocab_size);
        let row = |id: usize| if own.contains(&id) { id - own.start } else { own.len() } as u32;
        Ok(Self { row_of: Tensor::from_iter((0..vocab_size).map(row), device)?, group })
    }

    /// The embeddings of `ids [tokens]`: `rows` returns those of this rank's rows, and zeros for the row past the last.
    pub fn embed(&self, ids: &Tensor, rows: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        self.group.all_reduce(&rows(&self.row_of.index_select(ids, 0)?)?)
    }

    /// `logits [.., rows]` of this rank to those of all ranks, `[.., vocab_size]`.
    pub fn gather(&self, logits: &Tensor) -> Result<Tensor> {
        let mut dims = logits.dims().to_vec();
        let own = dims.pop().unwrap_or(0);
        let all = self.group.all_gather(&logits.reshape(((), own))?)?;
        dims.push(own * self.group.size());
        all.transpose(0, 1)?.contiguous()?.reshape(dims)
    }
}
