//! What the examples share: finding a checkpoint, checking its files, loading the model.

mod checkpoint;
mod hub;
mod load;
mod progress;
mod safetensors;

pub use checkpoint::Checkpoint;
pub use load::{fix_thread_count, load_model, ModelArgs};
pub use progress::bar;
