//! `gdn_linear`: projections of few rows, where reading the weight is all the work.

use candle_core::backend::BackendStorage;
use candle_core::{bail, CpuStorage, CudaStorage, CustomOp2, DType, Layout, Result, Shape, Tensor};
use candle_gdn_core::abi::{self as gdn, gdn_linear};
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
        true => apply2(&FewRows { launch }, launch.arena.as_ref(), x, weight).map(Some),
        false => Ok(None),
    }
}

struct FewRows<'a> {
    launch: &'a Launch,
}

impl CustomOp2 for FewRows<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("{OP}: x: expected a CUDA tensor")
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
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
mod tests {
    use super::*;
    use candle_core::Device;
    use candle_gdn_core::device::cuda::testing::device;

    /// Smooth enough to be anything, and no two alike.
    fn numbers(rows: usize, columns: usize, seed: f64) -> Tensor {
        let values: Vec<f64> = (0..rows * columns).map(|i| (seed + i as f64 * 0.61).sin()).collect();
        Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap()
    }

    fn norm(x: &Tensor) -> f64 {
        x.sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap().sqrt()
    }

    #[test]
    fn equals_the_product_in_f64() {
        let Some(device) = device() else { return };
        // An output's rounding is at most half a unit in its last place.
        for (dtype, bound) in [(DType::BF16, 4e-3), (DType::F16, 5e-4)] {
            for (inputs, outputs) in [(64, 1), (192, 33), (1024, 100), (2560, 257)] {
                for rows in [1, 2, 7, 8, 9, 16, 17, 32] {
                    // Both lie among other values, which must play no part.
                    let part = |seed: f64, first: usize, n: usize| {
                        let whole = numbers(n + 3, inputs, seed).to_dtype(dtype).unwrap();
                        let here = whole.narrow(0, first, n).unwrap().to_dtype(DType::F64).unwrap();
                        (here, whole.to_device(&device).unwrap().narrow(0, first, n).unwrap())
                    };
                    let ((x_here, x), (w_here, w)) = (part(0.3, 1, rows), part(0.7, 2, outputs));
                    let want = x_here.matmul(&w_here.t().unwrap()).unwrap();
                    device.synchronize().unwrap();
                    for overlap in [false, true] {
                        let y = multiply(&x, &w, &Launch { overlap, arena: None })
                            .unwrap()
                            .expect("a shape that the kernel takes");
                        let y = y.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
                        let error = norm(&(&y - &want).unwrap()) / norm(&want);
                        assert!(error < bound, "{dtype:?} {rows}x{inputs} -> {outputs}: {error}");
                    }
                }
            }
        }
    }

    #[test]
    fn leaves_other_shapes_to_matmul() {
        let Some(device) = device() else { return };
        let of = |rows: usize, inputs: usize, dtype| Tensor::zeros((rows, inputs), dtype, &device).unwrap();
        let takes = |x: &Tensor, w: &Tensor| multiply(x, w, &Launch::default()).unwrap().is_some();
        let (x, w) = (of(4, 128, DType::BF16), of(16, 128, DType::BF16));
        assert!(takes(&x, &w));
        assert!(!takes(&of(33, 128, DType::BF16), &w));
        assert!(!takes(&of(0, 128, DType::BF16), &w));
        assert!(!takes(&of(4, 128, DType::F32), &of(16, 128, DType::F32)));
        assert!(!takes(&of(4, 96, DType::BF16), &of(16, 96, DType::BF16)));
        let off = of(4, 192, DType::BF16).narrow(1, 4, 128).unwrap();
        assert!(!takes(&off, &w));
    }
}
