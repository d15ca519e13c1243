//! The record format of `benches/README.md`: what every benchmark writes and `report` reads.
//!
//! ```ignore
//! let mut run = Run::new("benches/gpu", Machine { device, host: host_cpu(), ..Machine::default() });
//! run.ceilings = Ceilings { copy_gb_s: Some(copy), matmul_tflop_s: Some(matmul) };
//! run.contender("candle-gdn", env!("CARGO_PKG_VERSION"));
//! let row = Row::new("decode", "16/32 B=1", "candle-gdn").variant("recurrent_128").auto(true).l2("cold");
//! let row = row.shape(Shape::heads(16, 32, 128, 128).batch(1).tokens(1)).gpu(Time::of(&mut samples));
//! run.push(row.work(bytes, flop).error("o", 0.0012));
//! run.write("benches/results/h200/gpu.json".as_ref())?;
//! ```

use anyhow::{Context, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version of the format; a reader refuses any other.
pub const SCHEMA: u32 = 1;

/// One run of one tool on one machine: a file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Run {
    pub schema: u32,
    /// What measured, as `benches/gpu`. Rows of different tools are different measurements.
    pub tool: String,
    /// Short hash, with `+` when the tree was dirty.
    pub commit: String,
    /// UTC, `YYYY-MM-DD`.
    pub date: String,
    /// What a reader types to get this file.
    pub command: String,
    pub machine: Machine,
    pub ceilings: Ceilings,
    /// Names and versions.
    pub contenders: BTreeMap<String, String>,
    pub rows: Vec<Row>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Machine {
    /// What ran the kernels: the GPU, or the CPU again.
    pub device: String,
    /// The CPU model.
    pub host: String,
    pub threads: Option<usize>,
    pub driver: Option<String>,
    pub cuda: Option<String>,
}

/// What the machine was measured to do at best, in the same run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Ceilings {
    /// A large copy: bytes read plus bytes written.
    pub copy_gb_s: Option<f64>,
    /// A large bf16 matrix product.
    pub matmul_tflop_s: Option<f64>,
}

/// One workload of one contender. Times are microseconds a call.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    pub suite: String,
    /// Rows of one suite with the same workload and `l2` are the same work.
    pub workload: String,
    pub contender: String,
    pub variant: Option<String>,
    /// Whether this is the variant that `Algo::Auto` takes.
    pub auto: bool,
    /// `cold` or `warm`.
    pub l2: Option<String>,
    pub shape: Shape,
    /// What a call does besides the rule itself.
    pub includes: Option<String>,
    pub launches: Option<u32>,
    /// Kernel time by CUPTI.
    pub gpu: Option<Time>,
    /// CUDA events around a replayed graph of many calls.
    pub event: Option<Time>,
    /// CUDA events around each call on an idle GPU.
    pub call: Option<Time>,
    /// Host clock around a call and a synchronisation.
    pub wall: Option<Time>,
    /// The part of `wall` until the call returned.
    pub host: Option<Time>,
    pub bytes: Option<u64>,
    pub flop: Option<u64>,
    pub floor_us: Option<f64>,
    /// What `gpu` is made of, as means a call.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Part>,
    /// Of what a call passes from kernel to kernel, its output too: memory at the peak.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub between_bytes: Option<u64>,
    /// Relative RMS errors against the rule in f64, by output. NaN is written as null.
    pub error: BTreeMap<String, Option<f64>>,
    pub note: String,
}

/// Microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Time {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

/// What some kernels of a call do.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    pub name: String,
    pub launches: u32,
    /// By how many microseconds they end after all that began before them, summed: what overlaps counts once.
    pub us: f64,
    /// That they have to read and write.
    pub bytes: Option<u64>,
}

/// The sizes that a workload has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Shape {
    /// Key heads.
    pub hk: Option<usize>,
    /// Value heads.
    pub hv: Option<usize>,
    /// Size of a key head.
    pub k: Option<usize>,
    /// Size of a value head.
    pub v: Option<usize>,
    /// Sequences.
    pub batch: Option<usize>,
    /// Tokens a sequence; absent where the sequences differ.
    pub tokens: Option<usize>,
    /// Tokens of all sequences.
    pub total_tokens: Option<usize>,
    /// Width of the model.
    pub hidden: Option<usize>,
    /// Channels of the convolution.
    pub channels: Option<usize>,
}

