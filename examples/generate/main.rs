//! Completes texts with a model of the Qwen3-Next family: `cargo run --release --example generate`.

mod args;
mod chat;
#[path = "../common/mod.rs"]
mod common;
mod decode;
mod draft;
mod engine;
mod figures;
mod fill;
mod generation;
mod graphs;
mod output;
mod prefixes;
mod prompt;
mod row;
mod sampler;
mod settings;
mod stream;

use args::Args;
use clap::Parser;
use common::{fix_thread_count, load_model, Checkpoint};
use generation::{Generation, Job};
use row::Stop;
use settings::Settings;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

/// What shells give a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

/// Set by Ctrl-C.
static INTERRUPT: AtomicBool = AtomicBool::new(false);

fn main() -> ExitCode {
    fix_thread_count();
    match run(&Args::parse()) {
        Ok(Stop::Interrupted) => ExitCode::from(INTERRUPTED),
        Ok(_) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> anyhow::Result<Stop> {
    // Everything that can be wrong with the arguments comes before the weights, which take long.
    let checkpoint = Checkpoint::find(args.model.model.as_deref(), &args.model.revision)?;
    let config = checkpoint.config()?;
    let settings = Settings::new(&args.sampling, &checkpoint, &config)?;
    let tokenizer = checkpoint.tokenizer()?;
    let prompts = prompt::tokens(&args.prompts, &checkpoint, &tokenizer, &config, args.run.max_seq_len)?;
    let model = load_model(&args.model, &checkpoint, &config)?;

    // From here on Ctrl-C waits for the current step; a second one does not.
    ctrlc::set_handler(|| {
        if INTERRUPT.swap(true, Ordering::SeqCst) {
            std::process::exit(INTERRUPTED.into());
        }
    })?;
    let job = Job {
        model: &model,
        tokenizer: &tokenizer,
        settings: &settings,
        run: &args.run,
        prompts: &prompts,
        prefill_chunk: args.model.prefill_chunk.get(),
        sample_len: args.sample_len,
        seed: args.sampling.seed,
        interrupt: &INTERRUPT,
    };
    Generation::new(&job)?.run()
}
