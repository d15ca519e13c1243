//! Families beside Qwen3-Next: OLMo-Hybrid, and Qwen3.5 with another output gate. Lara-4-Mini is refused.

use crate::support::{files, loss, options};
use anyhow::Result;
use candle_core::{safetensors, DType, Device, Tensor};
use candle_gdn::GateActivation;
use candle_gdn_models::{CausalLm, LoraAdapter, ModelConfig};
use candle_gdn_models_testing::golden::{Goldens, LARA_MINI, OLMO_HYBRID, QWEN3_5};
use candle_gdn_testing::devices::{devices, rel_rms, values};
use candle_nn::VarBuilder;
use finetune::data::{Data, Pack};
use finetune::model::Model;
use finetune::optimizer::{accumulate, Gradients};
use finetune::train::{Options, Run};
use finetune::weights::Weights;
use std::path::{Path, PathBuf};

/// Checkpoints and what is trained of them; OLMo-Hybrid with positions and without.
fn cases() -> Result<Vec<(&'static str, &'static Goldens, ModelConfig)>> {
    let mut cases = vec![];
    if OLMO_HYBRID.is_here() {
        let config = OLMO_HYBRID.config()?;
        assert!(!config.attention.rope_inv_freq.is_empty());
        let mut json: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(OLMO_HYBRID.dir() + "/config.json")?)?;
        json.as_object_mut().expect("an object").remove("rope_parameters");
        let without = ModelConfig::from_json(&json.to_string())?;
        assert!(without.attention.rope_inv_freq.is_empty());
        cases.extend([("OLMo-Hybrid", &OLMO_HYBRID, config), ("OLMo-Hybrid without positions", &OLMO_HYBRID, without)]);
    }
    if QWEN3_5.is_here() {
        let mut config = QWEN3_5.config()?;
        config.gdn.output_gate = GateActivation::Sigmoid;
        cases.push(("a sigmoid gate", &QWEN3_5, config));
    }
    Ok(cases)
}

fn sequences(goldens: &Goldens) -> Result<Vec<Vec<u32>>> {
    (1..3).map(|i| Ok(goldens.prompt(i)?.ids)).collect()
}

fn pack(goldens: &Goldens, device: &Device) -> Result<Pack> {
    Ok(Pack::new(&sequences(goldens)?.iter().map(Vec::as_slice).collect::<Vec<_>>(), device)?)
}

/// The logits of a sequence by the model that serves.
pub fn served(
    config: &ModelConfig,
    files: &[PathBuf],
    lora: Option<&LoraAdapter>,
    ids: &[u32],
    device: &Device,
) -> Result<Vec<f64>> {
    // SAFETY: nobody writes to the files.
    let vb = unsafe { VarBuilder::from_mmaped_safetensors(files, DType::F32, device)? };
    let model = CausalLm::loader(config).lora(lora).load(vb)?;
    let ids = Tensor::new(ids, device)?.unsqueeze(0)?;
    Ok(values(&model.logits(&model.forward_hidden(&ids, &mut model.new_state(1)?)?)?))
}

/// Of the first sequence, by the model in training.
pub fn trained(model: &Model, ids: &[u32], device: &Device) -> Result<Vec<f64>> {
    let pack = Pack::new(&[&[ids, &[0]].concat()], device)?;
    Ok(values(&model.forward(&pack.inputs, &pack.sequences)?))
}

#[test]
fn training_is_the_model_that_serves() -> Result<()> {
    for (name, goldens, config) in cases()? {
        for device in devices() {
            let (files, ids) = (files(&goldens.dir()), &sequences(goldens)?[0]);
            let weights = Weights::load(&files, &config, DType::F32, &device)?;
            let got = trained(&Model::new(&config, 1., weights.builder())?, ids, &device)?;
            let error = rel_rms(&got, &served(&config, &files, None, ids, &device)?);
            assert!(error < 1e-4, "{name}: {error:e}");
            let other = rel_rms(&got, &served(&goldens.config()?, &files, None, ids, &device)?);
            assert!(name == "OLMo-Hybrid" || other > 1e-3, "{name}: {other:e}");
        }
    }
    Ok(())
}

