//! The profile example as a program.
#![cfg(feature = "profile")]

#[cfg(feature = "profile")]
use candle_gdn_testing::skipped;

use candle_gdn_testing::program::program;

/// Exit status and stderr; nothing may be on stdout.
fn refused(args: &[&str]) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let out = program("profile").current_dir(dir.path()).args(args).output().expect("the example starts");
    assert!(out.stdout.is_empty(), "{out:?}");
    assert_eq!(std::fs::read_dir(dir.path()).expect("the directory").count(), 0, "a file was written");
    let stderr = String::from_utf8(out.stderr).expect("UTF-8 on stderr");
    assert!(!stderr.contains("panicked"), "{stderr}");
    (out.status.code(), stderr)
}

#[test]
fn decode_takes_one_token() {
    let (code, stderr) = refused(&["--op", "decode", "--tokens", "2"]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("--tokens: decode takes one token"), "{stderr}");
}

#[test]
fn a_kernel_of_another_op_is_named() {
    for (op, algo) in [("decode", "split"), ("prefill", "composed"), ("step", "chunked_sm90")] {
        let (code, stderr) = refused(&["--op", op, "--algo", algo]);
        assert_eq!(code, Some(1));
        assert!(stderr.contains(&format!("--algo: {algo} is ")) && stderr.contains("--op step"), "{stderr}");
    }
}

/// Every kernel that an op has, and what Auto takes at the defaults.
#[test]
fn every_kernel_is_profiled() {
    let chunked = ["auto", "recurrent", "recurrent_128", "chunked_sm80", "chunked_sm90"];
    let decode = ["auto", "recurrent", "recurrent_128", "decode"];
    let step = ["auto", "whole", "split", "heads", "composed"];
    for (op, algos) in [("prefill", &chunked[..]), ("decode", &decode), ("step", &step)] {
        for algo in algos {
            let dir = tempfile::tempdir().expect("a temporary directory");
            let args = ["--op", op, "--algo", algo, "--json", "table.json"];
            let out = program("profile").current_dir(dir.path()).args(args).output().expect("it starts");
            let stderr = String::from_utf8_lossy(&out.stderr);
            if stderr.contains("no CUDA device") {
                return skipped::skipped("no GPU");
            }
            if ["chunked_sm90", "split", "heads"].contains(algo) && !out.status.success() {
                // The only reason is a device without sm_90a.
                assert!(stderr.contains("refused with status 7") || stderr.contains("on this device"), "{stderr}");
                continue;
            }
            assert!(out.status.success(), "{op} {algo}: {stderr}");
            let read = |name: &str| -> serde_json::Value {
                let file = std::fs::File::open(dir.path().join(name)).expect("the file was written");
                serde_json::from_reader(std::io::BufReader::new(file)).expect("JSON")
            };
            let tables = read("table.json");
            assert!(
                tables.as_array().is_some_and(|t| !t.is_empty() && t.iter().all(|t| t["dropped"] == 0)),
                "{tables}"
            );
            let trace = read("profile.json");
            let named = trace["traceEvents"].as_array().is_some_and(|t| t.iter().any(|e| e["name"] == "thread_name"));
            assert!(named, "{op} {algo}: no track has a name");
        }
    }
}

/// Each file, then the table.
#[test]
#[cfg(all(feature = "profile", target_os = "linux"))]
fn a_full_disk_is_one_sentence() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let full = || std::fs::File::options().write(true).open("/dev/full").expect("a file of Linux");
    for (args, what) in
        [(&["--trace", "/dev/full"][..], "--trace"), (&["--json", "/dev/full"], "--json"), (&[], "stdout")]
    {
        let out = program("profile").current_dir(dir.path()).args(args).stdout(full()).output().expect("it starts");
        let stderr = String::from_utf8(out.stderr).expect("UTF-8 on stderr");
        if stderr.contains("no CUDA device") {
            return skipped::skipped("no GPU");
        }
        assert_eq!(out.status.code(), Some(1), "{stderr}");
        let lines: Vec<_> = stderr.lines().collect();
        let [line] = lines[..] else { panic!("expected one line, got {stderr}") };
        assert!(line.contains(what) && line.contains("No space left on device"), "{stderr}");
    }
}

#[test]
fn bad_arguments_are_named() {
    for (args, part) in [
        (["--algo", "fast"], "values: all, auto, recurrent, recurrent_128, decode, chunked_sm80, chunked_sm90"),
        (["--op", "encode"], "prefill"),
        (["--dtype", "f64"], "bf16"),
        (["--heads", "16"], "16/32"),
        (["--heads", "0/4"], "16/32"),
        (["--batch", "0"], "at least 1"),
        (["--dim", "0"], "at least 1"),
    ] {
        let (code, stderr) = refused(&args);
        assert_eq!(code, Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(args[0]) && stderr.contains(part), "{args:?}: {stderr}");
    }
}
