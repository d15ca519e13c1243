//! The profile buffer on the device: allocated, registered for the launches of a closure, and read back.

use candle_core::cuda_backend::cudarc::driver::DevicePtrMut;
use candle_core::{bail, CudaDevice, Error, Result};
use candle_gdn_core::abi as gdn;
use candle_gdn_core::device::cuda::check;
use std::ffi::{c_char, CStr};

/// Bytes after the buffer that no kernel may write, and what they hold.
const GUARD: usize = 4096;
const PATTERN: u8 = 0xa5;

/// Runs `launches` with a buffer of so many bytes registered: their result, and the bytes that the kernels wrote.
pub(super) fn record<T>(
    device: &CudaDevice,
    bytes: usize,
    events_per_warp: usize,
    launches: impl FnOnce() -> Result<T>,
) -> Result<(T, Vec<u8>)> {
    let Ok(events) = u32::try_from(events_per_warp) else {
        bail!("profile: events_per_warp: expected at most {}, got {}", u32::MAX, events_per_warp)
    };
    let stream = device.cuda_stream();
    stream.context().bind_to_thread().map_err(Error::wrap)?;
    let mut buffer = device.alloc_zeros::<u8>(bytes + GUARD)?;
    device.memcpy_htod(&[PATTERN; GUARD][..], &mut buffer.slice_mut(bytes..))?;
    let (address, order) = buffer.device_ptr_mut(&stream);
    drop(order);
    // The launches may go to another stream than the zeros did.
    stream.synchronize().map_err(Error::wrap)?;

    let registered = Registered::new(address, bytes, events)?;
    let value = launches();
    drop(registered);
    // Before anything else, for the kernels may still be writing.
    stream.context().synchronize().map_err(Error::wrap)?;
    let value = value?;

    let mut written = device.clone_dtoh(&buffer)?;
    if written.split_off(bytes) != [PATTERN; GUARD] {
        bail!("profile: a kernel wrote past the end of the buffer")
    }
    Ok((value, written))
}

/// While it lives, the launches of this thread write into the buffer.
struct Registered;

impl Registered {
    fn new(address: u64, bytes: usize, events: u32) -> Result<Self> {
        // SAFETY: the buffer has this many bytes, and outlives the launches.
        check("profile", unsafe { gdn::gdn_profile_set(address as *mut _, bytes as u64, events) })?;
        Ok(Self)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: null ends the recording.
        unsafe { gdn::gdn_profile_set(std::ptr::null_mut(), 0, 0) };
    }
}

/// The names that the kernels' library gives its scopes, and those of the roles.
pub(super) fn names() -> [Vec<&'static str>; 2] {
    let all = |name: unsafe extern "C" fn(u32) -> *const c_char| {
        (0..)
            .map_while(|id| {
                // SAFETY: a static string, or null past the last one.
                let name = unsafe { name(id) };
                (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_str().unwrap_or("?"))
            })
            .collect()
    };
    [all(gdn::gdn_profile_scope), all(gdn::gdn_profile_role)]
}
