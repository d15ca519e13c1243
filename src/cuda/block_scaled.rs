//! `gdn_linear` of weights in e4m3, and `gdn_dequantize` for more rows than it takes.

use crate::abi::{self as gdn, gdn_dequantize, gdn_linear_with, LinearOptions};
use crate::block_scaled::BlockScaled;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::result::memcpy_dtod_async;
use candle_core::{bail, CpuStorage, CudaStorage, CustomOp1, DType, Error, Layout, Result, Shape, Storage, Tensor};
use candle_gdn_core::device::cuda::{
    alloc, alloc_of, check, dtype_code, finish, int, read, stream_of, undo, write, Pointer,
};
use candle_gdn_core::device::{apply1, Launch, Working};
use candle_gdn_core::{held, held_or_none};
use std::ffi::c_void;
use std::ptr::null;

const OP: &str = "linear";

/// Rows of x that are multiplied with the bytes at most, which reads them once: dequantising for a product reads and writes
/// five a number.
const FEW: usize = 2 * gdn::GDN_LINEAR_ROWS;

/// `x [rows, in]` times the transpose of `weight`; `None` where there are more rows than the device takes of this width, or
/// not of pieces of 16 bytes.
pub fn few_rows(x: &Tensor, weight: &BlockScaled, launch: &Launch) -> Result<Option<Tensor>> {
    let takes = (1..=FEW).contains(&x.dim(0)?) && takes(x, weight);
    match takes {
        true => run(x, weight, launch, false),
        false => Ok(None),
    }
}

/// `silu(x gate^T) * (x up^T)` with the weight's rows those of the gate, then up's; `None` as above, and where up to 8
/// rows are one too few.
pub fn few_rows_swiglu(x: &Tensor, weight: &BlockScaled, launch: &Launch) -> Result<Option<Tensor>> {
    let takes = (1..=gdn::GDN_LINEAR_SWIGLU_ROWS).contains(&x.dim(0)?)
        && weight.below().is_none()
        && weight.outputs().is_multiple_of(2)
        && takes(x, weight);
    match takes {
        true => run(x, weight, launch, true),
        false => Ok(None),
    }
}

fn takes(x: &Tensor, weight: &BlockScaled) -> bool {
    let (layout, dtype) = (x.layout(), x.dtype());
    x.device().same_device(weight.bytes().device())
        && matches!(dtype, DType::BF16 | DType::F16)
        && weight.below().is_none_or(|below| below.dtype() == dtype)
        && layout.dims()[1] == weight.inputs()
        && layout.stride()[1] == 1
        && (layout.stride()[0] | layout.start_offset()) & 7 == 0
        && weight.outputs() > 0
        && !x.track_op()
}

/// The numbers that `weight` stands for, `[out, in]` in bf16 or f16, each rounded once.
pub fn dense(weight: &BlockScaled, dtype: DType) -> Result<Tensor> {
    apply1(&Dense { weight, dtype }, None, weight.bytes())
}

/// The scales of a weight, whose pointer is held.
pub fn scales_of(weight: &BlockScaled, scales: &Pointer<'_>) -> Result<gdn::Scales> {
    let layout = weight.scales().layout();
    Ok(gdn::Scales {
        ptr: scales.at::<f32>(layout.start_offset(), 4).cast_const(),
        stride: layout.stride()[0] as i64,
        rows: int(OP, "rows of a block", weight.block_rows())?,
    })
}

