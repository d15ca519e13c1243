//! The tokenizer and the chat template that a GGUF file carries.

use anyhow::{bail, Context, Result};
use candle_core::quantized::gguf_file::Value;
use candle_gdn_models::GgufFile;
use serde_json::{json, Map};
use std::collections::BTreeMap;
use tokenizers::Tokenizer;

/// How text is split before the merges: llama.cpp's names, and the patterns of the models' own tokenizer.json.
const SPLITS: &[(&str, Option<&str>)] = &[
    ("gpt-2", None),
    (
        "qwen2",
        Some(concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
            r"|\s+(?!\S)|\s+"
        )),
    ),
    (
        "qwen35",
        Some(concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}",
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )),
    ),
];

/// `tokenizer.ggml.token_type`
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// Builds the tokenizer: byte-level BPE, as all models of these families have it.
pub fn tokenizer(file: &GgufFile) -> Result<Tokenizer> {
    from_metadata(file).with_context(|| file.path().display().to_string())
}

/// The templates that the messages of a chat are put into, by name.
pub fn chat_templates(file: &GgufFile) -> BTreeMap<String, String> {
    let names =
        list(file, "tokenizer.chat_templates").unwrap_or_default().iter().filter_map(|name| name.to_string().ok());
    let named = names.map(|name| (name.clone(), format!("tokenizer.chat_template.{name}")));
    let keys = named.chain([("default".to_string(), "tokenizer.chat_template".to_string())]);
    keys.filter_map(|(name, key)| Some((name, text(file, &key).ok()?.to_string()))).collect()
}

/// The content of the token that `tokenizer.ggml.{name}_token_id` names: "bos", "eos".
pub fn special_token<'a>(file: &'a GgufFile, name: &str) -> Option<&'a str> {
    let id = file.value(&format!("tokenizer.ggml.{name}_token_id"))?.to_u64().ok()?;
    list(file, "tokenizer.ggml.tokens").ok()?.get(id as usize)?.to_string().ok().map(String::as_str)
}

fn from_metadata(file: &GgufFile) -> Result<Tokenizer> {
    let model = text(file, "tokenizer.ggml.model")?;
    if model != "gpt2" {
        bail!("`tokenizer.ggml.model`: expected \"gpt2\" (byte-level BPE), got {model:?}")
    }
    if matches!(file.value("tokenizer.ggml.add_bos_token"), Some(Value::Bool(true))) {
        bail!("`tokenizer.ggml.add_bos_token`: expected false, got true")
    }
    let pre = text(file, "tokenizer.ggml.pre")?;
    let tokens = list(file, "tokenizer.ggml.tokens")?;
    let mut vocab = Map::with_capacity(tokens.len());
    for (id, token) in tokens.iter().enumerate() {
        vocab.insert(string("tokenizer.ggml.tokens", token)?.to_string(), id.into());
    }
    let mut added = Vec::new();
    let kinds = list(file, "tokenizer.ggml.token_type")?;
    if kinds.len() != tokens.len() {
        bail!("`tokenizer.ggml.token_type`: expected {} entries (the tokens), got {}", tokens.len(), kinds.len())
    }
    for (id, (kind, token)) in kinds.iter().zip(tokens).enumerate() {
        let kind = match kind {
            Value::I32(kind) => *kind as u64,
            kind => kind.to_u64().context("`tokenizer.ggml.token_type`")?,
        };
        if kind == CONTROL || kind == USER_DEFINED {
            added.push(json!({
                "id": id, "content": string("tokenizer.ggml.tokens", token)?, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": kind == CONTROL
            }));
        }
    }
    let merges = list(file, "tokenizer.ggml.merges")?.iter().map(|merge| string("tokenizer.ggml.merges", merge));
    let merges = merges.collect::<Result<Vec<_>>>()?;
    byte_level("`tokenizer.ggml.pre`", pre, vocab, &merges, added).context("`tokenizer.ggml.*`")
}

/// Byte-level BPE. `split` is what `key` says of how text is split before the merges.
pub fn byte_level(
    key: &str,
    split: &str,
    vocab: Map<String, serde_json::Value>,
    merges: &[&str],
    added: Vec<serde_json::Value>,
) -> Result<Tokenizer> {
    let Some((_, pattern)) = SPLITS.iter().find(|(name, _)| *name == split) else {
        let known: Vec<_> = SPLITS.iter().map(|(name, _)| *name).collect();
        bail!("{key}: expected one of {}, got {split:?}", known.join(", "))
    };
    let byte_level = |use_regex: bool| {
        json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex
        })
    };
    let (normalizer, pre_tokenizer) = match pattern {
        None => (json!(null), byte_level(true)),
        Some(pattern) => {
            let split = json!({
                "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false
            });
            (json!({ "type": "NFC" }), json!({ "type": "Sequence", "pretokenizers": [split, byte_level(false)] }))
        }
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": byte_level(true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        },
    });
    Tokenizer::from_bytes(tokenizer.to_string()).map_err(anyhow::Error::msg)
}

fn text<'a>(file: &'a GgufFile, key: &str) -> Result<&'a str> {
    string(key, file.value(key).with_context(|| format!("`{key}` is missing"))?)
}

fn list<'a>(file: &'a GgufFile, key: &str) -> Result<&'a [Value]> {
    match file.value(key) {
        Some(Value::Array(list)) => Ok(list),
        Some(_) => bail!("`{key}`: expected a list"),
        None => bail!("`{key}` is missing"),
    }
}

fn string<'a>(key: &str, value: &'a Value) -> Result<&'a str> {
    match value {
        Value::String(text) => Ok(text),
        other => bail!("`{key}`: expected strings, got {other:?}"),
    }
}
