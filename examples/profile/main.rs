//! Where the cycles of decode, prefill and step kernels go: a table of its scopes, and a trace for Perfetto.

mod args;
mod call;
mod print;

use anyhow::{bail, Context, Result};
use args::Args;
use call::Call;
use candle_core::{DType, Device, Tensor};
use candle_gdn::profile::{record, Launch, Profile};
use clap::Parser;
use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
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
    let (tokens, each) = (args.tokens()?, args.each());
    each.iter().try_for_each(Args::check_algo)?;
    let device = Device::new_cuda(0).context("no CUDA device")?;
    if let [one] = &each[..] {
        return profile(one, tokens, &device);
    }
    let mut dropped = 0;
    for one in &each {
        match profile(one, tokens, &device) {
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

/// Events dropped.
fn profile(args: &Args, tokens: usize, device: &Device) -> Result<u64> {
    let call = Call::new(args, tokens, device)?;
    let (algo, kernel) = call.algo().map_err(|e| NotTaken(e.to_string()))?;
    // A first call includes loading the kernels.
    call.launch()?;
    device.synchronize()?;
    let ((), profile) = record(device, args.limits(tokens, algo), || {
        Tensor::zeros(FLUSH_BYTES / 4, DType::F32, device)?;
        call.launch().map(|_| ())
    })?;
    if profile.launches.is_empty() {
        bail!(NotTaken(format!("--algo: no kernel of {kernel} has stamps")))
    }

    // The files before the text: who reads that may stop.
    let tables: Vec<_> = profile.launches.iter().map(Launch::table).collect();
    if let Some(path) = &args.json {
        let tables: Vec<_> = tables.iter().map(|t| t.json().trim_end().to_owned()).collect();
        let json = format!("[{}]\n", tables.join(", "));
        std::fs::write(path, json).with_context(|| format!("--json: cannot write {}", path.display()))?;
    }
    let bytes = write_trace(args, &profile)?;
    let (batch, (key_heads, value_heads)) = (args.batch, args.heads);
    let mut out = std::io::stdout().lock();
    let mut tell = || -> std::io::Result<()> {
        writeln!(
            out,
            "{}: {batch} x {tokens} tokens, {key_heads} key and {value_heads} value heads of {}, {}, kernel {kernel}",
            args.op.name(),
            args.dim,
            args.dtype.as_str()
        )?;
        for (i, table) in tables.iter().enumerate() {
            if tables.len() > 1 {
                writeln!(out, "\nlaunch {} of {}", i + 1, tables.len())?;
            }
            print::table(table, &mut out)?;
        }
        let trace = args.trace.display();
        writeln!(out, "\n{trace}: {:.1} MB, open it at https://ui.perfetto.dev", bytes as f64 / 1e6)?;
        if bytes > 200_000_000 {
            writeln!(out, "that is much for a browser: --trace-sms 4 writes four multiprocessors only")?;
        }
        Ok(())
    };
    tell().context("cannot write to stdout")?;
    Ok(tables.iter().map(|t| t.dropped).sum())
}

/// The bytes of the trace.
fn write_trace(args: &Args, profile: &Profile) -> Result<u64> {
    let path = &args.trace;
    let mut sms: Vec<u32> = profile.launches.iter().flat_map(|l| &l.warps).map(|w| w.sm).collect();
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
