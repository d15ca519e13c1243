//! GGUF files: their tokenizers, and the generate example on them and with quantised matrices.

use crate::cli::{self, fails, generate, PROMPT};
use crate::gguf_writer::{demo, in_a_folder, GgufOfTiny, Layout};
use crate::golden::{converted, DEMO};
use crate::memory::said;
use crate::tiny::Tiny;
use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::GgmlDType;
use candle_core::Result;
use candle_gdn_cli::gguf_tokenizer;
use candle_gdn_models::GgufFile;
use candle_gdn_testing::devices::refused;
use std::path::{Path, PathBuf};

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

/// What a file asks for is obeyed, and the command line wins; what cannot be is named. Files are known by their content.
#[test]
fn sampling_of_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = demo();
    for (key, value) in [
        ("temp", Value::F32(1.5)),
        ("top_k", Value::I32(20)),
        ("top_p", Value::F32(0.95)),
        ("penalty_last_n", Value::I32(-1)),
        ("mirostat", Value::I32(0)),
    ] {
        file.metadata.insert(format!("general.sampling.{key}"), value);
    }
    let path = write(&file, dir.path(), "sha256-0123");
    let run =
        |path: &str, args: &[&str]| generate(&[&["--model", path, "--prompt", PROMPT, "-n", "20"], args].concat());
    let [one, two] = ["1", "2"].map(|seed| run(&path, &["--seed", seed]));
    assert!(one.stdout != two.stdout && !one.stderr.contains("not obeyed"), "{one:?}");
    let flags = ["--temperature", "1.5", "--top-k", "20", "--top-p", "0.95", "--seed", "1"];
    let plain = write(&demo(), dir.path(), "plain.GGUF");
    assert_eq!(run(&plain, &flags).stdout, one.stdout);
    assert_eq!(run(&path, &["--temperature", "0"]).stdout, run(&plain, &[]).stdout);
    file.metadata.insert("general.sampling.xtc_probability".into(), Value::F32(0.5));
    let path = write(&file, dir.path(), "xtc.gguf");
    assert!(run(&path, &[]).stderr.contains("not obeyed: general.sampling.xtc_probability"));
    file.metadata.insert("general.sampling.top_p".into(), Value::F32(1.5));
    let path = write(&file, dir.path(), "wrong.gguf");
    fails("generate", &["--model", &path, "--prompt", PROMPT], 1, &["wrong.gguf", "`general.sampling.top_p`", "1.5"]);
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
    // What is quantised in its file stays so, and is counted so.
    let [plain, again] =
        [&[][..], &["--quantize", "q4k"]].map(|more| generate(&[&args[..], &parts[..2], more].concat()));
    assert_eq!((said(&again, "weights"), &again.stdout), (said(&plain, "weights"), &plain.stdout));
    again.says(&["weights, of which --quantize changed none, on the CPU"]);
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
    fails("generate", &["--model", readme], 1, &["--model", "README.md", "a GGUF file"]);
    fails("generate", &["--quantize", "q9"], 2, &["--quantize", "q8_0"]);
}

/// King James, and what is hard for splitting.
const TEXTS: &[&str] = &[
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was \
     upon the face of the deep. And the Spirit of God moved upon the face of the waters.",
    "And God said, Let there be light: and there was light.\n\nAnd God saw the light, that it was good:  and God \
     divided the light from the darkness.\n",
    "The LORD is my shepherd; I shall not want.\t23:1 -- 1611!? (\"selah\") don't WE'LL thou'rt 'tis",
    "<|im_start|>user\nWho art thou?<|im_end|>\n<|im_start|>assistant\n",
    "  leading, trailing   \n \r\n x",
    "\u{3b1}\u{301}\u{928}\u{92e}\u{938}\u{94d}\u{924}\u{947} \u{5e9}\u{5dc}\u{5d5}\u{5dd} \u{1f54a}\u{fe0f} na\u{ef}ve 1234567",
    "",
];

fn tokens_of(tokenizer: &tokenizers::Tokenizer) -> Vec<Vec<u32>> {
    TEXTS.iter().map(|text| tokenizer.encode(*text, false).expect("ids").get_ids().to_vec()).collect()
}

