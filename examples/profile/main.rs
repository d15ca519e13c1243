//! Where the cycles of decode, prefill and step kernels go: a table of its scopes, and a trace for Perfetto.

mod args;
#[cfg(feature = "profile")]
mod call;
#[cfg(feature = "profile")]
mod print;
#[cfg(feature = "profile")]
mod run;

use args::Args;
use clap::Parser;
use std::io::{ErrorKind, Write};
use std::process::ExitCode;

#[cfg(feature = "profile")]
use run::run;

#[cfg(not(feature = "profile"))]
fn run(_: &Args) -> anyhow::Result<u64> {
    anyhow::bail!(
        "built without the `profile` feature: cargo run --release --features profile --example profile -- --help"
    )
}

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
