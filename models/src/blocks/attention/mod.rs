//! Softmax attention with norms on queries and keys, and rotary positions and an output gate where the model has them: the layer, its kernel on
//! the CPU, and its two ops on CUDA, before and after the append to the cache.

mod cache;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod decode;
mod forward;
mod kv_cache;
mod prepare;
mod projection_norm;
mod rotary;

pub use cache::AttentionCache;
pub use decode::AttentionDecode;
pub(crate) use forward::{CpuTokens, DeviceTokens};
pub(crate) use kv_cache::{capacity, new_tokens, CacheShape, CpuCaches};
pub use prepare::{rotary_frequencies, AttentionPrepare, PrepareOptions};
pub(crate) use rotary::{Angles, Rotary};

use super::norm::RmsNorm;
use crate::config::{AttentionConfig, LayerConfig, ModelConfig, QkNorm};
use crate::formats::{place, Source};
use crate::parallel::Collective;
use crate::weights::Weight;
use candle_core::{bail, Result, Tensor};
use projection_norm::ProjectionNorm;
use std::sync::Arc;

/// One layer's attention.
#[derive(Debug, Clone)]
pub(crate) struct GatedAttention {
    pub(crate) q_proj: Weight,
    pub(crate) k_proj: Weight,
    pub(crate) v_proj: Weight,
    pub(crate) o_proj: Weight,
    /// The rows of q_proj, k_proj and v_proj, which are views of it. `None` on the CPU, whose products are packed, and for
    /// quantised matrices that one launch cannot multiply.
    pub(crate) qkv_proj: Option<Weight>,
    pub(crate) norm: HeadsNorm,
    /// In the layout of [`AttentionPrepare`]; without positions one pair that never turns.
    pub(crate) frequencies: Tensor,
    /// Whether queries and keys are rotated.
    positions: bool,
    /// Tokens that a token sees, itself included; `None`: all before it.
    pub(crate) window: Option<usize>,
    pub(crate) cfg: AttentionConfig,
}

/// The norm of queries and keys.
#[derive(Debug, Clone)]
pub(crate) enum HeadsNorm {
    /// Of each head, in the kernels that rotate it.
    Head { q: RmsNorm, k: RmsNorm },
    /// Of all heads together, before these.
    Projection(ProjectionNorm),
}

impl HeadsNorm {
    /// Of queries, and of keys.
    fn norms(&self) -> [&RmsNorm; 2] {
        match self {
            Self::Head { q, k } => [q, k],
            Self::Projection(norm) => norm.norms(),
        }
    }
}

impl GatedAttention {
    /// `source` is at `..self_attn` of a layer, which is one of the shards of `group`.
    pub(crate) fn load(
        cfg: &ModelConfig,
        layer: &LayerConfig,
        source: &Source,
        group: Option<&Arc<dyn Collective>>,
    ) -> Result<Self> {
        let (h, a) = (cfg.hidden_size, &cfg.attention);
        let d = a.head_dim;
        if layer.window == Some(0) {
            bail!("config: a window of softmax attention: expected at least 1 token, got 0")
        }
        let sizes = [a.query_rows(), a.num_kv_heads * d, a.num_kv_heads * d];
        let device = source.device();
        let get = |name: &str, rows: usize| source.pp(name).matrix(rows, h, "weight");
        let matrices = [get("q_proj", sizes[0])?, get("k_proj", sizes[1])?, get("v_proj", sizes[2])?];
        let positions = layer.positions && !a.rope_inv_freq.is_empty();
        let norm = |name: &str, width: usize| {
            let norm = RmsNorm::load(width, cfg, source.pp(name).dense)?;
            if positions {
                rotated(norm, a)
            } else {
                Ok(norm)
            }
        };
        let norm = match a.qk_norm {
            QkNorm::Head => HeadsNorm::Head { q: norm("q_norm", d)?, k: norm("k_norm", d)? },
            QkNorm::Projection => {
                let (q, k) = (norm("q_norm", a.num_heads * d)?, norm("k_norm", a.num_kv_heads * d)?);
                HeadsNorm::Projection(ProjectionNorm::new(q, k, group.cloned()))
            }
        };
        let (qkv_proj, [q_proj, k_proj, v_proj]) = place::together_and_each(matrices, device)?;
        Ok(Self {
            q_proj,
            k_proj,
            v_proj,
            qkv_proj,
            frequencies: rotary_frequencies(if positions { &a.rope_inv_freq } else { &[0.] }, device)?,
            positions,
            o_proj: place::load(&source.pp("o_proj"), a.num_heads * d, h)?,
            norm,
            window: layer.window,
            cfg: a.clone(),
        })
    }

    /// Whether candle's kernels on CUDA multiply some of its weights, or make its heads contiguous.
    pub(crate) fn uses_candle(&self) -> bool {
        matches!(self.norm, HeadsNorm::Projection(_))
            || [&self.q_proj, &self.k_proj, &self.v_proj, &self.o_proj].into_iter().any(Weight::uses_candle)
    }
}

/// A norm whose scale has the factor of what is rotated after it: so the kernels know of none.
fn rotated(norm: RmsNorm, a: &AttentionConfig) -> Result<RmsNorm> {
    if a.rope_factor == 1. {
        return Ok(norm);
    }
    let rotated = 2 * a.rope_inv_freq.len();
    let factor = |i: usize| if i % a.head_dim < rotated { a.rope_factor as f32 } else { 1. };
    let factor = Tensor::from_iter((0..norm.scale.elem_count()).map(factor), norm.scale.device())?;
    Ok(RmsNorm { scale: (norm.scale * factor)?, ..norm })
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// The first of two pairs' values, and no others.
    #[test]
    fn what_is_rotated_has_the_factor() -> Result<()> {
        let config = |rope_factor| AttentionConfig {
            num_heads: 1,
            num_kv_heads: 1,
            head_dim: 6,
            rope_inv_freq: vec![1., 0.1],
            rope_factor,
            output_gate: true,
            qk_norm: QkNorm::Head,
        };
        let scale = |factor| -> Result<Vec<f32>> {
            let norm = RmsNorm { scale: Tensor::arange(1f32, 7., &Device::Cpu)?, eps: 1e-6 };
            rotated(norm, &config(factor))?.scale.to_vec1()
        };
        assert_eq!(scale(1.)?, [1., 2., 3., 4., 5., 6.]);
        assert_eq!(scale(1.5)?, [1.5, 3., 4.5, 6., 5., 6.]);
        Ok(())
    }
}