impl Run {
    /// An empty run of this commit, today, by this command line.
    pub fn new(tool: &str, machine: Machine) -> Run {
        Run {
            schema: SCHEMA,
            tool: tool.into(),
            commit: git_commit(),
            date: today(),
            command: command_line(),
            machine,
            ceilings: Ceilings::default(),
            contenders: BTreeMap::new(),
            rows: vec![],
        }
    }

    pub fn contender(&mut self, name: &str, version: &str) {
        self.contenders.insert(name.into(), version.into());
    }

    /// Takes the row, with the floor that its work has under this run's ceilings unless it brings one.
    pub fn push(&mut self, mut row: Row) {
        row.floor_us = row.floor_us.or_else(|| self.ceilings.floor_us(row.bytes, row.flop));
        self.rows.push(row);
    }

    /// JSON with a row a line, so that a diff shows which rows changed.
    pub fn to_json(&self) -> Result<String> {
        let mut json = serde_json::to_string_pretty(&Run { rows: vec![], ..self.clone() })?;
        if !self.rows.is_empty() {
            let rows = self.rows.iter().map(serde_json::to_string).collect::<serde_json::Result<Vec<_>>>()?;
            json.truncate(json.rfind("[]").context("rows come last")?);
            json += &format!("[\n    {}\n  ]\n}}", rows.join(",\n    "));
        }
        Ok(json + "\n")
    }

    /// Writes the file, and the folders above it where they are missing.
    pub fn write(&self, path: &Path) -> Result<()> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
        }
        std::fs::write(path, self.to_json()?).with_context(|| format!("{}: cannot be written", path.display()))
    }
}

impl Ceilings {
    /// The larger of the bytes at the copy rate and the operations at the matmul rate.
    pub fn floor_us(&self, bytes: Option<u64>, flop: Option<u64>) -> Option<f64> {
        let memory = bytes.zip(self.copy_gb_s).map(|(bytes, rate)| bytes as f64 / rate / 1e3);
        let arithmetic = flop.zip(self.matmul_tflop_s).map(|(flop, rate)| flop as f64 / rate / 1e6);
        let floor = memory.into_iter().chain(arithmetic).reduce(f64::max)?;
        (floor > 0.).then(|| rounded(floor))
    }
}

/// Methods that set one field each, to be chained.
macro_rules! setters {
    ($($field:ident($value:ident: $type:ty) = $set:expr;)*) => {
        $(pub fn $field(self, $value: $type) -> Self {
            Self { $field: $set, ..self }
        })*
    };
}

impl Row {
    pub fn new(suite: &str, workload: &str, contender: &str) -> Row {
        Row { suite: suite.into(), workload: workload.into(), contender: contender.into(), ..Row::default() }
    }

    setters! {
        variant(name: &str) = Some(name.into());
        auto(auto: bool) = auto;
        l2(state: &str) = Some(state.into());
        shape(shape: Shape) = shape;
        includes(what: &str) = Some(what.into());
        launches(number: u32) = Some(number);
        gpu(time: impl Into<Option<Time>>) = time.into();
        event(time: impl Into<Option<Time>>) = time.into();
        call(time: impl Into<Option<Time>>) = time.into();
        wall(time: impl Into<Option<Time>>) = time.into();
        host(time: impl Into<Option<Time>>) = time.into();
    }

    /// Bytes that have to be read and written, and floating-point operations; `Run::push` makes the floor of it.
    pub fn work(self, bytes: u64, flop: u64) -> Row {
        Row { bytes: Some(bytes), flop: Some(flop), ..self }
    }

    /// The relative RMS error of one output.
    pub fn error(mut self, output: &str, error: f64) -> Row {
        self.error.insert(output.into(), Some(error).filter(|e| e.is_finite()));
        self
    }

    /// Adds to the note.
    pub fn note(mut self, note: &str) -> Row {
        if !self.note.is_empty() && !note.is_empty() {
            self.note += "; ";
        }
        self.note += note;
        self
    }
}

impl Shape {
    pub fn heads(hk: usize, hv: usize, k: usize, v: usize) -> Shape {
        Shape { hk: Some(hk), hv: Some(hv), k: Some(k), v: Some(v), ..Shape::default() }
    }

    setters! {
        hidden(size: usize) = Some(size);
        channels(number: usize) = Some(number);
        batch(sequences: usize) = Some(sequences);
    }

