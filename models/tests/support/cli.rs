//! Runs an example as a user does.

// Each test program uses its part of this.
#![allow(dead_code)]

use candle_core::{safetensors, Device, Tensor};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "../../../tests/support/program.rs"]
mod program;
use program::program;

pub const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/generate/demo");

/// What a run left behind.
#[derive(Debug)]
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// An example that runs models, on the CPU.
pub fn command(example: &str) -> Command {
    let mut command = program(example);
    command.arg("--cpu");
    command
}

pub fn run(example: &str, args: &[impl AsRef<OsStr>]) -> Run {
    let out = command(example).args(args).output().expect("the example starts");
    Run {
        code: out.status.code(),
        stdout: String::from_utf8(out.stdout).expect("UTF-8 on stdout"),
        stderr: String::from_utf8(out.stderr).expect("UTF-8 on stderr"),
    }
}

/// Fails with exit status `code`, says `parts`, prints nothing on stdout and does not panic.
#[track_caller]
pub fn fails(example: &str, args: &[impl AsRef<OsStr>], code: i32, parts: &[&str]) {
    let run = run(example, args);
    assert_eq!(run.code, Some(code), "{run:?}");
    assert_eq!(run.stdout, "");
    assert!(!run.stderr.contains("panicked"), "{run:?}");
    for part in parts {
        assert!(run.stderr.contains(part), "expected {part:?} in {:?}", run.stderr);
    }
}

/// A copy of the demo checkpoint that a test may break.
pub struct Copy(tempfile::TempDir);

impl Copy {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for entry in std::fs::read_dir(DEMO).expect("the demo") {
            let entry = entry.expect("an entry");
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).expect("a copy");
        }
        Self(dir)
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn arg(&self) -> String {
        self.path().display().to_string()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.file(name), content).expect("a file");
    }

    /// Sets one field of a JSON file.
    pub fn set(&self, name: &str, field: &str, value: serde_json::Value) {
        let text = std::fs::read_to_string(self.file(name)).expect("a file");
        let mut json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        json[field] = value;
        self.write(name, json.to_string());
    }
}

/// A checkpoint that says the three bytes of a euro sign in turn, each a token, over and over.
pub fn euro() -> Copy {
    let copy = Copy::new();
    let tokenizer = tokenizers::Tokenizer::from_file(copy.file("tokenizer.json")).expect("a tokenizer");
    let euro = tokenizer.encode("€", false).expect("tokens").get_ids().to_vec();
    assert_eq!(euro.len(), 3, "the demo's vocabulary has a token a byte");
    let mut all = safetensors::load(copy.file("model.safetensors"), &Device::Cpu).expect("weights");
    let (embed, head) = chain(&euro, 1024, 192);
    all.insert("model.embed_tokens.weight".into(), embed);
    all.insert("lm_head.weight".into(), head);
    // Without mixers and feed-forward the head sees the token alone.
    for (name, t) in all.iter_mut() {
        if name.ends_with("out_proj.weight") || name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight") {
            *t = t.zeros_like().expect("zeros");
        }
    }
    safetensors::save(&all, copy.file("model.safetensors")).expect("a file");
    copy
}

/// Embedding and head `[vocab, hidden]` under which each of `cycle` is followed by the next.
fn chain(cycle: &[u32], vocab: usize, hidden: usize) -> (Tensor, Tensor) {
    let (mut embed, mut head) = (vec![0f32; vocab * hidden], vec![0f32; vocab * hidden]);
    for (i, &id) in cycle.iter().enumerate() {
        let next = cycle[(i + 1) % cycle.len()];
        embed[id as usize * hidden + i] = 1.;
        head[next as usize * hidden + i] = 1.;
    }
    let tensor = |v| Tensor::from_vec(v, (vocab, hidden), &Device::Cpu).expect("a tensor");
    (tensor(embed), tensor(head))
}
