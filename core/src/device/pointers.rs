//! Device pointers of candle's storages, and the plain structs of the C ABI made of them.

use crate::abi;
use crate::check::HeadsLayout;
use crate::status::status_text;
use crate::SequencePlan;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use candle_core::op::BackpropOp;
use candle_core::{bail, CudaDevice, CudaStorage, DType, Layout, Result, Shape, Storage, Tensor};
use half::{bf16, f16};
use std::ffi::c_int;
use std::sync::Arc;

/// A device address and the guard that orders its use on the stream.
pub struct Pointer<'a> {
    address: u64,
    _order: SyncOnDrop<'a>,
}

impl Pointer<'_> {
    /// The address of element `offset`, of `size` bytes each.
    pub fn at<T>(&self, offset: usize, size: usize) -> *mut T {
        (self.address + (offset * size) as u64) as *mut T
    }
}

/// `$body` with `$slice` bound to the storage's typed slice.
macro_rules! with_slice {
    ($storage:expr, $method:ident, $slice:ident => $body:expr) => {
        with_slice!($storage, $method, $slice => $body; F32 f32, BF16 bf16, F16 f16, U8 u8, U32 u32)
    };
    ($storage:expr, $method:ident, $slice:ident => $body:expr; $($dtype:ident $type:ty),+) => {
        match $storage.dtype() {
            $(DType::$dtype => {
                let $slice = $storage.$method::<$type>()?;
                $body
            })+
            dtype => bail!("candle-gdn: no CUDA kernel supports dtype {dtype:?}"),
        }
    };
}

pub fn read<'a>(storage: &'a CudaStorage, stream: &'a CudaStream) -> Result<Pointer<'a>> {
    with_slice!(storage, as_cuda_slice, slice => {
        let (address, order) = slice.device_ptr(stream);
        Ok(Pointer { address, _order: order })
    })
}

pub fn write<'a>(storage: &'a mut CudaStorage, stream: &'a CudaStream) -> Result<Pointer<'a>> {
    with_slice!(storage, as_cuda_slice_mut, slice => {
        let (address, order) = slice.device_ptr_mut(stream);
        Ok(Pointer { address, _order: order })
    })
}

/// An output of which every element will be written. At least one element, since CUDA allocates no empty block.
pub fn alloc(like: &CudaStorage, shape: &[usize]) -> Result<CudaStorage> {
    alloc_of(like.device(), like.dtype(), shape)
}

/// The same of another dtype.
pub fn alloc_of(device: &CudaDevice, dtype: DType, shape: &[usize]) -> Result<CudaStorage> {
    let n = shape.iter().product::<usize>().max(1);
    // SAFETY: the kernels write every element of the shape.
    Ok(unsafe {
        match dtype {
            DType::F32 => CudaStorage::wrap_cuda_slice(device.alloc::<f32>(n)?, device.clone()),
            DType::BF16 => CudaStorage::wrap_cuda_slice(device.alloc::<bf16>(n)?, device.clone()),
            DType::F16 => CudaStorage::wrap_cuda_slice(device.alloc::<f16>(n)?, device.clone()),
            dtype => bail!("candle-gdn: no CUDA kernel writes dtype {dtype:?}"),
        }
    })
}

/// Zeros of a float dtype. At least one, since CUDA allocates no empty block.
pub fn zeros_of(device: &CudaDevice, dtype: DType, shape: &[usize]) -> Result<CudaStorage> {
    let n = shape.iter().product::<usize>().max(1);
    Ok(match dtype {
        DType::F32 => CudaStorage::wrap_cuda_slice(device.alloc_zeros::<f32>(n)?, device.clone()),
        DType::BF16 => CudaStorage::wrap_cuda_slice(device.alloc_zeros::<bf16>(n)?, device.clone()),
        DType::F16 => CudaStorage::wrap_cuda_slice(device.alloc_zeros::<f16>(n)?, device.clone()),
        dtype => bail!("candle-gdn: no CUDA kernel writes dtype {dtype:?}"),
    })
}

/// The tensor of an output that a kernel wrote.
pub fn tensor_of(storage: CudaStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}

/// The storages of tensors on CUDA.
pub fn cuda_storages<'a, const N: usize>(op: &str, storages: [&'a Storage; N]) -> Result<[&'a CudaStorage; N]> {
    if !storages.iter().all(|storage| matches!(storage, Storage::Cuda(_))) {
        bail!("{op}: expected CUDA tensors");
    }
    Ok(storages.map(|storage| match storage {
        Storage::Cuda(storage) => storage,
        _ => unreachable!("checked above"),
    }))
}

/// What a launcher answered about its workspace, in bytes.
pub fn workspace_size(bytes: i64) -> usize {
    usize::try_from(bytes).unwrap_or(0)
}

pub fn dtype_code(dtype: DType) -> i32 {
    match dtype {
        DType::BF16 => abi::GDN_BF16,
        DType::F16 => abi::GDN_F16,
        _ => abi::GDN_F32,
    }
}

