//! The rule as an op with gradients, out of place.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use super::options::RuleOptions;
use crate::algo::Algo;
use crate::plan::refuses_rule;
use crate::reference::Dims;
use candle_core::{bail, CpuStorage, DType, Result, Shape, Storage, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::device::{SideOutput, Working};
use candle_gdn_core::{custom_op, CuSeqlens, SequencePlan};
use std::sync::Arc;

const OP: &str = "gdn_rule_diff";

struct RuleDiff {
    sizes: Dims,
    cu_seqlens: Option<CuSeqlens>,
    options: RuleOptions,
    /// Whether the third argument is the initial state; without one nobody reads it.
    has_state: bool,
    last: Arc<SideOutput>,
}

/// A checked call.
struct DiffPlan {
    seqs: SequencePlan,
    q: HeadsLayout,
    k: HeadsLayout,
    v: HeadsLayout,
    log_decay: HeadsLayout,
    beta: HeadsLayout,
    /// First element of the initial state.
    state: Option<usize>,
    scale: f64,
    out_shape: Shape,
}

/// The columns of a tensor `[.., columns]` from `start` on, as heads.
fn columns(layout: HeadsLayout, start: usize, dim: usize) -> HeadsLayout {
    HeadsLayout { offset: layout.offset + start, head_stride: dim, ..layout }
}

impl RuleDiff {
    fn lead(&self) -> Lead {
        Lead::of_tokens(self.cu_seqlens.as_ref())
    }

    fn plan(&self, [qkv, gates, state]: [Arg<'_>; 3]) -> Result<DiffPlan> {
        let Dims { key_heads, value_heads, key_dim, value_dim } = self.sizes;
        check_float(OP, "qkv", qkv.dtype)?;
        check_dtype(OP, "gates", gates.dtype, DType::F32)?;
        gates.check_place(OP, &qkv.device(), &[])?;
        let (lead, channels) = (self.lead(), self.channels());
        let dims = qkv.layout.dims();
        if dims.len() != lead.rank() + 1 {
            let packed = if lead == Lead::Batched { "; packed tokens need cu_seqlens" } else { "" };
            bail!("{OP}: qkv: expected shape [{}, {channels}], got {dims:?}{packed}", lead.names());
        }
        let lead_dims = &dims[..lead.rank()];
        let rows = heads_layout(OP, "qkv", qkv.layout, lead, lead_dims, (1, channels))?;
        let gate_rows = heads_layout(OP, "gates", gates.layout, lead, lead_dims, (1, 2 * value_heads))?;
        let seqs = SequencePlan::of_tokens((OP, "qkv"), (lead, lead_dims), self.cu_seqlens.as_ref())?;
        if self.has_state {
            check_dtype(OP, "state", state.dtype, DType::F32)?;
            state.check_place(OP, &qkv.device(), &[])?;
            check_dense(OP, "state", state.layout, &self.state_shape(&seqs))?;
        }
        let (algo, packed) = (self.options.algo, lead == Lead::Packed);
        if let Some(why) = refuses_rule(algo, qkv.dtype, (key_dim, value_dim), seqs.max_tokens, packed) {
            bail!("{OP}: algo: {algo:?} {why}");
        }
        let keys = key_heads * key_dim;
        Ok(DiffPlan {
            q: columns(rows, 0, key_dim),
            k: columns(rows, keys, key_dim),
            v: columns(rows, 2 * keys, value_dim),
            log_decay: columns(gate_rows, 0, 1),
            beta: columns(gate_rows, value_heads, 1),
            state: self.has_state.then(|| state.layout.start_offset()),
            scale: self.options.scale.unwrap_or((key_dim as f64).powf(-0.5)),
            out_shape: [lead_dims, &[value_heads, value_dim]].concat().into(),
            seqs,
        })
    }

    /// Columns of qkv.
    fn channels(&self) -> usize {
        let Dims { key_heads, value_heads, key_dim, value_dim } = self.sizes;
        2 * key_heads * key_dim + value_heads * value_dim
    }

    fn state_shape(&self, seqs: &SequencePlan) -> [usize; 4] {
        let Dims { value_heads, key_dim, value_dim, .. } = self.sizes;
        [seqs.count, value_heads, value_dim, key_dim]
    }

    fn on_cpu(&self, [qkv, gates, state]: [CpuArg<'_>; 3]) -> CpuOutput {
        let plan = self.plan([Arg::cpu("qkv", qkv), Arg::cpu("gates", gates), Arg::cpu("state", state)])?;
        let (out, last) = cpu::run(self, &plan, [qkv.0, gates.0, state.0])?;
        self.last.put(Storage::Cpu(CpuStorage::F32(last)), &self.state_shape(&plan.seqs)[..]);
        Ok((out, plan.out_shape))
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(&self, [qkv, gates, state]: [CudaArg<'_>; 3]) -> CudaOutput {
        let plan = self.plan([Arg::cuda("qkv", qkv), Arg::cuda("gates", gates), Arg::cuda("state", state)])?;
        let (out, last) = cuda::run(self, &plan, [qkv.0, gates.0, state.0])?;
        self.last.put(Storage::Cuda(last), &self.state_shape(&plan.seqs)[..]);
        Ok((out, plan.out_shape))
    }

    fn backward(&self, args: [&Tensor; 3], grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let [qkv, gates, state] = args;
        let _working = Working::new(qkv.device());
        let plan = self.plan([Arg::tensor("qkv", qkv), Arg::tensor("gates", gates), Arg::tensor("state", state)])?;
        // In the order of the arguments' shapes, whatever the loss made of o.
        let grads = (&grad.contiguous()?, self.last.take_gradient());
        let wants_state = self.has_state && state.track_op();
        #[cfg(feature = "cuda")]
        let (d_qkv, d_gates, d_state) = match qkv.device().is_cuda() {
            true => cuda::backward(self, &plan, args, grads, wants_state)?,
            false => cpu::backward(self, &plan, args, grads)?,
        };
        #[cfg(not(feature = "cuda"))]
        let (d_qkv, d_gates, d_state) = cpu::backward(self, &plan, args, grads)?;
        let some = |arg: &Tensor, gradient| arg.track_op().then_some(gradient);
        Ok([some(qkv, d_qkv), some(gates, d_gates), d_state.filter(|_| wants_state)])
    }
}

custom_op!(differentiable CustomOp3 for RuleDiff, OP, qkv qkv_layout, gates gates_layout, state state_layout);

/// The gated delta rule, for training: out of place, with gradients of all three tensors from o and from the final state.
///
/// With g the log decay, q and k divided by their L2 norm and q times `K^-0.5` (see [`RuleOptions`]):
///
/// ```text
/// S <- exp(g) S;   d = beta (v - S k);   S <- S + d k^T;   o = S q
/// ```
///
/// | tensor | without `cu_seqlens` | with `cu_seqlens` (packed) | dtype |
/// |---|---|---|---|
/// | `qkv` | `[batch, tokens, 2 HK K + HV V]`, q, k and v, each by head; may be a narrow view | `[tokens, ..]` | f32, bf16 or f16 |
/// | `gates` | `[batch, tokens, 2 HV]`, log decay (0 or less) before beta: [`gdn_gates`](crate::ops::gdn_gates) | `[tokens, 2 HV]` | f32 |
/// | `state` | `[batch, HV, V, K]`; `None` is zeros | `[sequences, HV, V, K]` | f32 |
/// | result o | `[batch, tokens, HV, V]` | `[tokens, HV, V]` | as qkv |
/// | result final state | as `state` | as `state` | f32 |
///
/// `sizes` has the heads: HK divides HV, K and V are 1 to 256. Lengths may be zero. Nothing crosses the border of a sequence: a
/// packed sequence has the bits of the same sequence alone, and so do its gradients, where neither is cut into segments
/// ([`RuleOptions::segments`]; 1 makes sure of it). `options.beta_scale` is checked but not used (beta has it).
///
/// Saved for the backward pass are the three arguments and nothing else: it computes norms and states again, from the state
/// before each chunk of tokens. The CPU keeps 16 MiB of such states a thread; on CUDA [`RuleOptions::recompute`]
/// keeps fewer. Sums have a fixed order: equal inputs give equal bits on equal devices. Formula: Yang et al., *Gated Delta Networks*, arXiv 2412.06464; [`reference`](mod@crate::reference) has the backward pass token by token.
///
/// Both results belong to one backward pass: where the loss depends on the final state, its gradient goes to that of o.
///
/// # Errors
/// When a rank, shape, dtype or device does not fit, `cu_seqlens` does not end at the number of tokens, a kernel was chosen
/// that has no backward pass, or more than 64 segments were asked for; the message names the argument, what was expected and what came.
pub fn gdn_rule_diff(
    qkv: &Tensor,
    gates: &Tensor,
    state: Option<&Tensor>,
    sizes: Dims,
    cu_seqlens: Option<&CuSeqlens>,
    options: RuleOptions,
) -> Result<(Tensor, Tensor)> {
    check_sizes(sizes)?;
    options.check(OP)?;
    if matches!(options.algo, Algo::Recurrent128 | Algo::Decode) {
        bail!("{OP}: algo: expected Auto, Recurrent, ChunkedSm80 or ChunkedSm90 in training, got {:?}", options.algo);
    }
    // What the kernels support (cuda/backward/cut.h); refused here and not first in the backward pass.
    if options.segments > 64 {
        bail!("{OP}: segments: expected at most 64 in training, got {}", options.segments);
    }
    let boundaries = cu_seqlens.map(CuSeqlens::tensor);
    for (arg, tensor) in [("gates", Some(gates)), ("state", state), ("cu_seqlens", boundaries)] {
        tensor.map_or(Ok(()), |tensor| check_device(OP, arg, tensor, qkv.device()))?;
    }
    let _working = Working::new(qkv.device());
    let last = Arc::<SideOutput>::default();
    let op =
        RuleDiff { sizes, cu_seqlens: cu_seqlens.cloned(), options, has_state: state.is_some(), last: last.clone() };
    let gates = dense_rows(gates)?;
    // Without a state a tensor that nobody reads and that is not tracked.
    let state = state.map_or_else(|| Tensor::zeros(1, DType::F32, qkv.device()), Tensor::contiguous)?;
    let o = dense_rows(qkv)?.apply_op3(&gates, &state, op)?;
    let last = last.tensor(&o)?;
    Ok((o, last))
}

fn check_sizes(sizes: Dims) -> Result<()> {
    let Dims { key_heads, value_heads, key_dim, value_dim } = sizes;
    if key_heads == 0 || value_heads == 0 || value_heads % key_heads != 0 {
        bail!("{OP}: sizes: expected a number of key heads that divides that of value heads, got {key_heads} and {value_heads}");
    }
    if !(1..=256).contains(&key_dim) || !(1..=256).contains(&value_dim) {
        bail!("{OP}: sizes: expected head sizes of 1 to 256, got {key_dim} (K) and {value_dim} (V)");
    }
    Ok(())
}
