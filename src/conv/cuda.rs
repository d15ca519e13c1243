//! `gdn_conv`: the causal convolution.

use super::pointers::{addressing, alloc, check, dense, dtype_code, heads, int, read, stream_of, write};
use crate::abi as gdn;
use crate::ops::{in_place_cuda, ConvPlan, Slots};
use crate::{held_slots, held_u32};
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result, Tensor};
use std::ffi::c_void;

/// Runs the causal convolution with `state` updated in place and returns y.
pub(crate) fn conv(
    plan: &ConvPlan,
    x: &CudaStorage,
    weight: &CudaStorage,
    state: &Tensor,
    slots: Option<&Slots>,
    cu_seqlens: Option<&Tensor>,
    silu: bool,
) -> Result<CudaStorage> {
    let name = "causal_conv1d";
    in_place_cuda(name, state, |(state, layout)| {
        let (dtype, weight_dtype) = (x.dtype(), weight.dtype());
        let stream = &*stream_of(x)?;
        let mut out = alloc(x, &plan.out_shape)?;

        let (x, weight) = (read(x, stream)?, read(weight, stream)?);
        held_slots!(slots, slots, stream);
        held_u32!(cu_seqlens, cu_seqlens, stream);
        let y = write(&mut out, stream)?;
        let state = write(state, stream)?;
        let state_ptr: *mut c_void = state.at(layout.start_offset(), dtype.size_in_bytes());
        let (seqs, in_slots, out_slots) = addressing(name, &plan.seqs, cu_seqlens, slots, layout)?;
        let params = gdn::ConvParams {
            x: heads(&x, plan.x, dtype),
            y: dense(&y, plan.seqs.tokens, 1, plan.channels),
            weight: weight.at(plan.weight_offset, weight_dtype.size_in_bytes()),
            state_in: state_ptr,
            state_out: state_ptr,
            in_slots,
            out_slots,
            seqs,
            channels: int(name, "channels", plan.channels)?,
            width: plan.width as i32,
            io_dtype: dtype_code(dtype),
            weight_dtype: dtype_code(weight_dtype),
            silu: silu.into(),
        };
        // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
        check(name, unsafe { gdn::gdn_conv(&params, stream.cu_stream().cast::<c_void>()) })?;
        drop((y, state));
        Ok(out)
    })
}
