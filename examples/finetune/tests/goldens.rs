//! Losses and gradients of torch, logits of transformers.

use crate::support::{config, files, loss};
use anyhow::{Context, Result};
use candle_core::backprop::GradStore;
use candle_core::{safetensors, DType, Device, Tensor};
use candle_gdn_models_testing::demo::DEMO;
use candle_gdn_models_testing::golden;
use candle_gdn_testing::devices::{devices, rel_rms, values};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::ParamsAdamW;
use finetune::data::Pack;
use finetune::model::Model;
use finetune::optimizer::{accumulate, AdamW, Gradients};
use finetune::weights::Weights;
use std::collections::{BTreeMap, HashMap};

const GOLDENS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/goldens/demo_training.safetensors");
/// Bound on the difference of a loss.
const LOSS: f64 = 1e-3;
/// Bound on the relative error of gradients, of their norm.
const GRADIENT: f64 = 1e-3;

fn goldens() -> Result<HashMap<String, Tensor>> {
    Ok(safetensors::load(GOLDENS, &Device::Cpu)?)
}

/// The packs of the steps: four sequences each.
fn packs(goldens: &HashMap<String, Tensor>, device: &Device) -> Result<Vec<Pack>> {
    let batches = goldens["batches"].to_dtype(DType::U32)?.to_vec3::<u32>()?;
    let pack = |batch: &Vec<Vec<u32>>| Pack::new(&batch.iter().map(Vec::as_slice).collect::<Vec<_>>(), device);
    Ok(batches.iter().map(pack).collect::<candle_core::Result<_>>()?)
}

/// Trains on all packs; `first` sees the gradients of the first step, and all that its backward pass left.
fn train(
    weights: &Weights,
    packs: &[Pack],
    (scale, params): (f64, ParamsAdamW),
    want: &Tensor,
    first: impl Fn(&Gradients, &GradStore) -> Result<()>,
) -> Result<()> {
    let (config, mut optimizer) = (config(DEMO)?, AdamW::new(params));
    for (step, (pack, want)) in packs.iter().zip(values(want)).enumerate() {
        let loss = loss(&config, scale, weights, pack)?;
        let mut gradients = Gradients::new();
        let pass = loss.backward()?;
        accumulate(&mut gradients, weights.variables(), &pass)?;
        let got = f64::from(loss.to_scalar::<f32>()?);
        println!("step {step}: loss {got}, torch {want}");
        assert!((got - want).abs() <= LOSS, "step {step}: loss {got}, torch {want}");
        if step == 0 {
            first(&gradients, &pass)?;
        }
        optimizer.step(weights.variables(), &gradients)?;
    }
    Ok(())
}

/// A gradient as torch has it, where the experts of a layer are two tensors.
fn gradient(gradients: &Gradients, name: &str) -> Result<Vec<f64>> {
    let get = |name: &str| Ok(values(gradients.get(name).with_context(|| format!("{name} has no gradient"))?));
    let Some((layer, part)) = name.split_once(".experts.") else { return get(name) };
    let parts: &[&str] = if part == "gate_up_proj" { &["gate_proj", "up_proj"] } else { &["down_proj"] };
    let names =
        (0..8).flat_map(|expert| parts.iter().map(move |part| format!("{layer}.experts.{expert}.{part}.weight")));
    let all = names.map(|name| get(&name)).collect::<Result<Vec<_>>>()?;
    Ok(all.concat())
}

