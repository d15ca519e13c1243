//! Checkpoints of known numbers, and what transformers makes of them as its users load them: in float32.

use candle_core::{safetensors::MmapedSafetensors, DType, Device, Result};
use candle_gdn_models::{CausalLm, DraftHeadChoice, ModelConfig};
use candle_gdn_testing::skipped::skipped;
use candle_nn::VarBuilder;
use std::path::PathBuf;

/// A checkpoint and its goldens; paths below the repository, or below the folder of the full golden files.
pub struct Goldens {
    checkpoint: &'static str,
    goldens: &'static str,
    prompts: usize,
}

pub const DEMO: Goldens =
    Goldens { checkpoint: "examples/generate/demo", goldens: "tests/goldens/demo_goldens.safetensors", prompts: 8 };
/// Checkpoints too large for the repository: only where `CANDLE_GDN_GOLDENS` names the folder that has them.
pub const QWEN3_5: Goldens =
    Goldens { checkpoint: "qwen3_5_tiny", goldens: "as_loaded/qwen3_5_tiny_goldens.safetensors", prompts: 5 };
pub const QWEN3_5_MOE: Goldens =
    Goldens { checkpoint: "qwen3_5_moe_tiny", goldens: "as_loaded/qwen3_5_moe_tiny_goldens.safetensors", prompts: 5 };

/// The families beside Qwen's, by transformers 5.24 in float32; where the checkpoints above are, these are.
pub const OLMO_HYBRID: Goldens = Goldens {
    checkpoint: "families/olmo_hybrid_tiny",
    goldens: "families/olmo_hybrid_tiny_goldens.safetensors",
    prompts: 5,
};
pub const LARA_MINI: Goldens = Goldens {
    checkpoint: "families/lara_mini_tiny",
    goldens: "families/lara_mini_tiny_goldens.safetensors",
    prompts: 5,
};

/// Adapters that PEFT 0.21.2 wrote, with what the model says with them, and the models.
pub const ADAPTERS: [(&str, Goldens); 6] = [
    ("tests/goldens/lora/demo_attention", DEMO),
    ("tests/goldens/lora/demo_gdn", DEMO),
    ("tests/goldens/lora/demo_experts", DEMO),
    ("lora/tiny_all", QWEN3_5),
    ("lora/tiny_patterns", QWEN3_5),
    ("lora/tiny_wrapped", QWEN3_5),
];

/// The adapters whose models are here, as folders.
pub fn adapters() -> impl Iterator<Item = (String, &'static Goldens)> {
    ADAPTERS.iter().filter(|(_, model)| model.is_here()).map(|(name, model)| (path(name), model))
}

/// Prompt `i` of an adapter's two, in float32: the ids, and their log-probabilities from the second on.
pub fn adapted(dir: &str, i: usize) -> Result<(Vec<u32>, Vec<f32>)> {
    // SAFETY: nobody writes to the files of the repository during the tests.
    let file = unsafe { MmapedSafetensors::new(format!("{dir}/goldens.safetensors"))? };
    let get = |what: &str| file.load(&format!("{i}.{what}"), &Device::Cpu);
    Ok((get("ids")?.to_dtype(DType::U32)?.to_vec1()?, get("logprobs")?.to_vec1()?))
}

/// One prompt, and the model's answer in float32.
pub struct Prompt {
    pub ids: Vec<u32>,
    pub logits_last: Vec<f32>,
    /// Of the ids from the second on.
    pub logprobs: Vec<f32>,
    pub greedy: Vec<u32>,
    /// Best minus second-best logit at each step.
    pub greedy_margin: Vec<f32>,
}

/// What the demo's draft head says after a prompt, in float32.
pub struct Drafted {
    pub ids: Vec<u32>,
    /// The model's greedy token.
    pub next: u32,
    /// Of the first draft after it.
    pub logits: Vec<f32>,
    /// Greedy, each fed back.
    pub drafts: Vec<u32>,
    /// Of the ids from the third on, each drafted after the ones before.
    pub logprobs: Vec<f32>,
}