#[test]
fn tokenizers_of_files_are_those_of_the_checkpoints() -> Result<()> {
    let want = tokenizers::Tokenizer::from_file(DEMO.dir() + "/tokenizer.json").expect("the demo's tokenizer");
    for name in ["demo-f16.gguf", "demo-q8_0.gguf"] {
        let Some(path) = converted(name) else { continue };
        let file = GgufFile::open(path)?;
        let got = gguf_tokenizer::tokenizer(&file).expect("a tokenizer");
        assert_eq!(tokens_of(&got), tokens_of(&want));
        for i in 0..DEMO.prompts() {
            let ids = DEMO.prompt(i)?.ids;
            let text = want.decode(&ids, false).expect("text");
            assert_eq!(got.decode(&ids, false).expect("text"), text);
            assert_eq!(got.encode(text, false).expect("ids").get_ids(), ids);
        }
        // Special tokens are skipped where they are not asked for.
        assert_eq!(got.decode(&[1, 2, 0], true).expect("text"), "");
        assert_eq!(gguf_tokenizer::special_token(&file, "eos"), Some("<|endoftext|>"));
        assert!(gguf_tokenizer::chat_templates(&file).values().any(|template| template.contains("<|im_start|>")));
    }
    Ok(())
}

/// Out of the demo's own tokenizer.json: what the converter writes of it.
fn with_tokenizer(pre: &str) -> Result<(tempfile::TempDir, PathBuf, GgufOfTiny)> {
    let json = std::fs::read_to_string(DEMO.dir() + "/tokenizer.json")?;
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let mut file = GgufOfTiny::new(&Tiny::qwen3_next(), Layout::Qwen3Next)?;
    file.add_tokenizer(&json, pre);
    file.metadata.insert("tokenizer.ggml.eos_token_id".into(), Value::U32(0));
    let (dir, path) = in_a_folder("tokens.gguf");
    Ok((dir, path, file))
}

#[test]
fn each_way_of_splitting() -> Result<()> {
    let want = tokenizers::Tokenizer::from_file(DEMO.dir() + "/tokenizer.json").expect("the demo's tokenizer");
    for pre in ["gpt-2", "qwen2", "qwen35"] {
        let (_dir, path, file) = with_tokenizer(pre)?;
        file.write(&path)?;
        let got = gguf_tokenizer::tokenizer(&GgufFile::open(&path)?).expect("a tokenizer");
        if pre == "gpt-2" {
            assert_eq!(tokens_of(&got), tokens_of(&want));
        }
        // However it was split, the text comes back, in the normal form where there is one.
        for text in TEXTS {
            let ids = got.encode(*text, false).expect("ids");
            let back = got.decode(ids.get_ids(), false).expect("text");
            if pre == "gpt-2" || text.is_ascii() {
                assert_eq!(back, *text, "{pre}");
            }
        }
        let pieces = |text: &str| got.encode(text, false).expect("ids").get_offsets().len();
        // Digits one by one, but for gpt-2.
        assert!(pre == "gpt-2" || pieces("1234") == 4, "{pre}");
    }
    let (_dir, path, mut file) = with_tokenizer("llama-bpe")?;
    let bad = |file: &GgufOfTiny, parts: &[&str]| -> Result<()> {
        file.write(&path)?;
        let tokenizer = gguf_tokenizer::tokenizer(&GgufFile::open(&path)?);
        refused(tokenizer.map_err(|e| candle_core::Error::Msg(format!("{e:#}"))), parts);
        Ok(())
    };
    bad(&file, &["tokens.gguf", "`tokenizer.ggml.pre`", "qwen35", "llama-bpe"])?;
    file.metadata.insert("tokenizer.ggml.pre".into(), Value::String("qwen2".into()));
    for key in ["model", "pre", "tokens", "merges", "token_type"].map(|key| format!("tokenizer.ggml.{key}")) {
        let mut without = file.clone();
        without.metadata.remove(&key);
        bad(&without, &["tokens.gguf", &key, "is missing"])?;
    }
    let mut short = file.clone();
    short.metadata.insert("tokenizer.ggml.token_type".into(), Value::Array(vec![Value::I32(1)]));
    bad(&short, &["`tokenizer.ggml.token_type`: expected", "got 1"])?;
    file.metadata.insert("tokenizer.ggml.model".into(), Value::String("llama".into()));
    bad(&file, &["`tokenizer.ggml.model`", "gpt2", "llama"])
}
