//! Memory that candle's CUDA allocations come from.

use candle_core::{Device, Result};

/// Lets a CUDA device keep the memory that is freed instead of returning it to the system at every synchronisation.
///
/// candle allocates from the device's stream-ordered pool, which by default gives back all that is free whenever the
/// host waits for the device. The next allocation then has to map memory anew, which can take longer than the kernels it
/// is for: a program that runs in a loop should call this once. It holds for the whole process and device; a limit that
/// someone has set already is left alone. What is kept counts as used for other processes.
///
/// Does nothing on other devices, or where the device has no such pool.
///
/// # Errors
/// When the driver refuses.
pub fn keep_freed_memory(device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return cuda(device);
    }
    let _ = device;
    Ok(())
}

#[cfg(feature = "cuda")]
fn cuda(device: &candle_core::CudaDevice) -> Result<()> {
    use candle_core::cuda_backend::cudarc::driver::result::{device::get_mem_pool, mem_pool};
    use candle_core::cuda_backend::cudarc::driver::sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    use candle_core::Error;

    let stream = device.cuda_stream();
    let context = stream.context();
    if !context.has_async_alloc() {
        return Ok(());
    }
    context.bind_to_thread().map_err(Error::wrap)?;
    let mut bytes = 0u64;
    // SAFETY: the device is candle's, the pool its current one, and the attribute a u64.
    unsafe {
        let pool = get_mem_pool(context.cu_device()).map_err(Error::wrap)?;
        mem_pool::get_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, (&raw mut bytes).cast())
            .map_err(Error::wrap)?;
        if bytes == 0 {
            bytes = u64::MAX;
            mem_pool::set_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, (&raw mut bytes).cast())
                .map_err(Error::wrap)?;
        }
    }
    Ok(())
}
