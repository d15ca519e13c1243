//! A checkpoint on disk: a directory with config.json, tokenizer and safetensors, or a GGUF file.

use crate::load::{LoadFormat, ModelArgs};
use crate::{builtin, gguf_tokenizer, hub, safetensors, status, vocab_tokenizer};
use anyhow::{bail, Context, Result};
use candle_gdn_models::{json_as_python, DraftHeadChoice, GgufFile, LoraAdapter, ModelConfig, SafetensorsFiles};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tokenizers::Tokenizer;

pub struct Checkpoint {
    /// The config.json, with the other files in its folder, or a GGUF file.
    path: PathBuf,
    gguf: Option<GgufFile>,
    files: OnceLock<SafetensorsFiles>,
    wide: OnceLock<u64>,
    format: LoadFormat,
    lora: Option<LoraAdapter>,
}

impl Checkpoint {
    /// The checkpoint that `--model` names, the demo where it is not given, and the adapter that `--lora` names.
    pub fn find(args: &ModelArgs) -> Result<Self> {
        let lora = args.lora.as_ref().map(LoraAdapter::open).transpose().context("--lora")?;
        Ok(Self { lora, ..Self::named(args.model.as_deref(), args.revision.as_deref(), args.load_format)? })
    }

    /// The checkpoint of this name, as [`ModelArgs`] says names; the demo without one.
    pub fn named(model: Option<&str>, revision: Option<&str>, format: LoadFormat) -> Result<Self> {
        let dummy = format == LoadFormat::Dummy;
        if let Some(model) = model.filter(|model| !Path::new(model).exists()) {
            if let Some(path) = hub::fetch(model, revision, !dummy)? {
                return if path.is_dir() { Self::in_dir(&path, format) } else { Self::in_file(&path, format) };
            }
        }
        if let Some(revision) = revision {
            let model = model.unwrap_or("the demo");
            bail!("--revision: expected --model to be a name on the hub, got {model} and revision {revision}")
        }
        let Some(model) = model else { return Self::in_dir(&builtin::folder()?.join("demo"), format) };
        let path = Path::new(model);
        if path.is_dir() {
            return Self::in_dir(path, format);
        }
        if path.is_file() {
            return Self::in_file(path, format);
        }
        if let Some(name) = builtin::known_models().find(|name| name.eq_ignore_ascii_case(model)) {
            let path = builtin::folder()?.join(format!("configs/{name}.json"));
            if !dummy {
                bail!("--model: {model} is known without weights only: --load-format dummy makes some up")
            }
            return Ok(Self::of(path, format));
        }
        if dummy {
            bail!(
                "--model: no directory and no file {model}, not a hub id of the form owner/name, and not one of {}",
                builtin::known_models().collect::<Vec<_>>().join(", ")
            )
        }
        bail!("--model: no directory {model}, and not a hub id of the form owner/name")
    }

    fn in_file(path: &Path, format: LoadFormat) -> Result<Self> {
        // Ollama's files have no ending.
        let is_named = path.extension().is_some_and(|ext| ext.eq_ignore_ascii_case("gguf"));
        let gguf = match is_named || GgufFile::is_gguf(path) {
            true => Some(GgufFile::open(path).context("--model")?),
            false if format == LoadFormat::Dummy => None,
            false => bail!("--model: expected a directory, a hub id, or a GGUF file, got {}", path.display()),
        };
        Ok(Self { gguf, ..Self::of(path.to_path_buf(), format) })
    }

