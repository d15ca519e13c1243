//! Quantisation of dense matrices as they are loaded.

use super::experts::ExpertBlocks;
use super::{path, Blocks, ExpertShape, Format, Stored, StoredExperts};
use candle_core::quantized::GgmlDType;
use candle_core::{bail, DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use std::sync::{Mutex, PoisonError};

/// A matrix that could not be quantised to the type that was asked for, or whose shard could not keep that of its file.
#[derive(Debug, Clone, PartialEq)]
pub struct OtherType {
    /// Full name in the checkpoint.
    pub name: String,
    /// The type it has; `None` is dense.
    pub dtype: Option<GgmlDType>,
}

/// A list of them that grows while a model is loaded.
#[derive(Debug, Default)]
pub(super) struct Others(Mutex<Vec<OtherType>>);

impl Others {
    pub(super) fn add(&self, name: &str, dtype: Option<GgmlDType>) {
        let other = OtherType { name: name.to_string(), dtype };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(other);
    }

    pub(super) fn all(&self) -> Vec<OtherType> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The type that a matrix of so many columns gets where `dtype` is asked for; `None` where it stays dense.
pub(crate) fn type_for(dtype: GgmlDType, columns: usize) -> Option<GgmlDType> {
    [dtype, GgmlDType::Q8_0].into_iter().find(|dtype| columns.is_multiple_of(dtype.block_size()))
}

/// What [`Loader::quantize`](crate::Loader::quantize) asks for, and where it could not be done.
#[derive(Debug)]
pub(crate) struct Quantizer {
    dtype: GgmlDType,
    others: Others,
}

const TYPES: &[GgmlDType] = &[
    GgmlDType::Q4_0,
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q8_0,
    GgmlDType::Q2K,
    GgmlDType::Q3K,
    GgmlDType::Q4K,
    GgmlDType::Q5K,
    GgmlDType::Q6K,
];

/// The matrices of decay and beta.
const GATES: [&str; 5] = [
    "linear_attn.in_proj_b.weight",
    "linear_attn.in_proj_a.weight",
    "linear_attn.in_proj_ba.weight",
    "linear_attn.b_proj.weight",
    "linear_attn.a_proj.weight",
];

impl Quantizer {
    pub(crate) fn new(dtype: GgmlDType) -> Result<Self> {
        if !TYPES.contains(&dtype) {
            bail!("quantize: expected one of {TYPES:?}, got {dtype:?}")
        }
        Ok(Self { dtype, others: Others::default() })
    }

    /// The type for `columns`, listed where it is not the one that was asked for.
    fn dtype_for(&self, path: &str, columns: usize) -> Option<GgmlDType> {
        let dtype = type_for(self.dtype, columns);
        if dtype != Some(self.dtype) {
            self.others.add(path, dtype);
        }
        dtype
    }

    /// The matrix `[rows, columns]` with its last `gates` rows, which are those of decay and beta, apart; `None` where it is
    /// loaded dense.
    pub(crate) fn with_gates(
        &self,
        weights: &VarBuilder,
        name: &str,
        shape: &[usize],
        gates: usize,
    ) -> Result<Option<Vec<Stored>>> {
        let columns = shape.last().copied().unwrap_or(0);
        let Some(dtype) = self.dtype_for(&path(weights, name), columns) else { return Ok(None) };
        let matrix = on_host(weights, shape, name)?;
        let others = matrix.dim(0)?.saturating_sub(gates);
        // A few rows that all else hangs on: a smaller type would save nothing.
        let parts = [(0, others, dtype), (others, gates, GgmlDType::Q8_0)].into_iter().filter(|(_, rows, _)| *rows > 0);
        let stored =
            |(first, rows, dtype)| Blocks::quantize(&matrix.narrow(0, first, rows)?, dtype).map(Stored::Blocks);
        parts.map(stored).collect::<Result<_>>().map(Some)
    }
}

impl Format for Quantizer {
    fn matrix(&self, weights: &VarBuilder, name: &str, shape: &[usize]) -> Result<Option<Stored>> {
        let path = path(weights, name);
        let are_gates = GATES.iter().any(|gate| path.ends_with(gate));
        let gates = shape.first().copied().filter(|_| are_gates).unwrap_or(0);
        Ok(self.with_gates(weights, name, shape, gates)?.and_then(|mut parts| parts.pop()))
    }

    fn experts(&self, weights: &VarBuilder, shape: ExpertShape) -> Result<Option<StoredExperts>> {
        let dtype = |name: &str, columns: usize| self.dtype_for(&path(weights, name), columns);
        let types = (dtype("gate_up_proj", shape.hidden), dtype("down_proj", shape.intermediate));
        let (Some(of_gate_up), Some(of_down)) = types else { return Ok(None) };
        let (mut gate_up, mut down) = (Vec::with_capacity(shape.experts), Vec::with_capacity(shape.experts));
        if weights.contains_tensor("gate_up_proj") {
            // One tensor at a time: those of all experts of a layer are large.
            let host = weights.clone().set_device(Device::Cpu);
            let [both, downs] = shape.stacked();
            for (name, shape, dtype, blocks) in
                [("gate_up_proj", both, of_gate_up, &mut gate_up), ("down_proj", downs, of_down, &mut down)]
            {
                let all = host.get(shape, name)?;
                for j in 0..shape.0 {
                    blocks.push(Blocks::quantize(&all.get(j)?, dtype)?);
                }
            }
        } else {
            for (j, (name, rows, columns)) in (0..shape.experts).flat_map(|j| shape.matrices().map(|m| (j, m))) {
                let matrix = on_host(&weights.pp(j).pp(name), &[rows, columns], "weight")?;
                match name {
                    "down_proj" => down.push(Blocks::quantize(&matrix, of_down)?),
                    _ => gate_up.push(Blocks::quantize(&matrix, of_gate_up)?),
                }
            }
        }
        let both = Blocks::one(gate_up).zip(Blocks::one(down));
        Ok(both.map(|(both, down)| StoredExperts::Blocks(ExpertBlocks { gate_up: vec![both], down })))
    }

    fn other_types(&self) -> Vec<OtherType> {
        self.others.all()
    }
}

/// A dense weight on the host in f32.
fn on_host(weights: &VarBuilder, shape: &[usize], name: &str) -> Result<Tensor> {
    let host = weights.clone().set_device(Device::Cpu);
    host.get_with_hints_dtype(shape, name, Default::default(), DType::F32)
}

#[cfg(test)]
mod tests;
