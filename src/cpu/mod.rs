//! CPU kernels over plain slices: `f32` accumulation, inputs in f32, bf16 or f16, work spread over candle's own
//! thread pool. No `Tensor` in here; the ops check shapes before they call in.

pub mod conv;
mod dispatch;
pub mod element;
mod gates;
pub mod matmul;
pub mod norm;
pub mod pages;
mod recurrent;
pub mod replay;
pub mod rule;
pub mod simd;
mod transposed;
pub mod view;

pub use element::{Element, Stored};
pub use gates::log_decay_and_beta;
pub use view::{Heads, Sequences, Slots};
