//! A checkpoint on disk: a directory with config.json, tokenizer and safetensors.

use super::{hub, safetensors};
use anyhow::{bail, Context, Result};
use candle_gdn::models::ModelConfig;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

/// The checkpoint that comes with the repository.
const DEMO_DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/generate/demo");

pub struct Checkpoint {
    dir: PathBuf,
}

impl Checkpoint {
    /// `model` is a directory, or `owner/name` on the hub at `revision`; the demo when absent.
    pub fn find(model: Option<&str>, revision: &str) -> Result<Self> {
        let Some(model) = model else { return Self::open(Path::new(DEMO_DIR)) };
        if Path::new(model).is_dir() {
            return Self::open(Path::new(model));
        }
        if !hub::is_id(model) {
            bail!("--model: no directory {model}, and not a hub id of the form owner/name")
        }
        let dir = hub::fetch(model, revision)
            .with_context(|| format!("--model: no directory {model}, so taken as a hub id"))?;
        Self::open(&dir)
    }

    fn open(dir: &Path) -> Result<Self> {
        if !dir.join("config.json").is_file() {
            bail!("--model: {} has no config.json", dir.display())
        }
        Ok(Self { dir: dir.to_path_buf() })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn config(&self) -> Result<ModelConfig> {
        let path = self.dir.join("config.json");
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        ModelConfig::from_json(&text).with_context(|| path.display().to_string())
    }

    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let path = self.dir.join("tokenizer.json");
        if !path.is_file() {
            bail!("{} is missing", path.display())
        }
        Tokenizer::from_file(&path).map_err(|e| anyhow::anyhow!("{}: {e}", path.display()))
    }

    /// The weight files, each checked to be there and whole.
    pub fn weights(&self) -> Result<Vec<PathBuf>> {
        let index = self.dir.join("model.safetensors.index.json");
        let single = self.dir.join("model.safetensors");
        let files: Vec<PathBuf> = if index.is_file() {
            let text = std::fs::read_to_string(&index).with_context(|| format!("cannot read {}", index.display()))?;
            let names = shard_names(&text).with_context(|| index.display().to_string())?;
            names.iter().map(|name| self.dir.join(name)).collect()
        } else if single.is_file() {
            vec![single]
        } else {
            bail!("{} has neither model.safetensors nor model.safetensors.index.json", self.dir.display())
        };
        for file in &files {
            safetensors::check(file)?;
        }
        Ok(files)
    }
}

/// The distinct files of a `model.safetensors.index.json`.
pub(super) fn shard_names(index: &str) -> Result<BTreeSet<String>> {
    let index: serde_json::Value = serde_json::from_str(index).context("not valid JSON")?;
    let Some(map) = index["weight_map"].as_object() else { bail!("`weight_map`: expected an object") };
    let mut names = BTreeSet::new();
    for (tensor, file) in map {
        // A name with a path in it would leave the directory.
        match file.as_str() {
            Some(name) if Path::new(name).file_name() == Some(name.as_ref()) => names.insert(name.to_string()),
            _ => bail!("`weight_map`: expected a file name for {tensor}, got {file}"),
        };
    }
    if names.is_empty() {
        bail!("`weight_map`: expected at least one file, got none")
    }
    Ok(names)
}
