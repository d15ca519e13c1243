//! OLMo-Hybrid and Lara-4-Mini against transformers, and against themselves in every way that a model is run.

use crate::golden::{argmax, Goldens, LARA_MINI, OLMO_HYBRID};
use crate::model::check_goldens;
use crate::parallel;
use crate::sequences::{assert_near, tokens, want};
use crate::serving::complete;
use crate::support::{devices, refused, Rng};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{shard_of, CausalLm, Collective, EngineOptions, ModelConfig, Request};
use candle_nn::VarBuilder;
use std::collections::HashMap;
use std::sync::Arc;

/// Bound on logits and log-probabilities in f32.
const BOUND: f32 = 1e-4;

fn families() -> impl Iterator<Item = &'static Goldens> {
    [&OLMO_HYBRID, &LARA_MINI].into_iter().filter(|goldens| goldens.is_here())
}

fn on_every_device(test: impl Fn(&Goldens, &CausalLm) -> Result<()>) -> Result<()> {
    devices()
        .iter()
        .try_for_each(|device| families().try_for_each(|goldens| test(goldens, &goldens.model(DType::F32, device)?)))
}

#[test]
fn families_match_transformers() -> Result<()> {
    on_every_device(|goldens, model| {
        check_goldens(&format!("{} on {:?}", goldens.dir(), model.device().location()), model, goldens, BOUND)
    })
}

/// Sequences of several lengths beside each other, fed in pieces, longer than a window.
#[test]
fn families_in_pieces_and_in_batches() -> Result<()> {
    on_every_device(|goldens, model| {
        let mut rng = Rng::new(5);
        for pieces in [&[1usize, 39, 40, 41][..], &[130, 1, 1, 1, 7], &[3, 3, 90, 3, 3, 3]] {
            let mut pool = model.new_sequences(3, 200)?;
            let mut all: Vec<(_, Vec<u32>)> = (0..3).map(|_| Ok((pool.begin()?, Vec::new()))).collect::<Result<_>>()?;
            for (i, piece) in pieces.iter().enumerate() {
                let new: Vec<Vec<u32>> = (0..3).map(|n| tokens(&mut rng, piece + n * (i % 2), model)).collect();
                let batch: Vec<_> = all.iter().zip(&new).map(|((sequence, _), new)| (*sequence, &new[..])).collect();
                let logits = model.feed(&mut pool, &batch)?.to_vec2::<f32>()?;
                for (((_, fed), new), logits) in all.iter_mut().zip(&new).zip(&logits) {
                    fed.extend(new);
                    assert_near(logits, &want(model, fed)?, &format!("{} {pieces:?}, {i}", goldens.dir()));
                }
            }
        }
        Ok(())
    })
}

/// Requests that share a prefix, through the engine with and without its cache, alone and beside each other.
#[test]
fn families_in_an_engine() -> Result<()> {
    on_every_device(|goldens, model| {
        let mut rng = Rng::new(11);
        let shared = tokens(&mut rng, 90, model);
        let prompts = (0..4).map(|n| [shared.clone(), tokens(&mut rng, 5 + n, model)].concat());
        let requests: Vec<Request> = prompts.map(|prompt| Request::new(prompt, 20)).collect();
        let options = |prefix_cache, sequences| EngineOptions { prefix_cache, ..EngineOptions::new(sequences, 200) };
        let (alone, _) = complete(model, options(0, 1), &requests, false)?;
        for (cache, sequences) in [(0, 4), (1 << 24, 1), (1 << 24, 4)] {
            let (got, stats) = complete(model, options(cache, sequences), &requests, false)?;
            assert_eq!(got, alone, "{}: cache {cache}, {sequences} sequences", goldens.dir());
            assert!(cache == 0 || sequences > 1 || stats.prefixes.hits > 0, "{:?}", stats.prefixes);
        }
        Ok(())
    })
}

