//! Fine-tuning of a model of Qwen's families or OLMo-Hybrid: the parts of `examples/finetune`.

pub mod adapter;
pub mod curve;
pub mod data;
pub mod folder;
pub mod model;
pub mod optimizer;
pub mod projection;
pub mod train;
pub mod weights;
