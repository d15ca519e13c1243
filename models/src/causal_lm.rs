//! The causal language model of the Qwen3-Next family.

use crate::config::ModelConfig;
use crate::blocks::decoder::{DecoderLayer, Residual};
use crate::blocks::embeddings::Embeddings;
use crate::blocks::kv_cache::CacheShape;
use crate::blocks::norm::RmsNorm;
use crate::parallel::Vocabulary;
use crate::blocks::rotary::Rotary;
use crate::state::ModelState;
use crate::blocks::linear::Linear;
use crate::formats::OtherType;
use candle_core::{bail, DType, Device, Result, Tensor};
use candle_gdn::plumbing::Launch;

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
    pub(crate) embeddings: Embeddings,
    pub(crate) layers: Vec<DecoderLayer>,
    pub(crate) norm: RmsNorm,
    pub(crate) head: Linear,
    pub(crate) rotary: Rotary,
    pub(crate) config: ModelConfig,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    /// Tells the states of two models apart.
    pub(crate) id: usize,
    /// Of which this model has a part, where others have the rest.
    pub(crate) vocabulary: Option<Vocabulary>,
    pub(crate) kv_heads: usize,
    pub(crate) heads: usize,
    pub(crate) other_types: Vec<OtherType>,
    pub(crate) quantized: bool,
}

impl CausalLm {
    /// Whether matrices are quantised, or were to be: candle's kernels multiply with those.
    pub fn is_quantized(&self) -> bool {
        self.quantized
    }

    /// The matrices that [`Loader::quantize`](crate::Loader::quantize) could not bring into the type that was asked for, and
    /// those of which a rank's part ([`Loader::group`](crate::Loader::group)) could not keep that of its file.
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
    pub(crate) fn cache_shape(&self, batch: usize, max_len: usize) -> CacheShape {
        CacheShape {
            batch,
            heads: self.heads,
            kv_heads: self.kv_heads,
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
        let mut x = Residual::new(self.embed(&self.checked_ids(ids)?)?.reshape((batch, tokens, hidden))?);
        let angles = self.rotary.angles(state.position(), tokens)?;
        state.advance(tokens, |states| {
            for (layer, state) in self.layers.iter().zip(states) {
                x = layer.forward(x, &angles, state)?;
            }
            Ok(x.norm(&self.norm, &Launch::default())?.1)
        })
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
