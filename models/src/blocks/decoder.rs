//! One decoder layer: a token mixer and a feed-forward, each behind a norm and a residual.

use super::attention::GatedAttention;
use super::gdn::gated_delta_net;
use super::mlp::Mlp;
use super::moe::SparseMoe;
use super::norm::RmsNorm;
use crate::config::{FfnKind, LayerConfig, MixerKind, ModelConfig};
use crate::formats::Source;
use crate::parallel::Collective;
use candle_core::{bail, Result, Tensor};
use candle_gdn::plumbing::Launch;
use candle_gdn::{Algo, GatedDeltaNet};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct DecoderLayer {
    input_norm: RmsNorm,
    pub(crate) mixer: Mixer,
    post_norm: RmsNorm,
    ffn: Ffn,
    /// The other ranks, where this one has a part of the layer.
    group: Option<Arc<dyn Collective>>,
}

/// What a token takes from those before it.
#[derive(Debug)]
pub(crate) enum Mixer {
    Linear(GatedDeltaNet),
    Full(GatedAttention),
}

#[derive(Debug)]
enum Ffn {
    Dense(Mlp),
    Moe(Box<SparseMoe>),
}

/// What runs from layer to layer: the sum so far, and what the last feed-forward adds to it, which the next norm does
/// in passing.
#[derive(Debug)]
pub(crate) struct Residual {
    sum: Tensor,
    add: Option<Tensor>,
}

impl DecoderLayer {
    /// `source` is at `..layers.{i}`.
    pub(crate) fn load(cfg: &ModelConfig, layer: &LayerConfig, source: &Source) -> Result<Self> {
        let norm = |name: &str| RmsNorm::load(cfg.hidden_size, cfg.rms_norm_eps, source.pp(name).dense());
        let mixer = match layer.mixer {
            MixerKind::LinearAttention => Mixer::Linear(gated_delta_net(&cfg.gdn, &source.pp("linear_attn"))?),
            MixerKind::FullAttention => Mixer::Full(GatedAttention::load(cfg, &source.pp("self_attn"))?),
        };
        let ffn = match (layer.ffn, &cfg.moe) {
            (FfnKind::Dense { intermediate_size }, _) => {
                Ffn::Dense(Mlp::load_from(cfg.hidden_size, intermediate_size, &source.pp("mlp"))?)
            }
            (FfnKind::Moe, Some(moe)) => {
                Ffn::Moe(Box::new(SparseMoe::load_from(moe, cfg.hidden_size, &source.pp("mlp"))?))
            }
            (FfnKind::Moe, None) => bail!("config: a layer uses experts but `moe` is absent"),
        };
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            mixer,
            post_norm: norm("post_attention_layernorm")?,
            ffn,
            group: None,
        })
    }

    /// The layer as a part of one, whose others `group` has.
    pub(crate) fn in_group(self, group: Option<Arc<dyn Collective>>) -> Self {
        Self { group, ..self }
    }

    /// The layer with this choice of the rule's kernel.
    pub(crate) fn with_algo(mut self, algo: Algo) -> Self {
        if let Mixer::Linear(layer) = self.mixer {
            self.mixer = Mixer::Linear(layer.with_algo(algo));
        }
        self
    }

    /// The layer with `mix` for the token mixer: `x [.., hidden]` to the same.
    pub(crate) fn around(
        &self,
        x: Residual,
        launch: &Launch,
        mix: impl FnOnce(&Mixer, &Tensor) -> Result<Tensor>,
    ) -> Result<Residual> {
        self.around_rows(x, launch, mix, |x| Ok(x.clone()))
    }

    /// [`around`](Self::around) of which only some `rows` go on behind the token mixer.
    pub(crate) fn around_rows(
        &self,
        x: Residual,
        launch: &Launch,
        mix: impl FnOnce(&Mixer, &Tensor) -> Result<Tensor>,
        rows: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Residual> {
        let (x, y) = x.norm(&self.input_norm, launch)?;
        let (x, h) = (rows(&x)?, rows(&self.sum(mix(&self.mixer, &y)?)?)?);
        let (sum, y) = self.post_norm.forward_sum(&x, &h, launch)?;
        let h = match &self.ffn {
            Ffn::Dense(mlp) => mlp.forward(&y, launch)?,
            Ffn::Moe(moe) => moe.forward(&y, launch)?,
        };
        Ok(Residual { sum, add: Some(self.sum(h)?) })
    }

    /// What the token mixer takes of `x`.
    pub(crate) fn mixer_input(&self, x: Residual, launch: &Launch) -> Result<Tensor> {
        Ok(x.norm(&self.input_norm, launch)?.1)
    }

    /// Over the ranks.
    fn sum(&self, part: Tensor) -> Result<Tensor> {
        match &self.group {
            Some(group) => group.all_reduce(&part),
            None => Ok(part),
        }
    }
}

impl Residual {
    /// Before the first layer.
    pub(crate) fn new(embedded: Tensor) -> Self {
        Self { sum: embedded, add: None }
    }

    /// The sum, and its norm.
    pub(crate) fn norm(self, norm: &RmsNorm, launch: &Launch) -> Result<(Tensor, Tensor)> {
        match self.add {
            Some(h) => norm.forward_sum(&self.sum, &h, launch),
            None => {
                let y = norm.forward(&self.sum, launch)?;
                Ok((self.sum, y))
            }
        }
    }

    /// Some of its rows.
    pub(crate) fn rows(&self, rows: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self { sum: rows(&self.sum)?, add: self.add.as_ref().map(rows).transpose()? })
    }
}
