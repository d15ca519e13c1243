//! The launch of `gdn_swiglu` in `models/cuda/gdn_model.h`.

use super::swiglu::SwigluPlan;
use crate::abi::model::{gdn_swiglu, SwigluParams};
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};
use candle_gdn_core::device::cuda::{alloc, check, dtype_code, int, read, stream_of, write};
use std::ffi::c_void;

/// `silu(gate) * up` of the halves of each row.
pub(super) fn swiglu(plan: &SwigluPlan, gate_up: &CudaStorage) -> Result<CudaStorage> {
    let (name, dtype, size) = ("swiglu", gate_up.dtype(), gate_up.dtype().size_in_bytes());
    let stream = &*stream_of(gate_up)?;
    let mut out = alloc(plan.launch.arena.as_ref(), gate_up, &plan.out_shape)?;
    let gate_up = read(gate_up, stream)?;
    let dst = write(&mut out, stream)?;
    let stride = plan.gate_up.stride as i64;
    let params = SwigluParams {
        gate: gate_up.at::<c_void>(plan.gate_up.offset, size),
        up: gate_up.at::<c_void>(plan.gate_up.offset + plan.columns, size),
        out: dst.at(0, size),
        gate_stride: stride,
        up_stride: stride,
        out_stride: plan.columns as i64,
        rows: plan.rows as i64,
        columns: int(name, "gate_up", plan.columns)?,
        dtype: dtype_code(dtype),
        overlap: plan.launch.overlap.into(),
    };
    // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
    check(name, unsafe { gdn_swiglu(&params, stream.cu_stream().cast::<c_void>()) })?;
    drop(dst);
    Ok(out)
}
