//! `gdn_conv`: the causal convolution.

use super::{CausalConv1d, ConvPlan, OP};
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};
use candle_gdn_core::abi as gdn;
use candle_gdn_core::device::cuda::*;
use candle_gdn_core::device::in_place_cuda;
use candle_gdn_core::{held_slots, held_u32, CuSeqlens, Slots};
use std::ffi::c_void;

/// Runs a checked call with the state updated in place and returns y.
pub(super) fn run(op: &CausalConv1d, plan: &ConvPlan, x: &CudaStorage, weight: &CudaStorage) -> Result<CudaStorage> {
    let slots = op.slots.as_ref().map(Slots::in_u32).transpose()?;
    in_place_cuda(OP, &op.state, |(state, layout)| {
        let (dtype, weight_dtype) = (x.dtype(), weight.dtype());
        let stream = &*stream_of(x)?;
        let mut out = alloc_of(x.device(), dtype, plan.out_shape.dims())?;

        let (x, weight) = (read(x, stream)?, read(weight, stream)?);
        held_slots!(slots, slots.as_ref(), stream);
        held_u32!(cu_seqlens, op.cu_seqlens.as_ref().map(CuSeqlens::tensor), stream);
        let y = write(&mut out, stream)?;
        let state = write(state, stream)?;
        let state_ptr: *mut c_void = state.at(layout.start_offset(), dtype.size_in_bytes());
        let (seqs, in_slots, out_slots) = addressing(OP, &plan.seqs, cu_seqlens, slots, layout)?;
        let params = gdn::ConvParams {
            x: heads(&x, plan.x, dtype),
            y: dense(&y, plan.seqs.tokens, 1, plan.channels),
            weight: weight.at(plan.weight_offset, weight_dtype.size_in_bytes()),
            state_in: state_ptr,
            state_out: state_ptr,
            in_slots,
            out_slots,
            seqs,
            channels: int(OP, "channels", plan.channels)?,
            width: plan.width as i32,
            io_dtype: dtype_code(dtype),
            weight_dtype: dtype_code(weight_dtype),
            silu: op.silu.into(),
        };
        // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
        check(OP, unsafe { gdn::gdn_conv(&params, stream.cu_stream().cast::<c_void>()) })?;
        drop((y, state));
        Ok(out)
    })
}
