//! The table of token embeddings.

use crate::config::ModelConfig;
use crate::formats::{place, Source, Stored};
use crate::weights::Weight;
use candle_core::{DType, Result, Tensor};

/// A table `[vocab_size, hidden_size]`, and the dtype of its rows.
#[derive(Debug)]
pub(crate) struct Embeddings {
    table: Weight,
    dtype: DType,
    outside: Option<Outside>,
}

/// Reads a row of zeros past the end of a table that cannot be padded.
#[derive(Debug)]
struct Outside {
    /// The row to read for each id, any for the one past the end: `[rows + 1]`
    row: Tensor,
    /// What it is multiplied by: ones, and a zero. `[rows + 1, 1]` in f32
    factor: Tensor,
}

impl Embeddings {
    /// Those of the model at `text`, and its head where it is the same matrix.
    pub(crate) fn load(config: &ModelConfig, text: &Source) -> Result<(Self, Option<Weight>)> {
        let (rows, columns, name) = (config.vocab_size, config.hidden_size, "embed_tokens.weight");
        let (tied, device) = (config.tie_word_embeddings, text.device());
        let stored = text.stored(rows, columns, name)?.and_then(Stored::blocks);
        let (table, head) = match stored {
            Some(blocks) => {
                let table = place::blocks(&blocks, device)?;
                (table.clone(), tied.then_some(table))
            }
            None => {
                let table = text.get((rows, columns), name)?;
                let head = match (tied, text.quantizer.is_some()) {
                    (true, true) => Some(place::stack(vec![text.matrix(rows, columns, name)?], device)?),
                    (true, false) => Some(Weight::dense(table.clone())?),
                    (false, _) => None,
                };
                // The head's packed copy: another one would be large.
                let shared = head.as_ref().filter(|head| head.panels().is_some());
                (shared.cloned().unwrap_or(Weight::Dense(table)), head)
            }
        };
        Ok((Self { table, dtype: text.dense.dtype(), outside: None }, head))
    }

    /// With a row of zeros after the last, for tokens of other ranks.
    pub(crate) fn in_group(self) -> Result<Self> {
        Ok(match &self.table {
            Weight::Dense(table) => Self { table: Weight::Dense(table.pad_with_zeros(0, 0, 1)?), ..self },
            Weight::Ggml(table) => {
                let (rows, device) = (table.shape().dims2()?.0, table.device());
                let row = Tensor::from_iter((0..rows as u32).chain([0]), &device)?;
                let factor = (0..=rows).map(|row| if row < rows { 1f32 } else { 0. });
                let factor = Tensor::from_iter(factor, &device)?.reshape((rows + 1, 1))?;
                Self { outside: Some(Outside { row, factor }), ..self }
            }
            _ => self,
        })
    }

    pub(crate) fn uses_candle(&self) -> bool {
        self.table.uses_candle()
    }

    /// `ids [tokens]` to `[tokens, hidden_size]`.
    pub(crate) fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        match &self.outside {
            None => self.table.lookup(ids, self.dtype),
            Some(Outside { row, factor }) => {
                let rows = self.table.lookup(&row.index_select(ids, 0)?, DType::F32)?;
                rows.broadcast_mul(&factor.index_select(ids, 0)?)?.to_dtype(self.dtype)
            }
        }
    }
}
