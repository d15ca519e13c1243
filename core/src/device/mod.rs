//! Everything that knows candle's storages: how a kernel is launched, where its output goes, what it writes in place, and
//! CUDA devices as programs that serve a model want them.

mod apply;
#[cfg(feature = "cuda")]
mod arena;
mod in_place;
mod launch;
mod locked;
#[cfg(feature = "cuda")]
mod pointers;
mod side_output;
#[cfg(feature = "cuda")]
mod stream_lock;
pub mod testing;
mod threads;

pub use apply::{apply1, apply2, apply3};
pub use in_place::*;
pub use launch::{Arena, Launch};
pub use locked::Locked;
pub use side_output::SideOutput;
pub use threads::{LastThread, Working};

/// The same for CUDA.
#[cfg(feature = "cuda")]
pub mod cuda {
    pub use super::arena::{alloc, finish, undo, with_workspace};
    pub use super::pointers::*;
    pub use super::stream_lock::{capture, is_per_thread, StreamGuard};
    pub use super::testing;

    use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute as Attribute;
    use candle_core::cuda_backend::cudarc::driver::CudaContext;

    /// [`check_gpu`](super::check_gpu) for a context.
    pub(super) fn check_context(context: &CudaContext) -> candle_core::Result<()> {
        static PASSED: super::Passed = super::Passed(std::sync::atomic::AtomicU64::new(0));
        PASSED.or_check(context.ordinal(), || {
            let ask = |attribute| context.attribute(attribute).map_err(candle_core::Error::wrap);
            let major = ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
            super::check_capability(major, ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?)
        })
    }
}

use candle_core::{Device, Result};

/// CUDA device `ordinal`, all of whose work goes to one stream, whichever host thread it comes from.
///
/// A device that `Device::new_cuda` makes has a stream for each host thread. Those cannot be captured as CUDA graphs
/// (the driver hangs or crashes when such a thread ends), and what two threads launch is not ordered.
/// `Device::new_cuda_with_stream` has one stream, but cudarc then guards every tensor with events, which cost the host
/// time and keep kernels from overlapping; on this device they are off, as one stream needs none.
///
/// Tensors of it and of another candle device on the same GPU meet only after `Device::synchronize`, and no
/// streams may be added to its context.
///
/// # Errors
/// Without the feature `cuda`, or where there is no such GPU, or it is older than [`check_gpu`] allows.
pub fn single_stream_device(ordinal: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(ordinal)?;
    check_gpu(&device)?;
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = &device {
        // SAFETY: the context is this device's own and new: every allocation to come is made, used and freed on its one
        // stream.
        unsafe { device.cuda_stream().context().disable_event_tracking() };
    }
    Ok(device)
}

/// That the kernels run on this GPU; any other device is fine. The driver is asked once for each GPU of the machine; later calls read
/// one number.
///
/// # Errors
/// When its compute capability is below 8.0.
pub fn check_gpu(device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return cuda::check_context(device.cuda_stream().context());
    }
    let _ = device;
    Ok(())
}

/// Numbers for which a check has passed. Those above 63 are checked each time.
#[cfg(any(feature = "cuda", test))]
struct Passed(std::sync::atomic::AtomicU64);

#[cfg(any(feature = "cuda", test))]
impl Passed {
    fn or_check(&self, number: usize, check: impl FnOnce() -> Result<()>) -> Result<()> {
        use std::sync::atomic::Ordering::Relaxed;
        let bit = 1u64.checked_shl(u32::try_from(number).unwrap_or(u32::MAX)).unwrap_or(0);
        if self.0.load(Relaxed) & bit == 0 {
            check()?;
            self.0.fetch_or(bit, Relaxed);
        }
        Ok(())
    }
}

#[cfg(any(feature = "cuda", test))]
fn check_capability(major: i32, minor: i32) -> Result<()> {
    if major < 8 {
        candle_core::bail!(
            "the GPU has compute capability {major}.{minor}, and the kernels need 8.0 or newer (RTX 30, A100 and later)"
        )
    }
    Ok(())
}

#[cfg(test)]
#[test]
fn old_gpus_are_refused() {
    let error = check_capability(7, 5).unwrap_err().to_string();
    assert!(error.starts_with("the GPU has compute capability 7.5, and the kernels need 8.0"), "{error}");
    assert!(check_capability(8, 0).is_ok() && check_capability(12, 0).is_ok());
}

#[cfg(test)]
#[test]
fn a_gpu_is_asked_until_it_has_passed() {
    let (passed, asked) = (Passed(0.into()), std::cell::Cell::new(0));
    let capability = |number: usize, major: i32| {
        passed.or_check(number, || {
            asked.set(asked.get() + 1);
            check_capability(major, 0)
        })
    };
    assert!(capability(0, 7).is_err() && capability(0, 7).is_err());
    assert_eq!(asked.get(), 2, "a refusal stays one");
    assert!(capability(0, 9).is_ok() && capability(0, 7).is_ok() && capability(1, 7).is_err());
    assert_eq!(asked.get(), 4);
    assert!(capability(64, 9).is_ok() && capability(64, 7).is_err(), "beyond what is kept");
}

/// Lets a CUDA device keep the memory that is freed instead of returning it to the system at every synchronisation.
///
/// candle allocates from the device's stream-ordered pool, which by default gives back all that is free whenever the
/// host waits for the device. The next allocation then has to map memory again, which can take longer than the kernels it
/// is for: a program that runs in a loop should call this once. It holds for the whole process and device; a limit that
/// was set before is kept. Other processes see the kept memory as used.
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
