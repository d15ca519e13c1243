//! `gdn_norm_backward`.

use super::super::{GateActivation, GatedRmsNorm, NormPlan, OP};
use candle_core::backend::BackendStorage;
use candle_core::{DType, Result, Tensor};
use candle_gdn_core::abi as gdn;
use candle_gdn_core::check::HeadsLayout;
use candle_gdn_core::device::cuda::*;
use candle_gdn_core::device::Locked;
use candle_gdn_core::held;
use std::ffi::c_void;
use std::ptr::null_mut;

/// The gradients of all arguments, that of the weight in f32.
pub(super) fn backward(
    op: &GatedRmsNorm,
    plan: &NormPlan,
    args: [&Tensor; 3],
    (grad, d_y): (&Tensor, HeadsLayout),
) -> Result<[Tensor; 3]> {
    let locked = Locked::new(args);
    let [x, z, weight] = cuda_storages(OP, locked.storages())?;
    let (device, dtype, weight_dtype) = (x.device(), x.dtype(), weight.dtype());
    let stream = &*stream_of(x)?;
    held!(grad, grad, stream);
    let (x, z, weight) = (read(x, stream)?, read(z, stream)?, read(weight, stream)?);
    let mut d_x = alloc_of(device, dtype, plan.out_shape.dims())?;
    let mut d_z = alloc_of(device, dtype, plan.out_shape.dims())?;
    let mut d_weight = alloc_of(device, DType::F32, &[plan.dim])?;
    {
        let (d_x, d_z) = (write(&mut d_x, stream)?, write(&mut d_z, stream)?);
        let d_weight = write(&mut d_weight, stream)?;
        let mut params = gdn::NormBackwardParams {
            x: heads(&x, plan.x, dtype),
            z: heads(&z, plan.z, dtype),
            d_out: heads(&grad, d_y, dtype),
            d_x: dense(&d_x, 0, plan.heads, plan.dim),
            d_z: dense(&d_z, 0, plan.heads, plan.dim),
            weight: weight.at(plan.weight_offset, weight_dtype.size_in_bytes()),
            d_weight: d_weight.at(0, 4),
            workspace: null_mut(),
            workspace_bytes: 0,
            tokens: plan.tokens as i64,
            heads: int(OP, "heads", plan.heads)?,
            head_v: plan.dim as i32,
            io_dtype: dtype_code(dtype),
            weight_dtype: dtype_code(weight_dtype),
            sigmoid: (op.gate == GateActivation::Sigmoid).into(),
            eps: op.eps as f32,
        };
        // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
        check(OP, unsafe { gdn::gdn_norm_backward_workspace(&params, &mut params.workspace_bytes) })?;
        with_workspace(None, device, stream, workspace_size(params.workspace_bytes), |workspace| {
            params.workspace = workspace;
            // SAFETY: as above.
            check(OP, unsafe { gdn::gdn_norm_backward(&params, stream.cu_stream().cast::<c_void>()) })
        })?;
    }
    let shape = &plan.out_shape;
    Ok([tensor_of(d_x, shape.clone()), tensor_of(d_z, shape.clone()), tensor_of(d_weight, plan.dim)])
}
