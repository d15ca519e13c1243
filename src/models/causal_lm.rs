//! The causal language model of the Qwen3-Next family.

use super::config::ModelConfig;
use super::decoder::DecoderLayer;
use super::kv_cache::CacheShape;
use super::norm::RmsNorm;
use super::rotary::Rotary;
use super::state::ModelState;
use crate::cpu::matmul::Weights;
use crate::host;
use crate::linear::Linear;
use candle_core::{bail, DType, Device, Result, Tensor};
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
/// use candle_gdn::models::{CausalLm, ModelConfig};
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
    pub(super) layers: Vec<DecoderLayer>,
    pub(super) norm: RmsNorm,
    head: Linear,
    pub(super) rotary: Rotary,
    pub(super) config: ModelConfig,
    pub(super) dtype: DType,
    pub(super) device: Device,
    /// Tells the states of two models apart.
    pub(super) id: usize,
}

/// The rows that tokens begin as.
#[derive(Debug)]
enum Embeddings {
    /// `[vocab_size, hidden_size]`
    Table(Tensor),
    /// Those of the head, which packs them for its products: another copy would be large.
    Head(Arc<Weights>),
}

impl CausalLm {
    /// Loads the model at the root of a checkpoint, in the dtype (f32, bf16 or f16) and on the
    /// device of `vb`. Weights that the text model does not need (`mtp.*`, a vision tower) are
    /// never read. On the CPU, matrices in f32 that bf16 or f16 holds exactly are kept in it, which halves
    /// memory and changes no result.
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
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Self> {
        static NEXT_ID: AtomicUsize = AtomicUsize::new(0);
        let dtype = vb.dtype();
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            bail!("dtype: expected F32, BF16 or F16, got {dtype:?}")
        }
        let is_here = |p: &&&str| vb.pp(p).contains_tensor("embed_tokens.weight");
        // If it is nowhere, the error names the tensor at the usual place.
        let prefix = PREFIXES.iter().find(is_here).unwrap_or(&PREFIXES[0]);
        let text = vb.pp(prefix);
        let shape = (config.vocab_size, config.hidden_size);
        let embeddings = text.get(shape, "embed_tokens.weight")?;
        let mut layers = Vec::with_capacity(config.layers.len());
        for (i, layer) in config.layers.iter().enumerate() {
            layers.push(DecoderLayer::load(config, layer, text.pp("layers").pp(i))?);
            progress(i + 1, config.layers.len());
        }
        let head = match config.tie_word_embeddings {
            true => Linear::from_weight(embeddings.clone())?,
            false => Linear::load(config.hidden_size, config.vocab_size, vb.pp("lm_head"))?,
        };
        let embeddings = match &head {
            Linear::Cpu(weights) if config.tie_word_embeddings => Embeddings::Head(weights.clone()),
            _ => Embeddings::Table(embeddings),
        };
        Ok(Self {
            embeddings,
            layers,
            norm: RmsNorm::load(config.hidden_size, config.rms_norm_eps, text.pp("norm"))?,
            head,
            rotary: Rotary::new(&config.attention.rope_inv_freq, config.max_position_embeddings, vb.device())?,
            config: config.clone(),
            dtype,
            device: vb.device().clone(),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        })
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

    /// The state of `batch` (at least 1) sequences before their first token.
    pub fn new_state(&self, batch: usize) -> Result<ModelState> {
        if batch == 0 {
            bail!("batch: expected at least 1, got 0")
        }
        let cache = self.cache_shape(batch, self.config.max_position_embeddings);
        let layers = self.layers.iter().map(|l| l.new_state(batch, &cache));
        let layers = layers.collect::<Result<Vec<_>>>()?;
        Ok(ModelState::new(layers, batch, self.id))
    }

    /// Of the keys and values of one softmax layer.
    pub(super) fn cache_shape(&self, batch: usize, max_len: usize) -> CacheShape {
        CacheShape {
            batch,
            heads: self.config.attention.num_heads,
            kv_heads: self.config.attention.num_kv_heads,
            head_dim: self.config.attention.head_dim,
            max_len,
            dtype: self.dtype,
            device: self.device.clone(),
        }
    }

