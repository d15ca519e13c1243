//! The tokenizer of a checkpoint without tokenizer.json: vocab.json, merges.txt and the added tokens of
//! tokenizer_config.json.

use crate::gguf_tokenizer::byte_level;
use crate::Checkpoint;
use anyhow::{bail, Context, Result};
use serde_json::{json, Value};
use tokenizers::Tokenizer;

/// `tokenizer_class` in tokenizer_config.json, without "Fast", and how it splits text.
const CLASSES: &[(&str, &str)] =
    &[("Qwen2Tokenizer", "qwen2"), ("Qwen3_5Tokenizer", "qwen35"), ("GPT2Tokenizer", "gpt-2")];

/// None where one of the two files is missing.
pub fn tokenizer(checkpoint: &Checkpoint) -> Result<Option<Tokenizer>> {
    let (vocab, config) = (checkpoint.json("vocab.json")?, checkpoint.json("tokenizer_config.json")?);
    let (Value::Object(vocab), Some((merges, path))) = (vocab, checkpoint.text("merges.txt")?) else { return Ok(None) };
    // Its first line is the version.
    let merges: Vec<_> = merges.lines().filter(|line| !line.is_empty() && !line.starts_with("#version")).collect();
    let added = added(checkpoint, &config)?;
    let class = config["tokenizer_class"].as_str().unwrap_or_default();
    let Some((_, split)) = CLASSES.iter().find(|(name, _)| *name == class.trim_end_matches("Fast")) else {
        let known: Vec<_> = CLASSES.iter().map(|(name, _)| *name).collect();
        bail!("tokenizer_config.json: `tokenizer_class`: expected one of {}, got {class:?}", known.join(", "))
    };
    let tokenizer = byte_level("tokenizer_config.json: `tokenizer_class`", split, vocab, &merges, added);
    tokenizer.with_context(|| path.with_file_name("vocab.json and merges.txt").display().to_string()).map(Some)
}

/// As tokenizer.json lists them, by their ids.
fn added(checkpoint: &Checkpoint, config: &Value) -> Result<Vec<Value>> {
    let mut added = Vec::new();
    for (id, token) in config["added_tokens_decoder"].as_object().into_iter().flatten() {
        let id: u32 = id.parse().with_context(|| format!("tokenizer_config.json: `added_tokens_decoder`: {id}"))?;
        let Value::Object(mut token) = token.clone() else {
            bail!("tokenizer_config.json: `added_tokens_decoder`: {id}: expected an object, got {token}")
        };
        token.insert("id".into(), id.into());
        added.push((id, token.into()));
    }
    // Older ones have names and ids alone.
    for (name, id) in checkpoint.json("added_tokens.json")?.as_object().into_iter().flatten() {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
        let id = id.with_context(|| format!("added_tokens.json: `{name}`: expected a token id"))?;
        if added.iter().all(|(other, _)| *other != id) {
            let special = name.starts_with("<|") && name.ends_with("|>");
            added.push((id, json!({
                "id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": special
            })));
        }
    }
    added.sort_by_key(|(id, _)| *id);
    Ok(added.into_iter().map(|(_, token)| token).collect())
}
