//! What is measured: the grids of each suite.

use candle_gdn_benches::record::Shape;
use clap::builder::RangedU64ValueParser;
use std::str::FromStr;

/// Key heads, value heads, and the size of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    pub hk: usize,
    pub hv: usize,
    pub dim: usize,
}

impl FromStr for Heads {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let (hk, hv) = s.split_once('/').ok_or_else(|| format!("expected HK/HV, as 16/32, got {s:?}"))?;
        let number = |x: &str| x.parse().map_err(|_| format!("expected HK/HV, as 16/32, got {s:?}"));
        let (hk, hv) = (number(hk)?, number(hv)?);
        if hk == 0 || hv == 0 || hv % hk != 0 {
            return Err(format!("no kernel takes {s}: the value heads must be a multiple of the key heads"));
        }
        Ok(Self { hk, hv, dim: 128 })
    }
}

impl std::fmt::Display for Heads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.hk, self.hv)
    }
}

/// One shape of the rule, in one of the suites.
pub struct Work {
    pub suite: &'static str,
    pub name: String,
    pub heads: Heads,
    /// Tokens of each sequence, all the same.
    pub lengths: Vec<usize>,
}

impl Work {
    /// One token of each sequence, through the decode op.
    pub fn decode(&self) -> bool {
        self.suite == "decode"
    }

    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Whether candle's tensor operations are timed on it too: the few shapes that have baselines in benches/peers.
    pub fn has_baseline(&self) -> bool {
        BASELINES.contains(&(self.suite, self.name.as_str()))
    }

    /// Every input and output once, the state read and written.
    pub fn bytes(&self, element: usize) -> u64 {
        let Heads { hk, hv, dim } = self.heads;
        let token = (2 * hk + 2 * hv) * dim * element + 2 * hv * element;
        (self.tokens() * token + 2 * self.lengths.len() * hv * dim * dim * 4) as u64
    }

    /// Token by token 6 K V a token and head: two products with the state and its update. In chunks of 64 tokens the three
    /// products with the state remain, and four of 64 x K or V come: K K^T, Q K^T, and those with the inverse and the
    /// masked Q K^T. The floor asks for what the fastest form needs, so the chunked count where matrix units can be used.
    pub fn flop(&self) -> u64 {
        let dim = self.heads.dim as u64;
        let within = if self.decode() { 0 } else { 2 * 64 * 4 * dim };
        (self.tokens() * self.heads.hv) as u64 * (6 * dim * dim + within)
    }

    pub fn shape(&self) -> Shape {
        let Heads { hk, hv, dim } = self.heads;
        Shape::heads(hk, hv, dim, dim).batch(self.lengths.len()).tokens(self.lengths[0])
    }
}

/// What the command line leaves of the grids.
#[derive(clap::Args)]
pub struct Choice {
    /// Key and value heads instead of the grid's, as 16/32
    #[arg(long, value_delimiter = ',')]
    heads: Vec<Heads>,
    /// Size of the key and value heads, 1 to 256
    #[arg(long, default_value_t = 128, value_parser = RangedU64ValueParser::<usize>::new().range(1..=256))]
    dim: usize,
    /// Numbers of sequences instead of the grid's
    #[arg(long, value_delimiter = ',', value_parser = positive)]
    batch: Vec<usize>,
    /// Tokens a sequence instead of the grid's
    #[arg(long, value_delimiter = ',', value_parser = positive)]
    tokens: Vec<usize>,
    /// A few shapes of each suite
    #[arg(long)]
    pub quick: bool,
}

fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a whole number of at least 1".into())
}

const HEADS: [(usize, usize); 6] = [(16, 32), (16, 16), (16, 48), (16, 64), (4, 8), (2, 8)];
const BATCHES: [usize; 9] = [1, 4, 8, 16, 32, 48, 64, 128, 256];
/// Sequences and tokens of each: FlashQLA's grid.
const PREFILL: [(usize, usize); 9] =
    [(1, 64), (1, 128), (1, 512), (1, 2048), (1, 8192), (1, 32768), (4, 2048), (4, 8192), (8, 1024)];

const BASELINES: [(&str, &str); 6] = [
    ("decode", "16/32 B=1"),
    ("decode", "16/32 B=8"),
    ("decode", "16/32 B=64"),
    ("prefill", "16/32 1x64"),
    ("prefill", "16/32 1x2048"),
    ("prefill", "16/32 8x1024"),
];

impl Choice {
    /// `chosen`, or else of the grid each place that is a multiple of `step` where it is to be quick.
    fn pick<T: Clone>(&self, chosen: &[T], grid: &[T], step: usize) -> Vec<T> {
        match (chosen, self.quick) {
            ([], true) => grid.iter().step_by(step).cloned().collect(),
            ([], false) => grid.to_vec(),
            (chosen, _) => chosen.to_vec(),
        }
    }

    fn heads(&self) -> impl Iterator<Item = Heads> + '_ {
        let grid = HEADS.map(|(hk, hv)| Heads { hk, hv, dim: self.dim });
        self.pick(&self.heads, &grid, grid.len()).into_iter().map(|heads| Heads { dim: self.dim, ..heads })
    }

    pub fn batches(&self, grid: &[usize]) -> Vec<usize> {
        self.pick(&self.batch, grid, 4)
    }

    pub fn tokens(&self, grid: &[usize]) -> Vec<usize> {
        self.pick(&self.tokens, grid, 3)
    }

    pub fn decode(&self) -> Vec<Work> {
        let mut works = vec![];
        for heads in self.heads() {
            for batch in self.batches(&BATCHES) {
                let name = self.name(heads, format!("B={batch}"));
                works.push(Work { suite: "decode", name, heads, lengths: vec![1; batch] });
            }
        }
        works
    }

    pub fn prefill(&self) -> Vec<Work> {
        let grid = match (&self.batch[..], &self.tokens[..]) {
            ([], []) if self.quick => PREFILL[..3].to_vec(),
            ([], []) => PREFILL.to_vec(),
            (batches, tokens) => {
                let tokens = if tokens.is_empty() { &[2048] } else { tokens };
                let batches = if batches.is_empty() { &[1] } else { batches };
                batches.iter().flat_map(|b| tokens.iter().map(move |t| (*b, *t))).collect()
            }
        };
        let mut works = vec![];
        for heads in self.heads() {
            for &(batch, tokens) in &grid {
                let name = self.name(heads, format!("{batch}x{tokens}"));
                works.push(Work { suite: "prefill", name, heads, lengths: vec![tokens; batch] });
            }
        }
        works
    }

    fn name(&self, heads: Heads, rest: String) -> String {
        match self.dim {
            128 => format!("{heads} {rest}"),
            dim => format!("{heads} of {dim} {rest}"),
        }
    }
}
