//! Command line.

use crate::chat::THINKING;
use crate::ModelArgs;
use anyhow::{bail, Context, Result};
use candle_gdn_models::{DraftHeadChoice, GraphChoice};
use clap::builder::{NonEmptyStringValueParser, PossibleValuesParser, TypedValueParser};
use clap::Parser;
use minijinja::Value;
use std::path::PathBuf;
use std::str::FromStr;

/// More drafts at once cost more than the accepted ones save.
const MOST_DRAFTED: usize = 64;

/// Tokens of a completion, by default.
const SAMPLE_LEN: usize = 128;

/// The prefix cache keeps states at multiples of this, where the chunks of a prefill begin.
const CHUNK: usize = 64;

/// Tokens that are made up at most, of all prompts.
const MOST_MADE_UP: usize = 1 << 24;

/// Completes texts with a Qwen3-Next model. The completions go to stdout, everything else to
/// stderr. Without arguments: the demo checkpoint and an opening that it knows. One prompt's
/// completion is printed as it comes; those of several are printed whole, in the order of the
/// prompts, each under a line "==> prompt 2 <==" on stdout too. Ctrl-C ends after the current step with exit
/// status 130.
#[derive(Parser, Debug)]
#[command(
    name = "generate",
    version,
    after_help = "Sampling options that are not given come from the checkpoint's generation_config.json, or from a GGUF \
file's general.sampling.*. Without \"do_sample\": true there, and without any of these entries, the \
most likely token is taken (--temperature 0). --top-k, --top-p or --min-p without --temperature draw at the temperature \
of the checkpoint, else at 1.

--batch, --draft, --mtp, --prefix-cache, --prefill-chunk and --cuda-graph change the rounding of sums and nothing else: in \
bf16, in f16 and with quantised matrices a close choice can fall another way."
)]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,

    #[command(flatten)]
    pub prompts: PromptArgs,

    #[command(flatten)]
    pub chat: ChatArgs,

    /// Tokens to generate at most, for each prompt [default: 128, with --interactive as many as there is room for]
    #[arg(short = 'n', long, value_name = "N")]
    sample_len: Option<usize>,

    /// End a completion before this text, which is not printed, or at this special token; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new(), conflicts_with = "prompt_tokens",
          allow_hyphen_values = true)]
    pub stop: Vec<String>,

    #[command(flatten)]
    pub sampling: SamplingArgs,

    #[command(flatten)]
    pub run: RunArgs,
}

impl Args {
    /// What can be wrong whatever the checkpoint is.
    pub fn check(&self) -> Result<()> {
        self.model.algo()?;
        let PromptArgs { chat, interactive, .. } = self.prompts;
        if let Some(option) = self.chat.option().filter(|_| !chat && !interactive) {
            bail!("{option}: expected --chat or --interactive")
        }
        if interactive && self.model.tensor_parallel.get() > 1 {
            bail!("--interactive: expected one device, got --tensor-parallel")
        }
        self.chat.check()?;
        let batch = self.run.batch.unwrap_or(1);
        match self.prompts.prompt_tokens {
            Some(count) if count.saturating_mul(batch) > MOST_MADE_UP => {
                bail!("--prompt-tokens: expected at most {MOST_MADE_UP} tokens in all, got {batch} times {count}")
            }
            _ => Ok(()),
        }
    }

    /// Tokens to generate at most.
    pub fn sample_len(&self) -> usize {
        self.sample_len.unwrap_or(if self.prompts.interactive { usize::MAX } else { SAMPLE_LEN })
    }
}

/// What is completed.
#[derive(clap::Args, Debug)]
pub struct PromptArgs {
    /// Text to complete, or the message with --chat; may be given several times
    /// [default: an opening that the demo knows]
    #[arg(long, conflicts_with_all = ["prompt_file", "prompts_file"], allow_hyphen_values = true)]
    pub prompt: Vec<String>,

    /// File with the text to complete
    #[arg(long, value_name = "FILE", conflicts_with = "prompts_file")]
    pub prompt_file: Option<PathBuf>,

    /// File with a text to complete on every line; empty lines are skipped
    #[arg(long, value_name = "FILE")]
    pub prompts_file: Option<PathBuf>,

    /// Put each prompt through the tokenizer's chat template, as a user's message
    #[arg(long)]
    pub chat: bool,

    /// Talk: each line of the input is a message, and the model remembers what was said. /reset starts again, /quit or
    /// the end of the input ends; Ctrl-C stops an answer, and twice the program. Without a chat template the lines and
    /// their completions are one text
    #[arg(long, conflicts_with_all = ["prompt", "prompt_file", "prompts_file", "batch", "prefix_cache", "prefix_block"])]
    pub interactive: bool,

