//! `gdn_scaled`, products with weights in e4m3 and dense ones that end in SwiGLU, and `gdn_dequantize`.

use crate::abi::scaled::{self as abi, gdn_dequantize, gdn_scaled};
use crate::cuda::apply;
use crate::weights::plan::{self, Kernel};
use crate::weights::E4m3;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::result::memcpy_dtod_async;
use candle_core::{bail, DType, Error, Layout, Result, Shape, Storage, Tensor};
use candle_gdn_core::abi::GDN_BAD_ALGO;
use candle_gdn_core::device::cuda::{
    alloc, alloc_of, check, dtype_code, finish, int, read, stream_of, undo, write, Pointer,
};
use candle_gdn_core::{held, held_or_none};
use candle_gdn_core::{Launch, Working};
use std::ffi::c_void;
use std::ptr::null;

const OP: &str = "linear";

/// `x [rows, in]` times the transpose of `weight` and, to the right of it, of the rows `below [rows, in]` in x's dtype.
pub(crate) fn e4m3(x: &Tensor, weight: &E4m3, below: Option<&Tensor>, launch: &Launch) -> Result<Tensor> {
    if let Some(y) = e4m3_as_stored(x, weight, below, launch)? {
        return Ok(y);
    }
    x.matmul(&dequantized(weight, below, x.dtype())?.t()?)
}

/// The same by the kernel that reads the bytes; `None` where it does not support x, or x does not fit.
fn e4m3_as_stored(x: &Tensor, weight: &E4m3, below: Option<&Tensor>, launch: &Launch) -> Result<Option<Tensor>> {
    let supported = plan::e4m3(x.dim(0)?) == Kernel::Few
        && x.dim(0)? > 0
        && supports(x, &weight.bytes)
        && below.is_none_or(|below| is_below(below, weight) && below.dtype() == x.dtype());
    match supported {
        true => Product { weight: &weight.bytes, scales: Some(weight), below, swiglu: false }.run(x, launch),
        false => Ok(None),
    }
}

/// `silu(x gate^T) * (x up^T)` with the weight's rows those of the gate, then up's; `None` as above, and for more than 8 rows.
pub(crate) fn e4m3_swiglu(x: &Tensor, weight: &E4m3, launch: &Launch) -> Result<Option<Tensor>> {
    match plan::swiglu_fits(x.dim(0)?, weight.bytes.dim(0)?) && supports(x, &weight.bytes) {
        true => Product { weight: &weight.bytes, scales: Some(weight), below: None, swiglu: true }.run(x, launch),
        false => Ok(None),
    }
}

/// The same of a dense weight; `None` also where a product and a kernel after it are faster.
pub(crate) fn dense_swiglu(x: &Tensor, weight: &Tensor, launch: &Launch) -> Result<Option<Tensor>> {
    let supported = plan::dense_swiglu_wins(x.dim(0)?, x.dim(1)?)
        && plan::swiglu_fits(x.dim(0)?, weight.dim(0)?)
        && weight.dtype() == x.dtype()
        && x.dim(1)?.is_multiple_of(64)
        && are_aligned(weight.layout())
        && !weight.track_op()
        && supports(x, weight);
    match supported {
        true => Product { weight, scales: None, below: None, swiglu: true }.run(x, launch),
        false => Ok(None),
    }
}

/// Whether the kernel reads x beside a weight. It has no gradient.
fn supports(x: &Tensor, weight: &Tensor) -> bool {
    x.device().is_cuda()
        && x.device().same_device(weight.device())
        && matches!(x.dtype(), DType::BF16 | DType::F16)
        && x.dims()[1] == weight.dims()[1]
        && x.dims()[1] > 0
        && weight.dims()[0] > 0
        && are_aligned(x.layout())
        && !x.track_op()
}

/// Rows of 16-byte units.
fn are_aligned(layout: &Layout) -> bool {
    layout.stride()[1] == 1 && (layout.stride()[0] | layout.start_offset()) & 7 == 0
}

/// Whether `below` can be the rows below a weight.
fn is_below(below: &Tensor, weight: &E4m3) -> bool {
    below.dims()[1] == weight.bytes.dims()[1]
        && below.is_contiguous()
        && below.device().same_device(weight.bytes.device())
}

/// The scales of a weight, whose pointer is held.
pub(crate) fn scales_of(weight: &E4m3, scales: &Pointer<'_>) -> Result<abi::Scales> {
    let layout = weight.scales.layout();
    Ok(abi::Scales {
        ptr: scales.at::<f32>(layout.start_offset(), 4).cast_const(),
        stride: layout.stride()[0] as i64,
        rows: int(OP, "rows of a block", weight.block_rows)?,
    })
}

struct Product<'a> {
    weight: &'a Tensor,
    /// Of the weight, if it is in e4m3.
    scales: Option<&'a E4m3>,
    below: Option<&'a Tensor>,
    swiglu: bool,
}

