//! The rows that tokens begin as.

use crate::blocks::linear::Linear;
use crate::config::ModelConfig;
#[cfg(feature = "cuda")]
use crate::cuda::quantized::Packed;
use crate::formats::Source;
use candle_core::quantized::QTensor;
use candle_core::{DType, Result, Tensor};
use candle_gdn::plumbing::cpu::matmul::Weights;
use candle_gdn::plumbing::host;
use std::sync::Arc;

/// A table, and what its rows come as.
#[derive(Debug)]
pub(crate) struct Embeddings {
    table: Table,
    hidden_size: usize,
    dtype: DType,
}

#[derive(Debug)]
enum Table {
    /// `[vocab_size, hidden_size]`
    Dense(Tensor),
    /// Those of the head, which packs them for its products: another copy would be large.
    Head(Arc<Weights>),
    /// As a file had them; the head shares them where they are tied.
    Quantized(Arc<QTensor>, Option<Behind>),
    /// The same, packed for our kernels.
    #[cfg(feature = "cuda")]
    Packed(Arc<Packed>),
}

/// What stands for a row of zeros behind the last one of a table that can have none more.
#[derive(Debug)]
struct Behind {
    /// The row to take for each, and for the one behind the last any: `[rows + 1]`
    row: Tensor,
    /// What it is multiplied by: ones, and a zero. `[rows + 1, 1]` in f32
    factor: Tensor,
}

impl Embeddings {
    /// Those of the model at `text`, and its head where it is the same matrix.
    pub(crate) fn load(config: &ModelConfig, text: &Source) -> Result<(Self, Option<Linear>)> {
        let (table, head) = Table::load(config, text)?;
        Ok((Self { table, hidden_size: config.hidden_size, dtype: text.dtype() }, head))
    }

    /// With a row of zeros behind the last, for tokens of other ranks.
    pub(crate) fn in_group(self) -> Result<Self> {
        let table = match self.table {
            Table::Dense(table) => Table::Dense(table.pad_with_zeros(0, 0, 1)?),
            Table::Head(weights) => Table::Head(weights),
            #[cfg(feature = "cuda")]
            Table::Packed(table) => Table::Packed(table),
            Table::Quantized(table, _) => {
                let behind = Behind::new(&table)?;
                Table::Quantized(table, Some(behind))
            }
        };
        Ok(Self { table, ..self })
    }

    /// `ids [tokens]` to `[tokens, hidden_size]`.
    pub(crate) fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        match &self.table {
            Table::Dense(table) => table.index_select(ids, 0),
            Table::Head(weights) => {
                let ids = ids.to_dtype(DType::U32)?.to_vec1::<u32>()?;
                let mut rows = vec![0f32; ids.len() * self.hidden_size];
                // Behind the last row are zeros.
                let known = ids
                    .iter()
                    .zip(rows.chunks_exact_mut(self.hidden_size))
                    .filter(|(id, _)| (**id as usize) < weights.outputs());
                known.for_each(|(id, row)| weights.read_row(*id as usize, row));
                host::tensor(rows, (ids.len(), self.hidden_size), self.dtype)
            }
            #[cfg(feature = "cuda")]
            Table::Packed(table) => table.rows(ids, self.dtype),
            Table::Quantized(table, None) => table.embedding(ids)?.to_dtype(self.dtype),
            Table::Quantized(table, Some(behind)) => {
                let rows = table.embedding(&behind.row.index_select(ids, 0)?)?;
                rows.broadcast_mul(&behind.factor.index_select(ids, 0)?)?.to_dtype(self.dtype)
            }
        }
    }
}

impl Table {
    fn load(config: &ModelConfig, text: &Source) -> Result<(Self, Option<Linear>)> {
        let (rows, columns, name) = (config.vocab_size, config.hidden_size, "embed_tokens.weight");
        let tied = config.tie_word_embeddings;
        if let Some(table) = text.stored_blocks(rows, columns, name)? {
            #[cfg(feature = "cuda")]
            if let Some(packed) = table.packed(text.device())?.map(Arc::new) {
                return Ok((Self::Packed(packed.clone()), tied.then(|| Linear::packed_blocks(packed))));
            }
            let table = Arc::new(table.qtensor((rows, columns), text.device())?);
            return Ok((Self::Quantized(table.clone(), None), tied.then(|| Linear::shared(table)).transpose()?));
        }
        let table = text.get((rows, columns), name)?;
        if !tied {
            return Ok((Self::Dense(table), None));
        }
        let head = match text.quantizes() {
            true => Linear::stack(vec![text.matrix(rows, columns, name)?], text.device())?,
            false => Linear::dense(table.clone())?,
        };
        Ok(match head.packed() {
            Some(weights) => (Self::Head(weights.clone()), Some(head)),
            None => (Self::Dense(table), Some(head)),
        })
    }
}

impl Behind {
    fn new(table: &QTensor) -> Result<Self> {
        let (rows, device) = (table.shape().dims2()?.0, table.device());
        let row = Tensor::from_iter((0..rows as u32).chain([0]), &device)?;
        let factor = Tensor::from_iter((0..=rows).map(|row| if row < rows { 1f32 } else { 0. }), &device)?;
        Ok(Self { row, factor: factor.reshape((rows + 1, 1))? })
    }
}
