//! Gated DeltaNet (the linear attention of Qwen3-Next, Qwen3.5 and OLMo-Hybrid) for [candle](candle_core).
//!
//! * [`GatedDeltaNet`] is the layer: load it from a checkpoint, give it a [`GdnState`], call `forward` with any number
//!   of tokens.
//! * The ops are for authors of their own layer: [`gdn_decode_in_place`] and [`gdn_prefill_in_place`] are the rule,
//!   [`causal_conv1d`] and [`gated_rms_norm`] stand before and behind it, and [`gdn_step_in_place`] is all three for up
//!   to 16 tokens, on CUDA in one kernel. All run on the CPU and, with the `cuda` feature, on CUDA.
//! * [`models`] holds whole language models, [`mod@reference`] the rule in `f64` that every kernel is tested against.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_gdn::{gdn_prefill_in_place, Gates, RuleOptions};
//!
//! # fn main() -> candle_core::Result<()> {
//! let (batch, tokens, key_heads, value_heads, dim) = (1, 10, 2, 4, 128);
//! let randn = |shape: &[usize]| Tensor::randn(0f32, 1., shape, &Device::Cpu);
//! let q = randn(&[batch, tokens, key_heads, dim])?;
//! let k = randn(&[batch, tokens, key_heads, dim])?;
//! let v = randn(&[batch, tokens, value_heads, dim])?;
//! let gates = Gates {
//!     a: randn(&[batch, tokens, value_heads])?,
//!     b: randn(&[batch, tokens, value_heads])?,
//!     a_log: randn(&[value_heads])?,
//!     dt_bias: randn(&[value_heads])?,
//! };
//! let state = Tensor::zeros((batch, value_heads, dim, dim), DType::F32, &Device::Cpu)?;
//! let o = gdn_prefill_in_place(&q, &k, &v, &gates, &state, None, RuleOptions::default())?;
//! assert_eq!(o.dims(), [batch, tokens, value_heads, dim]);
//! # Ok(())
//! # }
//! ```
#![warn(missing_docs)]

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod host;
mod layer;
mod linear;
pub mod models;
mod ops;
mod pool;
pub mod profile;
pub mod reference;
mod state;

pub use layer::{GatedDeltaNet, GdnConfig};
pub use ops::{
    causal_conv1d, checkpoint_rows, gated_rms_norm, gdn_decode, gdn_decode_in_place, gdn_prefill, gdn_prefill_in_place,
    gdn_step_in_place, Algo, CausalConv1d, CuSeqlens, GateActivation, GatedRmsNorm, Gates, GdnDecode, GdnPrefill,
    GdnStep, RuleOptions, StepAlgo, StepOptions, CHECKPOINT_MULTIPLE,
};
pub use pool::keep_freed_memory;
pub use state::GdnState;