/// Every parameter has a gradient, and a step along it changes the loss by as much as it says.
#[test]
fn gradients_are_those_of_finite_differences() -> Result<()> {
    for (name, goldens, config) in cases()? {
        for device in devices() {
            let weights = Weights::all_variables(&files(&goldens.dir()), &config, DType::F32, &device)?;
            let pack = pack(goldens, &device)?;
            let loss = || loss(&config, 1., &weights, &pack);
            let mut gradients = Gradients::new();
            accumulate(&mut gradients, weights.variables(), &loss()?.backward()?)?;
            assert_eq!(gradients.len(), weights.variables().len());
            for (parameter, variable) in weights.variables() {
                let gradient = &gradients[parameter];
                let square = values(gradient).iter().map(|g| g * g).sum::<f64>();
                assert!(square > 0., "{name}: {parameter} has no gradient");
                // Along the gradient the loss then changes by about this much: f32 shows it, and it bends little.
                let (change, before) = (4e-3, variable.as_tensor().copy()?);
                let at = |share: f64| -> Result<f64> {
                    variable.set(&(&before + (gradient * (share * change / square))?)?)?;
                    Ok(f64::from(loss()?.to_scalar::<f32>()?))
                };
                // Of the fourth order.
                let slope = (8. * (at(0.5)? - at(-0.5)?) - (at(1.)? - at(-1.)?)) / (6. * change);
                variable.set(&before)?;
                assert!((slope - 1.).abs() < 0.02, "{name}: {parameter}: {slope} of the gradient");
            }
        }
    }
    Ok(())
}

fn run(options: Options, (goldens, config): (&Goldens, &ModelConfig), device: &Device) -> Result<Run> {
    let data = Data::new(sequences(goldens)?, 400, options.seed);
    Run::new(options, config.clone(), files(&goldens.dir()), data, DType::F32, device)
}

/// An adapter of every projection of mixers and MLPs, and a whole checkpoint, each saved and served.
#[test]
fn what_is_trained_is_served() -> Result<()> {
    for (name, goldens, config) in cases()? {
        for device in devices() {
            for full in [false, true] {
                let options = Options { learning_rate: if full { 1e-3 } else { 1e-2 }, ..options(full) };
                let mut run = run(options, (goldens, &config), &device)?;
                while !run.is_done() {
                    run.step()?;
                }
                let losses: Vec<f32> = run.steps().iter().map(|step| step.loss).collect();
                assert!(losses[3] < losses[0] - 0.01, "{name}: {losses:?}");
                let dir = tempfile::tempdir()?;
                run.save(dir.path())?;
                let ids = &sequences(goldens)?[0];
                let want = trained(&run.model()?, ids, &device)?;
                let (adapter, files) = match full {
                    true => (None, vec![dir.path().join("model.safetensors")]),
                    false => (Some(LoraAdapter::open(dir.path())?), files(&goldens.dir())),
                };
                let error = rel_rms(&served(&config, &files, adapter.as_ref(), ids, &device)?, &want);
                // The checkpoint has matrices in bf16.
                assert!(error < if full { 3e-2 } else { 1e-4 }, "{name}, full {full}: {error:e}");
                if !full {
                    names_of(goldens, dir.path())?;
                }
            }
        }
    }
    Ok(())
}

/// The modules that an adapter has by default.
fn names_of(goldens: &Goldens, dir: &Path) -> Result<()> {
    let config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(dir.join("adapter_config.json"))?)?;
    let mlp = ["gate_proj", "up_proj", "down_proj"];
    let mixers: &[&str] = match goldens.dir() == OLMO_HYBRID.dir() {
        true => &["q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj", "o_proj"],
        false => {
            &["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
        }
    };
    assert_eq!(config["target_modules"], serde_json::json!([mixers, &mlp].concat()));
    let tensors = safetensors::load(dir.join("adapter_model.safetensors"), &Device::Cpu)?;
    // Three layers of Gated DeltaNet, one of softmax attention, four MLPs; two matrices each.
    let of_gdn = mixers.len() - if goldens.dir() == OLMO_HYBRID.dir() { 0 } else { 4 };
    assert_eq!(tensors.len(), 2 * (3 * of_gdn + 4 + 4 * mlp.len()));
    Ok(())
}

#[test]
fn other_families_are_refused() -> Result<()> {
    if LARA_MINI.is_here() {
        let config = LARA_MINI.config()?;
        let weights = Weights::load(&files(&LARA_MINI.dir()), &config, DType::F32, &Device::Cpu)?;
        let refused =
            |config: &ModelConfig| Model::new(config, 1., weights.builder()).err().expect("refused").to_string();
        let error = refused(&config);
        assert!(
            error.contains("expected linear_attention and full_attention") && error.contains("Lara-4-Mini"),
            "{error}"
        );
    }
    // Experts as Qwen3.5's files have them since transformers 5.
    let qwen = candle_gdn_models_testing::golden::DEMO;
    let config = qwen.config()?;
    let mut tensors = safetensors::load(qwen.dir() + "/model.safetensors", &Device::Cpu)?;
    let fused = "model.layers.0.mlp.experts.gate_up_proj";
    tensors.insert(fused.into(), Tensor::zeros((8, 128, 192), DType::F32, &Device::Cpu)?);
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let error = Model::new(&config, 1., vb).err().expect("refused").to_string();
    assert!(error.contains(fused) && error.contains("expected tensors of each expert"), "{error}");
    Ok(())
}