pub fn heads(pointer: &Pointer<'_>, layout: HeadsLayout, dtype: DType) -> abi::Heads {
    abi::Heads {
        ptr: pointer.at(layout.offset, dtype.size_in_bytes()),
        seq_stride: layout.seq_stride as i64,
        token_stride: layout.token_stride as i64,
        head_stride: layout.head_stride as i64,
    }
}

/// A contiguous output `[tokens, heads, dim]`; `tokens` per sequence is zero where they are packed.
pub fn dense(pointer: &Pointer<'_>, tokens: usize, heads: usize, dim: usize) -> abi::Heads {
    let row = (heads * dim) as i64;
    abi::Heads { ptr: pointer.at(0, 0), seq_stride: tokens as i64 * row, token_stride: row, head_stride: dim as i64 }
}

/// The sequences of a launch, and the slots that it reads and those that it writes: of one state, whose layout is
/// `state`.
pub fn addressing(
    op: &str,
    seqs: &SequencePlan,
    cu_seqlens: *const u32,
    (read, write): (*const u32, *const u32),
    state: &Layout,
) -> Result<(abi::Sequences, abi::Slots, abi::Slots)> {
    let sequences = sequences_of(op, seqs, cu_seqlens)?;
    let (num_slots, slot_stride) = (seqs.num_slots as i64, state.stride()[0] as i64);
    let of = |slots| abi::Slots { slots, num_slots, slot_stride };
    Ok((sequences, of(read), of(write)))
}

/// The sequences of a launch.
pub fn sequences_of(op: &str, seqs: &SequencePlan, cu_seqlens: *const u32) -> Result<abi::Sequences> {
    Ok(abi::Sequences {
        cu_seqlens,
        num_seqs: int(op, "sequences", seqs.count)?,
        tokens_per_seq: int(op, "tokens", seqs.tokens)?,
        max_tokens_per_seq: int(op, "tokens", seqs.max_tokens)?,
        total_tokens: int(op, "tokens of all sequences", seqs.total_tokens)?,
    })
}

pub fn int(op: &str, arg: &str, value: usize) -> Result<i32> {
    i32::try_from(value).or_else(|_| bail!("{op}: {arg}: expected at most {} on CUDA, got {value}", i32::MAX))
}

pub fn check(op: &str, status: c_int) -> Result<()> {
    if status == abi::GDN_OK {
        return Ok(());
    }
    bail!("{op}: CUDA kernel refused with status {status}: {}", status_text(status))
}

/// The stream of a storage, with its context current on this thread for the launcher's runtime calls. Launches begin here, so a GPU
/// that the kernels do not run on is refused here.
pub fn stream_of(storage: &CudaStorage) -> Result<Arc<CudaStream>> {
    let stream = storage.device().cuda_stream();
    super::cuda::check_context(stream.context())?;
    stream.context().bind_to_thread().map_err(candle_core::Error::wrap)?;
    Ok(stream)
}

/// `$name`: a pointer to a tensor that the op holds. Its guards live to the end of the enclosing block.
#[macro_export]
macro_rules! held {
    ($name:ident, $tensor:expr, $stream:expr) => {
        let (guard, _) = $tensor.storage_and_layout();
        let candle_core::Storage::Cuda(storage) = &*guard else {
            candle_core::bail!("{}: expected a CUDA tensor", stringify!($name))
        };
        let $name = $crate::device::cuda::read(storage, $stream)?;
    };
}

/// `$name`: a pointer to an optional tensor.
#[macro_export]
macro_rules! held_or_none {
    ($name:ident, $tensor:expr, $stream:expr) => {
        let guard = $tensor.map(|t| t.storage_and_layout().0);
        let $name = match guard.as_deref() {
            Some(candle_core::Storage::Cuda(storage)) => Some($crate::device::cuda::read(storage, $stream)?),
            Some(_) => candle_core::bail!("{}: expected a CUDA tensor", stringify!($name)),
            None => None,
        };
    };
}

/// `$name`: a pointer to an optional u32 tensor, null where there is none.
#[macro_export]
macro_rules! held_u32 {
    ($name:ident, $tensor:expr, $stream:expr) => {
        let offset = $tensor.map_or(0, |t| t.layout().start_offset());
        $crate::held_or_none!($name, $tensor, $stream);
        let $name = $name.as_ref().map_or(std::ptr::null(), |p| p.at::<u32>(offset, 4).cast_const());
    };
}

/// `$name`: pointers to the slots read and written, which are u32; null where there are none.
#[macro_export]
macro_rules! held_slots {
    ($name:ident, $slots:expr, $stream:expr) => {
        let slots: Option<&$crate::Slots> = $slots;
        // One tensor that is both is locked once.
        let separate = slots.filter(|slots| !slots.in_place());
        $crate::held_u32!(slots_read, slots.map($crate::Slots::read), $stream);
        $crate::held_u32!(slots_write, separate.map($crate::Slots::write), $stream);
        let $name = (slots_read, if separate.is_some() { slots_write } else { slots_read });
    };
}
