//! The gate of the feed-forward as an op.

#[cfg(feature = "cuda")]
mod cuda;
mod swiglu;

pub use swiglu::Swiglu;

pub(crate) use swiglu::RowsLayout;
