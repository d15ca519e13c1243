//! Building blocks of CPU kernels over plain slices: sums in `f32`, inputs in f32, bf16 or f16, work spread over candle's own
//! thread pool.

mod dispatch;
mod element;
pub mod matmul;
mod pages;
pub mod simd;
mod view;

pub use element::{Element, Stored};
pub use pages::{zeroed_vec, Pages};
pub use view::{parallel, prefetch, prefetch_line, Heads, Sequences, Shared, Slots};
