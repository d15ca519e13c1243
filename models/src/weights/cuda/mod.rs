//! Launches of the kernels that multiply weights on CUDA.

pub(crate) mod experts;
pub(crate) mod linear;
pub(crate) mod packed;
