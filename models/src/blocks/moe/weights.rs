//! Weights of the router and of all experts, stacked.

use crate::config::MoeConfig;
use crate::formats::{ExpertRows, Source};
use candle_core::{DType, Result, Tensor};
use candle_gdn::plumbing::BlockScaled;
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

/// The same in e4m3, where all of them are stored so and stay so. `source` is at `..experts`.
pub(super) fn stored_experts(
    cfg: &MoeConfig,
    hidden: usize,
    source: &Source,
) -> Result<Option<(BlockScaled, BlockScaled)>> {
    let (n, inner) = (cfg.num_experts, cfg.intermediate_size);
    if !source.keeps_fp8() {
        return Ok(None);
    }
    let room = |rows: usize, columns: usize| ExpertRows::new(rows, columns, source.device());
    let (mut gate_up, mut down) = (room(n * 2 * inner, hidden)?, room(n * hidden, inner)?);
    let push = |to: &mut ExpertRows, source: &Source, shape: &[usize], name: &str| -> Result<bool> {
        let rows = source.e4m3(shape, name)?;
        rows.iter().try_for_each(|rows| to.push(rows))?;
        Ok(rows.is_some())
    };
    if source.contains("gate_up_proj") {
        let all = push(&mut gate_up, source, &[n, 2 * inner, hidden], "gate_up_proj")?
            && push(&mut down, source, &[n, hidden, inner], "down_proj")?;
        return if all { Ok(Some((gate_up.finish()?, down.finish()?))) } else { Ok(None) };
    }
    for j in 0..n {
        let source = source.pp(j);
        let all = push(&mut gate_up, &source.pp("gate_proj"), &[inner, hidden], "weight")?
            && push(&mut gate_up, &source.pp("up_proj"), &[inner, hidden], "weight")?
            && push(&mut down, &source.pp("down_proj"), &[hidden, inner], "weight")?;
        if !all {
            return Ok(None);
        }
    }
    Ok(Some((gate_up.finish()?, down.finish()?)))
}
