//! `generation_config.json` and its like, or `general.sampling.*` of a GGUF file: the tokens that end a text, and the sampling that the
//! authors of a model recommend.

use crate::args::{self, SamplingArgs, SamplingOptions};
use crate::chat::special_tokens;
use crate::{status, Checkpoint};
use anyhow::{anyhow, bail, Context, Result};
use candle_gdn_models::{json_as_python, GgufFile, ModelConfig, Sampling};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use tokenizers::Tokenizer;

/// Keys of `generation_config.json` that are read here or do not change which token is chosen. One that ends with `_` stands for all
/// keys that begin so.
const KNOWN: [&str; 39] = [
    "_",
    "assistant_",
    "bos_token_id",
    "cache_",
    "chat_format",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",
    "disable_compile",
    "do_sample",
    "early_stopping",
    "eos_token_id",
    "frequency_penalty",
    "is_assistant",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_length",
    "max_matching_ngram_size",
    "max_new_tokens",
    "max_window_size",
    "min_p",
    "num_assistant_",
    "output_",
    "pad_token_id",
    "prefill_chunk_size",
    "presence_penalty",
    "prompt_lookup_num_tokens",
    "renormalize_logits",
    "repetition_penalty",
    "return_",
    "speculation_type",
    "target_lookbehind",
    "temperature",
    "top_k",
    "top_p",
    "transformers_version",
    "trust_remote_code",
    "use_",
];

pub struct Settings {
    /// Tokens that end a text.
    pub eos: BTreeSet<u32>,
    pub sampling: Sampling,
}

/// What a checkpoint asks for.
#[derive(Debug, Default)]
struct Recommended {
    eos: Vec<u32>,
    /// Whether tokens are drawn, and the most likely one not always taken.
    draws: bool,
    options: SamplingOptions,
}

