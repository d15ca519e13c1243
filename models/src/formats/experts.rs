//! The experts of a layer as blocks: from a file that has them quantised, or quantised as they are read.

use super::{Blocks, Matrix, Source};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor};

/// Matrices of all experts, one below the other.
pub(crate) struct ExpertBlocks {
    /// `[experts * 2 * intermediate, hidden]`, per expert the gate's rows, then up's; or, where they are of two types,
    /// the gates' `[experts * intermediate, hidden]`, then all ups'.
    pub gate_up: Vec<Blocks>,
    /// `[experts * hidden, intermediate]`
    pub down: Blocks,
}

/// Number and widths of a layer's experts.
#[derive(Clone, Copy)]
pub(crate) struct ExpertShape {
    pub experts: usize,
    pub intermediate: usize,
    pub hidden: usize,
}

impl Source<'_> {
    /// The experts here (`..mlp.experts`); `None` where they are dense and stay so.
    pub(crate) fn expert_blocks(&self, shape: ExpertShape) -> Result<Option<ExpertBlocks>> {
        match self.stored_experts(shape)? {
            Some(stored) => Ok(Some(stored)),
            None => self.quantized_experts(shape),
        }
    }

    fn stored_experts(&self, shape: ExpertShape) -> Result<Option<ExpertBlocks>> {
        let Some(gguf) = &self.gguf else { return Ok(None) };
        let ExpertShape { experts: n, intermediate, hidden } = shape;
        let stored = |name: &str, rows: usize, columns: usize| -> Result<Option<Blocks>> {
            Ok(match gguf.matrix(&self.path(name), &[n, rows, columns])? {
                Some(Matrix::Blocks(blocks)) => Some(blocks),
                _ => None,
            })
        };
        let gate_up = match gguf.contains(&self.path("gate_proj")) {
            true => {
                let [gate, up] = ["gate_proj", "up_proj"].map(|name| stored(name, intermediate, hidden));
                gate?.zip(up?).map(|(gate, up)| by_expert(gate, up, shape))
            }
            false => stored("gate_up_proj", 2 * intermediate, hidden)?.map(|both| vec![both]),
        };
        let down = stored("down_proj", hidden, intermediate)?;
        Ok(gate_up.zip(down).map(|(gate_up, down)| ExpertBlocks { gate_up, down }))
    }

    fn quantized_experts(&self, shape: ExpertShape) -> Result<Option<ExpertBlocks>> {
        let Some(quantizer) = &self.quantizer else { return Ok(None) };
        let ExpertShape { experts: n, intermediate, hidden } = shape;
        let of_gate_up = quantizer.dtype_for(&self.path("gate_up_proj"), hidden);
        let of_down = quantizer.dtype_for(&self.path("down_proj"), intermediate);
        let Some((of_gate_up, of_down)) = of_gate_up.zip(of_down) else { return Ok(None) };
        // Not in f32 before it is an expert's turn: all of a layer are large.
        let host = self.dense.clone().set_device(Device::Cpu);
        let mut parts = (Vec::with_capacity(n), Vec::with_capacity(n));
        if host.contains_tensor("gate_up_proj") {
            let gate_up = host.get((n, 2 * intermediate, hidden), "gate_up_proj")?;
            let down = host.get((n, hidden, intermediate), "down_proj")?;
            for j in 0..n {
                parts.0.push(Blocks::quantize(&gate_up.get(j)?, of_gate_up)?);
                parts.1.push(Blocks::quantize(&down.get(j)?, of_down)?);
            }
        } else {
            for j in 0..n {
                let get = |name: &str, rows: usize, columns: usize, dtype: GgmlDType| {
                    let weight: Tensor = host.pp(j).pp(name).get_with_hints_dtype(
                        (rows, columns),
                        "weight",
                        Default::default(),
                        DType::F32,
                    )?;
                    Blocks::quantize(&weight, dtype)
                };
                parts.0.push(get("gate_proj", intermediate, hidden, of_gate_up)?);
                parts.0.push(get("up_proj", intermediate, hidden, of_gate_up)?);
                parts.1.push(get("down_proj", hidden, intermediate, of_down)?);
            }
        }
        Ok(Blocks::one(parts.0)
            .zip(Blocks::one(parts.1))
            .map(|(both, down)| ExpertBlocks { gate_up: vec![both], down }))
    }
}

/// Each expert's gate and up side by side, if they are of one type.
fn by_expert(gate: Blocks, up: Blocks, shape: ExpertShape) -> Vec<Blocks> {
    let (n, rows) = (shape.experts, shape.intermediate);
    let both = Blocks::stack(vec![gate, up]);
    match both.as_slice() {
        [both] => {
            let rows_of = |matrix: usize| matrix * rows..(matrix + 1) * rows;
            let order: Vec<_> = (0..n).flat_map(|expert| [rows_of(expert), rows_of(n + expert)]).collect();
            vec![both.select_rows(&order)]
        }
        _ => both,
    }
}
