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
pub use worker::Worker;

/// To be called first, while there is one thread: numbers of threads and names of kernels are looked up in the environment.
///
/// # Errors
/// When a name is none of a kernel.
pub fn prepare(args: &Args) -> anyhow::Result<()> {
    common::fix_thread_count();
    common::fix_algo(&args.model)
}
