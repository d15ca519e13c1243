//! `gdn_rule`: the gated delta rule.

use super::arena::with_workspace;
use super::pointers::Pointer;
use super::pointers::{addressing, alloc, check, dense, dtype_code, heads, int, read, stream_of, write};
use crate::abi as gdn;
use crate::ops::{in_place_cuda, Algo, CudaWritten, Gates, RulePlan, Slots};
use crate::{held, held_slots, held_u32};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{bail, CudaStorage, DType, Layout, Result, Tensor};
use std::ffi::c_void;

/// What the rule needs besides its state.
pub(crate) struct RuleArgs<'a> {
    pub name: &'static str,
    pub plan: &'a RulePlan,
    pub q: &'a CudaStorage,
    pub k: &'a CudaStorage,
    pub v: &'a CudaStorage,
    pub gates: &'a Gates,
    pub slots: Option<&'a Slots>,
    pub cu_seqlens: Option<&'a Tensor>,
}

/// Runs the rule with `state` updated in place and returns o.
pub(crate) fn rule(args: &RuleArgs<'_>, state: &Tensor) -> Result<CudaStorage> {
    in_place_cuda(args.name, state, |state| launch(args, state))
}

fn launch(args: &RuleArgs<'_>, (state, layout): CudaWritten<'_>) -> Result<CudaStorage> {
    let stream = &*stream_of(args.q)?;
    let mut out = alloc(args.q, &args.plan.out_shape)?;
    let o = write(&mut out, stream)?;
    let state_dtype = state.dtype();
    let state = write(state, stream)?;
    with_params(args, stream, &o, (&state, layout, state_dtype), |params| {
        // SAFETY: the launcher reads the parameters and writes the one number.
        check(args.name, unsafe { gdn::gdn_rule_workspace(params, &mut params.workspace_bytes) })?;
        let bytes = usize::try_from(params.workspace_bytes).unwrap_or(0);
        with_workspace(None, args.q.device(), stream, bytes, |workspace| {
            params.workspace = workspace;
            // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
            check(args.name, unsafe { gdn::gdn_rule(params, stream.cu_stream().cast::<c_void>()) })
        })
    })?;
    drop((o, state));
    Ok(out)
}

/// The kernel that [`rule`] would run.
pub(crate) fn rule_choice(args: &RuleArgs<'_>, state: &Tensor) -> Result<Algo> {
    let stream = &*stream_of(args.q)?;
    held!(pointer, state, stream);
    let (mut algo, nowhere) = (0, read(args.q, stream)?); // no kernel is chosen by where o lies
    let state = (&pointer, state.layout(), state.dtype());
    with_params(args, stream, &nowhere, state, |params| {
        // SAFETY: the launcher reads the parameters and writes the one number.
        check(args.name, unsafe { gdn::gdn_rule_choice(params, &mut algo) })
    })?;
    match ALGOS.iter().find(|(_, code)| *code == algo) {
        Some((algo, _)) => Ok(*algo),
        None => bail!("{}: the kernels chose an unknown algorithm, {algo}", args.name),
    }
}

/// `gdn_algo`
const ALGOS: [(Algo, i32); 6] = [
    (Algo::Auto, gdn::GDN_AUTO),
    (Algo::Recurrent, gdn::GDN_RECURRENT),
    (Algo::Recurrent128, gdn::GDN_RECURRENT_128),
    (Algo::Decode128, gdn::GDN_DECODE_128),
    (Algo::ChunkedSm80, gdn::GDN_CHUNKED_SM80),
    (Algo::ChunkedSm90, gdn::GDN_CHUNKED_SM90),
];

fn algo_code(algo: Algo) -> i32 {
    ALGOS.iter().find(|(a, _)| *a == algo).map_or(-1, |(_, code)| *code) // -1 is refused by the launcher
}

/// `f` with the parameter struct, whose pointers live as long as `f` runs.
fn with_params<R>(
    args: &RuleArgs<'_>,
    stream: &CudaStream,
    o: &Pointer<'_>,
    (state, layout, state_dtype): (&Pointer<'_>, &Layout, DType),
    f: impl FnOnce(&mut gdn::RuleParams) -> Result<R>,
) -> Result<R> {
    let RuleArgs { name, plan, q, k, v, gates, slots, cu_seqlens, .. } = *args;
    let (dims, dtype, gate_dtype) = (plan.dims, q.dtype(), gates.a.dtype());
    let (q, k, v) = (read(q, stream)?, read(k, stream)?, read(v, stream)?);
    held!(a, gates.a, stream);
    held!(b, gates.b, stream);
    held!(a_log, gates.a_log, stream);
    held!(dt_bias, gates.dt_bias, stream);
    held_slots!(slots, slots, stream);
    held_u32!(cu_seqlens, cu_seqlens, stream);
    let state_size = state_dtype.size_in_bytes();
    let state_ptr: *mut c_void = state.at(layout.start_offset(), state_size);
    let (seqs, in_slots, out_slots) = addressing(name, &plan.seqs, cu_seqlens, slots, layout)?;
    f(&mut gdn::RuleParams {
        q: heads(&q, plan.q, dtype),
        k: heads(&k, plan.k, dtype),
        v: heads(&v, plan.v, dtype),
        a: heads(&a, plan.a, gate_dtype),
        b: heads(&b, plan.b, gate_dtype),
        a_log: a_log.at(gates.a_log.layout().start_offset(), 4),
        dt_bias: dt_bias.at(gates.dt_bias.layout().start_offset(), 4),
        o: dense(o, plan.seqs.tokens, dims.value_heads, dims.value_dim),
        state_in: state_ptr,
        state_out: state_ptr,
        token_states: std::ptr::null_mut(),
        checkpoints: std::ptr::null_mut(),
        workspace: std::ptr::null_mut(),
        workspace_bytes: 0,
        in_slots,
        out_slots,
        head_stride: 0,
        seqs,
        counts: std::ptr::null(),
        num_k_heads: int(name, "key heads", dims.key_heads)?,
        num_v_heads: int(name, "value heads", dims.value_heads)?,
        head_k: dims.key_dim as i32,
        head_v: dims.value_dim as i32,
        io_dtype: dtype_code(dtype),
        gate_dtype: dtype_code(gate_dtype),
        state_dtype: dtype_code(state_dtype),
        dt_bias_dtype: gdn::GDN_F32,
        gates: gdn::GDN_GATES_RAW,
        l2norm: plan.options.l2norm.into(),
        algo: algo_code(plan.options.algo),
        checkpoint_tokens: 0,
        segments: int(name, "segments", plan.options.segments)?,
        l2_eps: plan.options.l2_eps as f32,
        scale: plan.scale as f32,
        beta_scale: plan.options.beta_scale as f32,
    })
}
