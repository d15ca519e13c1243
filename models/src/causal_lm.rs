//! The causal language model of the Qwen3-Next family.

use crate::config::{Family, ModelConfig};
use crate::blocks::decoder::DecoderLayer;
use crate::blocks::embeddings::Embeddings;
use crate::blocks::kv_cache::CacheShape;
use crate::blocks::norm::RmsNorm;
use crate::parallel::{Collective, Cuts, Vocabulary};
use crate::blocks::rotary::Rotary;
use crate::blocks::linear::Linear;
use crate::formats::{dequantized, GgufFile, GgufWeights, LoadOptions, OtherType, Quantizer, Source};
use candle_core::{bail, DType, Device, Result, Tensor};
use candle_gdn::plumbing::Launch;
use candle_nn::VarBuilder;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

/// Where the text model stands in a checkpoint: alone, or inside a multimodal wrapper.
const PREFIXES: &[&str] = &["model", "model.language_model"];

/// Embedding, decoder layers, last norm and head.
///
/// ```no_run
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{DType, Device, Tensor};
/// use candle_gdn_models::{CausalLm, ModelConfig};
/// use candle_nn::VarBuilder;
///
/// let device = Device::Cpu;
/// let config = ModelConfig::from_json(&std::fs::read_to_string("config.json")?)?;
/// let files = ["model.safetensors"];
/// let vb = unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::F32, &device)? };
/// let model = CausalLm::load(&config, vb)?;
/// let mut state = model.new_state(1)?;
/// let prompt = Tensor::new(&[[11u32, 22, 33]], &device)?;
/// let logits = model.forward_last(&prompt, &mut state)?; // [1, vocab_size]
/// # let _ = logits;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct CausalLm {
    embeddings: Embeddings,
    pub(crate) layers: Vec<DecoderLayer>,
    pub(crate) norm: RmsNorm,
    head: Linear,
    pub(crate) rotary: Rotary,
    pub(crate) config: ModelConfig,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    /// Tells the states of two models apart.
    pub(crate) id: usize,
    /// Of which this model has a part, where others have the rest.
    vocabulary: Option<Vocabulary>,
    kv_heads: usize,
    heads: usize,
    other_types: Vec<OtherType>,
    quantized: bool,
}

impl CausalLm {
    /// Loads the model at the root of a checkpoint, in the dtype (f32, bf16 or f16) and on the
    /// device of `vb`. Weights that the text model does not need (`mtp.*`, a vision tower) are
    /// never read. On the CPU, matrices in f32 that bf16 or f16 holds exactly are kept in it, which halves
    /// memory and changes no result. Weights in fp8 ([`ModelConfig::fp8`]) are dequantised.
    ///
    /// # Errors
    /// A missing or misshapen weight, by its full name.
    pub fn load(config: &ModelConfig, vb: VarBuilder) -> Result<Self> {
        Self::load_with_progress(config, vb, |_, _| ())
    }

    /// [`load`](Self::load), calling `progress(loaded, of)` after every layer.
    pub fn load_with_progress(
        config: &ModelConfig,
        vb: VarBuilder,
        progress: impl FnMut(usize, usize),
    ) -> Result<Self> {
        Self::load_with(config, vb, &LoadOptions::default(), progress)
    }

    /// The same with options.
    ///
    /// # Errors
    /// As [`load`](Self::load), or a type that matrices cannot be quantised to.
    pub fn load_with(
        config: &ModelConfig,
        vb: VarBuilder,
        options: &LoadOptions,
        progress: impl FnMut(usize, usize),
    ) -> Result<Self> {
        let vb = match &config.fp8 {
            Some(fp8) => dequantized(vb, fp8, None),
            None => vb,
        };
        Self::load_from(config, Source::new(vb), options, None, progress)
    }

