//! What criterion measured, as a record of benches/README.md.

use anyhow::{Context, Result};
use candle_gdn_benches::record::{host_cpu, results_folder, Ceilings, Machine, Row, Run, Time};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion};
use serde::Deserialize;
use std::path::PathBuf;
use std::time::SystemTime;

/// One benchmark: where criterion keeps it and the row that it becomes.
pub struct Work {
    /// `group/function/parameter`, as criterion names its folders.
    pub id: String,
    pub row: Row,
}

/// A group of criterion's, and the rows of its benchmarks.
pub struct Suite<'a> {
    name: &'static str,
    pub group: BenchmarkGroup<'a, WallTime>,
    pub works: Vec<Work>,
}

impl<'a> Suite<'a> {
    pub fn new(c: &'a mut Criterion, name: &'static str) -> Self {
        Self { name, group: c.benchmark_group(name), works: vec![] }
    }

    /// Times `run`.
    pub fn time<R>(&mut self, function: &str, parameter: usize, row: Row, run: impl FnMut() -> R) {
        let mut run = run;
        self.group.bench_function(BenchmarkId::new(function, parameter), |b| b.iter(&mut run));
        self.works.push(Work { id: format!("{}/{function}/{parameter}", self.name), row });
    }
}

/// A sample of criterion's: total nanoseconds of as many iterations.
#[derive(Deserialize)]
struct Sample {
    iters: Vec<f64>,
    times: Vec<f64>,
}

/// Writes `cpu.json` from the benchmarks that ran since then; others would be of another hour or program.
pub fn write(works: &[Work], since: SystemTime, threads: usize) -> Result<()> {
    let folder = criterion_folder()?;
    let device = host_cpu();
    let mut run =
        Run::new("benches/cpu", Machine { host: device.clone(), device, threads: Some(threads), ..Machine::default() });
    run.contender("candle-gdn", env!("CARGO_PKG_VERSION"));
    run.contender("tensor ops", "candle 0.11");
    let mut rows = vec![];
    for work in works {
        let path = folder.join(&work.id).join("new/sample.json");
        let fresh = path.metadata().and_then(|m| m.modified()).is_ok_and(|time| time >= since);
        if !fresh {
            continue; // filtered out on the command line
        }
        let text = std::fs::read_to_string(&path)?;
        let sample: Sample = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        let mut us: Vec<f64> = sample.times.iter().zip(&sample.iters).map(|(ns, n)| ns / n / 1e3).collect();
        let time = Time::of(&mut us);
        if let ("copy", Some(bytes)) = (work.row.suite.as_str(), work.row.bytes) {
            let rate = (bytes as f64 / time.median / 1e3 * 10.).round() / 10.;
            run.ceilings = Ceilings { copy_gb_s: Some(rate), matmul_tflop_s: None };
        }
        rows.push(work.row.clone().wall(time));
    }
    if rows.is_empty() {
        // `--list`, a filter that nothing passed, or a program that was moved away from criterion's folder.
        eprintln!("nothing written: {} has no samples of this run", folder.display());
        return Ok(());
    }
    rows.into_iter().for_each(|row| run.push(row));
    let path = results_folder(&run.machine.device).join("cpu.json");
    println!("written to {}", path.display());
    run.write(&path)
}

/// Where criterion puts its samples: beside the folder that this program was built into.
fn criterion_folder() -> Result<PathBuf> {
    if let Some(home) = std::env::var_os("CRITERION_HOME") {
        return Ok(home.into());
    }
    let program = std::env::current_exe()?;
    let target = program.ancestors().nth(3).context("a program in target/release/deps")?;
    let from_env = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    Ok(from_env.as_deref().unwrap_or(target).join("criterion"))
}
