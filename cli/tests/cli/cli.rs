//! Runs an example as a user does.

// Each test program uses its part of this.
#![allow(dead_code)]

use candle_core::{safetensors, Device, Tensor};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};
use tokenizers::Tokenizer;

#[path = "../../../tests/support/program.rs"]
mod program;
use program::program;

pub const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/generate/demo");

pub const PROMPT: &str = "And it came to pass in those days, that there went out a decree";

/// What a run left behind.
#[derive(Debug)]
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Run {
    /// Of a program that has ended.
    pub fn of(out: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        Self { code: out.status.code(), stdout: text(out.stdout), stderr: text(out.stderr) }
    }

    /// Waits for the end.
    pub fn end(child: Child) -> Self {
        Self::of(child.wait_with_output().expect("an end"))
    }

    /// Waits for the end, but not longer than any program should take. What it writes must fit into pipes.
    #[track_caller]
    pub fn soon(mut child: Child) -> Self {
        let start = Instant::now();
        while child.try_wait().expect("a status").is_none() {
            if start.elapsed() > Duration::from_secs(60) {
                child.kill().expect("it can be killed");
                panic!("it hangs: {:?}", Self::end(child));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Self::end(child)
    }

    /// Fails unless it ended well.
    #[track_caller]
    pub fn good(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// Fails unless stderr says all `parts`.
    #[track_caller]
    pub fn says(&self, parts: &[&str]) {
        for part in parts {
            assert!(self.stderr.contains(part), "expected {part:?} in {self:?}");
        }
    }
}

/// An example that runs models, on the CPU.
pub fn command(example: &str) -> Command {
    let mut command = program(example);
    command.arg("--cpu");
    command
}

pub fn run(example: &str, args: &[impl AsRef<OsStr>]) -> Run {
    Run::of(command(example).args(args).output().expect("the example starts"))
}

#[track_caller]
pub fn generate(args: &[&str]) -> Run {
    run("generate", args).good()
}

/// Fails with exit status `code`, says `parts`, prints nothing on stdout and does not panic.
#[track_caller]
pub fn fails(example: &str, args: &[impl AsRef<OsStr>], code: i32, parts: &[&str]) {
    let run = run(example, args);
    assert_eq!((run.code, run.stdout.as_str()), (Some(code), ""), "{run:?}");
    assert!(!run.stderr.contains("panicked"), "{run:?}");
    run.says(parts);
}

/// Ctrl-C.
#[cfg(unix)]
pub fn interrupt(child: &Child) {
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill");
    assert!(kill.success());
}

pub fn tokenizer() -> Tokenizer {
    Tokenizer::from_file(format!("{DEMO}/tokenizer.json")).expect("a tokenizer")
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

    /// The path of a file that the test writes, as an argument.
    pub fn arg_of(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        self.write(name, content);
        self.file(name).display().to_string()
    }

    pub fn remove(&self, names: &[&str]) {
        names.iter().for_each(|name| std::fs::remove_file(self.file(name)).expect("a file"));
    }

    /// Changes the weights.
    pub fn weights(&self, change: impl FnOnce(&mut HashMap<String, Tensor>)) {
        let mut all = safetensors::load(self.file("model.safetensors"), &Device::Cpu).expect("weights");
        change(&mut all);
        safetensors::save(&all, self.file("model.safetensors")).expect("a file");
    }

    /// Sets one field of a JSON file.
    pub fn set(&self, name: &str, field: &str, value: serde_json::Value) {
        let text = std::fs::read_to_string(self.file(name)).expect("a file");
        let mut json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        json[field] = value;
        self.write(name, json.to_string());
    }
}

/// A checkpoint whose texts end with a comma, which is frequent.
pub fn ends_with_commas() -> Copy {
    let copy = Copy::new();
    let comma = tokenizer().encode(",", false).expect("tokens").get_ids().to_vec();
    copy.set("generation_config.json", "eos_token_id", comma.into());
    copy
}

/// A checkpoint whose texts do not end before `positions` do.
pub fn endless(positions: usize) -> Copy {
    let copy = Copy::new();
    for file in ["config.json", "generation_config.json"] {
        copy.set(file, "eos_token_id", serde_json::Value::Null);
    }
    copy.set("config.json", "max_position_embeddings", positions.into());
    copy
}

/// A checkpoint that says the three bytes of a euro sign in turn, each a token, over and over.
pub fn euro() -> Copy {
    let copy = Copy::new();
    let euro = tokenizer().encode("€", false).expect("tokens").get_ids().to_vec();
    assert_eq!(euro.len(), 3, "the demo's vocabulary has a token a byte");
    let (embed, head) = chain(&euro, 1024, 192);
    copy.weights(|all| {
        all.insert("model.embed_tokens.weight".into(), embed);
        all.insert("lm_head.weight".into(), head);
        // Without mixers and feed-forward the head sees the token alone.
        let silent = ["out_proj.weight", "o_proj.weight", "down_proj.weight"];
        for (_, t) in all.iter_mut().filter(|(name, _)| silent.iter().any(|end| name.ends_with(end))) {
            *t = t.zeros_like().expect("zeros");
        }
    });
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
