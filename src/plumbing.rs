//! What the kernels of other crates are built on, `candle-gdn-models` above all: checks of arguments, layouts, slots and
//! sequences as kernels take them, tensors written in place, the CPU's packed products, CUDA pointers and arenas. It
//! follows this crate's kernels, without a promise of stability.
#![allow(missing_docs)]

/// CPU kernels over plain slices.
pub mod cpu {
    pub use crate::cpu::element::*;
    pub use crate::cpu::pages::Pages;
    pub use crate::cpu::view::*;
    pub use crate::cpu::{matmul, simd};
}

/// The C ABI of the kernels.
pub mod abi {
    pub mod gdn {
        pub use crate::abi::*;
    }
}

/// Tensors on the CPU as plain slices.
pub mod host {
    pub use crate::host::*;
}

use candle_core::Tensor;

/// The running totals on the device, u32: to read, never to write.
pub fn cu_seqlens_on_device(cu_seqlens: &crate::CuSeqlens) -> &Tensor {
    cu_seqlens.tensor()
}

pub use crate::block_scaled::{BlockScaled, BLOCK_COLUMNS};
pub use crate::layer::{deinterleaved, no_tokens, Launched};
pub use crate::linear::{products, Weight};
pub use crate::ops::apply::{apply1, apply2, apply3};
pub use crate::ops::check::*;
pub use crate::ops::in_place::*;
pub use crate::ops::launch::{Arena, Launch};
pub use crate::ops::norm::{token_stride, uniform_tokens};
pub use crate::ops::ring::{Cursors, Move, RING_ROWS, RING_TOKENS};
pub use crate::ops::sequences::SequencePlan;
pub use crate::ops::slots::{cpu_slots, CpuSlots};
pub use crate::state::threads::{LastThread, Working};

/// The same for CUDA.
#[cfg(feature = "cuda")]
pub mod cuda {
    pub use crate::cuda::arena::{alloc, undo, with_workspace};
    pub use crate::cuda::block_scaled::scales_of;
    pub use crate::cuda::linear::{few_rows, few_rows_if_faster};
    pub use crate::cuda::pointers::*;
    pub use crate::cuda::testing;
    pub use crate::cuda::turns::{capture, is_per_thread, Turn};
}
