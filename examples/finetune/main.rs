//! Fine-tunes a model of Qwen's families or OLMo-Hybrid on a text file: `cargo run --release --example finetune`.

use anyhow::{anyhow, bail, Context, Result};
use candle_core::{DType, Device};
use candle_gdn_cli::{bar, fix_thread_count, gpu, status, Checkpoint, LoadFormat};
use candle_gdn_models::ModelConfig;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::Parser;
use finetune::data::{sequences, Data};
use finetune::folder;
use finetune::train::{Options, Run, STATE};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Trains an adapter (LoRA), or with --full every weight, to predict a text.
#[derive(Parser, Debug)]
#[command(version)]
struct Args {
    /// Directory of a checkpoint, or a name on the Hugging Face hub [default: the demo that comes with the repository]
    #[arg(long, value_name = "DIR|ID")]
    model: Option<String>,

    /// Revision on the hub: a branch, a tag or a commit [default: main]
    #[arg(long)]
    revision: Option<String>,

    /// Text to learn; <|endoftext|>, written out, separates documents [default: verses that come with the repository]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,

    /// Folder for the adapter or the checkpoint, the loss curve and the state of the run
    #[arg(long, value_name = "DIR", default_value = "finetuned")]
    out: PathBuf,

    /// Go on with the run that was saved in --out; model, text and what is trained must be as they were
    #[arg(long)]
    resume: bool,

    /// Train every weight instead of an adapter
    #[arg(long)]
    full: bool,

    /// Rank of the adapter
    #[arg(long, value_name = "R", default_value = "8", conflicts_with = "full")]
    rank: NonZeroUsize,

    /// Scale of the adapter, times its rank
    #[arg(long, value_name = "ALPHA", default_value = "16", conflicts_with = "full")]
    alpha: f64,

    /// Modules to adapt, by the last parts of their names, as in in_proj_qkvz,out_proj [default: all projections of the
    /// mixers, and of dense MLPs]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', conflicts_with = "full")]
    target_modules: Vec<String>,

    /// Updates of the weights
    #[arg(long, value_name = "N", default_value = "60")]
    steps: NonZeroUsize,

    /// Tokens of a sequence; longer documents are divided
    #[arg(long, value_name = "N", default_value = "256")]
    sequence_len: NonZeroUsize,

    /// Tokens of packed sequences in one pass, at most: bounds the memory
    #[arg(long, value_name = "N", default_value = "1024")]
    pass_tokens: usize,

    /// Passes whose gradients are added up for one update
    #[arg(long, value_name = "N", default_value = "1")]
    passes: NonZeroUsize,

    /// Largest learning rate [default: 3e-3, with --full 3e-4]
    #[arg(long, value_name = "LR")]
    learning_rate: Option<f64>,

    /// Steps in which the learning rate rises; then it falls as half a cosine [default: 6, or all where there are fewer]
    #[arg(long, value_name = "N")]
    warmup: Option<usize>,

    /// Share of a weight that a step takes away, times the learning rate
    #[arg(long, value_name = "X", default_value = "0.01")]
    weight_decay: f64,

    /// Largest norm of all gradients together; larger ones are scaled down
    #[arg(long, value_name = "NORM", default_value = "1")]
    clip: f64,

    /// Order of the sequences and first values of the adapter
    #[arg(long, default_value = "0")]
    seed: u64,

    /// Save every so many steps, beside at the end and at Ctrl-C
    #[arg(long, value_name = "N", default_value = "100")]
    save_every: NonZeroUsize,

    /// Number format of the passes; variables are in f32 [default: bf16 on a GPU, f32 on the CPU]
    #[arg(long, value_parser = PossibleValuesParser::new(["f32", "bf16"]).try_map(|name| name.parse::<DType>()))]
    dtype: Option<DType>,

    /// Run on the CPU even if there is a GPU
    #[arg(long)]
    cpu: bool,
}

/// Set by Ctrl-C.
static INTERRUPT: AtomicBool = AtomicBool::new(false);
/// What shells give a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;
const VERSES: &str = include_str!("verses.txt");

