//! A worker: `candle-gdn-dynamo --model … `. It serves until SIGTERM, finishes what it has, and ends.

use candle_gdn_dynamo::{fix_thread_count, Args, Worker};
use clap::Parser;
use std::sync::Arc;

fn main() -> anyhow::Result<()> {
    fix_thread_count();
    let (worker, config) = Worker::new(Args::parse())?;
    dynamo_backend_common::run(Arc::new(worker), config)
}
