//! `generation_config.json`: the tokens that end a text, and the sampling that the authors of a model recommend.

use crate::args::SamplingArgs;
use crate::Checkpoint;
use anyhow::{bail, Context, Result};
use candle_gdn_models::{json_as_python, ModelConfig, Sampling};
use serde_json::Value;
use std::collections::BTreeSet;

pub struct Settings {
    /// Tokens that end a text.
    pub eos: BTreeSet<u32>,
    pub sampling: Sampling,
}

impl Settings {
    /// Each option is that of the command line, else of the checkpoint; without either, the most likely token is chosen.
    pub fn new(args: &SamplingArgs, checkpoint: &Checkpoint, config: &ModelConfig) -> Result<Self> {
        let (file, path) = match checkpoint.text("generation_config.json")? {
            Some((text, path)) => {
                let path = path.display().to_string();
                (json_as_python(&text).with_context(|| path.clone())?, path)
            }
            None => (Value::Null, String::new()),
        };
        let mut eos: BTreeSet<u32> = config.eos_token_ids.iter().copied().collect();
        eos.extend(ids(&file["eos_token_id"]).with_context(|| path)?);
        // A bound on the candidates implies a random choice among them.
        let bounded = args.top_k.is_some() || args.top_p.is_some();
        let samples = file["do_sample"].as_bool().unwrap_or(false);
        let number = |key: &str| file[key].as_f64().filter(|x| *x > 0.);
        let temperature = match samples {
            true => number("temperature").unwrap_or(1.),
            false if bounded => 1.,
            false => 0.,
        };
        let sampling = Sampling {
            temperature: args.temperature.unwrap_or(temperature),
            top_k: args.top_k.or(file["top_k"].as_u64().map(|k| k as usize)).unwrap_or(0),
            top_p: args.top_p.or(number("top_p")).unwrap_or(1.),
            repeat_penalty: args.repeat_penalty.or(number("repetition_penalty").map(|x| x as f32)).unwrap_or(1.),
            repeat_last_n: args.repeat_last_n,
            ..Sampling::default()
        };
        Ok(Self { eos, sampling })
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
