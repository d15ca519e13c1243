//! Models of the Qwen3-Next family as workers of NVIDIA Dynamo: see the README.

#![deny(unsafe_code)]

mod args;
mod asked;
mod blocks;
mod card;
// Files of weights are mapped there.
#[allow(unsafe_code)]
#[path = "../../examples/common/mod.rs"]
mod common;
mod driver;
mod figures;
mod generate;
mod transfer;
mod worker;

pub use args::Args;
pub use common::fix_thread_count;
pub use worker::Worker;
