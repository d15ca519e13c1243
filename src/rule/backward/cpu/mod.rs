//! The op on the CPU.

use super::{DiffPlan, RuleDiff, OP};
use crate::rule::cpu::kernel;
use candle_core::{bail, CpuStorage, Result, Tensor};
use candle_gdn_core::check::{heads, storage_dtype};
use candle_gdn_core::cpu::{Element, Slots};
use candle_gdn_core::host;

/// o and the final state of a checked call.
pub fn run(op: &RuleDiff, plan: &DiffPlan, [qkv, gates, state]: [&CpuStorage; 3]) -> Result<(CpuStorage, Vec<f32>)> {
    let gates = gates_of(op, plan, gates)?;
    let mut last = initial_state(op, plan, state)?;
    let out = match qkv {
        CpuStorage::F32(x) => CpuStorage::F32(typed(op, plan, x, &gates, &mut last)),
        CpuStorage::BF16(x) => CpuStorage::BF16(typed(op, plan, x, &gates, &mut last)),
        CpuStorage::F16(x) => CpuStorage::F16(typed(op, plan, x, &gates, &mut last)),
        x => bail!("{OP}: qkv: expected dtype f32, bf16 or f16, got {:?}", storage_dtype(x)),
    };
    Ok((out, last))
}

/// Pairs of log decay and beta, `[tokens, HV]` in the packed order of the output.
fn gates_of(op: &RuleDiff, plan: &DiffPlan, gates: &CpuStorage) -> Result<Vec<(f32, f32)>> {
    let seqs = plan.seqs.cpu(op.cu_seqlens.as_ref());
    let rows = |layout| host::rows(gates, layout, seqs, (op.sizes.value_heads, 1));
    Ok(rows(plan.log_decay)?.into_iter().zip(rows(plan.beta)?).collect())
}

/// `[sequences, HV, V, K]`
fn initial_state(op: &RuleDiff, plan: &DiffPlan, state: &CpuStorage) -> Result<Vec<f32>> {
    let len = op.state_shape(&plan.seqs).iter().product();
    match plan.state {
        Some(start) => host::values(state, start, len),
        None => Ok(vec![0.0; len]),
    }
}

fn typed<T: Element>(op: &RuleDiff, plan: &DiffPlan, qkv: &[T], gates: &[(f32, f32)], state: &mut [f32]) -> Vec<T> {
    let mut out = vec![T::ZERO; plan.out_shape.elem_count()];
    let rule = kernel::Rule {
        sizes: op.sizes,
        q: heads(qkv, plan.q),
        k: heads(qkv, plan.k),
        v: heads(qkv, plan.v),
        gates,
        seqs: plan.seqs.cpu(op.cu_seqlens.as_ref()),
        slots: Slots { read: None, write: None, stride: op.state_shape(&plan.seqs)[1..].iter().product() },
        from_zeros: false,
        l2norm: op.options.l2norm,
        l2_eps: op.options.l2_eps,
        scale: plan.scale,
    };
    rule.run(&mut out, state);
    out
}

/// The gradients of qkv, the gates and the initial state.
pub fn backward(
    _: &RuleDiff,
    _: &DiffPlan,
    _: [&Tensor; 3],
    _: (&Tensor, Option<Tensor>),
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    bail!("{OP}: not yet")
}
