//! A vocabulary whose rows, of the embedding and of the head, are spread over the ranks.

use super::{Collective, Shard};
use candle_core::{Device, Result, Tensor};
use std::sync::Arc;

/// What a rank knows of the vocabulary besides its own rows.
#[derive(Debug, Clone)]
pub(crate) struct Vocabulary {
    group: Arc<dyn Collective>,
    /// Of each token its row on this rank, `[vocab_size]` in u32; of those of other ranks the one behind the last.
    row_of: Tensor,
}

impl Vocabulary {
    pub fn new(group: Arc<dyn Collective>, vocab_size: usize, device: &Device) -> Result<Self> {
        let own = Shard::of_rank(&*group)?.range(vocab_size);
        let row = |id: usize| if own.contains(&id) { id - own.start } else { own.len() } as u32;
        Ok(Self { row_of: Tensor::from_iter((0..vocab_size).map(row), device)?, group })
    }

    /// The embeddings of `ids [tokens]`: `rows` gives those of rows of this rank, and zeros for the one behind the last.
    pub fn embed(&self, ids: &Tensor, rows: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        self.group.all_reduce(&rows(&self.row_of.index_select(ids, 0)?)?)
    }

    pub fn group(&self) -> &Arc<dyn Collective> {
        &self.group
    }

    /// `logits [.., rows]` of this rank's rows to those of all, `[.., vocab_size]`.
    pub fn gather(&self, logits: &Tensor) -> Result<Tensor> {
        let mut dims = logits.dims().to_vec();
        let own = dims.pop().unwrap_or(0);
        let all = self.group.all_gather(&logits.reshape(((), own))?)?;
        dims.push(own * self.group.size());
        all.transpose(0, 1)?.contiguous()?.reshape(dims)
    }
}
