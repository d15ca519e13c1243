//! CPU kernels over plain slices, on candle-gdn's products and SIMD.

pub(crate) mod attention;
pub(crate) mod cached_attention;
pub(crate) mod logprobs;
pub(crate) mod rms_norm;
pub(crate) mod round;
pub(crate) mod sampling;
