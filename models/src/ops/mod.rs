//! The gate of the feed-forward as an op.

mod plan;
mod swiglu;

pub use swiglu::Swiglu;

pub(crate) use plan::RowsLayout;
#[cfg(feature = "cuda")]
pub(crate) use plan::SwigluPlan;
