//! CPU kernels over plain slices, on candle-gdn's products and SIMD.

pub(crate) mod attention;
pub(crate) mod bytes;
pub(crate) mod cached_attention;
pub(crate) mod moe;
pub(crate) mod rms_norm;
pub(crate) mod swiglu;
