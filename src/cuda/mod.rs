//! CUDA launchers behind the ops: candle storages in, the C ABI's parameter structs out, statuses into errors.
//!
//! Pointers are taken through cudarc's guards, so that its stream events hold; they are released after the launch. A
//! launch allocates its output and, where its kernel asks for one, a workspace, unless an [`arena::Arena`] has them.

pub mod arena;
pub mod block_scaled;
mod conv;
pub mod linear;
mod norm;
#[allow(missing_docs)] // for `plumbing` only
pub mod pointers;
#[cfg(feature = "profile")]
pub(crate) mod profile;
pub(crate) mod ring;
mod rule;
pub(crate) mod step;
#[doc(hidden)]
pub mod testing;
#[allow(missing_docs)]
pub mod turns;

pub(crate) use conv::conv;
pub(crate) use norm::norm;
pub(crate) use rule::{rule, rule_choice, RuleArgs};

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver;
use candle_core::{CudaStorage, Layout, Result};
use pointers::{stream_of, write};
use std::ffi::c_void;

/// Copies slot `from` of a state over slot `to`, another one of the same storage.
pub(crate) fn copy_slot(storage: &mut CudaStorage, layout: &Layout, from: usize, to: usize) -> Result<()> {
    let (stride, size) = (layout.stride()[0], storage.dtype().size_in_bytes());
    let bytes = layout.dims()[1..].iter().product::<usize>() * size;
    let stream = &*stream_of(storage)?;
    let pointer = write(storage, stream)?;
    let at = |slot: usize| pointer.at::<c_void>(layout.start_offset() + slot * stride, size) as u64;
    // SAFETY: both slots lie in the storage and do not overlap.
    unsafe { driver::result::memcpy_dtod_async(at(to), at(from), bytes, stream.cu_stream()) }
        .map_err(candle_core::Error::wrap)
}
