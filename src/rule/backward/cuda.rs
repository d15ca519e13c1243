//! `gdn_rule` out of place with ready gates, and `gdn_rule_backward`.

use super::{DiffPlan, RuleDiff, OP};
use crate::rule::cuda::algo_code;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{CudaStorage, DType, Result, Tensor};
use candle_gdn_core::abi as gdn;
use candle_gdn_core::check::HeadsLayout;
use candle_gdn_core::device::cuda::*;
use candle_gdn_core::device::Locked;
use candle_gdn_core::{held, held_or_none, held_u32, CuSeqlens};
use std::ffi::c_void;
use std::ptr::{null, null_mut};

/// o and the final state of a checked call.
pub(super) fn run(
    op: &RuleDiff,
    plan: &DiffPlan,
    [qkv, gates, state]: [&CudaStorage; 3],
) -> Result<(CudaStorage, CudaStorage)> {
    let (device, dtype) = (qkv.device(), qkv.dtype());
    let stream = &*stream_of(qkv)?;
    let mut out = alloc_of(device, dtype, plan.out_shape.dims())?;
    let shape = op.state_shape(&plan.seqs);
    // Without an initial state the kernel finds zeros where it leaves the final one.
    let mut last = match plan.state {
        Some(_) => alloc_of(device, DType::F32, &shape)?,
        None => zeros_of(device, DType::F32, &shape)?,
    };
    let (o, state_out) = (write(&mut out, stream)?, write(&mut last, stream)?);
    let state = read(state, stream)?;
    let state_in = plan.state.map_or_else(|| state_out.at::<c_void>(0, 4), |start| state.at(start, 4));
    with_common(op, plan, [qkv, gates], state_in, stream, |common, [q, k, v]| {
        let mut params = gdn::RuleParams {
            common: gdn::Common { state_out: state_out.at(0, 4), ..common },
            q,
            k,
            v,
            o: dense(&o, plan.seqs.tokens, op.sizes.value_heads, op.sizes.value_dim),
            workspace: null_mut(),
            workspace_bytes: 0,
            head_stride: 0,
            counts: null(),
            dt_bias_dtype: gdn::GDN_F32,
            gates: gdn::GDN_GATES_READY,
            algo: algo_code(op.options.algo),
            segments: int(OP, "segments", op.options.segments)?,
        };
        // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch; the first launcher writes one
        // number.
        check(OP, unsafe { gdn::gdn_rule_workspace(&params, &mut params.workspace_bytes) })?;
        with_workspace(None, device, stream, workspace_size(params.workspace_bytes), |workspace| {
            params.workspace = workspace;
            // SAFETY: as above.
            check(OP, unsafe { gdn::gdn_rule(&params, stream.cu_stream().cast::<c_void>()) })
        })
    })?;
    drop((o, state_out));
    Ok((out, last))
}

