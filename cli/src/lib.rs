//! What the examples share: finding a checkpoint, checking its files, loading the model.

// Each example uses its part of this.
#![allow(dead_code, unused_imports)]

mod builtin;
mod checkpoint;
pub mod dummy;
pub mod gguf_tokenizer;
mod gpu_count;
mod hub;
mod load;
mod memory;
mod progress;
pub mod ranks;
mod safetensors;

pub use checkpoint::Checkpoint;
pub use load::{draft_after, fix_algo, fix_thread_count, load_model, ModelArgs};
pub use memory::{Need, Room};
pub use progress::bar;
pub(crate) use ranks::tell;
pub use ranks::{is_first, Rank};