#[test]
fn full_training_is_torchs() -> Result<()> {
    let goldens = goldens()?;
    for device in devices() {
        let weights = Weights::all_variables(&files(DEMO), &config(DEMO)?, DType::F32, &device)?;
        let params = ParamsAdamW { lr: 3e-4, ..Default::default() };
        train(&weights, &packs(&goldens, &device)?, (1., params), &goldens["adamw_losses"], |gradients, _| {
            let names: Vec<&str> = goldens.keys().filter_map(|name| name.strip_prefix("grad.")).collect();
            assert_eq!(names.len(), 66);
            for name in names {
                let got = gradient(gradients, name)?;
                let count = got.len();
                let norm = got.iter().map(|x| x * x).sum::<f64>().sqrt();
                let want = values(&goldens[&format!("grad_norm.{name}")])[0];
                assert!((norm - want).abs() <= GRADIENT * want, "{name}: norm {norm}, torch {want}");
                let at = goldens[&format!("grad_at.{name}")].to_vec1::<i64>()?;
                let got: Vec<f64> = at.iter().map(|&i| got[i as usize]).collect();
                let want = values(&goldens[&format!("grad.{name}")]);
                let error = got.iter().zip(&want).map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt();
                // Of the norm that so many entries have on average. torch itself is that far from a gradient in f64: 1.2e-3 of three small
                // entries of an A_log.
                let share = norm * (at.len() as f64 / count as f64).sqrt();
                assert!(error <= GRADIENT * share, "{name}: {:e} of the norm", error / share);
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn training_of_an_adapter_is_torchs() -> Result<()> {
    let goldens = goldens()?;
    for device in devices() {
        let mut adapters = BTreeMap::new();
        for layer in 0..3 {
            for (projection, outputs) in [("in_proj_qkvz", 1536), ("out_proj", 192)] {
                let module = format!("model.layers.{layer}.linear_attn.{projection}");
                let a = goldens[&format!("lora.{layer}.{projection}.A")].clone();
                adapters.insert(format!("{module}.lora_A.weight"), a);
                adapters
                    .insert(format!("{module}.lora_B.weight"), Tensor::zeros((outputs, 8), DType::F32, &Device::Cpu)?);
            }
        }
        let weights = Weights::load(&files(DEMO), &config(DEMO)?, DType::F32, &device)?.with_variables(adapters)?;
        let params = ParamsAdamW { lr: 3e-3, weight_decay: 0., ..Default::default() };
        train(&weights, &packs(&goldens, &device)?, (2., params), &goldens["lora_losses"], |_, pass| {
            let adapters = weights.variables();
            assert!(adapters.len() == 12 && adapters.values().all(|x| pass.get(x).is_some()));
            let frozen: Vec<_> = weights.shapes().into_keys().filter(|name| !adapters.contains_key(*name)).collect();
            assert!(frozen.len() > 60);
            for name in frozen {
                let tensor = weights.get_unchecked(name, DType::F32, &device)?;
                assert!(!tensor.is_variable() && pass.get(&tensor).is_none(), "{name} has a gradient");
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Mixtures and dense ones, Qwen3-Next's names and Qwen3.5's, tied embeddings; OLMo-Hybrid.
#[test]
fn logits_are_those_of_transformers() -> Result<()> {
    let all = [golden::DEMO, golden::QWEN3_5, golden::QWEN3_5_MOE, golden::OLMO_HYBRID];
    for goldens in all.iter().filter(|goldens| goldens.is_here()) {
        for device in devices() {
            let config = goldens.config()?;
            let weights = Weights::load(&files(&goldens.dir()), &config, DType::F32, &device)?;
            let model = Model::new(&config, 1., weights.builder())?;
            // All prompts in one pack.
            let prompts = (0..goldens.prompts()).map(|i| goldens.prompt(i)).collect::<candle_core::Result<Vec<_>>>()?;
            let ids: Vec<Vec<u32>> = prompts.iter().map(|prompt| [&prompt.ids[..], &[0]].concat()).collect();
            let pack = Pack::new(&ids.iter().map(Vec::as_slice).collect::<Vec<_>>(), &device)?;
            let logits = model.forward(&pack.inputs, &pack.sequences)?;
            let mut end = 0;
            for (i, prompt) in prompts.iter().enumerate() {
                end += prompt.ids.len();
                let error = rel_rms(&logits.get(end - 1)?.to_vec1::<f32>()?, &prompt.logits_last);
                assert!(error <= 2e-4, "{}, prompt {i}: relative error {error:e}", goldens.dir());
            }
        }
    }
    Ok(())
}
