//! `generate --tensor-parallel` on the CPU, where ranks are threads.

use crate::cli::{command, fails, generate, run, Copy, Run, PROMPT};
use std::process::Stdio;

/// Text and notices are those of one device, each printed once.
#[track_caller]
fn same_as_alone(args: &[&str]) -> Run {
    let both = generate(&[args, &["--tensor-parallel", "2"]].concat());
    assert_eq!(both.stdout, generate(args).stdout);
    assert!(!both.stdout.is_empty());
    for line in ["memory: ", "loaded ", "decode: "] {
        assert_eq!(both.stderr.matches(line).count(), 1, "{line}: {}", both.stderr);
    }
    assert!(both.stderr.contains("on 2 threads"), "{}", both.stderr);
    both
}

#[test]
fn a_text() {
    same_as_alone(&["-n", "60", "--temperature", "0"]);
}

#[test]
fn a_text_by_quantised_parts() {
    let args = ["--prompt", PROMPT, "-n", "24"];
    let with = |more: &[&str]| same_as_alone(&[&args[..], &["--temperature", "0"], more].concat());
    assert!(with(&["--quantize", "q8_0"]).stderr.contains("matrices Q8_0, on 2 threads"));
    // 192 columns are no whole blocks of 256.
    let run = with(&["--quantize", "q4k"]).stderr;
    assert_eq!(run.matches("matrices are of another type").count(), 1, "{run}");
}

#[test]
fn drawn_tokens_are_the_same_on_all_ranks() {
    same_as_alone(&["-n", "60", "--temperature", "0.9", "--top-p", "0.9", "--repeat-penalty", "1.1"]);
}

#[test]
fn several_prompts_with_drafts_and_shared_beginnings() {
    let args = ["--prompt", "One day", "--prompt", "And the king", "--prompt", "And the king said", "--batch", "2"];
    same_as_alone(&[&args[..], &["-n", "30", "--temperature", "0", "--draft", "3"]].concat());
}

#[test]
fn what_cannot_be_is_said_before_anything_is_loaded() {
    let fails = |args: &[&str], part: &str| fails("generate", args, 1, &[part]);
    fails(&["--tensor-parallel", "3"], "expected at most as many ranks as key heads (2), got 3");
    fails(&["--tensor-parallel", "2", "--interactive"], "--interactive: expected one device");
    let odd = Copy::new();
    odd.set("config.json", "moe_intermediate_size", 63.into());
    let args = ["--tensor-parallel", "2", "--load-format", "dummy", "--model", &odd.arg()];
    fails(&args, "divides the inner width of the experts (63), got 2");
}

/// A rank that fails takes the program with it; the others would wait for it for ever.
#[test]
fn a_broken_checkpoint_ends_all_ranks() {
    let copy = Copy::new();
    let whole = std::fs::read(copy.file("model.safetensors")).unwrap();
    copy.write("model.safetensors", &whole[..whole.len() - 1]);
    let run = run("generate", &["--tensor-parallel", "2", "--model", &copy.arg()]);
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.stderr.contains("is truncated"), "{run:?}");
}

/// Nobody reads any more: the first rank notices, and all stop after the same token.
#[test]
fn a_closed_output_ends_all_ranks() {
    let args = ["--tensor-parallel", "2", "-n", "4000", "--temperature", "0", "--max-seq-len", "4090"];
    let mut child = command("generate")
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the example starts");
    drop(child.stdout.take());
    Run::soon(child).good();
}
