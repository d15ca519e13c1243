//! Internal to `candle-gdn` and `candle-gdn-models`: what their kernels are built on. Both pin this crate's version, which
//! follows them without a promise of stability.
//!
//! * [`device`]: everything that knows candle's storages: writes in place, the lock of a shared stream, the arena, pointers.
//! * [`check`]: checks of arguments and the layouts that kernels read. [`Slots`] and [`CuSeqlens`] say where states lie and
//!   where sequences begin.
//! * [`cpu`]: CPU kernels' views, vector loops and packed products. [`host`]: CPU tensors as slices.
//! * [`abi`]: the structs that all of the C ABI shares. [`status`]: the text of its errors.
#![allow(missing_docs)]

#[macro_use]
pub mod abi;
pub mod check;
pub mod cpu;
pub mod device;
pub mod host;
mod sequences;
mod slots;
pub mod status;

pub use check::*;
pub use device::*;
pub use sequences::{CuSeqlens, SequencePlan};
pub use slots::{cpu_slots, CpuSlots, Slots, NO_SLOT};