    fn in_dir(dir: &Path, format: LoadFormat) -> Result<Self> {
        let path = dir.join("config.json");
        if !path.is_file() {
            let of_gguf = |entry: &std::fs::DirEntry| entry.path().extension().is_some_and(|name| name == "gguf");
            let has_gguf =
                std::fs::read_dir(dir).is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(|e| of_gguf(&e))));
            let advice = if has_gguf { "; to load a GGUF file, give the path of the file" } else { "" };
            bail!("--model: {} has no config.json{advice}", dir.display())
        }
        Ok(Self::of(path, format))
    }

    fn of(path: PathBuf, format: LoadFormat) -> Self {
        Self { path, gguf: None, files: OnceLock::new(), wide: OnceLock::new(), format, lora: None }
    }

    /// Its name in messages.
    pub fn name(&self) -> std::path::Display<'_> {
        match self.gguf {
            Some(_) => self.path.display(),
            None => self.dir().display(),
        }
    }

    /// The GGUF file, if it is one.
    pub fn gguf(&self) -> Option<&GgufFile> {
        self.gguf.as_ref()
    }

    /// The adapter that is merged into its weights.
    pub fn lora(&self) -> Option<&LoraAdapter> {
        self.lora.as_ref()
    }

    /// The text of a file in the directory without a mark of byte order, and its path; None where it is missing.
    pub fn text(&self, name: &str) -> Result<Option<(String, PathBuf)>> {
        if self.gguf.is_some() {
            return Ok(None);
        }
        let path = self.dir().join(name);
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Some((without_bom(&text).to_string(), path))),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// The folder of its files.
    pub fn dir(&self) -> &Path {
        self.path.parent().unwrap_or(&self.path)
    }

    pub fn config(&self) -> Result<ModelConfig> {
        if let Some(file) = &self.gguf {
            return Ok(ModelConfig::from_gguf(file)?);
        }
        let text =
            std::fs::read_to_string(&self.path).with_context(|| format!("cannot read {}", self.path.display()))?;
        let here = || self.path.display().to_string();
        let config = match self.format {
            LoadFormat::Dummy => ModelConfig::from_json(&text).with_context(here)?,
            LoadFormat::Auto => match self.files() {
                Ok(files) => ModelConfig::from_safetensors(&text, files).with_context(here)?,
                // A broken configuration is told first.
                Err(e) => return ModelConfig::from_json(&text).with_context(here).and(Err(e)),
            },
        };
        match self.text("hf_quant_config.json")? {
            Some((text, path)) => config.with_hf_quant_config(&text).with_context(|| path.display().to_string()),
            None => Ok(config),
        }
    }

    /// Its safetensors files, mapped.
    pub fn files(&self) -> Result<&SafetensorsFiles> {
        if let Some(files) = self.files.get() {
            return Ok(files);
        }
        // SAFETY: the files are read-only here; like every mapping, it relies on nobody truncating them.
        let files = unsafe { SafetensorsFiles::open(&self.weights()?)? };
        Ok(self.files.get_or_init(|| files))
    }

    /// The texts of the files in a folder of the directory, by their names without the ending.
    pub fn texts(&self, folder: &str, ending: &str) -> Result<Vec<(String, String)>> {
        let Ok(entries) = std::fs::read_dir(self.dir().join(folder)) else { return Ok(Vec::new()) };
        let mut texts = Vec::new();
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            let (Some(name), true) = (path.file_stem(), path.extension().is_some_and(|e| e == ending)) else {
                continue;
            };
            let name = name.to_string_lossy().into_owned();
            texts.extend(self.text(&format!("{folder}/{name}.{ending}"))?.map(|(text, _)| (name, text)));
        }
        Ok(texts)
    }

    /// A JSON file in the directory, null where it is missing.
    pub fn json(&self, name: &str) -> Result<Value> {
        let Some((text, path)) = self.text(name)? else { return Ok(Value::Null) };
        json_as_python(&text).with_context(|| path.display().to_string())
    }

    /// Its tokenizer, which neither cuts texts nor fills them up. A missing one is None where weights are made up, else an
    /// error.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        let tokenizer = match &self.gguf {
            Some(file) => Some(gguf_tokenizer::tokenizer(file)?),
            None => self.json_tokenizer()?,
        };
        let Some(mut tokenizer) = tokenizer else { return Ok(None) };
        // A file has the settings of whoever saved it last, for training.
        tokenizer.with_truncation(None).map_err(anyhow::Error::msg)?.with_padding(None);
        Ok(Some(tokenizer))
    }

    /// From tokenizer.json, or from the vocab.json and merges.txt of older checkpoints.
    fn json_tokenizer(&self) -> Result<Option<Tokenizer>> {
        let Some((text, path)) = self.text("tokenizer.json")? else {
            return match (vocab_tokenizer::tokenizer(self)?, self.format) {
                (None, LoadFormat::Auto) => bail!("{} is missing", self.dir().join("tokenizer.json").display()),
                (tokenizer, _) => Ok(tokenizer),
            };
        };
        // tokenizers 0.23 panics where the JSON of a decoder is not valid, and over damaged data of a normalizer.
        serde_json::from_str::<Value>(&text).with_context(|| path.display().to_string())?;
        let parsed = std::panic::catch_unwind(|| Tokenizer::from_bytes(text));
        let parsed = parsed.unwrap_or_else(|_| Err("tokenizers cannot read it, for the reason above".into()));
        parsed.map(Some).map_err(|e| anyhow::anyhow!("{}: {e}", path.display()))
    }

    /// Whether to load the draft head, as `--mtp` says. Random weights have one only with `--mtp on`. The head of a GGUF file
    /// may be in a second file, named `mtp-` and the name of the first.
    pub fn draft_head(&mut self, choice: DraftHeadChoice, config: &ModelConfig) -> Result<bool> {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let beside = self.path.with_file_name(format!("mtp-{name}"));
        if let Some(file) = &mut self.gguf {
            if choice != DraftHeadChoice::Off && !file.has_draft_head(config) && beside.is_file() {
                match (file.add_draft_head(&beside).context("--mtp"), choice) {
                    // Nobody named that file.
                    (Err(e), DraftHeadChoice::Auto) => status!("no draft head: {e:#}"),
                    (added, _) => added?,
                }
            }
        }
        let is_here = || match &self.gguf {
            Some(file) => Ok(file.has_draft_head(config)),
            None => Ok(self.files()?.has_draft_head()),
        };
        match (choice, self.format) {
            (DraftHeadChoice::Off, _) | (DraftHeadChoice::Auto, LoadFormat::Dummy) => Ok(false),
            (DraftHeadChoice::Auto, LoadFormat::Auto) => is_here(),
            (DraftHeadChoice::On, LoadFormat::Auto) if !is_here()? => {
                bail!("--mtp on: {} has no draft head (mtp.*)", self.name())
            }
            _ => Ok(true),
        }
    }

    /// Numbers of more than 16 bits in the matrices of its files ([`SafetensorsFiles::wide_parameters`]). `config` is its own, or a rank's.
    pub fn wide_parameters(&self, config: &ModelConfig) -> Result<u64> {
        if self.format == LoadFormat::Dummy {
            return Ok(0);
        }
        // An estimate that looks for the right options asks again and again.
        let files = self.files()?;
        Ok(*self.wide.get_or_init(|| files.wide_parameters(config)))
    }

    /// The weight files: as in transformers, the single one if it is there, whatever an index beside it says. Each must be there
    /// and whole.
    pub fn weights(&self) -> Result<Vec<PathBuf>> {
        let index = self.dir().join("model.safetensors.index.json");
        let single = self.dir().join("model.safetensors");
        let files: Vec<PathBuf> = if single.is_file() {
            vec![single]
        } else if index.is_file() {
            let text = std::fs::read_to_string(&index).with_context(|| format!("cannot read {}", index.display()))?;
            let names = shard_names(&text).with_context(|| index.display().to_string())?;
            names.iter().map(|name| self.dir().join(name)).collect()
        } else {
            bail!("{} has neither model.safetensors nor model.safetensors.index.json", self.dir().display())
        };
        files.iter().try_for_each(|file| safetensors::check(file))?;
        Ok(files)
    }
}

/// The distinct files of a `model.safetensors.index.json`.
pub(super) fn shard_names(index: &str) -> Result<BTreeSet<String>> {
    let index = json_as_python(index)?;
    let Some(map) = index["weight_map"].as_object() else { bail!("`weight_map`: expected an object") };
    let mut names = BTreeSet::new();
    for (tensor, file) in map {
        // A name with a path in it would leave the directory.
        match file.as_str() {
            Some(name) if Path::new(name).file_name() == Some(name.as_ref()) => names.insert(name.to_string()),
            _ => bail!("`weight_map`: expected a file name for {tensor}, got {file}"),
        };
    }
    if names.is_empty() {
        bail!("`weight_map`: expected at least one file, got none")
    }
    Ok(names)
}

/// Some editors write a mark of byte order before a text.
fn without_bom(text: &str) -> &str {
    text.strip_prefix('\u{FEFF}').unwrap_or(text)
}
