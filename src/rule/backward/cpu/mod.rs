//! The op on the CPU.

mod chunk;
mod kernel;
mod matmul;
mod tokens;

use super::{DiffPlan, RuleDiff, OP};
use crate::reference::Dims;
use crate::rule::cpu::kernel::Rule;
use candle_core::{bail, CpuStorage, Device, Result, Tensor};
use candle_gdn_core::check::{heads, storage_dtype};
use candle_gdn_core::cpu::{zeroed_vec, Element, Heads, Slots};
use candle_gdn_core::{by_dtype, host};

/// o and the final state of a checked call.
pub fn run(op: &RuleDiff, plan: &DiffPlan, [qkv, gates, state]: [&CpuStorage; 3]) -> Result<(CpuStorage, Vec<f32>)> {
    let gates = gates_of(op, plan, gates)?;
    let mut last = initial_state(op, plan, state)?;
    let refused = || bail!("{OP}: qkv: expected dtype f32, bf16 or f16, got {:?}", storage_dtype(qkv));
    let out = by_dtype!(qkv => typed(op, plan, qkv, &gates, &mut last), else return refused());
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

/// The call for the kernels.
fn rule_of<'a, T: Element>(op: &'a RuleDiff, plan: &DiffPlan, qkv: &'a [T], gates: &'a [(f32, f32)]) -> Rule<'a, T> {
    Rule {
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
    }
}

fn typed<T: Element>(op: &RuleDiff, plan: &DiffPlan, qkv: &[T], gates: &[(f32, f32)], state: &mut [f32]) -> CpuStorage {
    let mut out = vec![T::ZERO; plan.out_shape.elem_count()];
    rule_of(op, plan, qkv, gates).run(&mut out, state);
    T::storage(out)
}

/// The gradients of qkv, the gates and the initial state.
pub fn backward(
    op: &RuleDiff,
    plan: &DiffPlan,
    [qkv, gates, state]: [&Tensor; 3],
    (d_o, d_last): (&Tensor, Option<Tensor>),
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let last = d_last.as_ref().unwrap_or(d_o);
    let start = [d_o, last].map(|tensor| tensor.layout().start_offset());
    host::with_storages([qkv, gates, state, d_o, last], |[x, gate_values, initial, d_o, last]| {
        let pairs = gates_of(op, plan, gate_values)?;
        let shape = op.state_shape(&plan.seqs);
        let call = Call {
            op,
            plan,
            gates: &pairs,
            state: plan.state.map(|_| initial_state(op, plan, initial)).transpose()?,
            d_last: d_last.as_ref().map(|_| host::values(last, start[1], shape.iter().product())).transpose()?,
        };
        let mut d_gates = vec![0.0; gates.elem_count()];
        let mut d_state = plan.state.map(|_| vec![0.0; shape.iter().product()]);
        let d_qkv = by_dtype!(
            x, d_o => call.run(x, &d_o[start[0]..], &mut d_gates, d_state.as_deref_mut().unwrap_or_default()),
            else bail!("{OP}: expected a gradient in {:?}", storage_dtype(x))
        );
        Ok((
            host::tensor_of(d_qkv, qkv.shape().clone()),
            Tensor::from_vec(d_gates, gates.shape(), &Device::Cpu)?,
            d_state.map(|d_state| Tensor::from_vec(d_state, &shape[..], &Device::Cpu)).transpose()?,
        ))
    })
}

/// A backward pass whose dtype is not known yet.
struct Call<'a> {
    op: &'a RuleDiff,
    plan: &'a DiffPlan,
    gates: &'a [(f32, f32)],
    state: Option<Vec<f32>>,
    d_last: Option<Vec<f32>>,
}

impl Call<'_> {
    /// The gradient of qkv; `d_o` is contiguous.
    fn run<T: Element>(&self, qkv: &[T], d_o: &[T], d_gates: &mut [f32], d_state: &mut [f32]) -> CpuStorage {
        let Dims { value_heads, value_dim, .. } = self.op.sizes;
        let row = value_heads * value_dim;
        let call = kernel::RuleBackward {
            rule: rule_of(self.op, self.plan, qkv, self.gates),
            d_o: Heads {
                data: d_o,
                seq_stride: self.plan.seqs.tokens * row,
                token_stride: row,
                head_stride: value_dim,
            },
            state: self.state.as_deref(),
            d_last: self.d_last.as_deref(),
        };
        let mut d_qkv = zeroed_vec::<T>(self.plan.seqs.total_tokens * self.op.channels());
        call.run(kernel::Output { qkv: &mut d_qkv, gates: d_gates, state: d_state });
        T::storage(d_qkv)
    }
}
