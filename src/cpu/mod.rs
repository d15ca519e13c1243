//! CPU kernels over plain slices: `f32` accumulation, inputs in f32, bf16 or f16, work spread over candle's own
//! thread pool. No `Tensor` in here; the ops check shapes before they call in.

pub(crate) mod attention;
pub(crate) mod cached_attention;
mod chunked;
pub(crate) mod conv;
mod gates;
pub(crate) mod matmul;
pub(crate) mod moe;
pub(crate) mod norm;
mod recurrent;
pub(crate) mod rms_norm;
pub(crate) mod rule;
mod simd;
pub(crate) mod swiglu;
mod transposed;
mod view;

pub(crate) use gates::log_decay_and_beta;
pub(crate) use view::{parallel, Element, Heads, Sequences, Shared, Slots, Stored};