/// Ranks have some heads; the norm over a whole projection is over those of all.
#[test]
fn families_on_ranks() -> Result<()> {
    for goldens in families() {
        let (config, file) = (goldens.config()?, goldens.dir() + "/model.safetensors");
        let weights = candle_core::safetensors::load(file, &Device::Cpu)?;
        let mut by_heads = weights.clone();
        cut_by_heads(&mut by_heads, &config)?;
        let part = |weights: &HashMap<String, Tensor>, group: Arc<dyn Collective>| {
            let all = VarBuilder::from_tensors(weights.clone(), DType::F32, &Device::Cpu);
            CausalLm::loader(&config).group(group.clone()).load(shard_of(all, &config, &*group)?)
        };
        let whole = goldens.model(DType::F32, &Device::Cpu)?;
        let check = |part: &(dyn Fn(Arc<dyn Collective>) -> Result<CausalLm> + Sync)| {
            parallel::check(&goldens.dir(), &whole, 2, parallel::BOUND, part);
        };
        check(&|group| part(&weights, group));
        check(&|group| part(&by_heads, group));
        check(&|group| parallel::from_files(goldens, None, Some(group)));
        let mut missing = weights.clone();
        if missing.remove("model.layers.0.linear_attn.k_conv1d.weight").is_some() {
            for rank in parallel::on_ranks(2, |group| part(&missing, group)) {
                refused(rank, &["model.layers.0.linear_attn."]);
            }
        }
    }
    Ok(())
}

/// The three convolutions as they belong to q, k and v; transformers saves thirds of them together.
fn cut_by_heads(weights: &mut HashMap<String, Tensor>, config: &ModelConfig) -> Result<()> {
    let (key, value) = (config.gdn.key_size(), config.gdn.value_size());
    for layer in 0..config.layers.len() {
        let name = |part: &str| format!("model.layers.{layer}.linear_attn.{part}_conv1d.weight");
        let Some(q) = weights.get(&name("q")) else { continue };
        let all = Tensor::cat(&[q, &weights[&name("k")], &weights[&name("v")]], 0)?;
        for (part, first, rows) in [("q", 0, key), ("k", key, key), ("v", 2 * key, value)] {
            weights.insert(name(part), all.narrow(0, first, rows)?);
        }
    }
    Ok(())
}

/// 8 bits leave the most likely token where its lead is large.
#[test]
fn families_quantised_at_load() -> Result<()> {
    on_every_device(|goldens, dense| {
        let weights = goldens.weights(DType::F32, dense.device())?;
        let model = CausalLm::loader(&goldens.config()?).quantize(GgmlDType::Q8_0).load(weights)?;
        let prompt = goldens.prompt(2)?;
        let (got, want) = (want(&model, &prompt.ids)?, want(dense, &prompt.ids)?);
        let error = crate::support::rel_rms(&got, &want);
        assert!(error > 0. && error < 5e-2, "{}: off by {error:e}", goldens.dir());
        assert!(prompt.greedy_margin[0] < 1e-2 || argmax(&got) == prompt.greedy[0]);
        Ok(())
    })
}

/// The sizes of the files, which their weights must have, with and without what a file need not say.
#[test]
fn sizes_are_completed_and_all_weights_read() -> Result<()> {
    for goldens in families() {
        let text = std::fs::read_to_string(goldens.dir() + "/config.json")?;
        let files = [std::path::PathBuf::from(goldens.dir() + "/model.safetensors")];
        // SAFETY: nobody writes to the files of the repository during the tests.
        let files = unsafe { candle_gdn_models::SafetensorsFiles::open(&files)? };
        let want = goldens.config()?;
        assert_eq!(ModelConfig::from_safetensors(&text, &files)?, want);
        // Every tensor is read: one of a layer that is not would be an error.
        CausalLm::loader(&want).load_safetensors(&files, DType::F32, &Device::Cpu)?;
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        for key in ["hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size", "num_experts"] {
            json.as_object_mut().unwrap().remove(key);
        }
        assert_eq!(ModelConfig::from_safetensors(&json.to_string(), &files)?, want);
    }
    Ok(())
}

/// YaRN's factor belongs to what is rotated.
#[test]
fn layers_without_positions_have_no_factor() -> Result<()> {
    for goldens in [&LARA_MINI].into_iter().filter(|goldens| goldens.is_here()) {
        let logits = |positions: bool, factor: f64| {
            let mut config = goldens.config()?;
            config.attention.rope_factor = factor;
            config.layers.iter_mut().for_each(|layer| layer.positions &= positions);
            let model = CausalLm::load(&config, goldens.weights(DType::F32, &Device::Cpu)?)?;
            want(&model, &goldens.prompt(1)?.ids)
        };
        assert_eq!(logits(false, 1.5)?, logits(false, 1.)?);
        assert_ne!(logits(true, 1.5)?, logits(true, 1.)?);
    }
    Ok(())
}
