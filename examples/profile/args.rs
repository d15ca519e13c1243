//! The command line.

// A build without the feature only checks it.
#![cfg_attr(not(feature = "profile"), allow(dead_code))]

use anyhow::{bail, Context, Result};
use candle_core::DType;
use candle_gdn::Algo;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Parser, ValueEnum};
use std::path::{Path, PathBuf};

/// Those of a step but for `auto`.
const STEP_ALGOS: [(&str, Algo); 4] =
    [("whole", Algo::StepWhole), ("split", Algo::StepSplit), ("heads", Algo::StepHeads), ("composed", Algo::Unfused)];

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub enum Op {
    Decode,
    Prefill,
    Step,
}

impl Op {
    pub fn name(self) -> &'static str {
        match self {
            Op::Decode => "gdn_decode",
            Op::Prefill => "gdn_prefill",
            Op::Step => "gdn_step",
        }
    }
}

/// Profiles one call of the gated delta rule on the first GPU, inputs out of its L2 cache: cycles per scope of each kernel
/// on stdout, and a Chrome trace. Needs a build with --features profile, whose kernels are slower than others: compare
/// shares, not times. Exits with 1 if events were dropped.
#[derive(Parser, Debug, Clone)]
#[command(name = "profile", version)]
pub struct Args {
    /// One token of each sequence, any number, or one token through convolution, rule and gated norm
    #[arg(long, value_enum, default_value = "decode")]
    pub op: Op,

    /// Sequences
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub batch: usize,

    /// Tokens of each sequence [default: 1024 for prefill, else 1]
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

    /// The kernel; whole, split, heads and composed are those of a step; or all that take the inputs, each with files of its
    /// own [default: auto, or for decode and prefill the variable CANDLE_GDN_ALGO]
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(
          ["all"].into_iter().chain(Algo::RULE.map(Algo::name)).chain(STEP_ALGOS.map(|a| a.0))))]
    algo: Option<String>,

    /// Events a warp may record [default: enough, unless the buffer would pass 2 GiB]
    #[arg(long, value_name = "N")]
    pub events: Option<usize>,

    /// Where the trace goes
    #[arg(long, value_name = "FILE", default_value = "profile.json")]
    pub trace: PathBuf,

    /// Trace only the first N multiprocessors; the table always holds all
    #[arg(long, value_name = "N")]
    pub trace_sms: Option<usize>,

    /// Where the tables go as a JSON array, one for each kernel, besides stdout
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl Args {
    pub fn tokens(&self) -> Result<usize> {
        match (self.op, self.tokens) {
            (Op::Prefill, tokens) => Ok(tokens.unwrap_or(1024)),
            (Op::Step, tokens) => Ok(tokens.unwrap_or(1)),
            (Op::Decode, Some(tokens)) if tokens != 1 => {
                bail!("--tokens: decode takes one token of each sequence, got {tokens}")
            }
            (Op::Decode, _) => Ok(1),
        }
    }

    /// Whether the op has the kernel.
    pub fn check_algo(&self) -> Result<()> {
        match self.op {
            Op::Step => self.step_algo().map(drop),
            Op::Decode | Op::Prefill => self.algo().map(drop),
        }
    }

    /// A call for each kernel that is asked for; where it is all, with their names in those of the files.
    pub fn each(&self) -> Vec<Self> {
        let names: Vec<_> = match (self.algo.as_deref(), self.op) {
            (Some("all"), Op::Step) => STEP_ALGOS.map(|a| a.0).into(),
            (Some("all"), _) => Algo::RULE.into_iter().filter(|algo| *algo != Algo::Auto).map(Algo::name).collect(),
            _ => return vec![self.clone()],
        };
        let one = |name: &str| Self {
            algo: Some(name.to_owned()),
            trace: named(&self.trace, name),
            json: self.json.as_deref().map(|path| named(path, name)),
            ..self.clone()
        };
        names.into_iter().map(one).collect()
    }

    /// Of decode and prefill.
    pub fn algo(&self) -> Result<Algo> {
        let Some(name) = &self.algo else { return Ok(Algo::from_env()?) };
        name.parse().ok().with_context(|| format!("--algo: {name} is for --op step"))
    }

    /// Of a step.
    pub fn step_algo(&self) -> Result<Algo> {
        let name = self.algo.as_deref().unwrap_or("auto");
        let auto = [("auto", Algo::Auto)];
        let found = STEP_ALGOS.iter().chain(&auto).find(|a| a.0 == name);
        found.map(|a| a.1).with_context(|| format!("--algo: {name} is not for --op step"))
    }
}

/// `profile.json` of one of several kernels as `profile-recurrent.json`.
fn named(path: &Path, name: &str) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let end = path.extension().map(|end| format!(".{}", end.to_string_lossy())).unwrap_or_default();
    path.with_file_name(format!("{stem}-{name}{end}"))
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&n| n > 0).ok_or_else(|| "expected a whole number of at least 1".into())
}

fn heads(text: &str) -> Result<(usize, usize), String> {
    let parse = |(k, v): (&str, &str)| Some((at_least_one(k).ok()?, at_least_one(v).ok()?));
    text.split_once('/').and_then(parse).ok_or_else(|| "expected key heads/value heads, as in 16/32".into())
}
