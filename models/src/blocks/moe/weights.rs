//! Weights of the router and of all experts, stacked.

use crate::config::MoeConfig;
use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;

/// `weight [rows, hidden]` of the router or of the shared expert's gate, in f32: which experts a token takes should not
/// depend on the dtype of the model.
pub(super) fn gate_weight(rows: usize, hidden: usize, vb: VarBuilder) -> Result<Tensor> {
    vb.get_with_hints_dtype((rows, hidden), "weight", Default::default(), DType::F32)
}

/// All experts of a layer, stacked: `[experts * 2 * intermediate, hidden]`, per expert the gate's rows, then up's, and
/// `[experts * hidden, intermediate]`. `vb` is at `..experts`, which holds either one tensor for all experts or one per
/// expert.
pub(super) fn stacked_experts(cfg: &MoeConfig, hidden: usize, vb: VarBuilder) -> Result<(Tensor, Tensor)> {
    let (n, inner) = (cfg.num_experts, cfg.intermediate_size);
    let (gate_up, down) = if vb.contains_tensor("gate_up_proj") {
        (vb.get((n, 2 * inner, hidden), "gate_up_proj")?, vb.get((n, hidden, inner), "down_proj")?)
    } else {
        // Filled in place: a list of all experts and then one `cat` would hold them twice.
        let zeros = |shape: (usize, usize)| Tensor::zeros(shape, vb.dtype(), vb.device());
        let gate_up = zeros((n * 2 * inner, hidden))?;
        let down = zeros((n * hidden, inner))?;
        for j in 0..n {
            let vb = vb.pp(j);
            let get = |name, out, in_| vb.pp(name).get((out, in_), "weight");
            gate_up.slice_set(&get("gate_proj", inner, hidden)?, 0, 2 * j * inner)?;
            gate_up.slice_set(&get("up_proj", inner, hidden)?, 0, (2 * j + 1) * inner)?;
            down.slice_set(&get("down_proj", hidden, inner)?, 0, j * hidden)?;
        }
        (gate_up, down)
    };
    Ok((gate_up.reshape((n * 2 * inner, hidden))?, down.reshape((n * hidden, inner))?))
}
