//! The generate and perplexity examples as a user runs them, on the CPU.

mod chat;
mod chat_options;
mod checkpoints;
mod cli;
mod cut_files;
mod faults;
mod from_hub;
mod generate;
mod gguf;
mod host_memory;
mod hub;
mod interrupts;
mod lora;
mod many;
mod memory;
mod mtp;
mod output;
mod parallel;
mod perplexity;
mod sampling;

use candle_gdn_models_testing::{gguf_writer, golden, tiny};
