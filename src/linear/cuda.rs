//! `gdn_linear`: projections of few rows, where reading the weight is all the work.

use candle_core::backend::BackendStorage;
use candle_core::{bail, DType, Layout, Result, Shape, Tensor};
use candle_gdn_core::abi::{self as gdn, gdn_linear};
use candle_gdn_core::check::{CpuArg, CpuOutput, CudaArg, CudaOutput};
use candle_gdn_core::custom_op;
use candle_gdn_core::device::cuda::{alloc, check, dtype_code, int, read, stream_of, write};
use candle_gdn_core::device::{apply2, Launch};
use std::ffi::c_void;

const OP: &str = "linear";

/// `x [rows, in]` times the transpose of `weight [out, in]`; `None` where the kernel does not support them. With
/// `launch.overlap` the weight is read while the kernel before this one on the stream may still run.
pub fn multiply(x: &Tensor, weight: &Tensor, launch: &Launch) -> Result<Option<Tensor>> {
    let (rows, inputs) = x.dims2()?;
    let (outputs, weight_inputs) = weight.dims2()?;
    // Rows of 16-byte units; the kernel has no gradient.
    let aligned = |layout: &Layout| {
        let stride = layout.stride();
        stride[1] == 1 && (stride[0] | layout.start_offset()) & 7 == 0
    };
    let supported = x.device().is_cuda()
        && weight.device().same_device(x.device())
        && matches!(x.dtype(), DType::BF16 | DType::F16)
        && weight.dtype() == x.dtype()
        && (1..=gdn::GDN_LINEAR_ROWS).contains(&rows)
        && inputs == weight_inputs
        && inputs > 0
        && inputs % 64 == 0
        && outputs > 0
        && aligned(x.layout())
        && aligned(weight.layout())
        && !x.track_op()
        && !weight.track_op();
    match supported {
        true => apply2(&FewRows { launch }, launch.arena.as_ref(), [("x", x), ("weight", weight)]).map(Some),
        false => Ok(None),
    }
}

struct FewRows<'a> {
    launch: &'a Launch,
}

custom_op!(CustomOp2 for FewRows<'_>, OP, x x_layout, weight weight_layout);

impl FewRows<'_> {
    fn on_cpu(&self, _: [CpuArg<'_>; 2]) -> CpuOutput {
        bail!("{OP}: x: expected a CUDA tensor")
    }

    fn on_cuda(&self, [(x, x_layout), (weight, weight_layout)]: [CudaArg<'_>; 2]) -> CudaOutput {
        let ((rows, inputs), (outputs, _)) = (x_layout.shape().dims2()?, weight_layout.shape().dims2()?);
        let (dtype, size) = (x.dtype(), x.dtype().size_in_bytes());
        let stream = &*stream_of(x)?;
        let mut out = alloc(self.launch.arena.as_ref(), x, &[rows, outputs])?;
        let (x, w) = (read(x, stream)?, read(weight, stream)?);
        let y = write(&mut out, stream)?;
        let params = gdn::LinearParams {
            x: x.at::<c_void>(x_layout.start_offset(), size).cast_const(),
            w: w.at::<c_void>(weight_layout.start_offset(), size).cast_const(),
            y: y.at(0, size),
            x_stride: x_layout.stride()[0] as i64,
            w_stride: weight_layout.stride()[0] as i64,
            y_stride: outputs as i64,
            rows: int(OP, "rows", rows)?,
            inputs: int(OP, "inputs", inputs)?,
            outputs: int(OP, "outputs", outputs)?,
            dtype: dtype_code(dtype),
            overlap: self.launch.overlap.into(),
        };
        // SAFETY: the launcher reads the parameters; the kernel reads `rows` rows of x and all of the weight, both of
        // `inputs` elements as their layouts say, and writes the rows of y; the guards outlive the launch.
        check(OP, unsafe { gdn_linear(&params, stream.cu_stream().cast::<c_void>()) })?;
        drop(y);
        Ok((out, Shape::from((rows, outputs))))
    }
}

#[cfg(test)]
mod tests;
