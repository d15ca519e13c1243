//! Tensors on the CPU as plain slices, for the kernels in [`crate::cpu`].

use crate::by_dtype;
use crate::check::{heads, HeadsLayout};
use crate::cpu::matmul::Weights;
use crate::cpu::{Element, Sequences};
use crate::device::Locked;
use candle_core::op::BackpropOp;
use candle_core::{bail, CpuStorage, DType, Device, Result, Shape, Storage, Tensor};
use half::{bf16, f16};

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
    let locked = Locked::new(dense.each_ref());
    let mut slices = [&[][..]; N];
    for ((slice, storage), x) in slices.iter_mut().zip(locked.storages()).zip(&dense) {
        let Storage::Cpu(CpuStorage::F32(data)) = storage else { bail!("expected a tensor on the CPU") };
        *slice = &data[x.layout().start_offset()..][..x.elem_count()];
    }
    Ok(f(slices))
}

/// Calls `f` with the storages of tensors on the CPU.
pub fn with_storages<const N: usize, R>(x: [&Tensor; N], f: impl FnOnce([&CpuStorage; N]) -> Result<R>) -> Result<R> {
    if !x.iter().all(|x| x.device().is_cpu()) {
        bail!("expected tensors on the CPU");
    }
    f(Locked::new(x).storages().map(|storage| match storage {
        Storage::Cpu(storage) => storage,
        _ => unreachable!("the device was checked"),
    }))
}

/// The tensor of `data`, in `dtype`.
pub fn tensor(data: Vec<f32>, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    Tensor::from_vec(data, shape.into(), &Device::Cpu)?.to_dtype(dtype)
}

/// The tensor of what a kernel wrote.
pub fn tensor_of(storage: CpuStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cpu(storage), shape, BackpropOp::none(), false)
}

/// The weights `[n, k]` or `[count, n, k]` of a float dtype, packed for the CPU's products.
pub fn pack(weights: &Tensor) -> Result<Weights> {
    let (count, n, k) = match *weights.dims() {
        [n, k] => (1, n, k),
        [count, n, k] => (count, n, k),
        ref dims => bail!("weight: expected two or three dimensions, got {dims:?}"),
    };
    if n == 0 || k == 0 {
        bail!("weight: expected at least one row and one column, got {:?}", weights.dims());
    }
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

/// The rows of `[sequence, token, heads, dim]` on the CPU in f32, `[tokens, heads, dim]` in the packed order of sequences.
pub fn rows(
    storage: &CpuStorage,
    layout: HeadsLayout,
    seqs: Sequences<'_>,
    (count, dim): (usize, usize),
) -> Result<Vec<f32>> {
    fn widen<T: Element>(x: &[T], layout: HeadsLayout, seqs: Sequences<'_>, (count, dim): (usize, usize)) -> Vec<f32> {
        let x = heads(x, layout);
        let mut out = Vec::with_capacity(seqs.total_tokens() * count * dim);
        for n in 0..seqs.count {
            let (first, tokens) = seqs.range(n);
            for (t, h) in (first..first + tokens).flat_map(|t| (0..count).map(move |h| (t, h))) {
                out.extend(x.row(n, t, h, dim).iter().map(|x| x.to_f32()));
            }
        }
        out
    }
    Ok(by_dtype!(storage => widen(storage, layout, seqs, (count, dim)), else bail!("expected dtype f32, bf16 or f16")))
}

/// `len` values of a storage from element `start` on, in f32.
pub fn values(storage: &CpuStorage, start: usize, len: usize) -> Result<Vec<f32>> {
    fn widen<T: Element>(x: &[T]) -> Vec<f32> {
        x.iter().map(|x| x.to_f32()).collect()
    }
    Ok(by_dtype!(storage => widen(&storage[start..start + len]), else bail!("expected dtype f32, bf16 or f16")))
}

/// A storage of `dtype` with these numbers.
pub fn storage(data: Vec<f32>, dtype: DType) -> Result<CpuStorage> {
    Ok(match dtype {
        DType::F32 => CpuStorage::F32(data),
        DType::BF16 => CpuStorage::BF16(data.into_iter().map(<bf16 as Element>::from_f32).collect()),
        DType::F16 => CpuStorage::F16(data.into_iter().map(<f16 as Element>::from_f32).collect()),
        dtype => bail!("expected dtype f32, bf16 or f16, got {dtype:?}"),
    })
}
