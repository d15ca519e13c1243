//! The demo checkpoint, and copies of it that a test may change.

use candle_core::{safetensors, Device, Tensor};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

pub const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../examples/generate/demo");

/// A copy of the demo checkpoint that a test may break.
pub struct Copy(tempfile::TempDir);

impl Copy {
    // What copies files is no default value.
    #[allow(clippy::new_without_default)]
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
