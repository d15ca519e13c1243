//! What `candle-gdn-models` is built on, under its old path: the internal crate, and what is still here.
#![allow(missing_docs)]

pub use candle_gdn_core::*;

/// The C ABI of the kernels.
pub mod abi {
    pub mod gdn {
        pub use crate::abi::*;
    }
}

/// The running totals on the device, u32: to read, never to write.
pub fn cu_seqlens_on_device(cu_seqlens: &CuSeqlens) -> &candle_core::Tensor {
    cu_seqlens.tensor()
}

pub use crate::layer::{select_rows, Matrices, Project};
pub use crate::linear::multiply;
pub use candle_gdn_core::cpu::matmul::products;

/// The same for CUDA.
#[cfg(feature = "cuda")]
pub mod cuda {
    pub use candle_gdn_core::device::cuda::*;
}
