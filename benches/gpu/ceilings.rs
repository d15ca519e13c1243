//! What this card does at best, measured in the same run as everything that is held against it.

use crate::clock::Clock;
use anyhow::{Context, Result};
use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::cudarc::nvrtc::compile_ptx;
use candle_core::{DType, Device, Tensor};
use candle_gdn_benches::record::Ceilings;

/// A block copies 16 KiB, four loads of 16 bytes in flight a thread: the plain streaming kernel at its best. It and the
/// driver's copy are within a few per cent of each other; the better one counts. candle's own copies and element-wise
/// kernels reach half of this on an H200.
const COPY: &str = r#"
extern "C" __global__ void stream_copy(const float4 *x, float4 *y) {
  const size_t i = blockIdx.x * (size_t)1024 + threadIdx.x;
  const float4 a = x[i], b = x[i + 256], c = x[i + 512], d = x[i + 768];
  y[i] = a, y[i + 256] = b, y[i + 512] = c, y[i + 768] = d;
}"#;
/// 2 GiB there and 2 GiB back: far past the L2 cache.
const COPY_FLOATS: usize = 1 << 29;

/// Bytes read plus bytes written by a large copy.
fn copy_gb_s(clock: &Clock, device: &Device) -> Result<f64> {
    let cuda = device.as_cuda_device()?;
    let ptx = compile_ptx(COPY).context("the copy kernel")?.to_src();
    let copy = cuda.get_or_load_custom_func("stream_copy", "ceilings", &ptx)?;
    let from = Tensor::randn(0f32, 1., COPY_FLOATS, device)?;
    let (from, _) = from.storage_and_layout();
    let candle_core::Storage::Cuda(from) = &*from else { unreachable!("it was made on the GPU") };
    let from = from.as_cuda_slice::<f32>()?;
    // SAFETY: written before it is read, which nobody does.
    let mut to = unsafe { cuda.alloc::<f32>(COPY_FLOATS)? };
    let grid =
        LaunchConfig { grid_dim: ((COPY_FLOATS / 4096) as u32, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
    let ours = least_us(clock, || {
        let mut launch = copy.builder();
        launch.arg(from).arg(&mut to);
        // SAFETY: the grid covers both slices and no more.
        unsafe { launch.launch(grid) }.map_err(candle_core::Error::wrap)?;
        Ok(())
    })?;
    let drivers = least_us(clock, || cuda.memcpy_dtod(from, &mut to))?;
    Ok(2. * 4. * COPY_FLOATS as f64 / ours.min(drivers) / 1e3)
}

/// µs of a call: the least mean of four, of eight such means.
fn least_us(clock: &Clock, mut call: impl FnMut() -> candle_core::Result<()>) -> Result<f64> {
    (0..8).try_fold(f64::INFINITY, |least, _| Ok(least.min(clock.stream_us(4, &mut call)? / 4.)))
}

pub fn measure(clock: &Clock, device: &Device) -> Result<Ceilings> {
    let copy = copy_gb_s(clock, device)?;

    let n = 8192;
    let half = |_| -> candle_core::Result<Tensor> { Tensor::randn(0f32, 1., (n, n), device)?.to_dtype(DType::BF16) };
    let (a, b) = (half(())?, half(())?.t()?);
    let matmul = 2. * (n as f64).powi(3) / least_us(clock, || a.matmul(&b).map(|_| ()))? / 1e6;
    Ok(Ceilings { copy_gb_s: Some(copy.round()), matmul_tflop_s: Some((matmul * 10.).round() / 10.) })
}
