//! `gdn_conv` out of place, and its backward pass.

use super::{ConvDiff, DiffPlan, OP};
use crate::conv::cuda::{launch, States};
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Result, Tensor};
use candle_gdn_core::abi as gdn;
use candle_gdn_core::check::HeadsLayout;
use candle_gdn_core::device::cuda::*;
use candle_gdn_core::device::Locked;
use candle_gdn_core::{held, held_u32, CuSeqlens};
use std::ffi::c_void;
use std::ptr::{null, null_mut};

/// Runs a checked call.
pub(super) fn run(op: &ConvDiff, plan: &DiffPlan, [x, weight, window]: [&CudaStorage; 3]) -> Result<CudaStorage> {
    let (DiffPlan { conv, window: start }, device, dtype) = (plan, x.device(), x.dtype());
    let stream = &*stream_of(x)?;
    // The kernel leaves the last inputs in a state: written here, and dropped.
    let shape = conv.window_shape();
    let mut last = match start {
        Some(_) => alloc_of(device, dtype, &shape)?,
        None => zeros_of(device, dtype, &shape)?,
    };
    held_u32!(cu_seqlens, op.cu_seqlens.as_ref().map(CuSeqlens::tensor), stream);
    let (window, last) = (read(window, stream)?, write(&mut last, stream)?);
    let state_out: *mut c_void = last.at(0, 1);
    let slots = gdn::Slots { slots: null(), num_slots: shape[0] as i64, slot_stride: (shape[1] * shape[2]) as i64 };
    let states = States {
        state_in: start.map_or(state_out, |start| window.at(start, dtype.size_in_bytes())),
        state_out,
        in_slots: slots,
        out_slots: slots,
        seqs: sequences_of(OP, &conv.seqs, cu_seqlens)?,
    };
    launch(OP, conv, op.silu, [x, weight], states, stream)
}

/// The gradients of all arguments, that of the weight in f32.
pub(super) fn backward(
    op: &ConvDiff,
    DiffPlan { conv: plan, window: start }: &DiffPlan,
    args: [&Tensor; 3],
    (d_y, rows): (&Tensor, HeadsLayout),
) -> Result<[Tensor; 3]> {
    let locked = Locked::new(args);
    let [x, weight, window] = cuda_storages(OP, locked.storages())?;
    let (device, dtype, weight_dtype) = (x.device(), x.dtype(), weight.dtype());
    let stream = &*stream_of(x)?;
    held!(d_y, d_y, stream);
    held_u32!(cu_seqlens, op.cu_seqlens.as_ref().map(CuSeqlens::tensor), stream);
    let (x, weight, window) = (read(x, stream)?, read(weight, stream)?, read(window, stream)?);
    let window_shape = plan.window_shape();
    let mut d_x = alloc_of(device, dtype, plan.out_shape.dims())?;
    let mut d_weight = alloc_of(device, DType::F32, &[plan.channels, plan.width])?;
    let mut d_window = alloc_of(device, dtype, if start.is_some() { &window_shape } else { &[1] })?;
    {
        let (d_x, d_weight) = (write(&mut d_x, stream)?, write(&mut d_weight, stream)?);
        let d_window = write(&mut d_window, stream)?;
        let mut params = gdn::ConvBackwardParams {
            x: heads(&x, plan.x, dtype),
            d_y: heads(&d_y, rows, dtype),
            d_x: dense(&d_x, plan.seqs.tokens, 1, plan.channels),
            weight: weight.at(plan.weight_offset, weight_dtype.size_in_bytes()),
            state_in: start.map_or(null(), |start| window.at::<c_void>(start, dtype.size_in_bytes()).cast_const()),
            d_weight: d_weight.at(0, 4),
            d_state_in: if start.is_some() { d_window.at(0, 1) } else { null_mut() },
            seqs: sequences_of(OP, &plan.seqs, cu_seqlens)?,
            workspace: null_mut(),
            workspace_bytes: 0,
            channels: int(OP, "channels", plan.channels)?,
            width: plan.width as i32,
            io_dtype: dtype_code(dtype),
            weight_dtype: dtype_code(weight_dtype),
            silu: op.silu.into(),
        };
        // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
        check(OP, unsafe { gdn::gdn_conv_backward_workspace(&params, &mut params.workspace_bytes) })?;
        with_workspace(None, device, stream, workspace_size(params.workspace_bytes), |workspace| {
            params.workspace = workspace;
            // SAFETY: as above.
            check(OP, unsafe { gdn::gdn_conv_backward(&params, stream.cu_stream().cast::<c_void>()) })
        })?;
    }
    let d_window = match start {
        Some(_) => tensor_of(d_window, window_shape.to_vec()),
        None => tensor_of(d_window, 1),
    };
    Ok([tensor_of(d_x, plan.out_shape.clone()), tensor_of(d_weight, (plan.channels, plan.width)), d_window])
}