    /// Loads a rank's part of a model, whose others the other ranks of `group` load at the same time: tensor
    /// parallelism. `config` is that of the whole model, `part` what [`part_of`](super::part_of) or
    /// [`part_of_safetensors`](super::part_of_safetensors) give. From then on all ranks make the same calls in the same
    /// order, each on a state or pool of its own, which holds its heads; logits are those of the whole, the same on all
    /// ranks.
    ///
    /// # Errors
    /// As [`load`](Self::load), or where the model cannot be divided so ([`ModelConfig::split`]).
    pub fn load_part(
        config: &ModelConfig,
        part: VarBuilder,
        group: Arc<dyn Collective>,
        progress: impl FnMut(usize, usize),
    ) -> Result<Self> {
        Self::load_part_with(config, part, group, &LoadOptions::default(), progress)
    }

    /// [`load_part`](Self::load_part) with options, which are the same on all ranks.
    ///
    /// # Errors
    /// As [`load_part`](Self::load_part), or a type that matrices cannot be quantised to.
    pub fn load_part_with(
        config: &ModelConfig,
        part: VarBuilder,
        group: Arc<dyn Collective>,
        options: &LoadOptions,
        progress: impl FnMut(usize, usize),
    ) -> Result<Self> {
        Self::load_from(config, Source::new(part), options, Some(group), progress)
    }

    /// Loads the model in a GGUF file that llama.cpp's converter made, with activations in `dtype` (f32, bf16 or f16).
    /// `config` is [`ModelConfig::from_gguf`]'s. Quantised matrices stay as they are, to the bit, and candle's kernels
    /// multiply with them; candle rounds what they are multiplied with to 8 bits. All else is loaded in `dtype`.
    ///
    /// # Errors
    /// A missing or misshapen tensor: the message names the file, the tensor, and the weight it stands for.
    pub fn load_gguf(config: &ModelConfig, file: &GgufFile, dtype: DType, device: &Device) -> Result<Self> {
        Self::load_gguf_with(config, file, dtype, device, &LoadOptions::default(), |_, _| ())
    }

    /// [`load_gguf`](Self::load_gguf) with options, which concern what is not quantised in the file, calling
    /// `progress(loaded, of)` after every layer.
    ///
    /// # Errors
    /// As [`load_gguf`](Self::load_gguf), or a type that matrices cannot be quantised to.
    pub fn load_gguf_with(
        config: &ModelConfig,
        file: &GgufFile,
        dtype: DType,
        device: &Device,
        options: &LoadOptions,
        progress: impl FnMut(usize, usize),
    ) -> Result<Self> {
        let weights = GgufWeights::new(file, &config.gdn, config.family != Family::Qwen3Next, None);
        Self::load_from(config, Source::gguf(weights, dtype, device), options, None, progress)
    }

    /// Loads a rank's part of the model in a GGUF file, as [`load_part`](Self::load_part) does of other checkpoints. Of each
    /// tensor the rank keeps its rows or columns, quantised as they are. Only where its columns are not whole blocks of
    /// their type, as a K type's 256 values may not divide the width of a part, they become
    /// [`Q8_0`](candle_core::quantized::GgmlDType::Q8_0), or dense where 32 does not divide it either;
    /// [`other_types`](Self::other_types) tells which did.
    ///
    /// # Errors
    /// As [`load_gguf_with`](Self::load_gguf_with) and [`load_part`](Self::load_part).
    pub fn load_gguf_part(
        config: &ModelConfig,
        file: &GgufFile,
        dtype: DType,
        device: &Device,
        group: Arc<dyn Collective>,
        options: &LoadOptions,
        progress: impl FnMut(usize, usize),
    ) -> Result<Self> {
        let cuts = Some(Cuts::new(config, &*group)?);
        let weights = GgufWeights::new(file, &config.gdn, config.family != Family::Qwen3Next, cuts);
        Self::load_from(config, Source::gguf(weights, dtype, device), options, Some(group), progress)
    }