    /// Tokens a sequence, and of all of them: set the batch first.
    pub fn tokens(self, tokens: usize) -> Shape {
        Shape { tokens: Some(tokens), total_tokens: Some(tokens * self.batch.unwrap_or(1)), ..self }
    }
}

impl Time {
    /// Median, minimum and maximum of at least one sample; the samples come back sorted.
    pub fn of(samples: &mut [f64]) -> Time {
        assert!(!samples.is_empty(), "a time needs a sample");
        samples.sort_by(f64::total_cmp);
        let n = samples.len();
        let median = (samples[(n - 1) / 2] + samples[n / 2]) / 2.;
        Time { median: rounded(median), min: rounded(samples[0]), max: rounded(samples[n - 1]) }
    }
}

/// Microseconds to a tenth of a nanosecond, below what any of the clocks tells.
pub fn rounded(us: f64) -> f64 {
    (us * 1e4).round() / 1e4
}

/// The short hash, with `+` when the tree is dirty apart from `benches/results`; `CANDLE_GDN_COMMIT` where the program
/// runs without its repository.
fn git_commit() -> String {
    if let Ok(commit) = std::env::var("CANDLE_GDN_COMMIT") {
        return commit;
    }
    let git = |args: &[&str]| {
        let out = Command::new("git").args(["-C", env!("CARGO_MANIFEST_DIR")]).args(args).output().ok()?;
        out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim().to_string())
    };
    let hash = git(&["rev-parse", "--short", "HEAD"]);
    let changes = git(&["status", "--porcelain", "--", ":/", ":(top,exclude)benches/results"]);
    hash.zip(changes).map_or("unknown".into(), |(hash, changes)| hash + if changes.is_empty() { "" } else { "+" })
}

/// UTC, `YYYY-MM-DD`.
fn today() -> String {
    let date = Command::new("date").args(["-u", "+%F"]).output();
    date.map_or("unknown".into(), |out| String::from_utf8_lossy(&out.stdout).trim().to_string())
}

/// Where the records of a machine lie: of `NVIDIA H200` in benches/results/nvidia-h200.
pub fn results_folder(device: &str) -> PathBuf {
    let dashed = device.to_ascii_lowercase().replace(|c: char| !c.is_ascii_alphanumeric(), "-");
    let slug = dashed.split('-').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-");
    [env!("CARGO_MANIFEST_DIR"), "results", &slug].iter().collect()
}

/// The CPU model, or `unknown`.
pub fn host_cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    model.map_or("unknown".into(), |(_, name)| name.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// The `cargo bench` that runs this program: its features, its arguments and the variables that set its threads and
/// its kernel.
fn command_line() -> String {
    let features = match (cfg!(feature = "cupti"), cfg!(feature = "cuda")) {
        (true, _) => " --features cupti",
        (_, true) => " --features cuda",
        _ => "",
    };
    let variables = ["CANDLE_GDN_ALGO", "CANDLE_NUM_THREADS", "RAYON_NUM_THREADS"];
    let variables = variables.iter().filter_map(|name| Some(format!("{name}={} ", std::env::var(name).ok()?)));
    variables.collect::<String>() + &cargo_command(features, std::env::args())
}

/// `cargo bench`, of the arguments that cargo gives the program it built.
pub fn cargo_command(features: &str, mut args: impl Iterator<Item = String>) -> String {
    let program = args.next().unwrap_or_default();
    let program = Path::new(&program).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    // cargo appends `-` and a hash of 16 digits.
    let name = match program.rsplit_once('-') {
        Some((name, hash)) if hash.len() == 16 && hash.chars().all(|c| c.is_ascii_hexdigit()) => name,
        _ => &program,
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./,:+".contains(c);
    let quoted = |arg: String| match !arg.is_empty() && arg.chars().all(plain) {
        true => arg,
        false => format!("'{}'", arg.replace('\'', r"'\''")),
    };
    // Where the file went says how somebody's disk is laid out, and nothing about the measurement.
    let mut rest = vec![];
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--bench" => {}
            "--out" => drop(args.next()),
            _ if arg.starts_with("--out=") => {}
            _ => rest.push(quoted(arg)),
        }
    }
    let dashes = if rest.is_empty() { "" } else { " -- " };
    format!("cargo bench{features} --bench {name}{dashes}{}", rest.join(" "))
}