fn main() -> ExitCode {
    fix_thread_count();
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(INTERRUPTED),
        Err(e) => {
            status!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_same_folder(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Whether all steps are done.
fn run(args: &Args) -> Result<bool> {
    // What needs no model comes before its download.
    args.check()?;
    let text = args.text()?;
    let device = match args.cpu || !candle_core::utils::cuda_is_available() {
        true => Device::Cpu,
        false => gpu(0)?,
    };
    let dtype = args.dtype.unwrap_or(if device.is_cpu() { DType::F32 } else { DType::BF16 });
    let checkpoint = Checkpoint::named(args.model.as_deref(), args.revision.as_deref(), LoadFormat::Auto)?;
    if checkpoint.gguf().is_some() {
        bail!("--model: expected a checkpoint in safetensors, got the GGUF file {}", checkpoint.name())
    }
    let config = checkpoint.config()?;
    let options = args.options(&checkpoint, &config, dtype)?;
    let data = args.data(&text, &checkpoint)?;
    let [sequences, tokens] = data.counts();
    folder::check(&args.out).context("--out")?;
    let files = checkpoint.weights()?;
    if args.full && files[0].parent().is_some_and(|from| is_same_folder(from, &args.out)) {
        bail!("--out: expected another folder than the checkpoint's, which --full would overwrite")
    }
    let mut run = Run::new(options, config, files, data, dtype, &device)?;
    if args.resume {
        run = run.resume(&args.out)?;
    }
    let [trained, all] = run.weights().counts();
    status!("training {trained} of {all} values on {tokens} tokens in {sequences} sequences");
    // From here on Ctrl-C waits for the current step; a second one does not.
    ctrlc::set_handler(|| {
        if INTERRUPT.swap(true, Ordering::SeqCst) {
            std::process::exit(INTERRUPTED.into());
        }
    })?;
    train(args, &mut run)?;
    run.save(&args.out)?;
    let (done, steps) = (run.steps().len(), args.steps);
    status!("step {done} of {steps}: saved in {}", args.out.display());
    if !run.is_done() {
        status!("interrupted: --resume goes on");
    }
    Ok(run.is_done())
}

/// Until the last step or Ctrl-C.
fn train(args: &Args, run: &mut Run) -> Result<()> {
    let bar = bar("training", args.steps.get(), "steps");
    bar.set_position(run.steps().len() as u64);
    let (start, mut tokens) = (Instant::now(), 0);
    let mut saved = args.resume.then(|| run.steps().len());
    while !run.is_done() && !INTERRUPT.load(Ordering::SeqCst) {
        // The weights of now are what went wrong: saved, they would replace good ones.
        let step = run.step().map_err(|e| anyhow!("{e:#}; {}", args.what_is_saved(saved)))?;
        tokens += step.tokens;
        let rate = tokens as f64 / start.elapsed().as_secs_f64();
        let (done, loss) = (run.steps().len(), step.loss);
        let message = format!("loss {loss:.3}, {rate:.0} tokens/s");
        bar.set_message(message.clone());
        bar.set_position(done as u64);
        // Without a terminal there is no bar.
        if bar.is_hidden() && (done == 1 || done % 10 == 0 || run.is_done()) {
            status!("step {done} of {}: {message}", args.steps);
        }
        if done % args.save_every == 0 && !run.is_done() {
            match run.save(&args.out) {
                Ok(()) => saved = Some(done),
                // There may be room again before the end.
                Err(e) => bar.suspend(|| status!("step {done}: not saved, training goes on: {e:#}")),
            }
        }
    }
    bar.abandon();
    Ok(())
}

impl Args {
    fn learning_rate(&self) -> f64 {
        self.learning_rate.unwrap_or(if self.full { 3e-4 } else { 3e-3 })
    }

    fn warmup(&self) -> usize {
        self.warmup.unwrap_or(6.min(self.steps.get()))
    }

    /// What can be wrong whatever the model is.
    fn check(&self) -> Result<()> {
        let (len, rate) = (self.sequence_len.get(), self.learning_rate());
        if self.pass_tokens < len {
            bail!("--pass-tokens: expected at least --sequence-len ({len}), got {}", self.pass_tokens)
        }
        for (option, value) in [("learning-rate", rate), ("alpha", self.alpha), ("clip", self.clip)] {
            if !(value > 0. && value.is_finite()) {
                bail!("--{option}: expected a number above 0, got {value}")
            }
        }
        if !(self.weight_decay >= 0. && self.weight_decay.is_finite()) {
            bail!("--weight-decay: expected a number of at least 0, got {}", self.weight_decay)
        }
        if self.warmup() > self.steps.get() {
            bail!("--warmup: expected at most --steps ({}), got {}", self.steps, self.warmup())
        }
        if !self.resume && self.out.join(STATE).exists() {
            bail!("--out: {} has a run already: --resume goes on with it, another --out keeps it", self.out.display())
        }
        Ok(())
    }

    fn text(&self) -> Result<String> {
        let Some(path) = &self.text else { return Ok(VERSES.to_string()) };
        let text = std::fs::read_to_string(path).with_context(|| format!("--text: cannot read {}", path.display()))?;
        // Editors of Windows begin a file with a byte order mark.
        Ok(text.strip_prefix('\u{FEFF}').unwrap_or(&text).to_string())
    }

    fn what_is_saved(&self, step: Option<usize>) -> String {
        match step {
            Some(step) => format!("{} has step {step}, from which --resume goes on", self.out.display()),
            None => "nothing was saved yet (--save-every)".to_string(),
        }
    }

    fn options(&self, checkpoint: &Checkpoint, config: &ModelConfig, dtype: DType) -> Result<Options> {
        let (len, limit) = (self.sequence_len.get(), config.max_position_embeddings);
        if len > limit {
            bail!("--sequence-len: expected at most max_position_embeddings ({limit}), got {len}")
        }
        Ok(Options {
            // PEFT looks for the checkpoint under this name.
            model: match &self.model {
                Some(model) => model.clone(),
                None => checkpoint.dir().canonicalize()?.display().to_string(),
            },
            revision: self.revision.clone(),
            full: self.full,
            rank: self.rank.get(),
            alpha: self.alpha,
            target_modules: self.target_modules.clone(),
            steps: self.steps.get(),
            learning_rate: self.learning_rate(),
            warmup: self.warmup(),
            weight_decay: self.weight_decay,
            clip: self.clip,
            sequence_len: len,
            pass_tokens: self.pass_tokens,
            passes: self.passes.get(),
            seed: self.seed,
            dtype: dtype.as_str().to_string(),
        })
    }

    fn data(&self, text: &str, checkpoint: &Checkpoint) -> Result<Data> {
        let Some(tokenizer) = checkpoint.tokenizer()? else { bail!("--model: expected a checkpoint with a tokenizer") };
        let sequences = sequences(text, &tokenizer, self.sequence_len.get()).context("--text")?;
        Ok(Data::new(sequences, self.pass_tokens, self.seed))
    }
}
