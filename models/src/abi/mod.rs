//! The C ABI of the CUDA kernels in Rust, one file a header. It is plain data, so that the tests compare it with the
//! headers wherever there is a C compiler.

#[cfg(any(feature = "cuda", test))]
pub(crate) mod attention;
pub(crate) mod logprobs;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod model;
pub(crate) mod moe;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod quantized;
pub(crate) mod sampling;
pub(crate) mod scaled;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod speculate;
