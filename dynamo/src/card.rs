//! The files of which Dynamo makes a model's card: tokenizer, chat template, and what ends a text.

use anyhow::{Context, Result};
use candle_gdn_cli::{gguf_tokenizer, Checkpoint};
use candle_gdn_models::ModelConfig;
use serde_json::json;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// What the frontend reads beside tokenizer.json.
const BESIDE: [&str; 4] = ["config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"];

/// A folder with these files.
pub struct Card {
    folder: PathBuf,
    /// Where they were written, of a GGUF file, which has them in it, or of a checkpoint without tokenizer.json.
    _written: Option<TempDir>,
}

impl Card {
    pub fn new(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<Self> {
        let written = TempDir::with_prefix("candle-gdn-card-")?;
        if checkpoint.gguf().is_some() {
            write(checkpoint, config, written.path()).context("the files of a GGUF file")?;
        } else {
            // An error here says what is missing.
            let tokenizer =
                checkpoint.tokenizer()?.context("--load-format dummy: expected a folder with a tokenizer.json")?;
            let dir = checkpoint.dir();
            if dir.join("tokenizer.json").is_file() {
                return Ok(Self { folder: dir.to_path_buf(), _written: None });
            }
            // Of vocab.json and merges.txt, which the frontend does not read.
            tokenizer.save(written.path().join("tokenizer.json"), false).map_err(anyhow::Error::msg)?;
            for name in BESIDE.into_iter().filter(|name| dir.join(name).is_file()) {
                std::fs::copy(dir.join(name), written.path().join(name)).with_context(|| name.to_string())?;
            }
        }
        Ok(Self { folder: written.path().to_path_buf(), _written: Some(written) })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What clients call a model that nobody named: an id is its own name, and of a path it is the last part.
    pub fn name(&self, model: Option<&str>) -> String {
        let Some(model) = model else { return "demo".into() };
        let path = Path::new(model);
        let stem = if path.is_file() { path.file_stem() } else { path.file_name() };
        let is_id = !path.exists();
        stem.filter(|_| !is_id).map_or(model.to_string(), |stem| stem.to_string_lossy().into_owned())
    }
}

/// What a GGUF file has of them.
fn write(checkpoint: &Checkpoint, config: &ModelConfig, to: &Path) -> Result<()> {
    let Some(file) = checkpoint.gguf() else { return Ok(()) };
    let tokenizer = gguf_tokenizer::tokenizer(file)?;
    tokenizer.save(to.join("tokenizer.json"), false).map_err(anyhow::Error::msg)?;
    let special = |name| gguf_tokenizer::special_token(file, name);
    let tokenizer_config = json!({
        "chat_template": gguf_tokenizer::chat_templates(file).remove("default"),
        "bos_token": special("bos"),
        "eos_token": special("eos"),
    });
    let model = json!({
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "eos_token_id": config.eos_token_ids,
        "max_position_embeddings": config.max_position_embeddings,
        "num_hidden_layers": config.layers.len(),
        "vocab_size": config.vocab_size,
    });
    let generation = json!({ "eos_token_id": config.eos_token_ids });
    for (name, value) in
        [("tokenizer_config.json", tokenizer_config), ("config.json", model), ("generation_config.json", generation)]
    {
        std::fs::write(to.join(name), value.to_string())?;
    }
    Ok(())
}
