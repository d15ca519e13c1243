//! A run of training: its steps, and the files from which it resumes.

use crate::adapter::Targets;
use crate::curve;
use crate::data::{Data, Position};
use crate::folder;
use crate::model::{cross_entropy, Model};
use crate::optimizer::{accumulate, clip, learning_rate, AdamW, Gradients};
use crate::weights::{self, save_checkpoint, Weights};
use anyhow::{bail, Context, Result};
use candle_core::{DType, Device};
use candle_gdn_cli::safetensors::read_header;
use candle_gdn_cli::status;
use candle_gdn_models::ModelConfig;
use candle_nn::ParamsAdamW;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What fixes the losses of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Options {
    pub model: String,
    /// On the hub.
    pub revision: Option<String>,
    /// Every weight is trained, no adapter.
    pub full: bool,
    pub rank: usize,
    pub alpha: f64,
    pub target_modules: Vec<String>,
    pub steps: usize,
    pub learning_rate: f64,
    pub warmup: usize,
    pub weight_decay: f64,
    pub clip: f64,
    pub sequence_len: usize,
    pub pass_tokens: usize,
    pub passes: usize,
    pub seed: u64,
    pub dtype: String,
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Mean over the step's tokens before its update, natural logarithm.
    pub loss: f32,
    /// Of all gradients, before clipping.
    pub gradient_norm: f32,
    pub tokens: usize,
}

/// Beside the tensors of the state.
#[derive(Serialize, Deserialize)]
struct Progress {
    options: Value,
    /// The [`weights::fingerprint`] of the checkpoint.
    base: u64,
    /// A hash of the sequences.
    text: u64,
    position: Position,
    steps: Vec<Step>,
}

/// What `--resume` reads.
pub const STATE: &str = "training_state.safetensors";
const PROGRESS: &str = "progress";
/// Options that a resumed run may have others of: they change neither the data nor the model, but the steps to come.
const OF_STEPS: [&str; 5] = ["steps", "learning_rate", "warmup", "weight_decay", "clip"];
/// Where a checkpoint keeps further chat templates.
const TEMPLATES: &str = "additional_chat_templates";
const INDEX: &str = "model.safetensors.index.json";

pub struct Run {
    options: Options,
    config: ModelConfig,
    files: Vec<PathBuf>,
    base: u64,
    weights: Weights,
    /// None where every weight is trained.
    targets: Option<Targets>,
    optimizer: AdamW,
    data: Data,
    steps: Vec<Step>,
}

impl Run {
    /// A new run on the checkpoint of `files`.
    pub fn new(
        options: Options,
        mut config: ModelConfig,
        files: Vec<PathBuf>,
        data: Data,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        config.tie_word_embeddings &= !weights::has_own_head(&files)?;
        let (weights, targets) = if options.full {
            (Weights::all_variables(&files, &config, dtype, device)?, None)
        } else {
            let frozen = Weights::load(&files, &config, dtype, device)?;
            let targets = Targets::new(&options.target_modules, &frozen, &config)?;
            let adapters = targets.init(&frozen, options.rank, options.seed)?;
            (frozen.with_variables(adapters)?, Some(targets))
        };
        let base = weights::fingerprint(&files)?;
        let optimizer = AdamW::new(ParamsAdamW { weight_decay: options.weight_decay, ..Default::default() });
        Ok(Self { options, config, files, base, weights, targets, optimizer, data, steps: Vec::new() })
    }

