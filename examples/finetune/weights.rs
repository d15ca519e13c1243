//! The tensors of a model in training.

use anyhow::{bail, Context, Result};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_gdn_models::{ModelConfig, SplitMix64};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Variables, which the optimiser changes, and frozen tensors. Variables are in f32, and so are all vectors (`A_log`, `dt_bias`,
/// norms); matrices are frozen in `dtype`, the one of the passes. A variable is cast to it in each pass, and its gradient back.
#[derive(Clone)]
pub struct Weights(Arc<Tensors>);

struct Tensors {
    /// By name, so that sums over all of them have one order.
    variables: BTreeMap<String, Var>,
    frozen: HashMap<String, Tensor>,
    dtype: DType,
    device: Device,
}

impl Weights {
    /// The weights of the text model in safetensors files, all frozen.
    ///
    /// # Errors
    /// When a file cannot be read, or a weight is neither in f32 nor in bf16 nor in f16.
    pub fn load(files: &[PathBuf], config: &ModelConfig, dtype: DType, device: &Device) -> Result<Self> {
        // SAFETY: sound as long as nobody writes to the files.
        let files = unsafe { MmapedSafetensors::multi(files)? };
        let names: Vec<String> = files.tensors().into_iter().map(|(name, _)| name).collect();
        let text = text_prefix(|name| names.iter().any(|n| n == name));
        let mut frozen = HashMap::new();
        for name in names.into_iter().filter(|name| is_own(name, text, config)) {
            let tensor = files.load(&name, &Device::Cpu)?;
            if !matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16) {
                bail!("{name}: expected a weight in f32, bf16 or f16 to train, got {:?}", tensor.dtype())
            }
            let kept = if tensor.rank() == 1 { DType::F32 } else { dtype };
            frozen.insert(name, tensor.to_dtype(kept)?.to_device(device)?);
        }
        let variables = BTreeMap::new();
        Ok(Self(Arc::new(Tensors { variables, frozen, dtype, device: device.clone() })))
    }

    /// The same with every weight a variable.
    pub fn all_variables(files: &[PathBuf], config: &ModelConfig, dtype: DType, device: &Device) -> Result<Self> {
        let frozen = Self::load(files, config, DType::F32, device)?;
        let variables = frozen.0.frozen.iter().map(|(name, x)| Ok((name.clone(), Var::from_tensor(x)?)));
        let variables = variables.collect::<Result<_>>()?;
        Ok(Self(Arc::new(Tensors { variables, frozen: HashMap::new(), dtype, device: device.clone() })))
    }

    /// The same with variables added, in f32.
    pub fn with_variables(&self, values: BTreeMap<String, Tensor>) -> Result<Self> {
        let mut variables = self.0.variables.clone();
        for (name, value) in values {
            variables.insert(name, Var::from_tensor(&value.to_dtype(DType::F32)?.to_device(&self.0.device)?)?);
        }
        Ok(Self(Arc::new(Tensors {
            variables,
            frozen: self.0.frozen.clone(),
            dtype: self.0.dtype,
            device: self.0.device.clone(),
        })))
    }

    pub fn variables(&self) -> &BTreeMap<String, Var> {
        &self.0.variables
    }

    /// Number of values in the variables and in all.
    pub fn counts(&self) -> [usize; 2] {
        let variables: usize = self.0.variables.values().map(|x| x.elem_count()).sum();
        [variables, variables + self.0.frozen.values().map(Tensor::elem_count).sum::<usize>()]
    }

    /// Names and shapes of all.
    pub fn shapes(&self) -> BTreeMap<&str, &Shape> {
        let variables = self.0.variables.iter().map(|(name, x)| (name.as_str(), x.shape()));
        variables.chain(self.0.frozen.iter().map(|(name, x)| (name.as_str(), x.shape()))).collect()
    }

    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// For one pass: what it gives of a variable is tracked and has today's values.
    pub fn builder(&self) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), self.0.dtype, self.0.device.clone())
    }
}

const HEAD: &str = "lm_head.weight";

