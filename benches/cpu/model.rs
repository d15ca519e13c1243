//! The demo checkpoint end to end, as `llama-bench` runs it: a prompt of 512 tokens, and 128 tokens one by one.

use crate::results::{Suite, Work};
use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_gdn_benches::record::{Row, Shape};
use candle_gdn_models::{CausalLm, ModelConfig};
use candle_nn::VarBuilder;
use criterion::{Criterion, Throughput};
use std::path::PathBuf;

const PROMPT: usize = 512;
const DECODE: usize = 128;

fn load() -> Result<CausalLm> {
    let demo: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../examples/generate/demo"].iter().collect();
    let config = demo.join("config.json");
    let text = std::fs::read_to_string(&config).with_context(|| config.display().to_string())?;
    // SAFETY: nobody writes the file while the benchmark runs.
    let vb =
        unsafe { VarBuilder::from_mmaped_safetensors(&[demo.join("model.safetensors")], DType::F32, &Device::Cpu)? };
    Ok(CausalLm::load(&ModelConfig::from_json(&text)?, vb)?)
}

/// A prompt of any tokens; what they say does not change the work.
fn ids(vocabulary: usize, n: usize) -> Tensor {
    let ids: Vec<u32> = (0..n).map(|i| (i * 7919 % vocabulary) as u32).collect();
    Tensor::new(&ids[..], &Device::Cpu).unwrap().unsqueeze(0).unwrap()
}

fn prompt(model: &CausalLm, ids: &Tensor) -> Result<u32> {
    let mut state = model.new_state(1)?;
    Ok(model.forward_last(ids, &mut state)?.squeeze(0)?.argmax(0)?.to_scalar()?)
}

/// Greedy, from an empty context.
fn decode(model: &CausalLm, tokens: usize) -> Result<u32> {
    let mut state = model.new_state(1)?;
    let mut next = 1u32;
    for _ in 0..tokens {
        let logits = model.forward_last(&Tensor::new(&[[next]], &Device::Cpu)?, &mut state)?;
        next = logits.squeeze(0)?.argmax(0)?.to_scalar()?;
    }
    Ok(next)
}

pub fn bench(c: &mut Criterion) -> Vec<Work> {
    let model = load().expect("the demo checkpoint is in the repository");
    let ids = ids(model.config().vocab_size, PROMPT);
    let mut suite = Suite::new(c, "model");
    let mut time = |what: &str, tokens: usize, run: &dyn Fn() -> Result<u32>| {
        let row = Row::new("model", &format!("demo {what} {tokens}"), "candle-gdn").includes("f32");
        let row = row.shape(Shape::default().batch(1).tokens(tokens));
        suite.group.throughput(Throughput::Elements(tokens as u64));
        suite.time(what, tokens, row, || run().unwrap());
    };
    time("prompt", PROMPT, &|| prompt(&model, &ids));
    time("decode", DECODE, &|| decode(&model, DECODE));
    suite.works
}
