//! Host memory that runs out: of the calls of a run for memory, mappings and threads one fails, each in turn.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

use crate::cli::{command, Run};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The words of those who are refused: Rust's allocator, the system's errors, the handler of Ctrl-C, a rank without the
/// other.
const SENTENCES: [&str; 6] = [
    "memory allocation of ",
    "Cannot allocate memory",
    "out of memory",
    "Resource temporarily unavailable",
    "system error",
    "one is gone",
];

/// The library that goes before the C library, compiled into `dir`.
fn library(dir: &Path) -> PathBuf {
    let (source, library) = (concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli/host_memory.c"), dir.join("fails.so"));
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut compile = Command::new(&compiler);
    let compiled = compile.args(["-shared", "-fPIC", "-Wall", "-Werror", source, "-o"]).arg(&library).output();
    let compiled = compiled.unwrap_or_else(|error| panic!("{compiler}: {error}: no C compiler"));
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    library
}

/// `calls` in turn fail. Each run ends: with the text, or with a beginning of it and a sentence. The last call is behind
/// the end of a run.
fn each_fails(args: &[&str], kind: &str, calls: impl Iterator<Item = u32>) {
    let dir = tempfile::tempdir().expect("a folder");
    let library = library(dir.path());
    let run = |call: u32| {
        let mut command = command("generate");
        command.args(["-n", "8", "--temperature", "0"]).args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env("LD_PRELOAD", &library).env("FAIL_KIND", kind).env("FAIL_AT", call.to_string());
        Run::soon(command.spawn().expect("the example starts"))
    };
    let whole = run(u32::MAX).good().stdout;
    assert!(!whole.is_empty());
    let (mut failed, mut last) = (0, None);
    for call in calls {
        let run = run(call);
        let what = format!("{kind} {call}, {args:?}: {run:?}");
        assert!(run.code != Some(0) || run.stdout == whole, "{what}");
        assert!(whole.starts_with(&run.stdout), "{what}");
        assert!(run.code == Some(0) || SENTENCES.iter().any(|sentence| run.stderr.contains(sentence)), "{what}");
        failed += u32::from(run.code != Some(0));
        last = run.code;
    }
    assert!(failed > 1 && last == Some(0), "{failed} runs failed, the last one ended with {last:?}");
}

const RANKS: [&str; 2] = ["--tensor-parallel", "2"];

#[test]
fn memory() {
    for args in [&[][..], &RANKS] {
        each_fails(args, "allocation", std::iter::successors(Some(20), |n| (*n < 250_000).then_some(n + n / 4)));
    }
}

#[test]
fn mappings_and_threads() {
    for args in [&[][..], &RANKS] {
        each_fails(args, "mapping", 1..40);
        each_fails(args, "thread", 1..20);
    }
}
