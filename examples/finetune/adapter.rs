//! Adapters (LoRA) in PEFT's format.

use crate::train::Options;
use crate::weights::{self, Weights};
use anyhow::{bail, Result};
use candle_core::{DType, Device, Tensor};
use candle_gdn_models::{FfnKind, ModelConfig, SplitMix64};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

/// What PEFT puts before the names of the model's modules.
const PREFIX: &str = "base_model.model.";

/// Modules that are adapted where none are named, those of them that the model has.
const MIXERS: [&str; 14] = [
    "in_proj_qkvz",
    "in_proj_ba",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "g_proj",
    "b_proj",
    "a_proj",
    "o_proj",
];
const MLP: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// The modules that get an adapter: their full names, and the last parts by which `target_modules` names them.
pub struct Targets {
    modules: BTreeSet<String>,
    names: Vec<String>,
}

impl Targets {
    /// Those that `names` says, as PEFT reads them: a full name, or the last parts of one. Without names, the projections of all mixers,
    /// and of dense MLPs.
    ///
    /// # Errors
    /// When a name is of no projection, or of what PEFT does not adapt as a projection: experts, routers, embeddings.
    pub fn new(names: &[String], weights: &Weights, config: &ModelConfig) -> Result<Self> {
        let shapes = weights.shapes();
        let matrices = shapes.iter().filter(|(_, shape)| shape.rank() == 2);
        let all: Vec<&str> = matrices.filter_map(|(name, _)| name.strip_suffix(".weight")).collect();
        let is_projection = |module: &str| {
            !module.contains(".experts.") && !module.ends_with(".mlp.gate") && !module.ends_with("embed_tokens")
        };
        let is = |module: &str, name: &str| {
            module.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        let is_dense = config.layers.iter().all(|layer| matches!(layer.ffn, FfnKind::Dense { .. }));
        let names: Vec<String> = if names.is_empty() {
            let usual = MIXERS.iter().chain(if is_dense { &MLP[..] } else { &[] });
            usual.filter(|name| all.iter().any(|module| is(module, name))).map(|name| name.to_string()).collect()
        } else {
            names.to_vec()
        };
        let mut modules = BTreeSet::new();
        for name in &names {
            let matching: Vec<&str> = all.iter().copied().filter(|module| is(module, name)).collect();
            if matching.is_empty() {
                let known: BTreeSet<&str> = all
                    .iter()
                    .filter(|module| is_projection(module))
                    .filter_map(|module| module.rsplit('.').next())
                    .collect();
                let known: Vec<&str> = known.into_iter().collect();
                bail!("--target-modules: expected names of projections ({}), got {name}", known.join(", "))
            }
            if let Some(module) = matching.iter().find(|module| !is_projection(module)) {
                bail!("--target-modules: {name}: expected projections only, but {module} is none in PEFT: experts, routers and embeddings are trained with --full")
            }
            modules.extend(matching.into_iter().map(String::from));
        }
        Ok(Self { modules, names })
    }

    /// New variables for `weights`: A uniform as torch begins a linear layer, B zero, so that the model begins unchanged.
    pub fn init(&self, weights: &Weights, rank: usize, seed: u64) -> Result<BTreeMap<String, Tensor>> {
        let shapes = weights.shapes();
        let mut random = SplitMix64::new(seed);
        let mut variables = BTreeMap::new();
        for module in &self.modules {
            let (outputs, inputs) = shapes[format!("{module}.weight").as_str()].dims2()?;
            let bound = 1. / (inputs as f64).sqrt();
            let uniform = || ((random.next() >> 11) as f64 / (1u64 << 53) as f64 * 2. - 1.) * bound;
            let a: Vec<f32> = std::iter::repeat_with(uniform).take(rank * inputs).map(|x| x as f32).collect();
            variables.insert(format!("{module}.lora_A.weight"), Tensor::from_vec(a, (rank, inputs), &Device::Cpu)?);
            variables
                .insert(format!("{module}.lora_B.weight"), Tensor::zeros((outputs, rank), DType::F32, &Device::Cpu)?);
        }
        Ok(variables)
    }

    /// Writes `adapter_model.safetensors` and `adapter_config.json`.
    pub fn save(&self, weights: &Weights, options: &Options, dir: &Path) -> Result<()> {
        let on_host =
            weights.variables().iter().map(|(name, x)| Ok((format!("{PREFIX}{name}"), x.to_device(&Device::Cpu)?)));
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        weights::write(&on_host.collect::<Result<_>>()?, metadata, &dir.join("adapter_model.safetensors"))?;
        let config = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": options.model,
            "revision": options.revision,
            "inference_mode": true,
            "r": options.rank,
            "lora_alpha": options.alpha,
            "lora_dropout": 0.0,
            "target_modules": self.names,
            "rank_pattern": {},
            "alpha_pattern": {},
            "use_rslora": false,
            "use_dora": false,
            "bias": "none",
            "fan_in_fan_out": false,
            "init_lora_weights": true,
            "modules_to_save": null,
        });
        Ok(std::fs::write(dir.join("adapter_config.json"), serde_json::to_string_pretty(&config)? + "\n")?)
    }
}
