//! What the programs share: the command line of a model, its checkpoint and tokenizer, the memory it needs, its ranks.

pub mod args;
mod builtin;
pub mod chat;
mod checkpoint;
pub mod dummy;
pub mod gguf_tokenizer;
mod hub;
mod load;
mod memory;
pub mod plan;
mod progress;
pub mod ranks;
pub mod safetensors;
pub mod settings;
pub mod stream;
mod vocab_tokenizer;

pub use checkpoint::Checkpoint;
pub use load::{draft_after, fix_thread_count, gpu, load_model, LoadFormat, ModelArgs};
pub use memory::{Need, Room};
pub use progress::bar;
pub use ranks::{is_first, Rank};