/// `None` where the kernel does not take so many rows.
fn run(x: &Tensor, weight: &BlockScaled, launch: &Launch, swiglu: bool) -> Result<Option<Tensor>> {
    let _working = Working::new(x.device());
    let (guard, layout) = x.storage_and_layout();
    let Storage::Cuda(x) = &*guard else { bail!("{OP}: x: expected a CUDA tensor") };
    let (rows, inputs) = layout.shape().dims2()?;
    let width = if swiglu { weight.outputs() / 2 } else { weight.outputs() };
    let (dtype, size, stream) = (x.dtype(), x.dtype().size_in_bytes(), &*stream_of(x)?);
    let arena = launch.arena.as_ref();
    let mut out = alloc(arena, x, &[rows, width])?;
    let x = read(x, stream)?;
    held!(bytes, weight.bytes(), stream);
    held!(scales, weight.scales(), stream);
    held_or_none!(below, weight.below(), stream);
    let y = write(&mut out, stream)?;
    let rows_below = match (&below, weight.below()) {
        (Some(pointer), Some(tensor)) => pointer.at::<c_void>(tensor.layout().start_offset(), size).cast_const(),
        _ => null(),
    };
    let outputs = if swiglu { width } else { weight.bytes().dim(0)? };
    let params = gdn::LinearParams {
        x: x.at::<c_void>(layout.start_offset(), size).cast_const(),
        w: bytes.at::<c_void>(weight.bytes().layout().start_offset(), 1).cast_const(),
        below: rows_below,
        y: y.at(0, size),
        scales: scales_of(weight, &scales)?,
        x_stride: layout.stride()[0] as i64,
        w_stride: inputs as i64,
        below_stride: inputs as i64,
        y_stride: width as i64,
        rows: int(OP, "rows", rows)?,
        inputs: int(OP, "inputs", inputs)?,
        outputs: int(OP, "outputs", outputs)?,
        outputs_below: int(OP, "rows below", width - outputs)?,
        dtype: dtype_code(dtype),
        overlap: launch.overlap.into(),
    };
    let options = LinearOptions { swiglu: swiglu.into(), ..LinearOptions::default() };
    // SAFETY: the launcher reads the parameters; the kernels read the rows of x, the weight and its scales, all of sizes that
    // `BlockScaled` has checked, and write the rows of y; the guards outlive the launches.
    let status = unsafe { gdn_linear_with(&params, &options, stream.cu_stream().cast::<c_void>()) };
    drop(y);
    // Asking beforehand would choose twice.
    if status == gdn::GDN_BAD_ALGO {
        undo(arena, out)?;
        return Ok(None);
    }
    check(OP, status)?;
    finish(arena, out, Shape::from((rows, width))).map(Some)
}

struct Dense<'a> {
    weight: &'a BlockScaled,
    dtype: DType,
}

impl CustomOp1 for Dense<'_> {
    fn name(&self) -> &'static str {
        "dequantize"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("dequantize: expected a CUDA tensor")
    }

    fn cuda_fwd(&self, bytes: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let Self { weight, dtype } = self;
        if !matches!(dtype, DType::BF16 | DType::F16) || weight.below().is_some_and(|below| below.dtype() != *dtype) {
            bail!("{OP}: x: expected bf16 or f16 as the weight's rows, got {dtype:?}")
        }
        let ((outputs, inputs), size) = (layout.shape().dims2()?, dtype.size_in_bytes());
        let (all, stream) = (weight.outputs(), &*stream_of(bytes)?);
        let mut out = alloc_of(bytes.device(), *dtype, &[all, inputs])?;
        let bytes = read(bytes, stream)?;
        held!(scales, weight.scales(), stream);
        held_or_none!(below, weight.below(), stream);
        let y = write(&mut out, stream)?;
        let params = gdn::DequantizeParams {
            w: bytes.at::<c_void>(layout.start_offset(), 1).cast_const(),
            scales: scales_of(weight, &scales)?,
            y: y.at(0, size),
            w_stride: inputs as i64,
            y_stride: inputs as i64,
            outputs: int(OP, "outputs", outputs)?,
            inputs: int(OP, "inputs", inputs)?,
            dtype: dtype_code(*dtype),
        };
        // SAFETY: the launcher reads the parameters; the kernel reads the weight and its scales and writes as many rows of
        // y; the guards outlive the launch.
        check(OP, unsafe { gdn_dequantize(&params, stream.cu_stream().cast::<c_void>()) })?;
        if let (Some(pointer), Some(tensor)) = (&below, weight.below()) {
            let from = pointer.at::<c_void>(tensor.layout().start_offset(), size) as u64;
            let to = y.at::<c_void>(outputs * inputs, size) as u64;
            // SAFETY: both have as many rows, all that y has behind those just written.
            unsafe { memcpy_dtod_async(to, from, tensor.elem_count() * size, stream.cu_stream()) }
                .map_err(Error::wrap)?;
        }
        drop(y);
        Ok((out, Shape::from((all, inputs))))
    }
}

#[cfg(test)]
mod tests;
