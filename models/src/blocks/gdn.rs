//! A Gated DeltaNet layer out of a checkpoint of any format.

use crate::formats::{place, Source, Stored};
use candle_core::{DType, Result, Shape, Tensor};
use candle_gdn::formats::Matrices;
use candle_gdn::{GatedDeltaNet, GdnConfig, Projection};
use std::cell::Cell;
use std::ops::Range;

/// The layer at `source` (`..linear_attn`), and whether candle's kernels on CUDA multiply some of its weights.
pub(crate) fn load(config: &GdnConfig, source: &Source) -> Result<(GatedDeltaNet, bool)> {
    let weights = LayerWeights { source, uses_candle: Cell::new(false) };
    Ok((GatedDeltaNet::load_from(config, &weights)?, weights.uses_candle.get()))
}

struct LayerWeights<'a, 'b> {
    source: &'a Source<'b>,
    uses_candle: Cell<bool>,
}

impl Matrices for LayerWeights<'_, '_> {
    type Matrix = Stored;

    fn prefix(&self) -> String {
        self.source.dense.prefix()
    }

    fn contains(&self, name: &str) -> bool {
        self.source.contains(name) || self.source.is_one_file && name == "in_proj_qkv.weight"
    }

    fn matrix(&self, rows: usize, columns: usize, name: &str) -> Result<Stored> {
        self.source.matrix(rows, columns, name)
    }

    fn select_rows(&self, matrix: Stored, ranges: &[Range<usize>]) -> Result<Stored> {
        matrix.select_rows(ranges)
    }

    fn projection(&self, matrices: Vec<Stored>) -> Result<Projection> {
        let weight = place::stack(matrices, self.source.device())?;
        self.uses_candle.set(self.uses_candle.get() || weight.uses_candle());
        Ok(weight.into())
    }

    fn tensor(&self, shape: Shape, name: &str) -> Result<Tensor> {
        self.source.get(shape, name)
    }

    fn vector(&self, len: usize, name: &str) -> Result<Tensor> {
        self.source.dense.get_with_hints_dtype(len, name, Default::default(), DType::F32)
    }
}