impl SimpleBackend for Weights {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if *tensor.shape() != shape {
            candle_core::bail!("{name}: expected shape {:?}, got {:?}", shape.dims(), tensor.dims())
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        match (self.0.variables.get(name), self.0.frozen.get(name)) {
            (Some(variable), _) => variable.to_dtype(dtype),
            (None, Some(tensor)) => tensor.to_dtype(dtype),
            (None, None) => candle_core::bail!("the checkpoint has no tensor {name}"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.variables.contains_key(name) || self.0.frozen.contains_key(name)
    }
}

/// What stands before `embed_tokens`, `layers` and `norm`: Qwen3.5's text model is one part of a multimodal one.
pub fn text_prefix(contains: impl Fn(&str) -> bool) -> &'static str {
    match contains("model.language_model.embed_tokens.weight") {
        true => "model.language_model",
        false => "model",
    }
}

/// Whether the model that is trained has this weight: there may be a draft head and a vision tower beside it.
fn is_own(name: &str, text: &str, config: &ModelConfig) -> bool {
    let parts = ["embed_tokens.", "layers.", "norm."];
    let in_text = name.strip_prefix(text).and_then(|rest| rest.strip_prefix('.'));
    in_text.is_some_and(|rest| parts.iter().any(|part| rest.starts_with(part)))
        || name.starts_with("lm_head.") && !config.tie_word_embeddings
}

/// Whether there is a head that differs from the embedding: then it is the head, whatever config.json says of tied ones. The loader of
/// [`candle_gdn_models`] decides so too.
pub fn has_own_head(files: &[PathBuf]) -> Result<bool> {
    // SAFETY: sound as long as nobody writes to the files.
    let files = unsafe { MmapedSafetensors::multi(files)? };
    if files.get(HEAD).is_err() {
        return Ok(false);
    }
    let table = format!("{}.embed_tokens.weight", text_prefix(|name| files.get(name).is_ok()));
    let load = |name: &str| files.load(name, &Device::Cpu)?.to_dtype(DType::F32);
    Ok(load(&table)?.ne(&load(HEAD)?)?.flatten_all()?.max(0)?.to_scalar::<u8>()? != 0)
}

/// Writes the checkpoint of `files` with the variables' values as `path`: matrices in the file's dtype, vectors in f32. What is no
/// variable is copied, but for a copy of the embedding as head: the trained embedding is the head.
pub fn save_checkpoint(files: &[PathBuf], variables: &BTreeMap<String, Var>, path: &Path) -> Result<()> {
    // SAFETY: sound as long as nobody writes to the files.
    let files = unsafe { MmapedSafetensors::multi(files)? };
    let mut tensors = BTreeMap::new();
    for (name, view) in files.tensors().into_iter().filter(|(name, _)| name != HEAD || variables.contains_key(HEAD)) {
        let old = || files.load(&name, &Device::Cpu);
        let tensor = match variables.get(&name) {
            None => old()?,
            Some(variable) if variable.rank() == 1 => variable.to_device(&Device::Cpu)?,
            Some(variable) => variable.to_device(&Device::Cpu)?.to_dtype(view.dtype().try_into()?)?,
        };
        tensors.insert(name, tensor);
    }
    write(&tensors, [("format".to_string(), "pt".to_string())].into(), path)
}

/// Writes a safetensors file.
pub fn write(tensors: &BTreeMap<String, Tensor>, metadata: HashMap<String, String>, path: &Path) -> Result<()> {
    let write = || -> Result<()> {
        // safetensors lets its owner alone read what it writes; this one may be read like all other files.
        let usual = File::create(path)?.metadata()?.permissions();
        safetensors::serialize_to_file(tensors, Some(metadata), path)?;
        Ok(std::fs::set_permissions(path, usual)?)
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// A number for the checkpoint in these files, by which another one is told from it: of their lengths, headers and some other bytes.
pub fn fingerprint(files: &[PathBuf]) -> Result<u64> {
    const PLACES: u64 = 64;
    let number = |bytes: &[u8]| bytes.iter().fold(0, |n, byte| n << 8 | u64::from(*byte));
    let mut hash = 0;
    for path in files {
        let mut file = File::open(path)?;
        let len = file.metadata()?.len();
        let (mut bytes, mut header) = (len.to_le_bytes().to_vec(), [0; 8]);
        file.read_exact(&mut header)?;
        (&file).take(u64::from_le_bytes(header)).read_to_end(&mut bytes)?;
        for place in 0..PLACES {
            file.seek(SeekFrom::Start(len / PLACES * place))?;
            (&file).take(64).read_to_end(&mut bytes)?;
        }
        hash = bytes.chunks(8).fold(hash, |hash, bytes| SplitMix64::new(hash ^ number(bytes)).next());
    }
    Ok(hash)
}
