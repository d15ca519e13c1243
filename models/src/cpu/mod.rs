//! CPU kernels over plain slices, on candle-gdn's products and SIMD.

pub(crate) mod logprobs;
pub(crate) mod round;
pub(crate) mod sampling;
