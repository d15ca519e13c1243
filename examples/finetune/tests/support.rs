//! The demo in training, and small runs of it.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_gdn_models::ModelConfig;
use candle_gdn_models_testing::demo::DEMO;
use candle_gdn_testing::devices::values;
use finetune::data::{sequences, Data, Pack};
use finetune::model::{cross_entropy, Model};
use finetune::train::{Options, Run};
use finetune::weights::Weights;
use std::path::PathBuf;
use tokenizers::Tokenizer;

pub fn config(dir: &str) -> Result<ModelConfig> {
    Ok(ModelConfig::from_json(&std::fs::read_to_string(format!("{dir}/config.json"))?)?)
}

pub fn files(dir: &str) -> Vec<PathBuf> {
    vec![format!("{dir}/model.safetensors").into()]
}

/// The mean loss of a pass, not yet a number.
pub fn loss(config: &ModelConfig, scale: f64, weights: &Weights, pack: &Pack) -> Result<Tensor> {
    let logits = Model::new(config, scale, weights.builder())?.forward(&pack.inputs, &pack.sequences)?;
    Ok((cross_entropy(&logits, &pack.targets)? / pack.tokens() as f64)?)
}

pub fn options(full: bool) -> Options {
    Options {
        model: "demo".into(),
        revision: Some("v1".into()),
        full,
        rank: 4,
        alpha: 8.,
        target_modules: vec![],
        steps: 4,
        learning_rate: 1e-3,
        warmup: 2,
        weight_decay: 0.01,
        clip: 1.,
        sequence_len: 16,
        pass_tokens: 40,
        passes: 2,
        seed: 1,
        dtype: "f32".into(),
    }
}

pub const TEXT: &str =
    "Shall I compare thee to a summer's day?<|endoftext|>Thou art more lovely and more temperate:<|endoftext|>
Rough winds do shake the darling buds of May, and summer's lease hath all too short a date<|endoftext|>And every fair";

/// The text that a run of these options begins with.
pub fn data(options: &Options, text: &str) -> Result<Data> {
    let tokenizer = Tokenizer::from_file(format!("{DEMO}/tokenizer.json")).map_err(anyhow::Error::msg)?;
    Ok(Data::new(sequences(text, &tokenizer, options.sequence_len)?, options.pass_tokens, options.seed))
}

/// A run on the demo that its options fix.
pub fn run(options: Options, dtype: DType, device: &Device) -> Result<Run> {
    run_on(DEMO, TEXT, options, dtype, device)
}

/// The same on a copy of the demo, or with another text.
pub fn run_on(dir: &str, text: &str, options: Options, dtype: DType, device: &Device) -> Result<Run> {
    let data = data(&options, text)?;
    Run::new(options, config(dir)?, files(dir), data, dtype, device)
}

/// All variables' values, by name.
pub fn variables(run: &Run) -> Vec<(String, Vec<f64>)> {
    run.weights().variables().iter().map(|(name, x)| (name.clone(), values(x))).collect()
}