    /// N made-up tokens for a prompt, --batch times (or once), to see how long it takes: no text is printed, and no
    /// token ends a completion
    #[arg(long, value_name = "N", value_parser = positive,
          conflicts_with_all = ["prompt", "prompt_file", "prompts_file", "chat", "interactive"])]
    pub prompt_tokens: Option<usize>,
}

/// What the chat template is and is given, with --chat or --interactive.
#[derive(clap::Args, Debug, Default)]
pub struct ChatArgs {
    /// A message of the system before all others
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,

    /// Answer without thinking first, if the chat template has a switch for it (enable_thinking)
    #[arg(long)]
    pub no_thinking: bool,

    /// A value that the chat template reads, such as preserve_thinking=true: JSON, or else a text; may be given several
    /// times
    #[arg(long, value_name = "KEY=VALUE", value_parser = template_arg)]
    pub template_arg: Vec<(String, Value)>,

    /// A file with the chat template, in the place of the checkpoint's own
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
}

impl ChatArgs {
    fn check(&self) -> Result<()> {
        if let Some(path) = &self.chat_template {
            // It may be a pipe, which can be read once.
            path.metadata().with_context(|| format!("--chat-template: cannot read {}", path.display()))?;
        }
        let switch =
            self.template_arg.iter().find(|(name, value)| THINKING.contains(&name.as_str()) && value.is_true());
        match switch.filter(|_| self.no_thinking) {
            Some((name, _)) => bail!("--no-thinking: expected no --template-arg {name}, which says otherwise"),
            None => Ok(()),
        }
    }

    /// The first option that was given.
    pub fn option(&self) -> Option<&'static str> {
        [
            ("--system", self.system.is_some()),
            ("--no-thinking", self.no_thinking),
            ("--template-arg", !self.template_arg.is_empty()),
            ("--chat-template", self.chat_template.is_some()),
        ]
        .into_iter()
        .find_map(|(option, given)| given.then_some(option))
    }
}

/// How tokens are chosen.
#[derive(clap::Args, Debug)]
pub struct SamplingArgs {
    #[command(flatten)]
    pub options: SamplingOptions,

    /// Seed of the random choices; each of several prompts draws from a generator of its own
    #[arg(long, default_value_t = 299792458)]
    pub seed: u64,
}

/// What the command line or a checkpoint says of how tokens are chosen.
#[derive(clap::Args, Clone, Debug, Default, PartialEq)]
pub struct SamplingOptions {
    /// Flatness of the distribution; 0 takes the most likely token
    #[arg(long, allow_negative_numbers = true, value_parser = temperature)]
    pub temperature: Option<f64>,

    /// Choose among the K most likely tokens; 0 chooses among all
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,

    /// Choose among the most likely tokens that together have probability P
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = probability)]
    pub top_p: Option<f64>,

    /// Choose among tokens at least P times as probable as the most likely one; 0 chooses among all
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = fraction)]
    pub min_p: Option<f64>,

    /// Makes tokens that occurred lately, in the prompt too, less likely; 1 does nothing
    #[arg(long, allow_negative_numbers = true, value_parser = penalty)]
    pub repeat_penalty: Option<f32>,

    /// How many of the last tokens --repeat-penalty looks at [default: 64; all, if
    /// generation_config.json has a penalty]
    #[arg(long, value_name = "N")]
    pub repeat_last_n: Option<usize>,

    /// Subtracted from the logits of tokens that are in the completion; below 0 it makes them likelier
    #[arg(long, allow_negative_numbers = true, value_parser = finite)]
    pub presence_penalty: Option<f32>,

    /// Subtracted once for each time that the token is in the completion
    #[arg(long, allow_negative_numbers = true, value_parser = finite)]
    pub frequency_penalty: Option<f32>,
}

impl SamplingOptions {
    /// These options; those that are not given are the `defaults`.
    pub fn with_defaults(self, defaults: Self) -> Self {
        Self {
            temperature: self.temperature.or(defaults.temperature),
            top_k: self.top_k.or(defaults.top_k),
            top_p: self.top_p.or(defaults.top_p),
            min_p: self.min_p.or(defaults.min_p),
            repeat_penalty: self.repeat_penalty.or(defaults.repeat_penalty),
            repeat_last_n: self.repeat_last_n.or(defaults.repeat_last_n),
            presence_penalty: self.presence_penalty.or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.or(defaults.frequency_penalty),
        }
    }
}

