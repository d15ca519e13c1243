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

impl Quantizer {
    pub(crate) fn new(dtype: GgmlDType) -> Result<Self> {
        if !TYPES.contains(&dtype) {
            bail!("quantize: expected one of {TYPES:?}, got {dtype:?}")
        }
        Ok(Self { dtype, others: Others::default() })
    }

    /// The type for `columns`, listed where it is not the one that was asked for.
    fn dtype_for(&self, path: &str, columns: usize) -> Option<GgmlDType> {
        let fits = |dtype: &GgmlDType| columns.is_multiple_of(dtype.block_size());
        let dtype = [self.dtype, GgmlDType::Q8_0].into_iter().find(fits);
        if dtype != Some(self.dtype) {
            self.others.add(path, dtype);
        }
        dtype
    }
}

impl Format for Quantizer {
    fn matrix(&self, weights: &VarBuilder, name: &str, shape: &[usize]) -> Result<Option<Stored>> {
        let path = path(weights, name);
        let Some(dtype) = self.dtype_for(&path, shape.last().copied().unwrap_or(0)) else { return Ok(None) };
        let gates = [".in_proj_b.weight", ".in_proj_a.weight", ".in_proj_ba.weight"];
        // A few rows that all else hangs on: a smaller type would save nothing.
        let dtype = if gates.iter().any(|gate| path.ends_with(gate)) { GgmlDType::Q8_0 } else { dtype };
        Ok(Some(Stored::Blocks(Blocks::quantize(&on_host(weights, shape, name)?, dtype)?)))
    }

    fn experts(&self, weights: &VarBuilder, shape: ExpertShape) -> Result<Option<StoredExperts>> {
        let dtype = |name: &str, columns: usize| self.dtype_for(&path(weights, name), columns);
        let types = (dtype("gate_up_proj", shape.hidden), dtype("down_proj", shape.intermediate));
        let (Some(of_gate_up), Some(of_down)) = types else { return Ok(None) };
        let (mut gate_up, mut down) = (Vec::with_capacity(shape.experts), Vec::with_capacity(shape.experts));
        if weights.contains_tensor("gate_up_proj") {
            // In f32 one by one: all experts of a layer are large.
            let host = weights.clone().set_device(Device::Cpu);
            let [both, downs] = shape.stacked();
            let (both, downs) = (host.get(both, "gate_up_proj")?, host.get(downs, "down_proj")?);
            for j in 0..shape.experts {
                gate_up.push(Blocks::quantize(&both.get(j)?, of_gate_up)?);
                down.push(Blocks::quantize(&downs.get(j)?, of_down)?);
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
