//! Checks of programs whose output nobody takes: a full disk, and pipes whose readers are gone.

use crate::program::{command, Run};
use std::fs::File;
use std::io::Write;
use std::process::Stdio;

/// Programs that write to stdout, with the arguments of each way of theirs to do so.
pub type Programs<'a> = [(&'a str, &'a [&'a str])];

/// A stream that takes nothing.
pub fn full() -> Stdio {
    File::options().write(true).open("/dev/full").expect("a file of Linux").into()
}

/// A stream that nobody reads.
pub fn closed() -> Stdio {
    std::io::pipe().expect("a pipe").1.into()
}

/// Runs a program with a line on stdin.
pub fn run(example: &str, args: &[&str], stdout: Stdio, stderr: Stdio) -> Run {
    let mut command = command(example);
    let mut child = command.args(args).stdin(Stdio::piped()).stdout(stdout).stderr(stderr).spawn().expect("a program");
    // Who does not read it may be gone.
    let _ = child.stdin.take().expect("a pipe").write_all(b"And\n");
    Run::soon(child)
}

/// Fails unless a full disk is one sentence, a closed pipe a quiet end, and a lost stderr changes neither text nor exit status.
pub fn check(programs: &Programs) {
    for (example, args) in programs {
        let what = format!("{example} {args:?}");
        let on_full = run(example, args, full(), Stdio::piped());
        assert_eq!(on_full.code, Some(1), "{what}: {on_full:?}");
        on_full.says(&["cannot write to stdout", "No space left on device"]);
        assert_eq!(on_full.stderr.matches("rror: ").count(), 1, "{what}: {on_full:?}");
        let on_closed = run(example, args, closed(), Stdio::piped());
        assert_eq!(on_closed.code, Some(0), "{what}: {on_closed:?}");
        assert!(!on_closed.stderr.contains("rror"), "{what}: {on_closed:?}");
        for run in [on_full, on_closed] {
            assert!(!run.stderr.contains("panicked"), "{what}: {run:?}");
        }
        let want = run(example, args, Stdio::piped(), Stdio::null());
        for stderr in [full(), closed()] {
            let got = run(example, args, Stdio::piped(), stderr);
            assert_eq!((got.code, &got.stdout), (Some(0), &want.stdout), "{what}");
        }
    }
}
