//! How well a model of the Qwen3-Next family predicts a text: one JSON line a token on stdout,
//! from the second token on, then one with the sum of it.

mod score;

use anyhow::{anyhow, bail, Context, Result};
use candle_gdn_cli::{fix_thread_count, load_model, status, Checkpoint, ModelArgs, Need, Rank, Room};
use clap::Parser;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// Scores a text: on stdout one line {"id":7,"logprob":-1.234567} for each token from the second
/// on (natural logarithm), then a line with the count of these tokens, their mean nll and the perplexity.
#[derive(Parser, Debug)]
#[command(name = "perplexity", version, mut_arg("tensor_parallel", |arg| arg.hide(true)))]
struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// File with the text to score
    #[arg(long, required_unless_present = "token_ids", conflicts_with = "token_ids")]
    file: Option<PathBuf>,

    /// The tokens to score, as in 5,7,9
    #[arg(long, value_name = "IDS")]
    token_ids: Option<String>,
}

const NOT_WRITTEN: &str = "cannot write to stdout";

fn main() -> ExitCode {
    fix_thread_count();
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if is_closed_output(&e) => ExitCode::SUCCESS,
        Err(e) => {
            status!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    // What can be wrong with the arguments alone comes before a download.
    args.model.algo()?;
    if args.model.tensor_parallel.get() > 1 {
        bail!("--tensor-parallel: expected 1, more are for generate")
    }
    let scored = scored(args)?;
    let checkpoint = Checkpoint::find(&args.model)?;
    let config = checkpoint.config()?;
    let (ids, source) = scored.tokens(&checkpoint)?;
    let limit = config.max_position_embeddings;
    if ids.len() < 2 {
        bail!("{source}: expected at least 2 tokens, got {}", ids.len())
    }
    if ids.len() > limit {
        bail!("{source}: expected at most max_position_embeddings ({limit}) tokens, got {}", ids.len())
    }
    if let Some(id) = ids.iter().find(|&&id| id as usize >= config.vocab_size) {
        bail!("{source}: expected token ids below vocab_size ({}), got {id}", config.vocab_size)
    }
    let rank = Rank::single(args.model.device()?);
    // Keys and values grow by doubling.
    let max_len = ids.len().next_power_of_two().min(limit);
    let room = Room {
        sequences: 1,
        max_len,
        least_len: max_len,
        draft: 0,
        snapshots: 0,
        cache: 0,
        prefixes: 0,
        draft_head: false,
    };
    Need::new(&args.model, &checkpoint, &config, &room, &rank)?.check(&rank)?;
    let model = load_model(&args.model, &checkpoint, &config, false, &rank)?;
    let mut out = BufWriter::new(std::io::stdout().lock());
    let total = score::score(&model, &ids, args.model.prefill_chunk(&rank.device), |id, logprob| {
        writeln!(out, "{{\"id\":{id},\"logprob\":{logprob:.6}}}").context(NOT_WRITTEN)
    })?;
    let count = ids.len() - 1;
    let nll = -total / count as f64;
    writeln!(out, "{{\"count\":{count},\"mean_nll\":{nll:.6},\"perplexity\":{:.6}}}", nll.exp())
        .context(NOT_WRITTEN)?;
    out.flush().context(NOT_WRITTEN)
}

/// What is scored.
enum Scored {
    Tokens(Vec<u32>),
    Text(String),
}

fn scored(args: &Args) -> Result<Scored> {
    if let Some(list) = &args.token_ids {
        let parse =
            |s: &str| s.trim().parse::<u32>().map_err(|_| anyhow!("--token-ids: expected a token id, got {s:?}"));
        return Ok(Scored::Tokens(list.split(',').map(parse).collect::<Result<_>>()?));
    }
    let Some(path) = &args.file else { bail!("expected --file or --token-ids") };
    let text = std::fs::read_to_string(path).with_context(|| format!("--file: cannot read {}", path.display()))?;
    // A byte order mark is no text.
    Ok(Scored::Text(text.strip_prefix('\u{FEFF}').unwrap_or(&text).to_string()))
}

impl Scored {
    /// The tokens, and the argument they come from.
    fn tokens(self, checkpoint: &Checkpoint) -> Result<(Vec<u32>, &'static str)> {
        let text = match self {
            Self::Tokens(ids) => return Ok((ids, "--token-ids")),
            Self::Text(text) => text,
        };
        let Some(tokenizer) = checkpoint.tokenizer()? else {
            bail!("--file: expected a checkpoint with tokenizer.json")
        };
        let encoding = tokenizer.encode(text, true).map_err(|e| anyhow!("--file: cannot tokenise: {e}"))?;
        Ok((encoding.get_ids().to_vec(), "--file"))
    }
}

fn is_closed_output(e: &anyhow::Error) -> bool {
    e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}
