//! The experts of a layer, one below the other.

use super::Blocks;
use crate::weights::E4m3;
use candle_core::{Result, Tensor};
use candle_gdn_core::check::zeros;
use candle_nn::VarBuilder;

/// Number and widths of a layer's experts.
#[derive(Clone, Copy)]
pub(crate) struct ExpertShape {
    pub experts: usize,
    pub intermediate: usize,
    pub hidden: usize,
}

/// Experts that are not dense.
pub(crate) enum StoredExperts {
    Blocks(ExpertBlocks),
    /// On CUDA: `[experts * 2 * intermediate, hidden]`, per expert the gate's rows, then up's; and `[experts * hidden,
    /// intermediate]`.
    E4m3([E4m3; 2]),
}

/// In ggml's types, on the host.
pub(crate) struct ExpertBlocks {
    /// `[experts * 2 * intermediate, hidden]`, per expert the gate's rows, then up's; or, where they are of two types,
    /// the gates' `[experts * intermediate, hidden]`, then all ups'.
    pub gate_up: Vec<Blocks>,
    /// `[experts * hidden, intermediate]`
    pub down: Blocks,
}

impl ExpertShape {
    /// Shapes of all experts' gates and ups together, and of their downs.
    pub fn stacked(self) -> [(usize, usize, usize); 2] {
        let Self { experts, intermediate, hidden } = self;
        [(experts, 2 * intermediate, hidden), (experts, hidden, intermediate)]
    }

    /// Name, rows and columns of the matrices of one expert.
    pub fn matrices(self) -> [(&'static str, usize, usize); 3] {
        let Self { intermediate, hidden, .. } = self;
        [("gate_proj", intermediate, hidden), ("up_proj", intermediate, hidden), ("down_proj", hidden, intermediate)]
    }
}

/// All experts dense: `[experts, 2 * intermediate, hidden]` and `[experts, hidden, intermediate]`. `weights` is at
/// `..experts`, which holds either one tensor for all experts or one per expert.
pub(crate) fn dense_experts(shape: ExpertShape, weights: &VarBuilder) -> Result<[Tensor; 2]> {
    let [gate_up, down] = shape.stacked();
    if weights.contains_tensor("gate_up_proj") {
        return Ok([weights.get(gate_up, "gate_up_proj")?, weights.get(down, "down_proj")?]);
    }
    // Filled in place: a list of all experts and then one `cat` would hold them twice.
    let zeros =
        |(n, rows, columns)| zeros("experts", "weights", &[n, rows, columns], weights.dtype(), weights.device());
    let [gate_up, down] = [zeros(gate_up)?, zeros(down)?];
    for j in 0..shape.experts {
        let [gate, up, of_down] = shape
            .matrices()
            .map(|(name, rows, columns)| weights.pp(j).pp(name).get((rows, columns), "weight")?.unsqueeze(0));
        let both = Tensor::cat(&[gate?, up?], 1)?;
        gate_up.slice_set(&both, 0, j)?;
        down.slice_set(&of_down?, 0, j)?;
    }
    Ok([gate_up, down])
}

/// Each expert's gate and up side by side, if they are of one type.
pub(super) fn by_expert(gate: Blocks, up: Blocks, shape: ExpertShape) -> Vec<Blocks> {
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
