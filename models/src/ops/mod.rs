//! The operations between the Gated DeltaNet layers: one file each, with the `CustomOp` struct, its checks and its
//! dispatch to the CPU or CUDA kernel.

mod attention;
mod plan;
mod residual;
mod swiglu;

pub use attention::{
    attention_decode, attention_prepare, rotary_frequencies, AttentionCache, AttentionDecode, AttentionPrepare,
    PrepareOptions,
};
pub use residual::{add_rms_norm, rms_norm, AddRmsNorm};
pub use swiglu::Swiglu;

#[cfg(feature = "cuda")]
pub(crate) use plan::{AttentionPlan, ResidualPlan, SwigluPlan};
