//! Output that nobody takes: a full disk, and pipes whose readers are gone.
#![cfg(target_os = "linux")]

use candle_gdn_testing::streams::{check, closed, full, run};
use std::process::Stdio;

#[test]
fn what_is_lost_changes_nothing_else() {
    check(&[
        ("generate", &["-n", "4"]),
        ("generate", &["-n", "4", "--prompt", "a", "--prompt", "b"]),
        ("generate", &["-n", "4", "--tensor-parallel", "2"]),
        ("generate", &["-n", "4", "--interactive"]),
        ("perplexity", &["--token-ids", "1,2,3"]),
    ]);
}

#[test]
fn an_error_that_nobody_reads_is_an_exit_status() {
    for stderr in [full, closed] {
        for (example, args) in
            [("generate", ["-n", "4", "--model", "/"]), ("perplexity", ["--token-ids", "1,2", "--model", "/"])]
        {
            assert_eq!(run(example, &args, Stdio::piped(), stderr()).code, Some(1), "{example}");
        }
        let two = ["-n", "4", "--tensor-parallel", "2"];
        assert_eq!(run("generate", &two, full(), stderr()).code, Some(1));
    }
}
