//! Softmax attention with an output gate, norms on queries and keys, and partial rotary positions: the layer, its kernel on
//! the CPU, and its two ops on CUDA, before and after the append to the cache.

mod cache;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod decode;
mod forward;
mod kv_cache;
mod prepare;
mod rotary;

pub use cache::AttentionCache;
pub use decode::AttentionDecode;
pub(crate) use forward::{CpuTokens, DeviceTokens};
pub(crate) use kv_cache::{capacity, new_tokens, CacheShape, CpuCaches};
pub use prepare::{rotary_frequencies, AttentionPrepare, PrepareOptions};
pub(crate) use rotary::{Angles, Rotary};

use super::norm::RmsNorm;
use crate::config::{AttentionConfig, ModelConfig};
use crate::formats::{place, Source};
use crate::weights::Weight;
use candle_core::{bail, Result, Tensor};

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
    pub(crate) q_norm: RmsNorm,
    pub(crate) k_norm: RmsNorm,
    /// In the layout of [`AttentionPrepare`].
    pub(crate) frequencies: Tensor,
    /// Tokens that a token sees, itself included; `None`: all before it.
    pub(crate) window: Option<usize>,
    pub(crate) cfg: AttentionConfig,
}

impl GatedAttention {
    /// `source` is at `..self_attn`.
    pub(crate) fn load(cfg: &ModelConfig, window: Option<usize>, source: &Source) -> Result<Self> {
        let (h, eps, a) = (cfg.hidden_size, cfg.rms_norm_eps, &cfg.attention);
        let d = a.head_dim;
        if window == Some(0) {
            bail!("config: a window of softmax attention: expected at least 1 token, got 0")
        }
        let sizes = [a.num_heads * 2 * d, a.num_kv_heads * d, a.num_kv_heads * d];
        let device = source.device();
        let get = |name: &str, rows: usize| source.pp(name).matrix(rows, h, "weight");
        let matrices = [get("q_proj", sizes[0])?, get("k_proj", sizes[1])?, get("v_proj", sizes[2])?];
        let norm = |name: &str| rotated(RmsNorm::load(d, eps, source.pp(name).dense)?, a);
        let (qkv_proj, [q_proj, k_proj, v_proj]) = place::together_and_each(matrices, device)?;
        Ok(Self {
            q_proj,
            k_proj,
            v_proj,
            qkv_proj,
            frequencies: rotary_frequencies(&a.rope_inv_freq, device)?,
            o_proj: place::load(&source.pp("o_proj"), a.num_heads * d, h)?,
            q_norm: norm("q_norm")?,
            k_norm: norm("k_norm")?,
            window,
            cfg: a.clone(),
        })
    }

    /// Whether candle's kernels on CUDA multiply some of its weights.
    pub(crate) fn uses_candle(&self) -> bool {
        [&self.q_proj, &self.k_proj, &self.v_proj, &self.o_proj].into_iter().any(Weight::uses_candle)
    }
}

/// A norm whose scale has the factor of what is rotated after it: so the kernels know of none.
fn rotated(norm: RmsNorm, a: &AttentionConfig) -> Result<RmsNorm> {
    if a.rope_factor == 1. {
        return Ok(norm);
    }
    let rotated = 2 * a.rope_inv_freq.len();
    let factor = (0..a.head_dim).map(|i| if i < rotated { a.rope_factor as f32 } else { 1. });
    let factor = Tensor::from_iter(factor, norm.scale.device())?;
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
