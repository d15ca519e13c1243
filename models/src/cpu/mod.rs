//! CPU kernels over plain slices, on candle-gdn's products and SIMD.

pub(crate) mod bytes;
pub(crate) mod logprobs;
pub(crate) mod moe;
pub(crate) mod round;
pub(crate) mod sampling;
pub(crate) mod swiglu;
