//! Models of the Qwen3-Next family as workers of NVIDIA Dynamo: see the README.

#![forbid(unsafe_code)]

mod args;
mod asked;
mod blocks;
mod card;
mod driver;
mod figures;
mod fingerprint;
mod transfer;
mod worker;

pub use args::Args;
pub use worker::Worker;

/// Requests that Dynamo takes in for a worker at once, and those that wait to be taken in.
const LIMITS: [&str; 2] = ["DYN_ENGINE_REQUEST_LIMIT", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT"];

/// Of the latter Dynamo has no fewer.
const QUEUE: usize = 2;

/// To be called first, while there is one thread: the number of threads and Dynamo's limits are looked up in the environment.
///
/// # Errors
/// When `--algo` or `CANDLE_GDN_ALGO` names no kernel.
pub fn prepare(args: &Args) -> anyhow::Result<()> {
    candle_gdn_cli::fix_thread_count();
    // What is refused there is refused at once, and the worker is asked again after a second; after an error of the
    // engine's it would be taken for dead.
    if LIMITS.iter().all(|name| std::env::var_os(name).is_none()) {
        let taken = args.serve.batch.saturating_add(args.serve.max_waiting.saturating_sub(QUEUE));
        for (name, value) in LIMITS.iter().zip([taken, QUEUE]) {
            std::env::set_var(name, value.to_string());
        }
    }
    args.model.algo().map(drop)
}
