//! `gdn_conv`: the causal convolution.

use super::{CausalConv1d, ConvPlan, OP};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{CudaStorage, Result};
use candle_gdn_core::abi as gdn;
use candle_gdn_core::device::cuda::*;
use candle_gdn_core::device::in_place_cuda;
use candle_gdn_core::{held_slots, held_u32, CuSeqlens, Slots};
use std::ffi::c_void;

/// Where a launch finds the inputs before its own, where it leaves the last ones, and which sequences have which.
pub(super) struct States {
    pub state_in: *const c_void,
    pub state_out: *mut c_void,
    pub in_slots: gdn::Slots,
    pub out_slots: gdn::Slots,
    pub seqs: gdn::Sequences,
}

/// Runs a checked call with the state updated in place and returns y.
pub(super) fn run(op: &CausalConv1d, plan: &ConvPlan, x: &CudaStorage, weight: &CudaStorage) -> Result<CudaStorage> {
    let slots = op.slots.as_ref().map(Slots::in_u32).transpose()?;
    in_place_cuda(OP, &op.state, |(state, layout)| {
        let (size, stream) = (state.dtype().size_in_bytes(), &*stream_of(x)?);
        held_slots!(slots, slots.as_ref(), stream);
        held_u32!(cu_seqlens, op.cu_seqlens.as_ref().map(CuSeqlens::tensor), stream);
        let state = write(state, stream)?;
        let state_out = state.at(layout.start_offset(), size);
        let (seqs, in_slots, out_slots) = addressing(OP, &plan.seqs, cu_seqlens, slots, layout)?;
        let states = States { state_in: state_out, state_out, in_slots, out_slots, seqs };
        launch(OP, plan, op.silu, [x, weight], states, stream)
    })
}

/// Launches the kernel, whose states the caller holds, and returns y.
pub(super) fn launch(
    op: &str,
    plan: &ConvPlan,
    silu: bool,
    [x, weight]: [&CudaStorage; 2],
    states: States,
    stream: &CudaStream,
) -> Result<CudaStorage> {
    let (dtype, weight_dtype) = (x.dtype(), weight.dtype());
    let mut out = alloc_of(x.device(), dtype, plan.out_shape.dims())?;
    let (x, weight) = (read(x, stream)?, read(weight, stream)?);
    let y = write(&mut out, stream)?;
    let params = gdn::ConvParams {
        x: heads(&x, plan.x, dtype),
        y: dense(&y, plan.seqs.tokens, 1, plan.channels),
        weight: weight.at(plan.weight_offset, weight_dtype.size_in_bytes()),
        state_in: states.state_in,
        state_out: states.state_out,
        in_slots: states.in_slots,
        out_slots: states.out_slots,
        seqs: states.seqs,
        channels: int(op, "channels", plan.channels)?,
        width: plan.width as i32,
        io_dtype: dtype_code(dtype),
        weight_dtype: dtype_code(weight_dtype),
        silu: silu.into(),
    };
    // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
    check(op, unsafe { gdn::gdn_conv(&params, stream.cu_stream().cast::<c_void>()) })?;
    drop(y);
    Ok(out)
}