/// How the model runs. This changes no completion, except by the rounding of sums.
#[derive(clap::Args, Debug)]
pub struct RunArgs {
    /// Prompts that run at once at most; the others follow as these end [default: all]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub batch: Option<usize>,

    /// Tokens of prompt and completion together that there is room for, or of all that is said with --interactive
    /// [default: the longest prompt and -n, or 32768, within the positions of the model]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_seq_len: Option<usize>,

    /// Tokens to draft at most at each step, from what followed the last tokens earlier in the text, and to verify in one
    /// pass; fewer where drafts were rejected. 0 drafts none
    #[arg(long, value_name = "N", default_value = "0", value_parser = drafted)]
    pub draft: usize,

    /// Let the draft head of the checkpoint draft tokens, to be verified in one pass: as many as save time, none where none
    /// do. Without a head auto runs without drafts, and on fails
    #[arg(long, default_value = "auto", value_parser = PossibleValuesParser::new(["auto", "on", "off"]).map(head))]
    pub mtp: DraftHeadChoice,

    /// Memory for the states of prefixes that prompts share, which then run once; 0 keeps none
    /// [default: 256 with several prompts, else 0]
    #[arg(long, value_name = "MIB")]
    pub prefix_cache: Option<usize>,

    /// Shared prefixes are cut to a multiple of this, itself a multiple of 64
    #[arg(long, value_name = "TOKENS", default_value = "64", value_parser = block)]
    pub prefix_block: usize,

    /// Report how many tokens came from --prefix-cache
    #[arg(long)]
    pub show_cache: bool,

    /// Capture a decode step as a CUDA graph and replay it: where that is impossible auto runs without, and on fails
    #[arg(long, default_value = "auto", value_parser = PossibleValuesParser::new(["auto", "on", "off"]).map(graph))]
    pub cuda_graph: GraphChoice,
}

pub fn graph(choice: String) -> GraphChoice {
    match choice.as_str() {
        "on" => GraphChoice::On,
        "off" => GraphChoice::Off,
        _ => GraphChoice::Auto,
    }
}

pub fn head(choice: String) -> DraftHeadChoice {
    match choice.as_str() {
        "on" => DraftHeadChoice::On,
        "off" => DraftHeadChoice::Off,
        _ => DraftHeadChoice::Auto,
    }
}

fn template_arg(s: &str) -> Result<(String, Value), String> {
    let (key, value) = s.split_once('=').filter(|(key, _)| !key.is_empty()).ok_or("expected KEY=VALUE")?;
    if ["messages", "add_generation_prompt"].contains(&key) {
        return Err(format!("{key} is the program's own"));
    }
    // As Python writes them.
    let json = match value {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        other => other,
    };
    Ok((key.into(), serde_json::from_str(json).unwrap_or_else(|_| value.into())))
}

pub fn temperature(s: &str) -> Result<f64, String> {
    number(s, "a number of at least 0", |x| x >= 0.)
}

pub fn probability(s: &str) -> Result<f64, String> {
    number(s, "a number in (0, 1]", |x| x > 0. && x <= 1.)
}

pub fn fraction(s: &str) -> Result<f64, String> {
    number(s, "a number in [0, 1]", |x| (0. ..=1.).contains(&x))
}

pub fn penalty(s: &str) -> Result<f32, String> {
    number(s, "a number above 0", |x| x > 0.)
}

pub fn finite(s: &str) -> Result<f32, String> {
    number(s, "a finite number", |_| true)
}

fn number<T: FromStr + Copy + Into<f64>>(s: &str, expected: &str, valid: fn(f64) -> bool) -> Result<T, String> {
    match s.parse::<T>() {
        Ok(x) if x.into().is_finite() && valid(x.into()) => Ok(x),
        _ => Err(format!("expected {expected}")),
    }
}

pub fn positive(s: &str) -> Result<usize, String> {
    whole(s, "a whole number of at least 1", |n| n > 0)
}

pub fn drafted(s: &str) -> Result<usize, String> {
    whole(s, &format!("a whole number of 0 to {MOST_DRAFTED}"), |n| n <= MOST_DRAFTED)
}

pub fn block(s: &str) -> Result<usize, String> {
    whole(s, &format!("a positive multiple of {CHUNK}"), |n| n > 0 && n % CHUNK == 0)
}

fn whole(s: &str, expected: &str, valid: impl Fn(usize) -> bool) -> Result<usize, String> {
    s.parse().ok().filter(|n| valid(*n)).ok_or(format!("expected {expected}"))
}