/// Of prompt `i` of the demo's.
pub fn drafted(i: usize) -> Result<Drafted> {
    // SAFETY: nobody writes to the files of the repository during the tests.
    let file = unsafe { MmapedSafetensors::new(path("tests/goldens/demo_mtp_goldens.safetensors"))? };
    let get = |what: &str| file.load(&format!("{i}.{what}"), &Device::Cpu);
    let ids = |what: &str| get(what)?.to_dtype(DType::U32)?.to_vec1::<u32>();
    let floats = |what: &str| get(what)?.to_vec1::<f32>();
    Ok(Drafted {
        ids: ids("ids")?,
        next: ids("next")?[0],
        logits: floats("draft_logits")?,
        drafts: ids("drafts")?,
        logprobs: floats("draft_logprobs")?,
    })
}

/// Below the repository, else below the folder of the full golden files. A program that was carried to another machine
/// runs in the checkout there.
fn path(name: &str) -> String {
    let full = std::env::var("CANDLE_GDN_GOLDENS").map(|dir| format!("{dir}/{name}")).ok();
    let places = [Some(format!("{}/../../../{name}", env!("CARGO_MANIFEST_DIR"))), full, Some(name.to_owned())];
    let exists = |place: &String| std::path::Path::new(place).exists();
    places.into_iter().flatten().find(exists).unwrap_or_else(|| name.to_owned())
}

/// A file that llama.cpp's converter made, where `CANDLE_GDN_GOLDENS` has it.
pub fn converted(name: &str) -> Option<PathBuf> {
    let Some(dir) = std::env::var_os("CANDLE_GDN_GOLDENS") else {
        skipped(format!("{name} is only among the full golden files (CANDLE_GDN_GOLDENS)"));
        return None;
    };
    let path = PathBuf::from(dir).join("gguf").join(name);
    assert!(path.exists(), "{} is missing", path.display());
    Some(path)
}

/// The most likely token; of equals the first.
pub fn argmax(x: &[f32]) -> u32 {
    (0..x.len()).max_by(|&i, &j| x[i].total_cmp(&x[j]).then(j.cmp(&i))).unwrap_or(0) as u32
}

pub fn log_softmax(logits: &[f32], id: u32) -> f32 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    (f64::from(logits[id as usize]) - max - sum.ln()) as f32
}

pub fn max_diff(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    // A NaN must not pass: f32::max would drop it.
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0., |m, d| if d <= m { m } else { d })
}

impl Goldens {
    /// Whether its files are here; says so where they are not.
    pub fn is_here(&self) -> bool {
        let here = std::path::Path::new(&path(self.goldens)).exists();
        if !here {
            skipped(format!("{} is only among the full golden files (CANDLE_GDN_GOLDENS)", self.goldens));
        }
        here
    }

    /// The checkpoint's directory.
    pub fn dir(&self) -> String {
        path(self.checkpoint)
    }

    pub fn prompts(&self) -> usize {
        self.prompts
    }

    pub fn config(&self) -> Result<ModelConfig> {
        ModelConfig::from_json(&std::fs::read_to_string(path(self.checkpoint) + "/config.json")?)
    }

    pub fn model(&self, dtype: DType, device: &Device) -> Result<CausalLm> {
        CausalLm::load(&self.config()?, self.weights(dtype, device)?)
    }

    /// With the checkpoint's draft head.
    pub fn model_with_head(&self, dtype: DType, device: &Device) -> Result<CausalLm> {
        CausalLm::loader(&self.config()?).draft_head(DraftHeadChoice::On).load(self.weights(dtype, device)?)
    }

    pub fn weights(&self, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
        let files = [path(self.checkpoint) + "/model.safetensors"];
        // SAFETY: nobody writes to the files of the repository during the tests.
        unsafe { VarBuilder::from_mmaped_safetensors(&files, dtype, device) }
    }

    pub fn prompt(&self, i: usize) -> Result<Prompt> {
        // SAFETY: as above.
        let file = unsafe { MmapedSafetensors::new(path(self.goldens))? };
        let get = |what: &str| file.load(&format!("{i}.{what}"), &Device::Cpu);
        let ids = |what: &str| get(what)?.to_dtype(DType::U32)?.to_vec1::<u32>();
        let floats = |what: &str| get(what)?.to_vec1::<f32>();
        Ok(Prompt {
            ids: ids("ids")?,
            logits_last: floats("logits_last")?,
            logprobs: floats("logprobs")?,
            greedy: ids("greedy")?,
            greedy_margin: floats("greedy_margin")?,
        })
    }
}
