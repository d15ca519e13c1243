//! Tables and plots of the benchmark records: `cargo bench --bench report`, `cargo bench --bench report -- DIR...`.

mod compare;
mod folder;
mod markdown;
mod output;
mod plots;
mod rates;
mod record;
mod stats;
mod summary;
mod tables;
mod timing;

use anyhow::{ensure, Context, Result};
use clap::Parser;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const RESULTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../benches/results");

/// Writes table.md, contest.md, timing.md, summary.md and the plots of each machine's records beside them.
#[derive(Parser)]
struct Args {
    /// Folders with the records of one machine [default: all of benches/results]
    #[arg(value_name = "DIR")]
    folders: Vec<PathBuf>,

    /// What cargo gives every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let folders = if args.folders.is_empty() { machines(Path::new(RESULTS)) } else { Ok(args.folders) };
    // One broken folder does not keep the others from their tables, and neither does a full stdout.
    let report = |folder: &PathBuf| output::report(folder).and_then(|files| list(&files));
    let errors: Vec<_> = match folders {
        Ok(folders) => folders.iter().filter_map(|folder| report(folder).err()).collect(),
        Err(e) => vec![e],
    };
    errors.iter().for_each(|e| eprintln!("error: {e:#}"));
    if errors.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// The files on stdout, for whoever reads it.
fn list(files: &[PathBuf]) -> Result<()> {
    let mut out = std::io::stdout();
    match files.iter().try_for_each(|file| writeln!(out, "{}", file.display())) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(e).context("cannot write to stdout"),
        _ => Ok(()),
    }
}

/// The folders in the folder of results.
fn machines(results: &Path) -> Result<Vec<PathBuf>> {
    let shown = results.display();
    let entries = results.read_dir().with_context(|| format!("{shown}: cannot be listed; benchmarks write there"))?;
    let mut folders: Vec<_> =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_dir()).collect();
    ensure!(!folders.is_empty(), "{shown}: no machine's folder");
    folders.sort();
    Ok(folders)
}
