//! The CPU kernels against the same thing written with candle tensor ops (what a candle user would otherwise have), and
//! against the machine's memory.
//!
//! `cargo bench --bench cpu`; `CANDLE_NUM_THREADS` and `RAYON_NUM_THREADS` set the threads. Every contender's result is
//! checked against the other's first. What was run is written to benches/results, for `benches/report.py`.

mod backward;
mod gguf;
mod model;
mod ops;
mod results;
mod rule;

use candle_core::{Device, Tensor};
use criterion::Criterion;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

pub fn randn(shape: &[usize]) -> Tensor {
    Tensor::randn(0f32, 1., shape, &Device::Cpu).expect("a CPU tensor")
}

/// Panics unless both contenders computed the same.
pub fn assert_close(what: &str, got: &Tensor, want: &Tensor) {
    let norm = |t: &Tensor| t.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap().sqrt();
    let error = norm(&(got - want).unwrap()) / norm(want);
    assert!(error < 1e-4, "{what}: the contenders disagree by {error:e}");
}

fn main() -> ExitCode {
    // candle asks for it at every matrix product, and reads /proc/cpuinfo unless this says it.
    let threads = candle_core::utils::get_num_threads();
    if std::env::var_os("RAYON_NUM_THREADS").is_none() {
        std::env::set_var("RAYON_NUM_THREADS", threads.to_string());
    }
    if std::env::args().any(|arg| arg == "--gguf") {
        return match gguf::run(&clap::Parser::parse()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => {
                eprintln!("error: {e:#}");
                ExitCode::FAILURE
            }
        };
    }
    let since = SystemTime::now();
    let mut c = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(2))
        .without_plots()
        .configure_from_args();
    let mut works = rule::bench(&mut c);
    works.extend(backward::bench(&mut c));
    works.extend(ops::conv(&mut c));
    works.extend(ops::norm(&mut c));
    works.extend(model::bench(&mut c));
    works.extend(ops::copy(&mut c));
    c.final_summary();
    match results::write(&works, since, threads) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}
