//! One decoder layer: a token mixer and a feed-forward, each behind a norm and a residual.

use super::attention::GatedAttention;
use super::config::{FfnKind, LayerConfig, MixerKind, ModelConfig};
use super::kv_cache::{CacheShape, KvCache};
use super::mlp::Mlp;
use super::moe::SparseMoe;
use super::norm::RmsNorm;
use super::rotary::Angles;
use crate::{GatedDeltaNet, GdnState};
use candle_core::{bail, Result, Tensor};
use candle_nn::VarBuilder;

#[derive(Debug)]
pub(crate) struct DecoderLayer {
    input_norm: RmsNorm,
    pub(super) mixer: Mixer,
    post_norm: RmsNorm,
    ffn: Ffn,
}

/// What a token takes from those before it.
#[derive(Debug)]
pub(super) enum Mixer {
    Linear(GatedDeltaNet),
    Full(GatedAttention),
}

#[derive(Debug)]
enum Ffn {
    Dense(Mlp),
    Moe(SparseMoe),
}

/// What a layer remembers of the tokens so far.
#[derive(Debug)]
pub(crate) enum LayerState {
    Linear(GdnState),
    Full(KvCache),
}

impl DecoderLayer {
    /// `vb` is at `..layers.{i}`.
    pub(crate) fn load(cfg: &ModelConfig, layer: &LayerConfig, vb: VarBuilder) -> Result<Self> {
        let norm = |name: &str| RmsNorm::load(cfg.hidden_size, cfg.rms_norm_eps, vb.pp(name));
        let mixer = match layer.mixer {
            MixerKind::LinearAttention => Mixer::Linear(GatedDeltaNet::load(&cfg.gdn, vb.pp("linear_attn"))?),
            MixerKind::FullAttention => Mixer::Full(GatedAttention::load(cfg, vb.pp("self_attn"))?),
        };
        let ffn = match (layer.ffn, &cfg.moe) {
            (FfnKind::Dense { intermediate_size }, _) => {
                Ffn::Dense(Mlp::load(cfg.hidden_size, intermediate_size, vb.pp("mlp"))?)
            }
            (FfnKind::Moe, Some(moe)) => Ffn::Moe(SparseMoe::load(moe, cfg.hidden_size, vb.pp("mlp"))?),
            (FfnKind::Moe, None) => bail!("config: a layer uses experts but `moe` is absent"),
        };
        Ok(Self { input_norm: norm("input_layernorm")?, mixer, post_norm: norm("post_attention_layernorm")?, ffn })
    }

    /// The state before the first token; `cache` describes a key-value cache of this model.
    pub(crate) fn new_state(&self, batch: usize, cache: &CacheShape) -> Result<LayerState> {
        Ok(match &self.mixer {
            Mixer::Linear(gdn) => LayerState::Linear(gdn.new_state(batch)?),
            Mixer::Full(_) => LayerState::Full(KvCache::new(cache)),
        })
    }

    /// `x [batch, tokens, hidden]` to the same.
    pub(crate) fn forward(&self, x: &Tensor, angles: &Angles, state: &mut LayerState) -> Result<Tensor> {
        self.around(x, |mixer, h| match (mixer, state) {
            (Mixer::Linear(gdn), LayerState::Linear(s)) => gdn.forward(h, s),
            (Mixer::Full(attn), LayerState::Full(s)) => attn.forward(h, angles, s),
            _ => bail!("state: its layers are of other kinds than the model's"),
        })
    }

    /// The layer with `mix` for the token mixer: `x [.., hidden]` to the same.
    pub(super) fn around(&self, x: &Tensor, mix: impl FnOnce(&Mixer, &Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let h = mix(&self.mixer, &self.input_norm.forward(x)?)?;
        let x = (x + h)?;
        let h = self.post_norm.forward(&x)?;
        let h = match &self.ffn {
            Ffn::Dense(mlp) => mlp.forward(&h)?,
            Ffn::Moe(moe) => moe.forward(&h)?,
        };
        x + h
    }
}

impl LayerState {
    pub(crate) fn reset(&mut self) -> Result<()> {
        match self {
            Self::Linear(s) => s.reset(),
            Self::Full(s) => {
                s.reset();
                Ok(())
            }
        }
    }
}
