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
mod greedy;
mod interactive;
mod output;
mod plan;
mod prefixes;
mod prompt;
mod row;
mod sampler;
mod settings;
mod stream;
mod talk;

use args::Args;
use clap::Parser;
use common::{fix_thread_count, load_model, Checkpoint, Need};
use generation::{Generation, Job};
use interactive::Interactive;
use plan::Plan;
use row::Stop;
use settings::Settings;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use talk::Talk;

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
    let checkpoint = Checkpoint::find(&args.model)?;
    let config = checkpoint.config()?;
    let mut settings = Settings::new(&args.sampling, &checkpoint, &config)?;
    let mut tokenizer = checkpoint.tokenizer()?;
    if args.prompts.prompt_tokens.is_some() {
        settings.eos.clear();
        tokenizer = None;
    }
    let talk = match args.prompts.interactive {
        true => Some(Talk::find(&checkpoint, tokenizer.as_ref(), args.prompts.chat)?),
        false => None,
    };
    let prompts = match talk {
        Some(_) => Vec::new(),
        None => prompt::tokens(&args.prompts, &checkpoint, tokenizer.as_ref(), &config, &args.run)?,
    };
    let device = args.model.device()?;
    let plan = Plan::new(args, &config, &prompts);
    Need::new(&args.model, &checkpoint, &config, &plan.room(), &device)?.check(&device)?;
    let model = load_model(&args.model, &checkpoint, &config, &device)?;

    // From here on Ctrl-C waits for the current step; a second one does not.
    ctrlc::set_handler(|| {
        if INTERRUPT.swap(true, Ordering::SeqCst) {
            std::process::exit(INTERRUPTED.into());
        }
    })?;
    let job = Job {
        model: &model,
        tokenizer: tokenizer.as_ref(),
        settings: &settings,
        run: &args.run,
        plan: &plan,
        prompts: &prompts,
        prefill_chunk: args.model.prefill_chunk.get(),
        sample_len: args.sample_len(),
        seed: args.sampling.seed,
        interrupt: &INTERRUPT,
    };
    match talk {
        Some(talk) => Interactive::new(&job, talk)?.run(),
        None => Generation::new(&job)?.run(),
    }
}
