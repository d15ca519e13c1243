//! Whole language models on top of [`GatedDeltaNet`](crate::GatedDeltaNet): Qwen3-Next and the
//! Qwen3.5 and 3.6 text models, dense and mixture of experts.
//!
//! The families share every block: gated softmax attention with partial rotary positions and a
//! key-value cache, zero-centred RMS norms in f32, SwiGLU and sparse mixture of experts. They
//! differ in `config.json` and in where and how the weights are stored, which
//! [`ModelConfig::from_json`] and [`CausalLm::load`] recognise.

mod attention;
mod causal_lm;
mod config;
mod decoder;
mod kv_cache;
mod mlp;
mod moe;
mod norm;
pub mod qwen3_next;
mod rotary;
mod routing;
mod state;

pub use causal_lm::CausalLm;
pub use config::{AttentionConfig, Family, FfnKind, LayerConfig, MixerKind, ModelConfig, MoeConfig};
pub use state::ModelState;
