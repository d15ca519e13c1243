//! The launch of `gdn_residual` in `models/cuda/gdn_model.h`.

use super::op::ResidualPlan;
use crate::abi::model::{gdn_residual, ResidualParams};
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};
use candle_gdn_core::device::cuda::{alloc, check, dtype_code, int, read, stream_of, write};
use std::ffi::c_void;

/// The norm; with h the sum, then the norm, in one tensor.
pub(super) fn residual(
    plan: &ResidualPlan,
    x: &CudaStorage,
    h: &CudaStorage,
    weight: &CudaStorage,
) -> Result<CudaStorage> {
    let (name, dtype, size) = ("add_rms_norm", x.dtype(), x.dtype().size_in_bytes());
    let stream = &*stream_of(x)?;
    let mut out = alloc(plan.launch.arena.as_ref(), x, &plan.out_shape)?;
    let (x, h, weight) = (read(x, stream)?, read(h, stream)?, read(weight, stream)?);
    let result = write(&mut out, stream)?;
    let params = ResidualParams {
        x: x.at::<c_void>(plan.x.offset, size),
        h: plan.h.map_or(std::ptr::null(), |rows| h.at::<c_void>(rows.offset, size).cast_const()),
        sum: if plan.h.is_some() { result.at(0, size) } else { std::ptr::null_mut() },
        y: result.at(if plan.h.is_some() { plan.rows * plan.dim } else { 0 }, size),
        weight: weight.at(plan.weight_offset, 4),
        x_stride: plan.x.stride as i64,
        h_stride: plan.h.map_or(0, |rows| rows.stride) as i64,
        sum_stride: plan.dim as i64,
        y_stride: plan.dim as i64,
        rows: plan.rows as i64,
        dim: int(name, "x", plan.dim)?,
        dtype: dtype_code(dtype),
        overlap: plan.launch.overlap.into(),
        eps: plan.eps as f32,
    };
    // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
    check(name, unsafe { gdn_residual(&params, stream.cu_stream().cast::<c_void>()) })?;
    drop(result);
    Ok(out)
}
