//! `gdn_rule`: the gated delta rule, and what its launches have in common with those of the step.

use super::call::{Rule, RulePlan};
use crate::algo::Algo;
use crate::state::{common_of, State};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{bail, CudaStorage, DType, Result};
use candle_gdn_core::abi as gdn;
use candle_gdn_core::device::cuda::*;
use candle_gdn_core::device::{in_place_cuda, CudaWritten};
use candle_gdn_core::{held, held_or_none, held_slots, held_u32, CuSeqlens, Slots};
use std::ffi::c_void;
use std::ptr::{null, null_mut};

/// Runs a checked call with the state updated in place and returns o.
pub(super) fn run(rule: &Rule, plan: &RulePlan, qkv: [&CudaStorage; 3]) -> Result<CudaStorage> {
    let slots = rule.slots.as_ref().map(Slots::in_u32).transpose()?;
    in_place_cuda(rule.name, &rule.state, |state| launch(rule, plan, slots.as_ref(), qkv, state))
}

fn launch(
    rule: &Rule,
    plan: &RulePlan,
    slots: Option<&Slots>,
    qkv: [&CudaStorage; 3],
    (state, layout): CudaWritten<'_>,
) -> Result<CudaStorage> {
    let stream = &*stream_of(qkv[0])?;
    let mut out = alloc_of(qkv[0].device(), qkv[0].dtype(), plan.out_shape.dims())?;
    let o = write(&mut out, stream)?;
    let state_dtype = state.dtype();
    let state = write(state, stream)?;
    with_params(rule, plan, slots, qkv, &o, (&state, layout, state_dtype), stream, |params| {
        // SAFETY: the launcher reads the parameters and writes the one number.
        check(rule.name, unsafe { gdn::gdn_rule_workspace(params, &mut params.workspace_bytes) })?;
        let bytes = workspace_size(params.workspace_bytes);
        with_workspace(None, qkv[0].device(), stream, bytes, |workspace| {
            params.workspace = workspace;
            // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
            check(rule.name, unsafe { gdn::gdn_rule(params, stream.cu_stream().cast::<c_void>()) })
        })
    })?;
    drop((o, state));
    Ok(out)
}

/// The kernel that [`run`] would launch.
pub(super) fn choice(rule: &Rule, plan: &RulePlan, qkv: [&CudaStorage; 3]) -> Result<Algo> {
    let slots = rule.slots.as_ref().map(Slots::in_u32).transpose()?;
    let stream = &*stream_of(qkv[0])?;
    held!(pointer, rule.state, stream);
    let (mut algo, output) = (0, read(qkv[0], stream)?); // where o lies chooses no kernel
    let state = (&pointer, rule.state.layout(), rule.state.dtype());
    with_params(rule, plan, slots.as_ref(), qkv, &output, state, stream, |params| {
        // SAFETY: the launcher reads the parameters and writes the one number.
        check(rule.name, unsafe { gdn::gdn_rule_choice(params, &mut algo) })
    })?;
    match ALGOS.iter().find(|(_, code)| *code == algo) {
        Some((algo, _)) => Ok(*algo),
        None => bail!("{}: the kernels chose an unknown algorithm, {algo}", rule.name),
    }
}

/// Refuses a kernel that was chosen and does not support the call on this device, before what makes q, k and v has written
/// anything: they will lie in an allocation of their own, which is aligned as `like` is.
pub(crate) fn check_choice(rule: &Rule, plan: &RulePlan, like: &CudaStorage) -> Result<()> {
    match rule.options.algo {
        Algo::Auto => Ok(()),
        _ => choice(rule, plan, [like; 3]).map(drop),
    }
}

/// `gdn_algo`
const ALGOS: [(Algo, i32); 6] = [
    (Algo::Auto, gdn::GDN_AUTO),
    (Algo::Recurrent, gdn::GDN_RECURRENT),
    (Algo::Recurrent128, gdn::GDN_RECURRENT_128),
    (Algo::Decode, gdn::GDN_DECODE),
    (Algo::ChunkedSm80, gdn::GDN_CHUNKED_SM80),
    (Algo::ChunkedSm90, gdn::GDN_CHUNKED_SM90),
];

