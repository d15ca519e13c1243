//! `gdn_rule`: the gated delta rule, and what its launches have in common with those of the step and the ring.

use super::arena::with_workspace;
use super::pointers::{addressing, alloc, check, dense, dtype_code, heads, int, read, stream_of, write, Pointer};
use crate::abi as gdn;
use crate::ops::{in_place_cuda, Algo, CudaWritten, Gates, RulePlan, Slots};
use crate::reference::Dims;
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

/// A state on the device: where it is, its layout and its dtype.
pub(super) type State<'a> = (&'a Pointer<'a>, &'a Layout, DType);

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
    with_params(args, stream, &nowhere, (&pointer, state.layout(), state.dtype()), |params| {
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
    state: State<'_>,
    f: impl FnOnce(&mut gdn::RuleParams) -> Result<R>,
) -> Result<R> {
    let RuleArgs { name, plan, q, k, v, gates, slots, cu_seqlens } = *args;
    let dtype = q.dtype();
    let (q, k, v) = (read(q, stream)?, read(k, stream)?, read(v, stream)?);
    with_common(name, plan, dtype, (gates, slots, cu_seqlens), state, stream, |common| {
        f(&mut gdn::RuleParams {
            common,
            q: heads(&q, plan.q, dtype),
            k: heads(&k, plan.k, dtype),
            v: heads(&v, plan.v, dtype),
            o: dense(o, plan.seqs.tokens, plan.dims.value_heads, plan.dims.value_dim),
            workspace: std::ptr::null_mut(),
            workspace_bytes: 0,
            head_stride: 0,
            counts: std::ptr::null(),
            dt_bias_dtype: gdn::GDN_F32,
            gates: gdn::GDN_GATES_RAW,
            algo: algo_code(plan.options.algo),
            segments: int(name, "segments", plan.options.segments)?,
        })
    })
}

/// `f` with what the launches of the rule, the step and the ring have in common, the state updated in place. Its pointers live
/// as long as `f` runs.
pub(super) fn with_common<R>(
    name: &str,
    plan: &RulePlan,
    io_dtype: DType,
    (gates, slots, cu_seqlens): (&Gates, Option<&Slots>, Option<&Tensor>),
    state: State<'_>,
    stream: &CudaStream,
    f: impl FnOnce(gdn::Common) -> Result<R>,
) -> Result<R> {
    held!(a, gates.a, stream);
    held!(b, gates.b, stream);
    held!(a_log, gates.a_log, stream);
    held!(dt_bias, gates.dt_bias, stream);
    held_slots!(slots, slots, stream);
    held_u32!(cu_seqlens, cu_seqlens, stream);
    let (seqs, in_slots, out_slots) = addressing(name, &plan.seqs, cu_seqlens, slots, state.1)?;
    let gate_dtype = gates.a.dtype();
    f(gdn::Common {
        a: heads(&a, plan.a, gate_dtype),
        b: heads(&b, plan.b, gate_dtype),
        a_log: a_log.at(gates.a_log.layout().start_offset(), 4),
        dt_bias: dt_bias.at(gates.dt_bias.layout().start_offset(), 4),
        in_slots,
        out_slots,
        seqs,
        gate_dtype: dtype_code(gate_dtype),
        l2norm: plan.options.l2norm.into(),
        l2_eps: plan.options.l2_eps as f32,
        scale: plan.scale as f32,
        beta_scale: plan.options.beta_scale as f32,
        ..common_of(name, plan.dims, io_dtype, state)?
    })
}

/// The same for a launch that has a state updated in place and no tokens, still without sequences and slots.
pub(super) fn common_of(
    name: &str,
    dims: Dims,
    io_dtype: DType,
    (state, layout, dtype): State<'_>,
) -> Result<gdn::Common> {
    let state: *mut c_void = state.at(layout.start_offset(), dtype.size_in_bytes());
    let slots = gdn::Slots { slots: std::ptr::null(), num_slots: 0, slot_stride: 0 };
    Ok(gdn::Common {
        a: gdn::NO_HEADS,
        b: gdn::NO_HEADS,
        a_log: std::ptr::null(),
        dt_bias: std::ptr::null(),
        state_in: state,
        state_out: state,
        in_slots: slots,
        out_slots: slots,
        seqs: sequences(0, 0, std::ptr::null()),
        num_k_heads: int(name, "key heads", dims.key_heads)?,
        num_v_heads: int(name, "value heads", dims.value_heads)?,
        head_k: dims.key_dim as i32,
        head_v: dims.value_dim as i32,
        io_dtype: dtype_code(io_dtype),
        gate_dtype: gdn::GDN_F32,
        state_dtype: dtype_code(dtype),
        l2norm: 0,
        l2_eps: 0.0,
        scale: 1.0,
        beta_scale: 1.0,
    })
}

/// Sequences of the same length, or with `cu_seqlens` of that length at most.
pub(super) fn sequences(count: i32, tokens: i32, cu_seqlens: *const u32) -> gdn::Sequences {
    gdn::Sequences { cu_seqlens, num_seqs: count, tokens_per_seq: tokens, max_tokens_per_seq: tokens, total_tokens: 0 }
}
