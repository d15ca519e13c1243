//! Runs the kernels and writes their tables and traces.

use crate::args::Args;
use crate::call::Call;
use crate::print;
use anyhow::{bail, Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_gdn::profile::{record, Launch, Limits, Profile};
use candle_gdn::Algo;
use std::fs::File;
use std::io::{BufWriter, Write};

/// Written between the inputs and the launch, so that nothing of them is left in any card's L2 cache.
const FLUSH_BYTES: usize = 512 << 20;

/// Tokens of a chunk.
const CHUNK: usize = 64;

/// The profile buffer is not made larger than this on its own.
const MOST_BYTES: usize = 2 << 30;

/// Profiles what is asked for; the number of events that found no room.
pub fn run(args: &Args) -> Result<u64> {
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
            Err(e) if e.is::<NotSupported>() => writeln!(std::io::stderr(), "skipped: {e:#}")?,
            Err(e) => return Err(e),
        }
    }
    Ok(dropped)
}

/// Why a kernel is not profiled: among all of them it is skipped.
#[derive(Debug)]
struct NotSupported(String);

impl std::fmt::Display for NotSupported {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotSupported {}

/// Profiles one kernel.
fn profile(args: &Args, tokens: usize, device: &Device) -> Result<u64> {
    let call = Call::new(args, tokens, device)?;
    let (algo, kernel) = call.algo().map_err(|e| NotSupported(e.to_string()))?;
    // A first call includes loading the kernels.
    call.launch()?;
    device.synchronize()?;
    let ((), profile) = record(device, limits(args, tokens, algo), || {
        Tensor::zeros(FLUSH_BYTES / 4, DType::F32, device)?;
        call.launch().map(|_| ())
    })?;
    if profile.launches.is_empty() {
        bail!(NotSupported(format!("--algo: no kernel of {kernel} has stamps")))
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
    let mut print_all = || -> std::io::Result<()> {
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
    print_all().context("cannot write to stdout")?;
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

/// Room for the kernels of a call by `algo`; `None`: of a step.
fn limits(args: &Args, tokens: usize, algo: Option<Algo>) -> Limits {
    let (heads, chunks) = (args.batch.saturating_mul(args.heads.1), tokens.div_ceil(CHUNK));
    let scopes = chunks.saturating_mul(12);
    let tiles = heads.saturating_mul(args.dim.div_ceil(64));
    // Beside a block for each tile: segments fill the card about once a pass, of which there are three.
    let scan_warps = tiles.saturating_mul(16).saturating_add(1 << 14);
    let (warps, events) = match algo {
        // A block of eight warps for each chunk of a key head, and the scan.
        Some(Algo::ChunkedSm80) => {
            let records = args.batch.saturating_mul(args.heads.0).saturating_mul(chunks).saturating_mul(8);
            (scan_warps.saturating_add(records), scopes)
        }
        // A block runs several heads where there are more than multiprocessors, of which a card with sm_90a has more
        // than 64.
        Some(Algo::ChunkedSm90) => (scan_warps, (2 + tiles / 64).saturating_mul(scopes.saturating_add(16))),
        // The smallest tiles have 16 rows, the largest blocks eight warps. A block of the step may hold all value heads of
        // a key head, each in four pieces with three scopes.
        _ => {
            let heads_of_key = if algo.is_none() { args.heads.1.div_ceil(args.heads.0) } else { 0 };
            let events = tokens.div_ceil(16).saturating_mul(24).saturating_add(heads_of_key.saturating_mul(16));
            (heads.saturating_mul(args.dim.div_ceil(16) * 8), events)
        }
    };
    let most = (MOST_BYTES / 16 / warps.max(1)).max(32);
    Limits { warps, events_per_warp: args.events.unwrap_or_else(|| events.min(most - 32).saturating_add(32)) }
}
