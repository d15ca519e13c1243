//! `gdn_norm`: the gated norm.

use super::pointers::{alloc, check, dense, dtype_code, heads, int, read, stream_of, write};
use crate::abi as gdn;
use crate::ops::NormPlan;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};
use std::ffi::c_void;

/// Runs the gated norm.
pub(crate) fn norm(
    plan: &NormPlan,
    x: &CudaStorage,
    z: &CudaStorage,
    weight: &CudaStorage,
    eps: f64,
    sigmoid: bool,
) -> Result<CudaStorage> {
    let (name, dtype, weight_dtype) = ("gated_rms_norm", x.dtype(), weight.dtype());
    let stream = &*stream_of(x)?;
    let mut out = alloc(x, &plan.out_shape)?;
    let (x, z, weight) = (read(x, stream)?, read(z, stream)?, read(weight, stream)?);
    let to = write(&mut out, stream)?;
    let params = gdn::NormParams {
        x: heads(&x, plan.x, dtype),
        z: heads(&z, plan.z, dtype),
        out: dense(&to, 0, plan.heads, plan.dim),
        weight: weight.at(plan.weight_offset, weight_dtype.size_in_bytes()),
        tokens: plan.tokens as i64,
        heads: int(name, "heads", plan.heads)?,
        head_v: plan.dim as i32,
        io_dtype: dtype_code(dtype),
        weight_dtype: dtype_code(weight_dtype),
        sigmoid: sigmoid.into(),
        eps: eps as f32,
    };
    // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
    check(name, unsafe { gdn::gdn_norm(&params, stream.cu_stream().cast::<c_void>()) })?;
    drop(to);
    Ok(out)
}
