//! The command line.

use anyhow::{bail, Result};
use candle_core::DType;
use candle_gdn::profile::Limits;
use candle_gdn::Algo;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Parser, ValueEnum};
use std::path::PathBuf;

/// The profile buffer is not made larger than this on its own.
const MOST_BYTES: usize = 2 << 30;

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub enum Op {
    Decode,
    Prefill,
}

/// Profiles one launch of the gated delta rule on the first GPU, inputs out of its L2 cache: cycles per scope on
/// stdout, and a Chrome trace. Needs a build with --features profile, whose kernels are slower than others: compare
/// shares, not times. Exits with 1 if events were dropped.
#[derive(Parser, Debug)]
#[command(name = "profile", version)]
pub struct Args {
    /// One token of each sequence, or any number
    #[arg(long, value_enum, default_value = "decode")]
    pub op: Op,

    /// Sequences
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub batch: usize,

    /// Tokens of each sequence [default: 1 for decode, 1024 for prefill]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    tokens: Option<usize>,

    /// Key heads and value heads
    #[arg(long, value_name = "HK/HV", default_value = "16/32", value_parser = heads)]
    pub heads: (usize, usize),

    /// Size of a head, of keys and values alike
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least_one)]
    pub dim: usize,

    /// Number format of the inputs
    #[arg(long, default_value = "bf16",
          value_parser = PossibleValuesParser::new(["f32", "bf16", "f16"]).try_map(|name| name.parse::<DType>()))]
    pub dtype: DType,

    /// The kernel: recurrent, recurrent_128, decode_128, or auto; or all of them, each with files of its own. The chunk
    /// forms have no clock stamps [default: the variable CANDLE_GDN_ALGO, or auto]
    #[arg(long, value_name = "NAME", value_parser = algos)]
    algo: Option<Algos>,

    /// Events a warp may record [default: enough, unless the buffer would pass 2 GiB]
    #[arg(long, value_name = "N")]
    events: Option<usize>,

    /// Where the trace goes
    #[arg(long, value_name = "FILE", default_value = "profile.json")]
    pub trace: PathBuf,

    /// Trace only the first N multiprocessors; the table always holds all
    #[arg(long, value_name = "N")]
    pub trace_sms: Option<usize>,

    /// Where the table goes as JSON, besides stdout
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The kernels asked for: one, or all.
#[derive(Clone, Debug, PartialEq)]
struct Algos(Vec<Algo>);

impl Args {
    /// The kernels to profile.
    pub fn algos(&self) -> Result<Vec<Algo>> {
        match &self.algo {
            Some(Algos(algos)) => Ok(algos.clone()),
            None => Ok(vec![Algo::from_env()?]),
        }
    }

    pub fn tokens(&self) -> Result<usize> {
        match (self.op, self.tokens) {
            (Op::Decode, Some(tokens)) if tokens != 1 => {
                bail!("--tokens: decode takes one token of each sequence, got {tokens}")
            }
            (Op::Decode, _) => Ok(1),
            (Op::Prefill, tokens) => Ok(tokens.unwrap_or(1024)),
        }
    }

    /// Room for any of the kernels.
    pub fn limits(&self, tokens: usize) -> Limits {
        // The smallest tiles have 16 rows, the largest blocks eight warps.
        let warps = self.batch.saturating_mul(self.heads.1).saturating_mul(self.dim.div_ceil(16) * 8);
        let most = (MOST_BYTES / 16 / warps.max(1)).max(16);
        let events_per_warp = self.events.unwrap_or_else(|| tokens.div_ceil(16).saturating_mul(24).min(most - 16) + 16);
        Limits { warps, events_per_warp }
    }
}

fn algos(name: &str) -> Result<Algos, String> {
    match name {
        "all" => Ok(Algos(Algo::ALL.to_vec())),
        name => match name.parse::<Algo>() {
            Ok(algo) => Ok(Algos(vec![algo])),
            Err(e) => Err(e.replacen("expected ", "expected all, ", 1)),
        },
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&n| n > 0).ok_or_else(|| "expected a whole number of at least 1".into())
}

fn heads(text: &str) -> Result<(usize, usize), String> {
    let parse = |(k, v): (&str, &str)| Some((at_least_one(k).ok()?, at_least_one(v).ok()?));
    text.split_once('/').and_then(parse).ok_or_else(|| "expected key heads/value heads, as in 16/32".into())
}