impl Product<'_> {
    /// `None` where the kernel does not support so many rows.
    fn run(&self, x: &Tensor, launch: &Launch) -> Result<Option<Tensor>> {
        let Self { weight, below, .. } = *self;
        let _working = Working::new(x.device());
        let (guard, layout) = x.storage_and_layout();
        let Storage::Cuda(x) = &*guard else { bail!("{OP}: x: expected a CUDA tensor") };
        let (rows, inputs) = layout.shape().dims2()?;
        let all = weight.dim(0)? + below.map_or(Ok(0), |below| below.dim(0))?;
        let width = if self.swiglu { all / 2 } else { all };
        let outputs = if self.swiglu { width } else { weight.dim(0)? };
        let (dtype, size, stream) = (x.dtype(), x.dtype().size_in_bytes(), &*stream_of(x)?);
        let arena = launch.arena.as_ref();
        let mut out = alloc(arena, x, &[rows, width])?;
        let x = read(x, stream)?;
        held!(w, weight, stream);
        held_or_none!(scales, self.scales.map(|weight| &weight.scales), stream);
        held_or_none!(below_at, below, stream);
        let y = write(&mut out, stream)?;
        let params = abi::ScaledParams {
            x: x.at::<c_void>(layout.start_offset(), size).cast_const(),
            w: w.at::<c_void>(weight.layout().start_offset(), weight.dtype().size_in_bytes()).cast_const(),
            below: match (&below_at, below) {
                (Some(pointer), Some(tensor)) => {
                    pointer.at::<c_void>(tensor.layout().start_offset(), size).cast_const()
                }
                _ => null(),
            },
            y: y.at(0, size),
            scales: match (&scales, self.scales) {
                (Some(pointer), Some(weight)) => scales_of(weight, pointer)?,
                _ => abi::NO_SCALES,
            },
            x_stride: layout.stride()[0] as i64,
            w_stride: weight.layout().stride()[0] as i64,
            below_stride: inputs as i64,
            y_stride: width as i64,
            rows: int(OP, "rows", rows)?,
            inputs: int(OP, "inputs", inputs)?,
            outputs: int(OP, "outputs", outputs)?,
            outputs_below: int(OP, "rows below", width - outputs)?,
            swiglu: self.swiglu.into(),
            dtype: dtype_code(dtype),
            overlap: launch.overlap.into(),
        };
        // SAFETY: the launcher reads the parameters; the kernels read the rows of x, the weight, its scales and the rows below,
        // whose sizes were checked, and write the rows of y; the guards outlive the launches.
        let status = unsafe { gdn_scaled(&params, null(), stream.cu_stream().cast::<c_void>()) };
        drop(y);
        // Asking beforehand would choose twice.
        if status == GDN_BAD_ALGO && self.scales.is_some() {
            undo(arena, out)?;
            return Ok(None);
        }
        check(OP, status)?;
        finish(arena, out, Shape::from((rows, width))).map(Some)
    }
}

/// The numbers of `weight` and of the rows `below`, `[out, in]` in bf16 or f16, each rounded once.
fn dequantized(weight: &E4m3, below: Option<&Tensor>, dtype: DType) -> Result<Tensor> {
    apply("dequantize", None, &weight.bytes, |bytes, layout| {
        let fits = below.is_none_or(|below| below.dtype() == dtype && is_below(below, weight));
        if !matches!(dtype, DType::BF16 | DType::F16) || !fits {
            bail!("{OP}: x: expected bf16 or f16 as the weight's rows, got {dtype:?}")
        }
        let ((outputs, inputs), size) = (layout.shape().dims2()?, dtype.size_in_bytes());
        let all = outputs + below.map_or(Ok(0), |below| below.dim(0))?;
        let stream = &*stream_of(bytes)?;
        let mut out = alloc_of(bytes.device(), dtype, &[all, inputs])?;
        let bytes = read(bytes, stream)?;
        held!(scales, weight.scales, stream);
        held_or_none!(below_at, below, stream);
        let y = write(&mut out, stream)?;
        let params = abi::DequantizeParams {
            w: bytes.at::<c_void>(layout.start_offset(), 1).cast_const(),
            scales: scales_of(weight, &scales)?,
            y: y.at(0, size),
            w_stride: inputs as i64,
            y_stride: inputs as i64,
            outputs: int(OP, "outputs", outputs)?,
            inputs: int(OP, "inputs", inputs)?,
            dtype: dtype_code(dtype),
        };
        // SAFETY: the launcher reads the parameters; the kernel reads the weight and its scales and writes as many rows of
        // y; the guards outlive the launch.
        check(OP, unsafe { gdn_dequantize(&params, stream.cu_stream().cast::<c_void>()) })?;
        if let (Some(pointer), Some(tensor)) = (&below_at, below) {
            let source = pointer.at::<c_void>(tensor.layout().start_offset(), size) as u64;
            let rest = y.at::<c_void>(outputs * inputs, size) as u64;
            // SAFETY: both have as many rows, the rest of y after those just written.
            unsafe { memcpy_dtod_async(rest, source, tensor.elem_count() * size, stream.cu_stream()) }
                .map_err(Error::wrap)?;
        }
        drop(y);
        Ok((out, Shape::from((all, inputs))))
    })
}

#[cfg(test)]
mod tests;
