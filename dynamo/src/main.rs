//! A worker: `candle-gdn-dynamo --model … `. It serves until SIGTERM, finishes what it has, and ends.

use candle_gdn_dynamo::{prepare, Args, Worker};
use clap::Parser;
use std::sync::Arc;

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    prepare(&args)?;
    let (worker, config) = Worker::new(args)?;
    dynamo_backend_common::run(Arc::new(worker), config)
}
