//! A Gated DeltaNet layer out of a checkpoint of any format.

use crate::formats::{place, Source, Stored};
use candle_core::{DType, Result, Shape, Tensor};
use candle_gdn::formats::Matrices;
use candle_gdn::{GatedDeltaNet, GdnConfig, Projection};
use std::cell::Cell;
use std::ops::Range;

/// The layer at `source` (`..linear_attn`), and whether candle's kernels on CUDA multiply some of its weights.
pub(crate) fn load(config: &GdnConfig, source: &Source) -> Result<(GatedDeltaNet, bool)> {
    let gates = 2 * config.num_value_heads;
    let weights = LayerWeights { source, gates, uses_candle: Cell::new(false) };
    Ok((GatedDeltaNet::load_from(config, &weights)?, weights.uses_candle.get()))
}

struct LayerWeights<'a, 'b> {
    source: &'a Source<'b>,
    /// Rows of decay and beta.
    gates: usize,
    uses_candle: Cell<bool>,
}

impl Matrices for LayerWeights<'_, '_> {
    /// Matrices whose rows are one below the other: one, or two where the last rows are gates.
    type Matrix = Vec<Stored>;

    fn prefix(&self) -> String {
        self.source.dense.prefix()
    }

    fn contains(&self, name: &str) -> bool {
        self.source.contains(name) || self.source.is_one_file && name == "in_proj_qkv.weight"
    }

    fn matrix(&self, rows: usize, columns: usize, name: &str) -> Result<Vec<Stored>> {
        // All projections in one.
        let quantizer = self.source.quantizer.as_ref().filter(|_| name == "in_proj.weight");
        let apart = quantizer.map(|q| q.with_gates(&self.source.dense, name, &[rows, columns], self.gates));
        match apart.transpose()?.flatten() {
            Some(parts) => Ok(parts),
            None => Ok(vec![self.source.matrix(rows, columns, name)?]),
        }
    }

    fn select_rows(&self, matrix: Vec<Stored>, ranges: &[Range<usize>]) -> Result<Vec<Stored>> {
        matrix.into_iter().map(|rows| rows.select_rows(ranges)).collect()
    }

    fn projection(&self, matrices: Vec<Vec<Stored>>) -> Result<Projection> {
        let weight = place::stack(matrices.into_iter().flatten().collect(), self.source.device())?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::Quantizer;
    use candle_core::quantized::GgmlDType::{Q4K, Q8_0};
    use candle_core::Device;
    use candle_nn::VarBuilder;
    use std::sync::Arc;

    #[test]
    fn gates_in_the_matrix_of_all_projections_keep_eight_bits() -> Result<()> {
        let weights = [("in_proj.weight".to_string(), Tensor::ones((12, 256), DType::F32, &Device::Cpu)?)];
        let mut source = Source::new(VarBuilder::from_tensors(weights.into(), DType::F32, &Device::Cpu));
        source.quantizer = Some(Arc::new(Quantizer::new(Q4K)?));
        let layer = LayerWeights { source: &source, gates: 4, uses_candle: Cell::new(false) };
        let parts = layer.matrix(12, 256, "in_proj.weight")?.into_iter().filter_map(Stored::blocks);
        assert_eq!(parts.map(|part| (part.dtype, part.rows)).collect::<Vec<_>>(), [(Q4K, 8), (Q8_0, 4)]);
        Ok(())
    }
}
