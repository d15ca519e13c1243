//! `gdn_ready_gates` and its backward pass.

use super::{GatesPlan, GdnGates, OP};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{CudaStorage, DType, Result, Tensor};
use candle_gdn_core::abi as gdn;
use candle_gdn_core::check::HeadsLayout;
use candle_gdn_core::device::cuda::*;
use candle_gdn_core::device::Locked;
use candle_gdn_core::held;
use std::ffi::c_void;

/// Runs a checked call.
pub(super) fn run(op: &GdnGates, plan: &GatesPlan, args: [&CudaStorage; 3]) -> Result<CudaStorage> {
    let stream = &*stream_of(args[0])?;
    let mut out = alloc_of(args[0].device(), DType::F32, plan.shape().dims())?;
    let gates = write(&mut out, stream)?;
    with_params(op, plan, args, Some(&gates), stream, |params| {
        // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
        check(OP, unsafe { gdn::gdn_ready_gates(&params, stream.cu_stream().cast::<c_void>()) })
    })?;
    drop(gates);
    Ok(out)
}

/// The gradients of all arguments.
pub(super) fn backward(op: &GdnGates, plan: &GatesPlan, args: [&Tensor; 3], grad: &Tensor) -> Result<[Tensor; 3]> {
    let locked = Locked::new(args);
    let storages = cuda_storages(OP, locked.storages())?;
    let (device, stream) = (storages[0].device(), &*stream_of(storages[0])?);
    held!(grad_pointer, grad, stream);
    let mut d_ba = alloc_of(device, storages[0].dtype(), plan.shape().dims())?;
    let mut d_a_log = alloc_of(device, DType::F32, &[plan.heads])?;
    let mut d_dt_bias = alloc_of(device, DType::F32, &[plan.heads])?;
    {
        let d_ba_pointer = write(&mut d_ba, stream)?;
        let (d_a_log, d_dt_bias) = (write(&mut d_a_log, stream)?, write(&mut d_dt_bias, stream)?);
        let dense = HeadsLayout { offset: 0, ..columns(plan) };
        let grad_layout = HeadsLayout { offset: grad.layout().start_offset(), ..dense };
        let [d_b, d_a] = halves(&d_ba_pointer, dense, plan.heads, args[0].dtype());
        let [d_log_decay, d_beta] = halves(&grad_pointer, grad_layout, plan.heads, DType::F32);
        with_params(op, plan, storages, None, stream, |gates| {
            let mut params = gdn::ReadyGatesBackwardParams {
                gates,
                d_log_decay,
                d_beta,
                d_a,
                d_b,
                d_a_log: d_a_log.at(0, 4),
                d_dt_bias: d_dt_bias.at(0, 4),
                workspace: std::ptr::null_mut(),
                workspace_bytes: 0,
            };
            // SAFETY: as above; the launcher writes the one number.
            check(OP, unsafe { gdn::gdn_ready_gates_backward_workspace(&params, &mut params.workspace_bytes) })?;
            with_workspace(None, device, stream, workspace_size(params.workspace_bytes), |workspace| {
                params.workspace = workspace;
                // SAFETY: as above.
                check(OP, unsafe { gdn::gdn_ready_gates_backward(&params, stream.cu_stream().cast::<c_void>()) })
            })
        })?;
    }
    Ok([tensor_of(d_ba, plan.shape()), tensor_of(d_a_log, plan.heads), tensor_of(d_dt_bias, plan.heads)])
}

/// Contiguous columns of both gates.
fn columns(plan: &GatesPlan) -> HeadsLayout {
    HeadsLayout { offset: 0, seq_stride: 0, token_stride: 2 * plan.heads, head_stride: 1 }
}

/// The first and the second half of the columns.
fn halves(pointer: &Pointer<'_>, layout: HeadsLayout, heads_each: usize, dtype: DType) -> [gdn::Heads; 2] {
    let second = HeadsLayout { offset: layout.offset + heads_each, ..layout };
    [heads(pointer, layout, dtype), heads(pointer, second, dtype)]
}

/// `f` with the parameter struct, whose pointers live as long as `f` runs.
fn with_params<R>(
    op: &GdnGates,
    plan: &GatesPlan,
    [ba, a_log, dt_bias]: [&CudaStorage; 3],
    gates: Option<&Pointer<'_>>,
    stream: &CudaStream,
    f: impl FnOnce(gdn::ReadyGatesParams) -> Result<R>,
) -> Result<R> {
    let dtype = ba.dtype();
    let (ba, a_log, dt_bias) = (read(ba, stream)?, read(a_log, stream)?, read(dt_bias, stream)?);
    let [b, a] = halves(&ba, plan.ba, plan.heads, dtype);
    let [log_decay, beta] =
        gates.map_or([gdn::NO_HEADS; 2], |gates| halves(gates, columns(plan), plan.heads, DType::F32));
    f(gdn::ReadyGatesParams {
        a,
        b,
        log_decay,
        beta,
        a_log: a_log.at(plan.offsets[0], 4),
        dt_bias: dt_bias.at(plan.offsets[1], 4),
        num_seqs: 1,
        tokens_per_seq: plan.tokens as i64,
        heads: int(OP, "heads", plan.heads)?,
        gate_dtype: dtype_code(dtype),
        beta_scale: op.beta_scale as f32,
    })
}
