//! Command line.

use super::common::ModelArgs;
use clap::Parser;
use std::path::PathBuf;

/// Completes a text with a Qwen3-Next model. The completion goes to stdout, everything else to
/// stderr. Without arguments: the demo checkpoint and an opening that it knows. Ctrl-C ends after
/// the current token with exit status 130.
#[derive(Parser, Debug)]
#[command(
    version,
    after_help = "Sampling options that are not given come from the checkpoint's \
generation_config.json; without one, the most likely token is taken (--temperature 0)."
)]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,

    /// Text to complete, or the message with --chat [default: an opening that the demo knows]
    #[arg(long, conflicts_with = "prompt_file")]
    pub prompt: Option<String>,

    /// File with the text to complete
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,

    /// Put the prompt through the tokenizer's chat template, as a user's message
    #[arg(long)]
    pub chat: bool,

    /// Tokens to generate at most
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    pub sample_len: usize,

    /// Flatness of the distribution; 0 takes the most likely token
    #[arg(long, allow_negative_numbers = true, value_parser = temperature)]
    pub temperature: Option<f64>,

    /// Choose among the K most likely tokens; 0 chooses among all
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,

    /// Choose among the most likely tokens that together have probability P
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = probability)]
    pub top_p: Option<f64>,

    /// Seed of the random choices
    #[arg(long, default_value_t = 299792458)]
    pub seed: u64,

    /// Makes tokens that occurred lately less likely; 1 does nothing
    #[arg(long, allow_negative_numbers = true, value_parser = penalty)]
    pub repeat_penalty: Option<f32>,

    /// How many of the last tokens --repeat-penalty looks at
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub repeat_last_n: usize,
}

fn temperature(s: &str) -> Result<f64, String> {
    number(s, "a number of at least 0", |x| x >= 0.)
}

fn probability(s: &str) -> Result<f64, String> {
    number(s, "a number in (0, 1]", |x| x > 0. && x <= 1.)
}

fn penalty(s: &str) -> Result<f32, String> {
    number(s, "a number above 0", |x| x > 0.).map(|x| x as f32)
}

fn number(s: &str, expected: &str, valid: impl Fn(f64) -> bool) -> Result<f64, String> {
    match s.parse::<f64>() {
        Ok(x) if x.is_finite() && valid(x) => Ok(x),
        _ => Err(format!("expected {expected}")),
    }
}
