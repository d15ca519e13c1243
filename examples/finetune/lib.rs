//! Fine-tuning of a model of the Qwen3-Next family: the parts of `examples/finetune`.

pub mod adapter;
pub mod curve;
pub mod data;
pub mod model;
pub mod optimizer;
pub mod projection;
pub mod train;
pub mod weights;
