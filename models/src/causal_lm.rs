//! The causal language model of every family.

use crate::blocks::attention::{CacheShape, Rotary};
use crate::blocks::decoder::{DecoderLayer, Mixer};
use crate::blocks::draft_head::DraftHead;
use crate::blocks::embeddings::Embeddings;
use crate::blocks::norm::RmsNorm;
use crate::config::ModelConfig;
use crate::formats::OtherType;
use crate::parallel::Vocabulary;
use crate::weights::Weight;
use candle_core::{bail, DType, Device, Result, Tensor};
use candle_gdn::GatedDeltaNet;
use candle_gdn_core::{Launch, Working};

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
    pub(crate) draft_head: Option<DraftHead>,
    pub(crate) norm: RmsNorm,
    pub(crate) head: Weight,
    pub(crate) rotary: Rotary,
    pub(crate) config: ModelConfig,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    /// Unique in the process, so that a state of another model is noticed.
    pub(crate) id: usize,
    /// The vocabulary's shard of this rank, where there are several.
    pub(crate) vocabulary: Option<Vocabulary>,
    pub(crate) kv_heads: usize,
    pub(crate) heads: usize,
    pub(crate) other_types: Vec<OtherType>,
    pub(crate) remarks: Vec<String>,
    /// Set where matrices are quantised, or quantising was requested.
    pub(crate) quantized: Option<Kernels>,
}

/// Whose kernels on CUDA multiply with the quantised matrices of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernels {
    /// Ours alone.
    Ours,
    /// Candle's, with some matrices at least.
    Candles,
}

impl CausalLm {
    /// Whether matrices are quantised, or quantising was requested.
    pub fn is_quantized(&self) -> bool {
        self.quantized.is_some()
    }

    /// The matrices that [`Loader::quantize`](crate::Loader::quantize) could not bring into the requested type, and those whose
    /// shard ([`Loader::group`](crate::Loader::group)) could not keep the type of its file.
    pub fn other_types(&self) -> &[OtherType] {
        &self.other_types
    }

    /// What a user should know of the checkpoint, a line each: tensors that were left unread, settings that its weights contradict.
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// Whether the model has the checkpoint's draft head ([`Loader::draft_head`](crate::Loader::draft_head)).
    pub fn has_draft_head(&self) -> bool {
        self.draft_head.is_some()
    }

    /// The configuration that the model was loaded with.
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

    pub(crate) fn gated_delta_nets(&self) -> impl Iterator<Item = &GatedDeltaNet> {
        self.layers.iter().filter_map(|layer| match &layer.mixer {
            Mixer::Linear(gdn) => Some(gdn),
            Mixer::Full(_) => None,
        })
    }

    /// The window of each softmax layer.
    pub(crate) fn attention_windows(&self) -> impl Iterator<Item = Option<usize>> + '_ {
        self.layers.iter().filter_map(|layer| match &layer.mixer {
            Mixer::Full(attention) => Some(attention.window),
            Mixer::Linear(_) => None,
        })
    }

    /// The keys and values of one sequence in one softmax layer without a window.
    pub(crate) fn cache_shape(&self, max_len: usize) -> CacheShape {
        CacheShape {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.config.attention.head_dim,
            max_len,
            window: None,
            dtype: self.dtype,
            device: self.device.clone(),
        }
    }

    /// The head: `hidden [.., hidden_size]` in the model's dtype to `[.., vocab_size]` in f32.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.logits_launched(hidden, &Launch::default().overlapping())
    }

    /// At the end of a pass: an error where another rank did not take part in all of it.
    pub(crate) fn settle(&self) -> Result<()> {
        self.vocabulary.as_ref().map_or(Ok(()), |vocabulary| vocabulary.group.settle())
    }

    /// Whether another rank is gone, so that no pass can succeed any more.
    pub(crate) fn has_lost_a_rank(&self) -> bool {
        self.vocabulary.as_ref().is_some_and(|vocabulary| vocabulary.group.is_lost())
    }

    /// After an error in the middle of a pass, which the other ranks go on with, this one leaves them: they would wait for ever, or
    /// use sums that belong to other passes. False where it is alone.
    pub(crate) fn leave(&self) -> bool {
        let group = self.vocabulary.as_ref().map(|vocabulary| &vocabulary.group).filter(|group| group.size() > 1);
        group.inspect(|group| group.leave()).is_some()
    }

    /// `result`, or an error where another rank has one. All ranks call this, since they must go on alike. One that cannot leaves.
    pub(crate) fn agree<T>(&self, result: Result<T>) -> Result<T> {
        let Some(Vocabulary { group, .. }) = self.vocabulary.as_ref().filter(|shard| shard.group.size() > 1) else {
            return result;
        };
        let _working = Working::new(&self.device);
        let count = || {
            let failed = group.all_reduce(&Tensor::new(&[f32::from(u8::from(result.is_err()))], &self.device)?)?;
            group.settle()?;
            failed.to_vec1::<f32>()
        };
        let failed = count().inspect_err(|_| group.leave())?[0];
        if result.is_ok() && failed > 0. {
            bail!("expected all ranks to succeed, but another one failed")
        }
        result
    }

    /// [`logits`](Self::logits) with the launch options of a pass.
    pub(crate) fn logits_launched(&self, hidden: &Tensor, launch: &Launch) -> Result<Tensor> {
        self.scores_launched(hidden, launch)?.to_dtype(DType::F32)
    }

    /// The logits in the dtype of the head's product.
    pub(crate) fn scores_launched(&self, hidden: &Tensor, launch: &Launch) -> Result<Tensor> {
        self.scores_by(&self.head, hidden, launch)
    }

    /// [`scores_launched`](Self::scores_launched) of drafts: `hidden [rows, hidden_size]`.
    pub(crate) fn draft_scores(&self, head: &DraftHead, hidden: &Tensor, launch: &Launch) -> Result<Tensor> {
        self.scores_by(head.copy_for(hidden.dim(0)?).unwrap_or(&self.head), hidden, launch)
    }

    fn scores_by(&self, head: &Weight, hidden: &Tensor, launch: &Launch) -> Result<Tensor> {
        let _working = Working::new(&self.device);
        if hidden.elem_count() == 0 {
            let mut dims = hidden.dims().to_vec();
            dims.pop();
            dims.push(self.config.vocab_size);
            return Tensor::zeros(dims, self.dtype, &self.device);
        }
        let logits = head.multiply(&hidden.contiguous()?, launch)?;
        match &self.vocabulary {
            Some(vocabulary) => vocabulary.gather(&logits),
            None => Ok(logits),
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
