//! Gated DeltaNet, the linear attention of Qwen3-Next, Qwen3.5 to 3.8, OLMo-Hybrid and Lara-4-Mini, for [candle](candle_core).
//!
//! * [`GatedDeltaNet`] is the layer: load it from a checkpoint, give it a [`GdnState`], call `forward` with any number
//!   of tokens.
//! * A server keeps the states of its sequences in the slots of a [`StatePool`], one a layer:
//!   [`GatedDeltaNet::forward_slots`] feeds packed sequences of any lengths, prompts and decode steps in one call, and
//!   [`GatedDeltaNet::verify`] feeds drafted tokens that may be taken back. With [`PoolOptions::ring`] decode does not write a
//!   state with every token.
//! * [`ops`] is for authors of their own layer: the gated delta rule, the convolution before it, the norm after it, and all
//!   three as one step. All run on the CPU and, with the `cuda` feature, on CUDA.
//! * [`TrainableGatedDeltaNet`] is the layer in training: gradients of x, of every weight and of the states, batched and packed.
//! * [`mod@reference`] is the rule and its backward pass in `f64` that every kernel is tested against.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_gdn::ops::{gdn_prefill_in_place, Gates, RuleOptions};
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
//!
//! Several host threads: see [`StatePool`](StatePool#threads).
#![warn(missing_docs)]

mod algo;
mod conv;
mod layer;
mod linear;
mod norm;
mod plan;
#[cfg(any(feature = "profile", test))]
pub mod profile;
pub mod reference;
mod rule;
mod state;
mod step;

/// What a number format of weights implements so that the layer can use it: a product, and a source of a layer's matrices.
pub mod formats {
    pub use crate::layer::{select_rows, Matrices, Project};
}

/// The ops, for authors of their own layer. Each is a struct that candle applies as a custom op, and a function.
pub mod ops {
    pub use crate::conv::{causal_conv1d, causal_conv1d_diff, CausalConv1d};
    pub use crate::linear::multiply;
    pub use crate::norm::{gated_rms_norm, GatedRmsNorm};
    pub use crate::rule::{
        gdn_decode_in_place, gdn_gates, gdn_prefill_in_place, gdn_rule_diff, Gates, GdnDecode, GdnPrefill, RuleOptions,
    };
    pub use crate::step::{gdn_step_in_place, GdnStep, StepOptions};
    pub use candle_gdn_core::device::Launch;
}

pub use algo::Algo;
pub use candle_core;
pub use candle_gdn_core::device::{keep_freed_memory, single_stream_device};
pub use candle_gdn_core::{CuSeqlens, Slots, NO_SLOT};
pub use layer::{
    Accepted, ConvWeight, Drafted, GatedDeltaNet, GdnConfig, GdnParts, InProjection, Projection,
    TrainableGatedDeltaNet, TrainingState,
};
pub use linear::DenseWeight;
pub use norm::GateActivation;
pub use state::{GdnState, PoolOptions, RingSpans, StatePool};
