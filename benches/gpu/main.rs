//! Times on a GPU, through candle: how fast, and how close to what the card can do. See benches/README.md.
//!
//! `cargo bench --features cupti --bench gpu -- --help`

mod ceilings;
mod check;
mod clock;
mod cupti;
mod drafts;
mod inputs;
mod layer;
mod model;
mod ops;
mod rule;
mod workloads;

use anyhow::{anyhow, Context, Result};
use candle_core::{DType, Device};
use candle_gdn::Algo;
use candle_gdn_benches::record::{self, Machine, Row, Run, Time};
use clap::builder::PossibleValuesParser;
use clap::{Parser, ValueEnum};
use clock::{Call, Clock, Sample, Tier};
use std::path::PathBuf;
use std::process::ExitCode;
use workloads::{Choice, Work};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// One token of each sequence
    Decode,
    /// FlashQLA's grid of lengths
    Prefill,
    Conv,
    Norm,
    /// The whole layer at hidden 2048
    Layer,
    /// Decode steps, snapshots, drafts and prompts of whole models with random weights
    Model,
    /// Steps with a draft head, by depth, of whole models with random weights; only when asked for, and not kept
    Drafts,
}

#[derive(Parser)]
#[command(
    about = "Times of candle-gdn on a GPU, next to what the card can do",
    bin_name = "cargo bench --bench gpu --"
)]
struct Args {
    /// What to measure [default: everything]
    suites: Vec<Suite>,
    /// Kernel variants of the rule, alone and in the layer: auto, all, or names (recurrent, recurrent_128, decode,
    /// chunked_sm80, chunked_sm90); whole models take one [default: the variable CANDLE_GDN_ALGO, or auto]
    #[arg(long, value_delimiter = ',')]
    algo: Vec<String>,
    #[command(flatten)]
    choice: Choice,
    /// Of the inputs
    #[arg(long, default_value = "bf16", value_parser = PossibleValuesParser::new(["bf16", "f16", "f32"]))]
    dtype: String,
    /// Models of the suites `model` and `drafts`: demo, or names of examples/generate/configs
    #[arg(long, value_delimiter = ',', default_value = "demo,qwen3.5-4b")]
    models: Vec<String>,
    /// Clocks to read [default: all; gpu needs a build with --features cupti]
    #[arg(long, value_delimiter = ',')]
    tiers: Vec<Tier>,
    /// Print by how much each kernel of a call ends after those before it: these times add up to `gpu`
    #[arg(long)]
    kernels: bool,
    /// Folder for gpu.json [default: benches/results/<device>]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Name of the file in that folder
    #[arg(long, default_value = "gpu.json")]
    file: String,
    /// Which GPU
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// What cargo passes to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

/// What the suites share.
pub struct Bench {
    pub device: Device,
    pub dtype: DType,
    pub algos: Vec<Algo>,
    pub all_algos: bool,
    pub choice: Choice,
    pub clock: Clock,
    /// Shapes whose result was over its bound.
    pub failures: usize,
    kernels: bool,
    run: Run,
    path: PathBuf,
}

impl Bench {
    /// The rule's kernel in the layers of whole models.
    pub fn layer_algo(&self) -> Algo {
        match self.algos[..] {
            [algo] => algo,
            _ => Algo::Auto,
        }
    }

    fn rules(&mut self, works: Vec<Work>) -> Result<()> {
        works.iter().try_for_each(|work| rule::run(self, work))
    }

    /// Keeps a row, prints it and writes the file, so that a run cut short leaves what it has.
    pub fn push(&mut self, row: Row) -> Result<()> {
        self.run.push(row);
        let row = &self.run.rows[self.run.rows.len() - 1];
        let us = |t: Option<Time>| t.map_or("-".into(), |t| format!("{:.2}", t.median));
        let best = row.gpu.or(row.event);
        let rate = match (best, row.bytes, row.flop, row.floor_us) {
            (Some(t), Some(bytes), Some(flop), Some(floor)) => {
                let ceilings = self.run.ceilings;
                let memory = ceilings.copy_gb_s.map_or(0., |rate| bytes as f64 / rate / 1e3);
                if memory >= 0.999 * floor {
                    let rate = bytes as f64 / t.median / 1e3;
                    format!("{rate:7.0} GB/s    {:3.0} % of copy", 100. * memory / t.median)
                } else {
                    let rate = flop as f64 / t.median / 1e6;
                    format!("{rate:7.1} TFLOP/s {:3.0} % of matmul", 100. * floor / t.median)
                }
            }
            _ => String::new(),
        };
        println!(
            "{:15} {:22} {:14}{} {:4} {:>2} {:>10} {:>10} {:>10} {:>10} {:>9} {:>9}  {rate}{}{}",
            row.suite,
            row.workload,
            row.variant.as_deref().unwrap_or("-"),
            if row.auto { '*' } else { ' ' },
            row.l2.as_deref().unwrap_or(""),
            row.launches.map_or("-".into(), |n| n.to_string()),
            us(row.gpu),
            us(row.event),
            us(row.call),
            us(row.wall),
            us(row.host),
            row.floor_us.map_or("-".into(), |us| format!("{us:.2}")),
            if row.note.is_empty() { "" } else { "  " },
            row.note,
        );
        self.run.write(&self.path)
    }

    pub fn push_sample(&mut self, sample: Sample) -> Result<()> {
        self.push(sample.row.clone())?;
        if self.kernels {
            for k in sample.kernels() {
                let name: String = k.name.chars().take(110).collect();
                println!("      {:9.2} us ({:9.2} from begin to end)  x{:<4.1} {name}", k.added_us, k.us, k.launches);
            }
        }
        Ok(())
    }

