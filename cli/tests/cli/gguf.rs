//! The generate example on GGUF files and with quantised matrices.

use crate::cli::{self, fails, generate, PROMPT};
use crate::gguf_writer::{demo, GgufOfTiny};
use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::GgmlDType;
use std::path::Path;

fn write(file: &GgufOfTiny, dir: &Path, name: &str) -> String {
    let path = dir.join(name);
    file.write(&path).unwrap();
    path.display().to_string()
}

#[test]
fn a_gguf_file_says_what_its_checkpoint_says() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(&demo(), dir.path(), "demo.gguf");
    for args in
        [&["--prompt", PROMPT][..], &["--chat", "--prompt", "In the beginning"], &["--prompt", "\u{e9}t\u{e9} 12"]]
    {
        let args = [args, &["-n", "20"]].concat();
        assert_eq!(generate(&[&["--model", &path], &args[..]].concat()).stdout, generate(&args).stdout, "{args:?}");
    }
    let parts = generate(&["--model", &path, "--prompt", PROMPT, "-n", "20", "--tensor-parallel", "2"]);
    assert_eq!(parts.stdout, generate(&["--prompt", PROMPT, "-n", "20"]).stdout);
    assert!(parts.stderr.contains("on 2 threads"), "{parts:?}");
    let random = generate(&["--model", &path, "--load-format", "dummy", "--prompt-tokens", "20"]);
    assert!(random.stdout.is_empty() && random.stderr.contains("decode: 127 tokens"), "{random:?}");
    let perplexity = |args: &[&str]| cli::run("perplexity", &[args, &["--token-ids", "3,4,5"]].concat()).stdout;
    assert_eq!(perplexity(&["--model", &path]).lines().count(), 3);
}

#[test]
fn quantised_matrices_say_nearly_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(&demo().quantized(GgmlDType::Q8_0), dir.path(), "demo-q8_0.gguf");
    let want = " from Caesar Augustus, that all the world should be taxed.";
    let args = ["--prompt", PROMPT, "-n", "24"];
    let parts = ["--model", path.as_str(), "--tensor-parallel", "2"];
    for quantised in [&parts[..2], &parts, &["--quantize", "q8_0"], &["--quantize", "q6k"]] {
        let run = generate(&[&args[..], quantised].concat());
        assert!(run.stdout.starts_with(want), "{quantised:?}: {run:?}");
    }
    // 192 columns are no whole blocks of 256.
    let run = generate(&[&args[..], &["--quantize", "q4_k"]].concat());
    assert!(run.stderr.contains("matrices are of another type") && run.stderr.contains("Q4K"), "{run:?}");
}

#[test]
fn bad_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(&demo(), dir.path(), "demo.gguf");
    let whole = std::fs::read(&path).unwrap();
    for len in [0, 3, 1000, whole.len() / 2] {
        std::fs::write(&path, &whole[..len]).unwrap();
        fails("generate", &["--model", &path, "--prompt", PROMPT], 1, &["--model", "demo.gguf"]);
    }
    let mut file = demo();
    file.metadata.insert("tokenizer.ggml.pre".into(), Value::String("klingon".into()));
    let path = write(&file, dir.path(), "pre.gguf");
    fails("generate", &["--model", &path, "--prompt", PROMPT], 1, &["pre.gguf", "klingon"]);
    file.metadata.remove("tokenizer.chat_template");
    file.metadata.insert("tokenizer.ggml.pre".into(), Value::String("gpt-2".into()));
    let path = write(&file, dir.path(), "plain.gguf");
    fails("generate", &["--model", &path, "--chat", "--prompt", "a"], 1, &["plain.gguf", "no chat template"]);
    fails("generate", &["--model", "/nowhere/at.gguf"], 1, &["--model", "/nowhere/at.gguf"]);
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
    fails("generate", &["--model", readme], 1, &["--model", "README.md", "gguf"]);
    fails("generate", &["--quantize", "q9"], 2, &["--quantize", "q8_0"]);
}
