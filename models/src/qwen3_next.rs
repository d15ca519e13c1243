//! Qwen3-Next under the names that candle's own models have.

pub use super::{CausalLm as Model, ModelConfig as Config, ModelState as State};