    /// Runs `ids [batch, tokens]` (u32, u8 or i64) behind the tokens that `state` has seen and
    /// returns the logits of every position, `[batch, tokens, vocab_size]` in f32. `tokens` may
    /// be any number; feeding a prompt in parts gives what feeding it whole gives.
    ///
    /// # Errors
    /// Another rank or dtype, an id outside the vocabulary, another batch than the state's, a
    /// state of another model, more than `max_position_embeddings` tokens. `state` is unchanged
    /// by these; after a failure inside a layer it refuses to go on until it is reset.
    pub fn forward(&self, ids: &Tensor, state: &mut ModelState) -> Result<Tensor> {
        let hidden = self.forward_hidden(ids, state)?;
        self.logits(&hidden)
    }

    /// [`forward`](Self::forward), but the head runs for the last position only:
    /// `[batch, vocab_size]` in f32. No tokens at all are an error.
    pub fn forward_last(&self, ids: &Tensor, state: &mut ModelState) -> Result<Tensor> {
        let tokens = match ids.dims() {
            [_, tokens] => *tokens,
            dims => bail!("ids: expected [batch, tokens], got {dims:?}"),
        };
        if tokens == 0 {
            bail!("ids: expected at least 1 token, got 0")
        }
        let hidden = self.forward_hidden(ids, state)?;
        self.logits(&hidden.narrow(1, tokens - 1, 1)?)?.squeeze(1)
    }

    /// [`forward`](Self::forward) up to the last norm: `[batch, tokens, hidden_size]` in the
    /// model's dtype, for [`logits`](Self::logits).
    pub fn forward_hidden(&self, ids: &Tensor, state: &mut ModelState) -> Result<Tensor> {
        let (batch, tokens) = match ids.dims() {
            &[batch, tokens] => (batch, tokens),
            dims => bail!("ids: expected [batch, tokens], got {dims:?}"),
        };
        let max_positions = self.config.max_position_embeddings;
        state.check(self.id, batch, tokens, max_positions)?;
        let hidden = self.config.hidden_size;
        if tokens == 0 {
            return Tensor::zeros((batch, 0, hidden), self.dtype, &self.device);
        }
        let mut x = self.embed(&self.checked_ids(ids)?)?.reshape((batch, tokens, hidden))?;
        let angles = self.rotary.angles(state.position(), tokens)?;
        state.advance(tokens, |states| {
            for (layer, state) in self.layers.iter().zip(states) {
                x = layer.forward(&x, &angles, state)?;
            }
            self.norm.forward(&x)
        })
    }

    /// The head: `hidden [.., hidden_size]` in the model's dtype to `[.., vocab_size]` in f32.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        if hidden.elem_count() == 0 {
            let mut dims = hidden.dims().to_vec();
            dims.pop();
            dims.push(self.config.vocab_size);
            return Tensor::zeros(dims, DType::F32, &self.device);
        }
        self.head.forward(&hidden.contiguous()?)?.to_dtype(DType::F32)
    }

    /// `ids [tokens]` to `[tokens, hidden_size]`.
    pub(super) fn embed(&self, ids: &Tensor) -> Result<Tensor> {
        match &self.embeddings {
            Embeddings::Table(table) => table.index_select(ids, 0),
            Embeddings::Head(weights) => {
                let hidden = self.config.hidden_size;
                let ids = ids.to_dtype(DType::U32)?.to_vec1::<u32>()?;
                let mut rows = vec![0f32; ids.len() * hidden];
                for (id, row) in ids.iter().zip(rows.chunks_exact_mut(hidden)) {
                    weights.read_row(*id as usize, row);
                }
                host::tensor(rows, (ids.len(), hidden), self.dtype)
            }
        }
    }

    /// The ids in one row on the model's device. An id outside the table would be undefined
    /// behaviour in a GPU gather, so they are looked at on the host, which is free when they come
    /// from there.
    fn checked_ids(&self, ids: &Tensor) -> Result<Tensor> {
        if !matches!(ids.dtype(), DType::U32 | DType::U8 | DType::I64) {
            bail!("ids: expected dtype U32, U8 or I64, got {:?}", ids.dtype())
        }
        let ids = ids.flatten_all()?;
        let host = ids.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        let vocab = self.config.vocab_size;
        if let Some(id) = host.iter().find(|&&id| id < 0 || id as u64 >= vocab as u64) {
            bail!("ids: expected token ids below vocab_size ({vocab}), got {id}")
        }
        ids.to_device(&self.device)
    }
}
