//! The generate example on GGUF files and with quantised matrices.

#[path = "support/cli.rs"]
mod cli;
#[path = "support/gguf_writer.rs"]
#[allow(dead_code)]
mod gguf_writer;
#[path = "support/tiny.rs"]
#[allow(dead_code)]
mod tiny;

use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::GgmlDType;
use candle_core::{safetensors, DType, Device};
use cli::{fails, Run, DEMO};
use gguf_writer::{GgufOfTiny, Layout};
use serde_json::Value as Json;
use std::path::Path;
use tiny::Tiny;

const PROMPT: &str = "And it came to pass in those days, that there went out a decree";

fn json(name: &str) -> Json {
    serde_json::from_str(&std::fs::read_to_string(format!("{DEMO}/{name}")).unwrap()).unwrap()
}

/// The demo as llama.cpp's converter makes it, with its tokenizer and template.
fn demo() -> GgufOfTiny {
    let weights = safetensors::load(format!("{DEMO}/model.safetensors"), &Device::Cpu).unwrap();
    let weights = weights.into_iter().map(|(name, w)| (name, w.to_dtype(DType::F32).unwrap())).collect();
    let mut config = json("config.json");
    config["rope_theta"] = config["rope_parameters"]["rope_theta"].clone();
    let demo = Tiny { config, weights };
    let mut file = GgufOfTiny::new(&demo, Layout::Qwen3Next).unwrap();

    let tokenizer = json("tokenizer.json");
    let string = |text: &str| Value::String(text.to_string());
    let count = demo.config["vocab_size"].as_u64().unwrap() as usize;
    let mut tokens = vec![(string("?"), Value::I32(1)); count];
    for (token, id) in tokenizer["model"]["vocab"].as_object().unwrap() {
        tokens[id.as_u64().unwrap() as usize] = (string(token), Value::I32(1));
    }
    for added in tokenizer["added_tokens"].as_array().unwrap() {
        let control = Value::I32(if added["special"] == true { 3 } else { 4 });
        tokens[added["id"].as_u64().unwrap() as usize] = (string(added["content"].as_str().unwrap()), control);
    }
    let (tokens, types) = tokens.into_iter().unzip();
    let merge = |merge: &Json| match merge {
        Json::Array(pair) => string(&format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap())),
        merge => string(merge.as_str().unwrap()),
    };
    let merges = tokenizer["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
    let template = json("tokenizer_config.json")["chat_template"].as_str().unwrap().to_string();
    for (key, value) in [
        ("tokenizer.ggml.model", string("gpt2")),
        ("tokenizer.ggml.pre", string("gpt-2")),
        ("tokenizer.ggml.tokens", Value::Array(tokens)),
        ("tokenizer.ggml.token_type", Value::Array(types)),
        ("tokenizer.ggml.merges", Value::Array(merges)),
        ("tokenizer.chat_template", Value::String(template)),
    ] {
        file.metadata.insert(key.to_string(), value);
    }
    file
}

fn generate(args: &[&str]) -> Run {
    let run = cli::run("generate", args);
    assert_eq!(run.code, Some(0), "{run:?}");
    run
}

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
