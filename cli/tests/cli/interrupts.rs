//! Ctrl-C at every moment of a run: it ends soon, with nothing on stdout that is not part of the text.
#![cfg(unix)]

use crate::cli::{command, interrupt, Run};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Moments, from the start of a run to some time after its end.
const MOMENTS: u32 = 20;

fn start(args: &[&str]) -> Child {
    let mut command = command("generate");
    command.args(["-n", "100", "--temperature", "0"]).args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("the example starts")
}

/// The completions on stdout: one, or several under headers.
fn texts(stdout: &str) -> Vec<&str> {
    stdout
        .split("==> prompt ")
        .map(|text| text.split_once(" <==\n").map_or(text, |(_, text)| text).trim_end())
        .collect()
}

/// Each moment in turn, with one Ctrl-C or with two.
fn at_every_moment(args: &[&str]) {
    let begin = Instant::now();
    let whole = Run::end(start(args)).good().stdout;
    let (time, whole) = (begin.elapsed(), texts(&whole));
    for moment in 0..MOMENTS {
        let times = 1 + moment % 2;
        let after = time.mul_f64(1.2) * moment / (MOMENTS - 1);
        let mut child = start(args);
        std::thread::sleep(after);
        (0..times).for_each(|_| interrupt(&child));
        let sent = Instant::now();
        let status = loop {
            match child.try_wait().expect("a status") {
                Some(status) => break status,
                None if sent.elapsed() > Duration::from_secs(30) => panic!("{args:?}: no end, Ctrl-C after {after:?}"),
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        };
        // Before the weights are there it is the signal that ends it, at the end the run.
        let ended = matches!((status.code(), status.signal()), (Some(0 | 130), _) | (None, Some(2)));
        let run = Run::end(child);
        assert!(ended && !run.stderr.contains("panicked"), "{args:?}, {times} after {after:?}, {status}: {run:?}");
        let got = texts(&run.stdout);
        assert!(status.code() != Some(0) || got == whole, "{args:?}, {times} after {after:?}: {run:?}");
        for (got, want) in got.iter().zip(&whole) {
            assert!(want.starts_with(got), "{args:?}, {times} after {after:?}: {run:?}");
        }
    }
}

#[test]
fn one_text() {
    at_every_moment(&[]);
}

#[test]
fn several_texts() {
    at_every_moment(&["--prompt", "One day", "--prompt", "And the king", "--prompt", "Now these", "--batch", "2"]);
}

#[test]
fn ranks() {
    at_every_moment(&["--tensor-parallel", "2"]);
}
