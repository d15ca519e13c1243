//! The draft head of a checkpoint, under `mtp.`: from a hidden state of the model and the next token to the token
//! after that.

use super::decoder::{DecoderLayer, Residual};
use super::norm::RmsNorm;
use crate::config::{LayerConfig, MixerKind, ModelConfig};
use crate::formats::{place, Source};
use crate::parallel::Collective;
use crate::weights::{plan, Weight};
use candle_core::{bail, Result, Tensor, D};
use candle_gdn_core::Launch;
use std::sync::Arc;

/// One softmax layer after a projection of both; embedding and `lm_head` are the model's.
#[derive(Debug)]
pub(crate) struct DraftHead {
    norm_embedding: RmsNorm,
    norm_hidden: RmsNorm,
    /// `[hidden, 2 * hidden]`: of the embedding, then of the hidden state.
    fc: Weight,
    pub(crate) layer: DecoderLayer,
    pub(crate) norm: RmsNorm,
    /// The model's `lm_head` rounded to 8 bits: reading it is most of what a draft takes, and what a draft is rounded to the model
    /// judges.
    lm_head: Option<Weight>,
}

impl DraftHead {
    /// Whether `source`, the root of a checkpoint, has one.
    pub(crate) fn is_in(source: &Source) -> bool {
        source.pp("mtp").pp("fc").contains("weight")
    }

    /// Of the checkpoint at `source`; `config` is that of the rank's shard.
    pub(crate) fn load(config: &ModelConfig, source: &Source, group: Option<Arc<dyn Collective>>) -> Result<Self> {
        let (mtp, h) = (source.pp("mtp"), config.hidden_size);
        let norm = |name: &str| RmsNorm::load(h, config, mtp.pp(name).dense);
        let Some(last) = config.layers.last() else { bail!("config: expected at least one layer") };
        let layer = LayerConfig::new(MixerKind::FullAttention, last.ffn);
        Ok(Self {
            norm_embedding: norm("pre_fc_norm_embedding")?,
            norm_hidden: norm("pre_fc_norm_hidden")?,
            fc: place::load(&mtp.pp("fc"), 2 * h, h)?,
            layer: DecoderLayer::load(config, &layer, &mtp.pp("layers").pp(0), group)?,
            norm: norm("norm")?,
            lm_head: None,
        })
    }

    /// With a copy of `lm_head` of its own, where that is read faster.
    pub(crate) fn with_copy_of(self, lm_head: &Weight) -> Result<Self> {
        #[cfg(feature = "cuda")]
        return Ok(Self { lm_head: place::rounded(lm_head)?, ..self });
        #[cfg(not(feature = "cuda"))]
        let _ = lm_head;
        #[cfg(not(feature = "cuda"))]
        Ok(self)
    }

    /// Whether candle's kernels on CUDA multiply some of its weights.
    pub(crate) fn uses_candle(&self) -> bool {
        self.fc.uses_candle() || self.layer.uses_candle
    }

    /// The copy, where so many rows are faster by it.
    pub(crate) fn copy_for(&self, rows: usize) -> Option<&Weight> {
        self.lm_head.as_ref().filter(|_| rows <= plan::FEW)
    }

    /// What the layer takes: of the embeddings of tokens and the hidden states before them, `[tokens, hidden]` each.
    pub(crate) fn input(&self, embedded: &Tensor, hidden: &Tensor, launch: &Launch) -> Result<Residual> {
        let embedded = self.norm_embedding.forward(embedded, launch)?;
        let hidden = self.norm_hidden.forward(hidden, launch)?;
        let both = Tensor::cat(&[embedded, hidden], D::Minus1)?;
        Ok(Residual::new(self.fc.multiply(&both, launch)?))
    }
}