pub(super) fn algo_code(algo: Algo) -> i32 {
    // -1 is refused by the launcher.
    ALGOS.iter().find(|(a, _)| *a == algo.of_rule()).map_or(-1, |(_, code)| *code)
}

/// `f` with the parameter struct, whose pointers live as long as `f` runs.
#[allow(clippy::too_many_arguments)] // a call, and where it runs
fn with_params<R>(
    rule: &Rule,
    plan: &RulePlan,
    slots: Option<&Slots>,
    [q, k, v]: [&CudaStorage; 3],
    o: &Pointer<'_>,
    state: State<'_>,
    stream: &CudaStream,
    f: impl FnOnce(&mut gdn::RuleParams) -> Result<R>,
) -> Result<R> {
    let dtype = q.dtype();
    let (q, k, v) = (read(q, stream)?, read(k, stream)?, read(v, stream)?);
    with_common(rule, plan, slots, dtype, state, stream, |common| {
        f(&mut gdn::RuleParams {
            common,
            q: heads(&q, plan.q, dtype),
            k: heads(&k, plan.k, dtype),
            v: heads(&v, plan.v, dtype),
            o: dense(o, plan.seqs.tokens, plan.sizes.value_heads, plan.sizes.value_dim),
            workspace: null_mut(),
            workspace_bytes: 0,
            head_stride: 0,
            counts: null(),
            dt_bias_dtype: gdn::GDN_F32,
            gates: if rule.gates.raw.is_some() { gdn::GDN_GATES_RAW } else { gdn::GDN_GATES_READY },
            algo: algo_code(rule.options.algo),
            segments: int(rule.name, "segments", rule.options.segments)?,
        })
    })
}

/// `f` with what the launches of the rule, the step and the ring have in common, the state updated in place. Its pointers live
/// as long as `f` runs.
pub(crate) fn with_common<R>(
    rule: &Rule,
    plan: &RulePlan,
    slots: Option<&Slots>,
    io_dtype: DType,
    state: State<'_>,
    stream: &CudaStream,
    f: impl FnOnce(gdn::Common) -> Result<R>,
) -> Result<R> {
    let (gates, gate_dtype) = (&rule.gates, rule.gates.a.dtype());
    held!(a, gates.a, stream);
    held!(b, gates.b, stream);
    let raw = gates.raw.as_ref();
    held_or_none!(a_log, raw.map(|[a_log, _]| a_log), stream);
    held_or_none!(dt_bias, raw.map(|[_, dt_bias]| dt_bias), stream);
    let start = |pointer: Option<&Pointer<'_>>, i: usize| match (pointer, raw) {
        (Some(pointer), Some(raw)) => pointer.at::<c_void>(raw[i].layout().start_offset(), 4),
        _ => null_mut(),
    };
    held_slots!(slots, slots, stream);
    held_u32!(cu_seqlens, rule.cu_seqlens.as_ref().map(CuSeqlens::tensor), stream);
    let common = common_of(rule.name, plan.sizes, io_dtype, state)?;
    let (seqs, in_slots, out_slots) = addressing(rule.name, &plan.seqs, cu_seqlens, slots, state.1)?;
    f(gdn::Common {
        a: heads(&a, plan.a, gate_dtype),
        b: heads(&b, plan.b, gate_dtype),
        a_log: start(a_log.as_ref(), 0).cast(),
        dt_bias: start(dt_bias.as_ref(), 1),
        state_in: if rule.from_zeros { null() } else { common.state_in },
        in_slots,
        out_slots,
        seqs,
        gate_dtype: dtype_code(gate_dtype),
        l2norm: rule.options.l2norm.into(),
        l2_eps: rule.options.l2_eps as f32,
        scale: plan.scale as f32,
        beta_scale: rule.options.beta_scale as f32,
        ..common
    })
}