    /// Times the calls and keeps the row.
    pub fn time(&mut self, row: Row, calls: &[Call<'_>]) -> Result<()> {
        let sample = self.clock.time(row, calls)?;
        self.push_sample(sample)
    }

    /// Whether the row's errors are within `bound`; otherwise it is kept as it is, without times.
    pub fn holds(&mut self, row: &Row, bound: f64) -> Result<bool> {
        let holds = row.error.values().all(|e| e.is_some_and(|e| e <= bound));
        if !holds {
            self.failures += 1;
            self.push(row.clone().note("over its bound, not timed"))?;
        }
        Ok(holds)
    }

    /// As [`Bench::time`], for a row that holds its bound.
    pub fn time_if_held(&mut self, row: Row, bound: f64, calls: &[Call<'_>]) -> Result<()> {
        match self.holds(&row, bound)? {
            true => self.time(row, calls),
            false => Ok(()),
        }
    }
}

fn algos(names: &[String]) -> Result<Vec<Algo>> {
    if names.iter().any(|name| name == "all") {
        return Ok(Algo::RULE.to_vec());
    }
    if names.is_empty() {
        return Ok(vec![Algo::from_env()?]);
    }
    let known = |e: String| anyhow!("--algo: {}", e.replacen("expected ", "expected all, ", 1));
    names.iter().map(|name| name.parse().map_err(known)).collect()
}

/// The device's name, the driver's version and the CUDA version that it speaks.
fn machine(device: &Device) -> Result<Machine> {
    use candle_core::cuda_backend::cudarc::driver::sys;
    let stream = device.as_cuda_device()?.cuda_stream();
    let mut cuda = 0;
    // SAFETY: the call writes one number.
    unsafe { sys::cuDriverGetVersion(&mut cuda) }.result()?;
    let version = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let driver =
        version.split_whitespace().find(|word| word.split('.').count() >= 2 && word.starts_with(char::is_numeric));
    Ok(Machine {
        device: stream.context().name()?,
        host: record::host_cpu(),
        threads: None,
        driver: driver.map(str::to_owned),
        cuda: Some(format!("{}.{}", cuda / 1000, cuda % 1000 / 10)),
    })
}

fn bench(args: Args) -> Result<usize> {
    let algos = algos(&args.algo)?;
    let dtype = args.dtype.parse::<DType>()?;
    let tiers = match (&args.tiers[..], cfg!(feature = "cupti")) {
        ([], true) => vec![Tier::Gpu, Tier::Event, Tier::Call, Tier::Wall],
        ([], false) => {
            eprintln!("built without CUPTI, so there are no pure kernel times: --features cupti has them");
            vec![Tier::Event, Tier::Call, Tier::Wall]
        }
        (tiers, _) => tiers.to_vec(),
    };
    let device = Device::new_cuda(args.device).with_context(|| format!("no CUDA device {}", args.device))?;
    candle_gdn::keep_freed_memory(&device)?;
    let machine = machine(&device)?;
    let path = args.out.unwrap_or_else(|| record::results_folder(&machine.device)).join(&args.file);
    let clock = Clock::new(&device, &tiers)?;
    let mut run = Run::new("benches/gpu", machine);
    run.contender("candle-gdn", env!("CARGO_PKG_VERSION"));
    run.contender("candle", "0.11");
    run.ceilings = ceilings::measure(&clock, &device)?;
    println!(
        "{}, copy {:.0} GB/s, bf16 matmul {:.0} TFLOP/s, L2 {} MiB, commit {}",
        run.machine.device,
        run.ceilings.copy_gb_s.unwrap_or_default(),
        run.ceilings.matmul_tflop_s.unwrap_or_default(),
        clock.l2_bytes()? >> 20,
        run.commit,
    );
    println!("times in us a call, medians; gpu: CUPTI, event: graph replay, call: events around a call, wall: synchronised call, host: until it returned");
    println!(
        "{:15} {:22} {:15} {:4} {:>2} {:>10} {:>10} {:>10} {:>10} {:>9} {:>9}",
        "suite", "workload", "variant", "L2", "n", "gpu", "event", "call", "wall", "host", "floor"
    );
    let all_algos = args.algo.iter().any(|name| name == "all");
    let (choice, kernels) = (args.choice, args.kernels);
    let mut bench = Bench { device, dtype, algos, all_algos, choice, clock, failures: 0, kernels, run, path };
    let suites = match args.suites.is_empty() {
        true => Suite::value_variants().iter().copied().filter(|suite| *suite != Suite::Drafts).collect(),
        false => args.suites,
    };
    for suite in suites {
        match suite {
            Suite::Decode => bench.rules(bench.choice.decode())?,
            Suite::Prefill => bench.rules(bench.choice.prefill())?,
            Suite::Conv => ops::conv(&mut bench)?,
            Suite::Norm => ops::norm(&mut bench)?,
            Suite::Layer => layer::layer(&mut bench)?,
            Suite::Model => model::model(&mut bench, &args.models, args.device)?,
            Suite::Drafts => drafts::drafts(&bench, &args.models, args.device)?,
        }
    }
    println!("* what Algo::Auto takes; written to {}", bench.path.display());
    Ok(bench.failures)
}

fn main() -> ExitCode {
    match bench(Args::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(n) => {
            eprintln!("error: {n} results were over their bounds");
            ExitCode::FAILURE
        }
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::from(2)
        }
    }
}
