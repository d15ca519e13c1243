//! Completes texts with a model of the Qwen3-Next family: `cargo run --release --example generate`.

mod completion;
mod generation;
mod interactive;
mod job;
mod output;
mod prompt;
mod talk;

use anyhow::{bail, Context, Result};
use candle_gdn_cli::args::Args;
use candle_gdn_cli::chat::Template;
use candle_gdn_cli::plan::Plan;
use candle_gdn_cli::settings::Settings;
use candle_gdn_cli::{fix_thread_count, is_first, load_model, ranks, status, Checkpoint, Need, Rank};
use candle_gdn_models::{DraftHeadChoice, ModelConfig};
use clap::Parser;
use completion::Stop;
use generation::Generation;
use interactive::Interactive;
use job::Job;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use talk::Talk;
use tokenizers::Tokenizer;

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
            status!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<Stop> {
    // What can be wrong with the arguments alone comes before a download, all else before the weights, which take long.
    args.check()?;
    let texts = prompt::texts(&args.prompts)?;
    let mut checkpoint = Checkpoint::find(&args.model)?;
    let config = checkpoint.config()?;
    let made_up = args.prompts.prompt_tokens.is_some();
    let tokenizer = if made_up { None } else { checkpoint.tokenizer()? };
    let mut settings = Settings::new(&args.sampling, &checkpoint, &config, tokenizer.as_ref())?;
    if made_up {
        settings.eos.clear();
    } else if tokenizer.is_none() {
        let instead = if args.prompts.interactive { "--interactive: " } else { "expected --prompt-tokens N: " };
        bail!("{instead}{} has no tokenizer.json, so no text can go in", checkpoint.name())
    }
    let template = match (args.prompts.chat, args.prompts.interactive) {
        (true, _) => Some(Template::load(&checkpoint, &args.chat)?),
        (_, true) => Template::find(&checkpoint, &args.chat).context("--interactive")?,
        (false, false) => None,
    };
    if let Some(tokenizer) = &tokenizer {
        settings.eos.extend(template.as_ref().and_then(|template| template.end_of_turn(tokenizer)));
        settings.eos.extend(special_tokens(&args.stop, tokenizer));
    }
    let (mut talk, mut prompts) = (None, Vec::new());
    if args.prompts.interactive {
        talk = tokenizer.as_ref().map(|tokenizer| Talk::new(tokenizer, template.as_ref()));
    } else {
        prompts = prompt::tokens(&args.prompts, texts, tokenizer.as_ref(), template.as_ref(), &config, &args.run)?;
    }
    let draft_head = checkpoint.draft_head(args.run.mtp, &config)?;
    let plan = Plan::new(args, &config, draft_head, &prompts);
    let (checkpoint, tokenizer) = (&checkpoint, tokenizer.as_ref());
    let task = Task { args, checkpoint, config, settings, tokenizer, prompts, plan };
    match (args.model.tensor_parallel.get(), talk) {
        (1, Some(talk)) => task.on(&Rank::single(args.model.device()?), |job| Interactive::new(job, talk)?.run()),
        (1, None) => task.on(&Rank::single(args.model.device()?), |job| Generation::new(job)?.run()),
        (n, _) => {
            // Before any rank begins: all of them would say it.
            task.config.split(n)?;
            ranks::run(n, args.model.on_cpu(), |rank| task.on(rank, |job| Generation::new(job)?.run()))
        }
    }
}

/// Those of the texts that are special tokens, which no text of a completion shows.
fn special_tokens<'a>(texts: &'a [String], tokenizer: &'a Tokenizer) -> impl Iterator<Item = u32> + 'a {
    let special = |id: &u32| tokenizer.get_added_tokens_decoder().get(id).is_some_and(|token| token.special);
    texts.iter().filter_map(|text| tokenizer.token_to_id(text)).filter(special)
}

/// What is asked for, checked.
struct Task<'a> {
    args: &'a Args,
    checkpoint: &'a Checkpoint,
    config: ModelConfig,
    settings: Settings,
    tokenizer: Option<&'a Tokenizer>,
    prompts: Vec<Vec<u32>>,
    plan: Plan,
}

impl Task<'_> {
    /// Loads the model, or a rank's part of it, and does `work`.
    fn on(&self, rank: &Rank, work: impl FnOnce(&Job) -> Result<Stop>) -> Result<Stop> {
        let Self { args, checkpoint, config, .. } = self;
        let part = rank.group.as_ref().map(|group| config.split(group.size())).transpose()?;
        let of_rank = part.as_ref().unwrap_or(config);
        let need = |head: bool| Need::new(&args.model, checkpoint, of_rank, &self.plan.room(head), rank);
        let mut draft_head = self.plan.draft_head;
        // Nobody who did not ask for the head goes without the rest for it.
        if draft_head && args.run.mtp == DraftHeadChoice::Auto {
            draft_head = rank.on_all(need(true)?.fits(&rank.device))?;
        }
        need(draft_head)?.check(rank)?;
        let model = load_model(&args.model, checkpoint, config, draft_head, rank)?;
        if is_first() {
            // From here on Ctrl-C waits for the current step; a second one does not.
            ctrlc::set_handler(|| {
                if INTERRUPT.swap(true, Ordering::SeqCst) {
                    std::process::exit(INTERRUPTED.into());
                }
            })?;
        }
        work(&Job {
            model: &model,
            tokenizer: self.tokenizer,
            settings: &self.settings,
            stop: &args.stop,
            run: &args.run,
            plan: &self.plan,
            prompts: &self.prompts,
            prefill_chunk: args.model.prefill_chunk(&rank.device),
            sample_len: args.sample_len(),
            seed: args.sampling.seed,
            interrupt: &INTERRUPT,
            pace: &rank.pace,
        })
    }
}
