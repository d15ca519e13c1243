//! One decoder layer: a token mixer and a feed-forward, each with a norm and a residual.

use super::attention::GatedAttention;
use super::gdn;
use super::mlp::Mlp;
use super::moe::SparseMoe;
use super::norm::RmsNorm;
use crate::config::{FfnKind, LayerConfig, MixerKind, ModelConfig, NormPlacement};
use crate::formats::{LayerNames, Source};
use crate::parallel::Collective;
use candle_core::{bail, Result, Tensor};
use candle_gdn::{Algo, GatedDeltaNet};
use candle_gdn_core::Launch;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct DecoderLayer {
    mixer_norm: RmsNorm,
    pub(crate) mixer: Mixer,
    ffn_norm: RmsNorm,
    ffn: Ffn,
    norms: NormPlacement,
    /// The other ranks, where this one has a shard of the layer.
    group: Option<Arc<dyn Collective>>,
    /// Whether candle's kernels on CUDA multiply some of its weights.
    pub(crate) uses_candle: bool,
}

/// How a token reads the tokens before it.
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

/// What goes from layer to layer: the sum so far, and the output of the last feed-forward, normed where its norm stands behind it,
/// which the kernel of the next norm adds to it.
#[derive(Debug)]
pub(crate) struct Residual {
    sum: Tensor,
    add: Option<Tensor>,
}

impl DecoderLayer {
    /// `source` is at `..layers.{i}`; the layer is one of the shards of `group`.
    pub(crate) fn load(
        cfg: &ModelConfig,
        layer: &LayerConfig,
        source: &Source,
        group: Option<Arc<dyn Collective>>,
    ) -> Result<Self> {
        let names = LayerNames::of(cfg.family).norms(layer.norms, |name| source.contains(name));
        let [mixer_norm, ffn_norm] = names.map(|name| RmsNorm::load(cfg.hidden_size, cfg, source.pp(name).dense));
        let (mixer, uses_candle) = match layer.mixer {
            MixerKind::LinearAttention => {
                let (layer, uses_candle) = gdn::load(&cfg.gdn, &source.pp("linear_attn"))?;
                (Mixer::Linear(layer), uses_candle)
            }
            MixerKind::FullAttention => {
                let attention = GatedAttention::load(cfg, layer, &source.pp("self_attn"), group.as_ref())?;
                let uses_candle = attention.uses_candle();
                (Mixer::Full(attention), uses_candle)
            }
        };
        let ffn = match (layer.ffn, &cfg.moe) {
            (FfnKind::Dense { intermediate_size }, _) => {
                Ffn::Dense(Mlp::load(cfg.hidden_size, intermediate_size, &source.pp("mlp"))?)
            }
            (FfnKind::Moe, Some(moe)) => Ffn::Moe(Box::new(SparseMoe::load(moe, cfg.hidden_size, &source.pp("mlp"))?)),
            (FfnKind::Moe, None) => bail!("config: a layer uses experts but `moe` is absent"),
        };
        let uses_candle = uses_candle
            || match &ffn {
                Ffn::Dense(mlp) => mlp.uses_candle(),
                Ffn::Moe(moe) => moe.uses_candle(),
            };
        Ok(Self { mixer_norm: mixer_norm?, mixer, ffn_norm: ffn_norm?, ffn, norms: layer.norms, group, uses_candle })
    }

    /// The layer with this choice of the rule's kernel.
    pub(crate) fn with_algo(mut self, algo: Algo) -> Self {
        if let Mixer::Linear(layer) = self.mixer {
            self.mixer = Mixer::Linear(layer.with_algo(algo));
        }
        self
    }

    /// The residual sum, and what the token mixer reads: its norm, or the sum itself.
    pub(crate) fn mixer_input(&self, x: Residual, launch: &Launch) -> Result<(Tensor, Tensor)> {
        match self.norms {
            NormPlacement::Before => x.norm(&self.mixer_norm, launch),
            NormPlacement::Behind => {
                let sum = x.total(&self.mixer_norm, launch)?;
                Ok((sum.clone(), sum))
            }
        }
    }

    /// The layer after its token mixer, whose output is `mixed` (of this rank's shard): `[.., hidden]` each.
    pub(crate) fn feed_forward(&self, sum: &Tensor, mixed: Tensor, launch: &Launch) -> Result<Residual> {
        let mixed = self.all_reduce(mixed)?;
        self.feed_forward_of(sum, &mixed, launch)
    }

    /// [`feed_forward`](Self::feed_forward) of some rows alone.
    pub(crate) fn feed_forward_rows(
        &self,
        sum: &Tensor,
        mixed: Tensor,
        rows: &Tensor,
        launch: &Launch,
    ) -> Result<Residual> {
        let mixed = self.all_reduce(mixed)?.index_select(rows, 0)?;
        self.feed_forward_of(&sum.index_select(rows, 0)?, &mixed, launch)
    }

    fn feed_forward_of(&self, sum: &Tensor, mixed: &Tensor, launch: &Launch) -> Result<Residual> {
        let (sum, y) = match self.norms {
            NormPlacement::Before => self.ffn_norm.forward_sum(sum, mixed, launch)?,
            NormPlacement::Behind => {
                let normed = self.mixer_norm.forward(mixed, launch)?;
                let sum = self.ffn_norm.forward_sum(sum, &normed, launch)?.0;
                (sum.clone(), sum)
            }
        };
        let h = match &self.ffn {
            Ffn::Dense(mlp) => mlp.forward(&y, launch)?,
            Ffn::Moe(moe) => moe.forward(&y, launch)?,
        };
        let h = self.all_reduce(h)?;
        let h = match self.norms {
            NormPlacement::Before => h,
            NormPlacement::Behind => self.ffn_norm.forward(&h, launch)?,
        };
        Ok(Residual { sum, add: Some(h) })
    }

    /// The sum over the ranks.
    fn all_reduce(&self, shard: Tensor) -> Result<Tensor> {
        match &self.group {
            Some(group) => group.all_reduce(&shard),
            None => Ok(shard),
        }
    }
}

impl Residual {
    /// Before the first layer.
    pub(crate) fn new(embedded: Tensor) -> Self {
        Self { sum: embedded, add: None }
    }

    /// The sum alone, by the kernel of `norm`, whose result is dropped: that of a captured pass must be one of ours.
    fn total(self, norm: &RmsNorm, launch: &Launch) -> Result<Tensor> {
        match self.add {
            Some(h) => Ok(norm.forward_sum(&self.sum, &h, launch)?.0),
            None => Ok(self.sum),
        }
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
