//! Tensors on the CPU as plain slices, for the kernels in [`crate::cpu`].

use crate::cpu::matmul::Weights;
use candle_core::{bail, CpuStorage, DType, Device, Result, Shape, Storage, Tensor};

/// Calls `f` with the values of a tensor on the CPU in f32, row by row.
pub fn with_f32<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
    with_f32s([x], |[x]| f(x))
}

/// [`with_f32`] of several tensors.
pub fn with_f32s<const N: usize, R>(x: [&Tensor; N], f: impl FnOnce([&[f32]; N]) -> R) -> Result<R> {
    let mut dense = x.map(Tensor::clone);
    for x in &mut dense {
        *x = x.to_dtype(DType::F32)?.contiguous()?;
    }
    let guards = dense.each_ref().map(Tensor::storage_and_layout);
    let mut slices = [&[][..]; N];
    for (slice, (storage, layout)) in slices.iter_mut().zip(&guards) {
        let Storage::Cpu(CpuStorage::F32(data)) = &**storage else { bail!("expected a tensor on the CPU") };
        *slice = &data[layout.start_offset()..][..layout.shape().elem_count()];
    }
    Ok(f(slices))
}

/// The tensor of `data`, in `dtype`.
pub fn tensor(data: Vec<f32>, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    Tensor::from_vec(data, shape.into(), &Device::Cpu)?.to_dtype(dtype)
}

/// The weights `[n, k]` or `[count, n, k]` of a float dtype, packed for the CPU's products.
pub fn pack(weights: &Tensor) -> Result<Weights> {
    let (count, n, k) = match *weights.dims() {
        [n, k] => (1, n, k),
        [count, n, k] => (count, n, k),
        ref dims => bail!("weight: expected two or three dimensions, got {dims:?}"),
    };
    let weights = weights.contiguous()?;
    let (storage, layout) = weights.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + count * n * k;
    match &*storage {
        Storage::Cpu(CpuStorage::F32(data)) => Ok(Weights::pack_f32(&data[range], count, n, k)),
        Storage::Cpu(CpuStorage::BF16(data)) => Ok(Weights::pack_half(&data[range], count, n, k)),
        Storage::Cpu(CpuStorage::F16(data)) => Ok(Weights::pack_half(&data[range], count, n, k)),
        _ => bail!("weight: expected f32, bf16 or f16 on the CPU, got {:?}", weights.dtype()),
    }
}
