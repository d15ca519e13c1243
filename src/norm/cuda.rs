//! `gdn_norm`: the gated norm.

use super::{GateActivation, GatedRmsNorm, NormPlan, OP};
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};
use candle_gdn_core::abi as gdn;
use candle_gdn_core::device::cuda::*;
use std::ffi::c_void;

/// Runs a checked call.
pub(super) fn run(
    op: &GatedRmsNorm,
    plan: &NormPlan,
    x: &CudaStorage,
    z: &CudaStorage,
    weight: &CudaStorage,
) -> Result<CudaStorage> {
    let (dtype, weight_dtype) = (x.dtype(), weight.dtype());
    let stream = &*stream_of(x)?;
    let mut out = alloc_of(x.device(), dtype, plan.out_shape.dims())?;
    let (x, z, weight) = (read(x, stream)?, read(z, stream)?, read(weight, stream)?);
    let dst = write(&mut out, stream)?;
    let params = gdn::NormParams {
        x: heads(&x, plan.x, dtype),
        z: heads(&z, plan.z, dtype),
        out: dense(&dst, 0, plan.heads, plan.dim),
        weight: weight.at(plan.weight_offset, weight_dtype.size_in_bytes()),
        tokens: plan.tokens as i64,
        heads: int(OP, "heads", plan.heads)?,
        head_v: plan.dim as i32,
        io_dtype: dtype_code(dtype),
        weight_dtype: dtype_code(weight_dtype),
        sigmoid: (op.gate == GateActivation::Sigmoid).into(),
        eps: op.eps as f32,
    };
    // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
    check(OP, unsafe { gdn::gdn_norm(&params, stream.cu_stream().cast::<c_void>()) })?;
    drop(dst);
    Ok(out)
}
