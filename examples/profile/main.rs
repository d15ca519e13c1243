//! Where the cycles of a decode or prefill kernel go: a table of its scopes, and a trace for Perfetto.

mod args;
mod print;

use anyhow::{bail, Context, Result};
use args::{Args, Op};
use candle_core::{DType, Device, Tensor};
use candle_gdn::profile::{record, Launch, Profile};
use candle_gdn::{Algo, Gates, GdnDecode, GdnPrefill, RuleOptions};
use clap::Parser;
use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Written between the inputs and the launch, so that nothing of them is left in any card's L2 cache.
const FLUSH_BYTES: usize = 512 << 20;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(dropped) => {
            let _ = writeln!(
                std::io::stderr(),
                "warning: {dropped} events found no room: the end of some warps is missing, and counted as unstamped; \
                 raise --events"
            );
            ExitCode::FAILURE
        }
        // Nobody reads the table.
        Err(e) if e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) => {
            ExitCode::SUCCESS
        }
        Err(e) => {
            let _ = writeln!(std::io::stderr(), "error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// Events dropped.
fn run(args: &Args) -> Result<u64> {
    if !cfg!(feature = "profile") {
        bail!("built without the `profile` feature: cargo run --release --features profile --example profile -- --help")
    }
    let (tokens, algos) = (args.tokens()?, args.algos()?);
    let device = Device::new_cuda(0).context("no CUDA device")?;
    let mut rule = Rule::new(args, tokens, &device)?;
    if let [algo] = algos[..] {
        rule.options.algo = algo;
        return profile(args, tokens, &rule, None);
    }
    let (mut dropped, mut seen) = (0, vec![]);
    for algo in algos {
        rule.options.algo = algo;
        // Of `auto` what it takes, once.
        rule.options.algo = rule.algo().unwrap_or(algo);
        if seen.contains(&rule.options.algo) {
            continue;
        }
        seen.push(rule.options.algo);
        match profile(args, tokens, &rule, Some(rule.options.algo)) {
            Ok(more) => dropped += more,
            Err(e) if e.is::<NotTaken>() => writeln!(std::io::stderr(), "left out: {e:#}")?,
            Err(e) => return Err(e),
        }
    }
    Ok(dropped)
}

/// Why a kernel is not profiled: among all of them it is left out.
#[derive(Debug)]
struct NotTaken(String);

impl std::fmt::Display for NotTaken {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotTaken {}

/// Events dropped. The names of the files say `which` kernel where there are several.
fn profile(args: &Args, tokens: usize, rule: &Rule, which: Option<Algo>) -> Result<u64> {
    let algo = rule.algo().map_err(|e| NotTaken(e.to_string()))?;
    if matches!(algo, Algo::ChunkedSm80 | Algo::ChunkedSm90) {
        bail!(NotTaken(format!("--algo: {algo} has no clock stamps: ask for recurrent_128 or recurrent")))
    }
    // A first launch includes loading the kernel.
    rule.launch()?;
    let device = rule.state.device();
    device.synchronize()?;
    let limits = args.limits(tokens);
    let ((), profile) = record(device, limits, || {
        Tensor::zeros(FLUSH_BYTES / 4, DType::F32, device)?;
        rule.launch().map(|_| ())
    })?;
    let [launch] = &profile.launches[..] else { bail!("expected one launch, got {}", profile.launches.len()) };
    let of_kernel = |path: &Path| named(path, which);

    let name = match args.op {
        Op::Decode => "gdn_decode",
        Op::Prefill => "gdn_prefill",
    };
    let (batch, (key_heads, value_heads)) = (args.batch, args.heads);
    // The files before the text: who reads that may stop.
    let table = launch.table();
    if let Some(path) = &args.json {
        let path = of_kernel(path);
        std::fs::write(&path, table.json()).with_context(|| format!("--json: cannot write {}", path.display()))?;
    }
    let trace = of_kernel(&args.trace);
    let bytes = write_trace(args, &trace, &profile, launch)?;
    let mut out = std::io::stdout().lock();
    let mut tell = || -> std::io::Result<()> {
        writeln!(
            out,
            "{name}: {batch} x {tokens} tokens, {key_heads} key and {value_heads} value heads of {}, {}, kernel {algo}",
            args.dim,
            args.dtype.as_str()
        )?;
        print::table(&table, &mut out)?;
        let trace = trace.display();
        writeln!(out, "\n{trace}: {:.1} MB, open it at https://ui.perfetto.dev", bytes as f64 / 1e6)?;
        if bytes > 200_000_000 {
            writeln!(out, "that is much for a browser: --trace-sms 4 writes four multiprocessors only")?;
        }
        Ok(())
    };
    tell().context("cannot write to stdout")?;
    Ok(table.dropped)
}

/// `profile.json` of one of several kernels as `profile-recurrent.json`.
fn named(path: &Path, which: Option<Algo>) -> PathBuf {
    let Some(algo) = which else { return path.into() };
    let (stem, end) = (path.file_stem().unwrap_or_default(), path.extension().unwrap_or_default());
    let name = format!("{}-{algo}.{}", stem.to_string_lossy(), end.to_string_lossy());
    path.with_file_name(name.trim_end_matches('.'))
}

/// The bytes of the trace.
fn write_trace(args: &Args, path: &Path, profile: &Profile, launch: &Launch) -> Result<u64> {
    let mut sms: Vec<u32> = launch.warps.iter().map(|w| w.sm).collect();
    sms.sort_unstable();
    sms.dedup();
    sms.truncate(args.trace_sms.unwrap_or(usize::MAX));
    let write = || -> std::io::Result<u64> {
        let mut out = BufWriter::new(File::create(path)?);
        profile.write_trace(&mut out, |warp| sms.binary_search(&warp.sm).is_ok())?;
        out.flush()?;
        Ok(path.metadata()?.len())
    };
    write().with_context(|| format!("--trace: cannot write {}", path.display()))
}

/// The inputs of a launch.
struct Rule {
    op: Op,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: Tensor,
    options: RuleOptions,
}

impl Rule {
    fn new(args: &Args, tokens: usize, device: &Device) -> Result<Self> {
        let ((key_heads, value_heads), dim) = (args.heads, args.dim);
        let lead = match args.op {
            Op::Decode => vec![args.batch],
            Op::Prefill => vec![args.batch, tokens],
        };
        let randn = |tail: &[usize]| -> candle_core::Result<Tensor> {
            Tensor::randn(0f32, 1., [&lead[..], tail].concat(), device)?.to_dtype(args.dtype)
        };
        let gates = Gates {
            a: randn(&[value_heads])?,
            b: randn(&[value_heads])?,
            a_log: Tensor::rand(0f32, 1.2, value_heads, device)?,
            dt_bias: Tensor::rand(-1f32, 0., value_heads, device)?,
        };
        Ok(Self {
            op: args.op,
            q: randn(&[key_heads, dim])?,
            k: randn(&[key_heads, dim])?,
            v: randn(&[value_heads, dim])?,
            gates,
            state: Tensor::zeros((args.batch, value_heads, dim, dim), DType::F32, device)?,
            options: RuleOptions::default(),
        })
    }

    fn decode(&self) -> candle_core::Result<GdnDecode> {
        GdnDecode::new(self.gates.clone(), &self.state, self.options)
    }

    fn prefill(&self) -> candle_core::Result<GdnPrefill> {
        GdnPrefill::new(self.gates.clone(), &self.state, None, self.options)
    }

    fn algo(&self) -> candle_core::Result<Algo> {
        match self.op {
            Op::Decode => self.decode()?.algo(&self.q, &self.k, &self.v),
            Op::Prefill => self.prefill()?.algo(&self.q, &self.k, &self.v),
        }
    }

    fn launch(&self) -> candle_core::Result<Tensor> {
        match self.op {
            Op::Decode => self.decode()?.forward(&self.q, &self.k, &self.v),
            Op::Prefill => self.prefill()?.forward(&self.q, &self.k, &self.v),
        }
    }
}
