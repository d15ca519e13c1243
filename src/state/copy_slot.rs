//! A slot of a state over another one of the same tensor.

use candle_core::{bail, CpuStorage, Result, Tensor};
use candle_gdn_core::device::{in_place, StorageMut};

/// Copies slot `src` of `state` `[slots, ..]`, whose slots are contiguous, over slot `dst`, another one of the same
/// tensor, which candle's own copies refuse.
pub fn copy_slot(op: &'static str, state: &Tensor, src: usize, dst: usize) -> Result<()> {
    in_place(op, state, |storage, layout| {
        let (len, stride) = (layout.dims()[1..].iter().product::<usize>(), layout.stride()[0]);
        let [src, dst] = [src, dst].map(|slot| layout.start_offset() + slot * stride);
        match storage {
            StorageMut::Cpu(CpuStorage::F32(data)) => data.copy_within(src..src + len, dst),
            StorageMut::Cpu(CpuStorage::BF16(data)) => data.copy_within(src..src + len, dst),
            StorageMut::Cpu(CpuStorage::F16(data)) => data.copy_within(src..src + len, dst),
            StorageMut::Cpu(_) => bail!("{op}: expected a state in f32, bf16 or f16"),
            #[cfg(feature = "cuda")]
            StorageMut::Cuda(storage) => copy_on_cuda(storage, src, dst, len)?,
        }
        Ok(())
    })
}

/// Copies `len` elements of a storage.
#[cfg(feature = "cuda")]
fn copy_on_cuda(storage: &mut candle_core::CudaStorage, src: usize, dst: usize, len: usize) -> Result<()> {
    use candle_core::backend::BackendStorage;
    use candle_core::cuda_backend::cudarc::driver::result::memcpy_dtod_async;
    use candle_gdn_core::device::cuda::{stream_of, write};
    use std::ffi::c_void;

    let size = storage.dtype().size_in_bytes();
    let stream = &*stream_of(storage)?;
    let pointer = write(storage, stream)?;
    let [src, dst] = [src, dst].map(|start| pointer.at::<c_void>(start, size) as u64);
    // SAFETY: both slots lie in the storage and do not overlap.
    unsafe { memcpy_dtod_async(dst, src, len * size, stream.cu_stream()) }.map_err(candle_core::Error::wrap)
}
