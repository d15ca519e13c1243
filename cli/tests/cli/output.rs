//! Output that nobody takes: a full disk, and pipes whose readers are gone.
#![cfg(target_os = "linux")]

use crate::cli::{command, Run, DEMO};
use std::fs::File;
use std::io::Write;
use std::process::Stdio;

/// The programs that write to stdout, in each way of theirs to do so.
const PROGRAMS: [(&str, &[&str]); 6] = [
    ("generate", &["-n", "4"]),
    ("generate", &["-n", "4", "--prompt", "a", "--prompt", "b"]),
    ("generate", &["-n", "4", "--tensor-parallel", "2"]),
    ("generate", &["-n", "4", "--interactive"]),
    ("perplexity", &["--token-ids", "1,2,3"]),
    ("candle_transformers", &["-n", "4", "--model", DEMO]),
];

/// A stream that takes nothing.
fn full() -> Stdio {
    File::options().write(true).open("/dev/full").expect("a file of Linux").into()
}

/// A stream that nobody reads.
fn closed() -> Stdio {
    std::io::pipe().expect("a pipe").1.into()
}

fn run(example: &str, args: &[&str], stdout: Stdio, stderr: Stdio) -> Run {
    let mut command = command(example);
    let mut child = command.args(args).stdin(Stdio::piped()).stdout(stdout).stderr(stderr).spawn().expect("a program");
    // Who does not read it may be gone.
    let _ = child.stdin.take().expect("a pipe").write_all(b"And\n");
    Run::soon(child)
}

#[test]
fn a_full_disk_is_one_sentence() {
    for (example, args) in PROGRAMS {
        let run = run(example, args, full(), Stdio::piped());
        assert_eq!(run.code, Some(1), "{example} {args:?}: {run:?}");
        run.says(&["cannot write to stdout", "No space left on device"]);
        assert_eq!(run.stderr.matches("rror: ").count(), 1, "{example} {args:?}: {run:?}");
        assert!(!run.stderr.contains("panicked"), "{example} {args:?}: {run:?}");
    }
}

#[test]
fn a_closed_pipe_is_a_quiet_end() {
    for (example, args) in PROGRAMS {
        let run = run(example, args, closed(), Stdio::piped());
        assert_eq!(run.code, Some(0), "{example} {args:?}: {run:?}");
        assert!(!run.stderr.contains("rror") && !run.stderr.contains("panicked"), "{example} {args:?}: {run:?}");
    }
}

/// What stderr does not take is lost, and nothing else: neither the text nor the exit status.
#[test]
fn nobody_has_to_take_stderr() {
    for stderr in [full, closed] {
        for (example, args) in PROGRAMS {
            let [got, want] = [stderr(), Stdio::null()].map(|stderr| run(example, args, Stdio::piped(), stderr));
            assert_eq!((got.code, got.stdout), (Some(0), want.stdout), "{example} {args:?}");
        }
        for (example, args) in
            [("generate", ["-n", "4", "--model", "/"]), ("perplexity", ["--token-ids", "1,2", "--model", "/"])]
        {
            assert_eq!(run(example, &args, Stdio::piped(), stderr()).code, Some(1), "{example}");
        }
        let two = ["-n", "4", "--tensor-parallel", "2"];
        assert_eq!(run("generate", &two, full(), stderr()).code, Some(1));
    }
}