impl Settings {
    /// Each option is that of the command line, else of the checkpoint; without either, the most likely token is chosen.
    pub fn new(
        args: &SamplingArgs,
        checkpoint: &Checkpoint,
        config: &ModelConfig,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Self> {
        let file = match (checkpoint.gguf(), checkpoint.text("generation_config.json")?) {
            (Some(file), _) => general_sampling(file).with_context(|| file.path().display().to_string())?,
            (None, Some((text, path))) => generation_config(&text).with_context(|| path.display().to_string())?,
            (None, None) => Recommended::default(),
        };
        let mut eos: BTreeSet<u32> = config.eos_token_ids.iter().copied().collect();
        eos.extend(&file.eos);
        // Some configurations lack the token with which the tokenizer ends a turn.
        let own = special_tokens(checkpoint)?.remove("eos_token");
        eos.extend(own.and_then(|own| tokenizer?.token_to_id(own.as_str()?)));
        Ok(Self { eos, sampling: sampling(&args.options, file) })
    }
}

/// What the command line says, else the file, else the defaults. A file's temperature and bounds need its `do_sample`, or a bound of
/// the command line.
fn sampling(flags: &SamplingOptions, file: Recommended) -> Sampling {
    // A bound on the candidates implies a random choice among them.
    let bounded = flags.top_k.is_some() || flags.top_p.is_some() || flags.min_p.is_some();
    let is_greedy = flags.temperature.is_none() && !bounded && !file.draws;
    let SamplingOptions { temperature, top_k, top_p, min_p, .. } = file.options;
    let given = [temperature.is_some(), top_k.is_some(), top_p.is_some(), min_p.is_some()];
    let unused = ["temperature", "top_k", "top_p", "min_p"].into_iter().zip(given).filter(|(_, given)| *given);
    let unused: Vec<&str> = unused.map(|(key, _)| key).collect();
    if is_greedy && !unused.is_empty() {
        status!("generation_config.json: not obeyed without do_sample: {}", unused.join(", "));
    }
    let options = flags.clone().with_defaults(file.options);
    let default = Sampling::default();
    Sampling {
        temperature: if is_greedy { 0. } else { options.temperature.unwrap_or(1.) },
        top_k: options.top_k.unwrap_or(default.top_k),
        top_p: options.top_p.unwrap_or(default.top_p),
        min_p: options.min_p.unwrap_or(default.min_p),
        repeat_penalty: options.repeat_penalty.unwrap_or(default.repeat_penalty),
        repeat_last_n: options.repeat_last_n.unwrap_or(default.repeat_last_n),
        presence_penalty: options.presence_penalty.unwrap_or(default.presence_penalty),
        frequency_penalty: options.frequency_penalty.unwrap_or(default.frequency_penalty),
    }
}

/// As transformers reads the file; one line names what is not obeyed.
fn generation_config(text: &str) -> Result<Recommended> {
    let Value::Object(file) = json_as_python(text)? else { bail!("expected an object") };
    let is_known =
        |key: &str| KNOWN.iter().any(|known| key == *known || known.ends_with('_') && key.starts_with(known));
    let others = file.iter().filter(|(key, value)| !is_known(key) && !is_neutral(key, value));
    let others: Vec<&str> = others.map(|(key, _)| key.as_str()).collect();
    if !others.is_empty() {
        status!("generation_config.json: not obeyed: {}", others.join(", "));
    }
    let repeat_penalty = option(&file, "repetition_penalty", args::penalty)?;
    Ok(Recommended {
        eos: ids(file.get("eos_token_id").unwrap_or(&Value::Null))?,
        draws: option(&file, "do_sample", |s| s.parse().map_err(|_| "expected true or false".into()))?.unwrap_or(false),
        options: SamplingOptions {
            temperature: option(&file, "temperature", args::temperature)?,
            top_k: option(&file, "top_k", count)?,
            top_p: option(&file, "top_p", args::probability)?,
            min_p: option(&file, "min_p", args::fraction)?,
            repeat_penalty,
            // Here it concerns all tokens.
            repeat_last_n: repeat_penalty.map(|_| usize::MAX),
            presence_penalty: option(&file, "presence_penalty", args::finite)?,
            frequency_penalty: option(&file, "frequency_penalty", args::finite)?,
        },
    })
}

/// As llama.cpp reads `general.sampling.*` of a GGUF file, which asks for drawing; one line names what is not obeyed.
fn general_sampling(file: &GgufFile) -> Result<Recommended> {
    const PREFIX: &str = "general.sampling.";
    const KNOWN: [&str; 6] = ["temp", "top_k", "top_p", "min_p", "penalty_last_n", "penalty_repeat"];
    let value = |key: &str| match (file.integer(key), file.number(key), file.value(key)) {
        (Some(n), _, _) => n.into(),
        (None, Some(x), _) => x.into(),
        (None, None, other) => format!("{other:?}").into(),
    };
    let entries: Map<String, Value> =
        file.keys().filter(|key| key.starts_with(PREFIX)).map(|key| (key.to_string(), value(key))).collect();
    let others =
        entries.iter().filter(|(key, value)| !KNOWN.contains(&&key[PREFIX.len()..]) && !is_neutral(key, value));
    let others: Vec<&str> = others.map(|(key, _)| key.as_str()).collect();
    if !others.is_empty() {
        status!("not obeyed: {}", others.join(", "));
    }
    let key = |name: &str| format!("{PREFIX}{name}");
    let last_n = |s: &str| match s {
        "-1" => Ok(usize::MAX), // the whole text
        _ => count(s),
    };
    let options = SamplingOptions {
        temperature: option(&entries, &key("temp"), args::temperature)?,
        top_k: option(&entries, &key("top_k"), count)?,
        top_p: option(&entries, &key("top_p"), args::probability)?,
        min_p: option(&entries, &key("min_p"), args::fraction)?,
        repeat_penalty: option(&entries, &key("penalty_repeat"), args::penalty)?,
        repeat_last_n: option(&entries, &key("penalty_last_n"), last_n)?,
        ..SamplingOptions::default()
    };
    let SamplingOptions { temperature, top_k, top_p, min_p, .. } = options;
    let draws = temperature.is_some() || top_k.is_some() || top_p.is_some() || min_p.is_some();
    Ok(Recommended { eos: Vec::new(), draws, options })
}

/// The value of a key; None where it is missing or null.
fn option<T>(
    file: &Map<String, Value>,
    key: &str,
    parse: impl Fn(&str) -> std::result::Result<T, String>,
) -> Result<Option<T>> {
    match file.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => parse(&value.to_string()).map(Some).map_err(|e| anyhow!("`{key}`: {e}, got {value}")),
    }
}

fn count(s: &str) -> std::result::Result<usize, String> {
    match s {
        // How vLLM writes all.
        "-1" => Ok(0),
        _ => s.parse().map_err(|_| "expected a whole number of at least 0".into()),
    }
}

/// Whether the key with this value does nothing in transformers.
fn is_neutral(key: &str, value: &Value) -> bool {
    const AT_ONE: [&str; 6] = [
        "encoder_repetition_penalty",
        "guidance_scale",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "typical_p",
    ];
    match value {
        Value::Number(x) => !key.ends_with("_id") && x.as_f64() == Some(f64::from(u8::from(AT_ONE.contains(&key)))),
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

/// One id, a list of them, or none.
fn ids(value: &Value) -> Result<Vec<u32>> {
    let list = match value {
        Value::Null => &[],
        Value::Array(list) => list.as_slice(),
        one => std::slice::from_ref(one),
    };
    let id = |v: &Value| match v.as_u64().map(u32::try_from) {
        Some(Ok(id)) => Ok(id),
        _ => bail!("`eos_token_id`: expected a token id or a list of them, got {value}"),
    };
    list.iter().map(id).collect()
}