    /// Steps done.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    pub fn is_done(&self) -> bool {
        self.steps.len() >= self.options.steps
    }

    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// The model as it is now.
    pub fn model(&self) -> Result<Model<'_>> {
        let scale = self.options.alpha / self.options.rank as f64;
        Ok(Model::new(&self.config, scale, self.weights.builder())?)
    }

    /// The passes of one step, and its update.
    pub fn step(&mut self) -> Result<Step> {
        let packs = (0..self.options.passes).map(|_| self.data.next(self.weights.device()));
        let packs = packs.collect::<Result<Vec<_>>>()?;
        let tokens: usize = packs.iter().map(|pack| pack.tokens()).sum();
        let (mut gradients, mut loss) = (Gradients::new(), 0f32);
        for pack in &packs {
            let logits = self.model()?.forward(&pack.inputs, &pack.sequences)?;
            // Each token counts the same, however many the other passes of the step have.
            let part = (cross_entropy(&logits, &pack.targets)? / tokens as f64)?;
            accumulate(&mut gradients, self.weights.variables(), &part.backward()?)?;
            loss += part.to_scalar::<f32>()?;
        }
        let gradient_norm = clip(&mut gradients, self.options.clip)? as f32;
        if !(loss + gradient_norm).is_finite() {
            bail!(
                "step {}: the loss is {loss}, the norm of the gradients {gradient_norm}: try a lower --learning-rate",
                self.steps.len() + 1
            )
        }
        let Options { learning_rate: peak, warmup, steps, .. } = self.options;
        self.optimizer.params.lr = learning_rate(peak, warmup, steps, self.steps.len());
        self.optimizer.step(self.weights.variables(), &gradients)?;
        let step = Step { loss, gradient_norm, tokens };
        self.steps.push(step);
        Ok(step)
    }

    /// Writes the adapter or the checkpoint, the curve, and last the state: only that is read again. Each file appears whole.
    pub fn save(&self, dir: &Path) -> Result<()> {
        folder::save(dir, STATE, |part| self.write(part))
    }

    fn write(&self, dir: &Path) -> Result<()> {
        match &self.targets {
            Some(targets) => targets.save(&self.weights, &self.options, dir)?,
            None => self.save_full(dir)?,
        }
        curve::draw(&self.steps.iter().map(|step| step.loss).collect::<Vec<_>>(), &dir.join("loss.svg"))?;
        let mut tensors = BTreeMap::new();
        for (name, variable) in self.weights.variables() {
            tensors.insert(format!("variable.{name}"), variable.to_device(&Device::Cpu)?);
        }
        for (name, [m, v]) in &self.optimizer.moments {
            tensors.insert(format!("first_moment.{name}"), m.to_device(&Device::Cpu)?);
            tensors.insert(format!("second_moment.{name}"), v.to_device(&Device::Cpu)?);
        }
        let options = serde_json::to_value(&self.options)?;
        let (text, position) = (self.data.hash(), self.data.position());
        let progress = Progress { options, base: self.base, text, position, steps: self.steps.clone() };
        let metadata = [(PROGRESS.to_string(), serde_json::to_string(&progress)?)].into();
        weights::write(&tensors, metadata, &dir.join(STATE))
    }

    /// The whole checkpoint, which programs load as they load the original one.
    fn save_full(&self, dir: &Path) -> Result<()> {
        save_checkpoint(&self.files, self.weights.variables(), &dir.join("model.safetensors"))?;
        let from = self.files[0].parent().unwrap_or(Path::new("."));
        copy_texts(from, dir, &["json", "txt", "jinja"])?;
        if from.join(TEMPLATES).is_dir() {
            let to = dir.join(TEMPLATES);
            std::fs::create_dir(&to).with_context(|| format!("cannot make {}", to.display()))?;
            copy_texts(&from.join(TEMPLATES), &to, &["jinja"])?;
        }
        Ok(())
    }

    /// Goes on where the run in `dir` was saved.
    ///
    /// # Errors
    /// When there is none, or its model, its data or what is trained differs.
    pub fn resume(mut self, dir: &Path) -> Result<Self> {
        let path = dir.join(STATE);
        let progress = progress(&path).with_context(|| format!("--resume: {}", path.display()))?;
        let new: Value = serde_json::from_str(&serde_json::to_string(&self.options)?)?;
        let old = &progress.options;
        for (name, new) in new.as_object().into_iter().flatten() {
            let old = &old[name];
            if old != new && !OF_STEPS.contains(&name.as_str()) {
                bail!("--resume: {name}: expected {old} as in the run before, got {new}")
            }
            if old != new {
                status!("--resume: {name}: {new} from here on, {old} in the run before");
            }
        }
        if progress.base != self.base {
            bail!("--resume: --model: expected the weights of the run before, got others under the same name")
        }
        if progress.text != self.data.hash() {
            bail!("--resume: --text: expected the text of the run before, got another")
        }
        let mut tensors = candle_core::safetensors::load(&path, self.weights.device())?;
        for (name, variable) in self.weights.variables() {
            let value = tensors.remove(&format!("variable.{name}"));
            variable.set(&value.with_context(|| format!("--resume: {} has no {name}", path.display()))?)?;
            let moment = |of: &str| tensors.get(&format!("{of}_moment.{name}")).cloned();
            if let (Some(m), Some(v)) = (moment("first"), moment("second")) {
                self.optimizer.moments.insert(name.clone(), [m, v]);
            }
        }
        self.optimizer.step = progress.steps.len();
        self.data.seek(progress.position);
        self.steps = progress.steps;
        Ok(self)
    }
}

/// Copies the files of a folder that have one of these endings; not the index of shards, which become one file.
fn copy_texts(from: &Path, to: &Path, endings: &[&str]) -> Result<()> {
    for entry in std::fs::read_dir(from)? {
        let path = entry?.path();
        let is_text = path.extension().is_some_and(|own| endings.iter().any(|ending| own == *ending));
        let Some(name) = path.file_name().filter(|name| is_text && path.is_file() && *name != INDEX) else { continue };
        // Of the content alone: a checkpoint's files may be read-only.
        let copied = std::fs::read(&path).and_then(|bytes| std::fs::write(to.join(name), bytes));
        copied.with_context(|| format!("cannot copy {}", path.display()))?;
    }
    Ok(())
}

/// What stands in the header of a state.
fn progress(path: &Path) -> Result<Progress> {
    let (header, ..) = read_header(path)?;
    let metadata = header.get("__metadata__").context("expected the state of a training run")?;
    let progress = metadata[PROGRESS].as_str().context("expected the state of a training run")?;
    Ok(serde_json::from_str(progress)?)
}