/// The gradients of qkv, the gates and, where it is wanted, the initial state.
pub(super) fn backward(
    op: &RuleDiff,
    plan: &DiffPlan,
    args: [&Tensor; 3],
    (d_o, d_last): (&Tensor, Option<Tensor>),
    wants_state: bool,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let locked = Locked::new(args);
    let [qkv, gates, state] = cuda_storages(OP, locked.storages())?;
    let (device, dtype) = (qkv.device(), qkv.dtype());
    let stream = &*stream_of(qkv)?;
    held!(d_o_pointer, d_o, stream);
    let d_last_start = d_last.as_ref().map_or(0, |d_last| d_last.layout().start_offset());
    held_or_none!(d_last, d_last.as_ref(), stream);
    let shape = op.state_shape(&plan.seqs);
    let mut d_qkv = alloc_of(device, dtype, args[0].dims())?;
    let mut d_gates = alloc_of(device, DType::F32, args[1].dims())?;
    let mut d_state = wants_state.then(|| alloc_of(device, DType::F32, &shape)).transpose()?;
    {
        let state = read(state, stream)?;
        let state_in = plan.state.map_or(null_mut(), |start| state.at::<c_void>(start, 4));
        let (d_qkv, d_gates) = (write(&mut d_qkv, stream)?, write(&mut d_gates, stream)?);
        let d_state = d_state.as_mut().map(|d_state| write(d_state, stream)).transpose()?;
        let of = |layout| heads(&d_qkv, op.dense(plan, layout, plan.q.offset, op.channels()), dtype);
        let gate = |layout| {
            heads(&d_gates, op.dense(plan, layout, plan.log_decay.offset, 2 * op.sizes.value_heads), DType::F32)
        };
        let start = d_o.layout().start_offset() * dtype.size_in_bytes();
        let (value_heads, value_dim) = (op.sizes.value_heads, op.sizes.value_dim);
        let d_o = dense(&d_o_pointer, plan.seqs.tokens, value_heads, value_dim);
        with_common(op, plan, [qkv, gates], state_in, stream, |common, [q, k, v]| {
            let mut params = gdn::RuleBackwardParams {
                common,
                q,
                k,
                v,
                d_o: gdn::Heads { ptr: d_o.ptr.wrapping_byte_add(start), ..d_o },
                d_state_out: d_last.as_ref().map_or(null(), |d_last| d_last.at::<f32>(d_last_start, 4).cast_const()),
                d_q: of(plan.q),
                d_k: of(plan.k),
                d_v: of(plan.v),
                d_log_decay: gate(plan.log_decay),
                d_beta: gate(plan.beta),
                d_state_in: d_state.as_ref().map_or(null_mut(), |d_state| d_state.at(0, 4)),
                workspace: null_mut(),
                workspace_bytes: 0,
                segments: int(OP, "segments", op.options.segments)?,
                recompute: op.options.recompute.into(),
                algo: algo_code(op.options.algo),
            };
            // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch; the first launcher writes
            // one number.
            check(OP, unsafe { gdn::gdn_rule_backward_workspace(&params, &mut params.workspace_bytes) })?;
            with_workspace(None, device, stream, workspace_size(params.workspace_bytes), |workspace| {
                params.workspace = workspace;
                // SAFETY: as above.
                check(OP, unsafe { gdn::gdn_rule_backward(&params, stream.cu_stream().cast::<c_void>()) })
            })
        })?;
    }
    let d_state = d_state.map(|d_state| tensor_of(d_state, shape.to_vec()));
    Ok((tensor_of(d_qkv, args[0].shape().clone()), tensor_of(d_gates, args[1].shape().clone()), d_state))
}

impl RuleDiff {
    /// The same columns in a contiguous tensor of `columns`, `first` being where the first of them lies in the argument.
    fn dense(&self, plan: &DiffPlan, layout: HeadsLayout, first: usize, columns: usize) -> HeadsLayout {
        HeadsLayout {
            offset: layout.offset - first,
            seq_stride: plan.seqs.tokens * columns,
            token_stride: columns,
            head_stride: layout.head_stride,
        }
    }
}

/// `f` with what both passes have in common and with q, k and v, whose pointers live as long as `f` runs.
fn with_common<R>(
    op: &RuleDiff,
    plan: &DiffPlan,
    [qkv, gates]: [&CudaStorage; 2],
    state_in: *mut c_void,
    stream: &CudaStream,
    f: impl FnOnce(gdn::Common, [gdn::Heads; 3]) -> Result<R>,
) -> Result<R> {
    let dtype = qkv.dtype();
    let (qkv, gates) = (read(qkv, stream)?, read(gates, stream)?);
    held_u32!(cu_seqlens, op.cu_seqlens.as_ref().map(CuSeqlens::tensor), stream);
    let slots = gdn::Slots {
        slots: null(),
        num_slots: plan.seqs.count as i64,
        slot_stride: op.state_shape(&plan.seqs)[1..].iter().product::<usize>() as i64,
    };
    let common = gdn::Common {
        a: heads(&gates, plan.log_decay, DType::F32),
        b: heads(&gates, plan.beta, DType::F32),
        a_log: null(),
        dt_bias: null(),
        state_in,
        state_out: null_mut(),
        in_slots: slots,
        out_slots: slots,
        seqs: sequences_of(OP, &plan.seqs, cu_seqlens)?,
        num_k_heads: int(OP, "key heads", op.sizes.key_heads)?,
        num_v_heads: int(OP, "value heads", op.sizes.value_heads)?,
        head_k: op.sizes.key_dim as i32,
        head_v: op.sizes.value_dim as i32,
        io_dtype: dtype_code(dtype),
        gate_dtype: gdn::GDN_F32,
        state_dtype: gdn::GDN_F32,
        l2norm: op.options.l2norm.into(),
        l2_eps: op.options.l2_eps as f32,
        scale: plan.scale as f32,
        beta_scale: 1.0,
    };
    f(common, [plan.q, plan.k, plan.v].map(|layout| heads(&qkv, layout, dtype)))
}