    fn load_from(
        config: &ModelConfig,
        source: Source,
        options: &LoadOptions,
        group: Option<Arc<dyn Collective>>,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Self> {
        static NEXT_ID: AtomicUsize = AtomicUsize::new(0);
        let (dtype, device) = (source.dtype(), source.device().clone());
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            bail!("dtype: expected F32, BF16 or F16, got {dtype:?}")
        }
        let quantized = source.is_quantized() || options.quantize.is_some();
        let source = match options.quantize {
            Some(to) => source.quantized(Arc::new(Quantizer::new(to)?)),
            None => source,
        };
        let is_here = |p: &&&str| source.pp(p).contains("embed_tokens.weight");
        // If it is nowhere, the error names the tensor at the usual place.
        let prefix = PREFIXES.iter().find(is_here).unwrap_or(&PREFIXES[0]);
        let text = source.pp(prefix);
        let whole = config;
        let part = group.as_ref().map(|group| whole.split(group.size())).transpose()?;
        let config = part.as_ref().unwrap_or(whole);
        let (mut embeddings, tied) = Embeddings::load(config, &text)?;
        if group.is_some() {
            embeddings = embeddings.in_group()?;
        }
        let mut layers = Vec::with_capacity(config.layers.len());
        for (i, layer) in config.layers.iter().enumerate() {
            let layer = DecoderLayer::load(config, layer, &text.pp("layers").pp(i))?;
            layers.push(layer.in_group(group.clone()));
            progress(i + 1, config.layers.len());
        }
        let vocabulary = group.map(|group| Vocabulary::new(group, whole.vocab_size, &device)).transpose()?;
        let head = match tied {
            Some(tied) => tied,
            None => source.pp("lm_head").linear(config.hidden_size, config.vocab_size)?,
        };
        Ok(Self {
            embeddings,
            layers,
            norm: RmsNorm::load(config.hidden_size, config.rms_norm_eps, text.pp("norm").dense())?,
            head,
            rotary: Rotary::new(&config.attention.rope_inv_freq, config.max_position_embeddings),
            config: whole.clone(),
            vocabulary,
            heads: config.attention.num_heads,
            kv_heads: config.attention.num_kv_heads,
            dtype,
            device,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            quantized,
            other_types: source.other_types(),
        })
    }

    /// Whether matrices are quantised, or were to be: candle's kernels multiply with those.
    pub fn is_quantized(&self) -> bool {
        self.quantized
    }

    /// The matrices that [`LoadOptions::quantize`] could not bring into the type that was asked for, and those of which a
    /// rank's part ([`load_gguf_part`](Self::load_gguf_part)) could not keep that of its file.
    pub fn other_types(&self) -> &[OtherType] {
        &self.other_types
    }

    /// The configuration it was loaded with.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The dtype of weights and activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device of weights and state.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Of the keys and values of one softmax layer and one sequence.
    pub(crate) fn cache_shape(&self, max_len: usize) -> CacheShape {
        CacheShape {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.config.attention.head_dim,
            max_len,
            dtype: self.dtype,
            device: self.device.clone(),
        }
    }

    /// The head: `hidden [.., hidden_size]` in the model's dtype to `[.., vocab_size]` in f32.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.logits_launched(hidden, &Launch::default().overlapping())
    }

    /// No kernel of a pass writes a weight, so that the launch may overlap.
    pub(crate) fn logits_launched(&self, hidden: &Tensor, launch: &Launch) -> Result<Tensor> {
        if hidden.elem_count() == 0 {
            let mut dims = hidden.dims().to_vec();
            dims.pop();
            dims.push(self.config.vocab_size);
            return Tensor::zeros(dims, DType::F32, &self.device);
        }
        let logits = self.head.forward_launched(&hidden.contiguous()?, launch)?;
        match &self.vocabulary {
            Some(vocabulary) => vocabulary.gather(&logits)?.to_dtype(DType::F32),
            None => logits.to_dtype(DType::F32),
        }
    }

    /// `ids [tokens]` to `[tokens, hidden_size]`.
    pub(crate) fn embed(&self, ids: &Tensor) -> Result<Tensor> {
        match &self.vocabulary {
            Some(vocabulary) => vocabulary.embed(ids, |rows| self.embeddings.rows(rows)),
            None => self.embeddings.rows(ids),
        }
    }
}
