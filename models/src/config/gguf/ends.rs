//! The tokens that end a text, as llama.cpp finds them in a GGUF file: by their ids, and by their names.

use crate::formats::{integer, GgufFile};
use candle_core::quantized::gguf_file::Value;
use candle_core::{bail, Result};
use std::collections::BTreeSet;

/// Of `tokenizer.ggml.NAME_token_id`, or a list `.._token_ids` as Ollama writes it.
const IDS: [&str; 7] = ["eos", "eot", "eom", "eog", "fim_pad", "fim_rep", "fim_sep"];

/// Names that end a turn, a text, or a piece of one in other models' vocabularies too.
const NAMES: &[&str] = &[
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<|fim_pad|>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<eos>",
    "</s>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
];

/// `tokenizer.ggml.token_type` of tokens that are no text.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// In ascending order. Ids outside the vocabulary are left out.
pub(super) fn token_ids(file: &GgufFile, vocab_size: usize) -> Result<Vec<u32>> {
    let mut found = BTreeSet::new();
    for key in IDS.iter().flat_map(|name| ["id", "ids"].map(|end| format!("tokenizer.ggml.{name}_token_{end}"))) {
        let list = match file.value(&key) {
            None => continue,
            Some(Value::Array(list)) => list.as_slice(),
            Some(one) => std::slice::from_ref(one),
        };
        for value in list {
            let Some(id) = integer(value) else {
                bail!("{}: `{key}`: expected token ids, got {value:?}", file.path().display())
            };
            found.extend(u32::try_from(id).ok());
        }
    }
    let list = |key: &str| match file.value(key) {
        Some(Value::Array(list)) => list.as_slice(),
        _ => &[],
    };
    let kinds = list("tokenizer.ggml.token_type");
    for (id, token) in list("tokenizer.ggml.tokens").iter().enumerate() {
        let Value::String(token) = token else { continue };
        // "</s>" may be a piece of text.
        let is_text = || kinds.get(id).and_then(integer).is_some_and(|kind| kind != CONTROL && kind != USER_DEFINED);
        if NAMES.contains(&token.as_str()) && !is_text() {
            found.insert(id as u32);
        }
    }
    Ok(found.into_iter().filter(|id| (*id as usize) < vocab_size).collect())
}
