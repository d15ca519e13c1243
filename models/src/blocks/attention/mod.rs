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
pub(crate) use forward::CpuTokens;
pub(crate) use kv_cache::{CacheShape, CpuCaches};
pub use prepare::{rotary_frequencies, AttentionPrepare, PrepareOptions};
pub(crate) use rotary::{Angles, Rotary};

use super::norm::RmsNorm;
use crate::blocks::linear::Linear;
use crate::config::{AttentionConfig, ModelConfig};
use crate::formats::{E4m3Rows, Matrix, Source};
use candle_core::{Result, Tensor};

/// One layer's attention.
#[derive(Debug, Clone)]
pub(crate) struct GatedAttention {
    pub(crate) q_proj: Linear,
    pub(crate) k_proj: Linear,
    pub(crate) v_proj: Linear,
    pub(crate) o_proj: Linear,
    /// The rows of q_proj, k_proj and v_proj, which are views of it. `None` on the CPU, whose products are packed, and for
    /// quantised matrices that one launch cannot multiply.
    pub(crate) qkv_proj: Option<Linear>,
    pub(crate) q_norm: RmsNorm,
    pub(crate) k_norm: RmsNorm,
    /// In the layout of [`AttentionPrepare`].
    pub(crate) frequencies: Tensor,
    pub(crate) cfg: AttentionConfig,
}

impl GatedAttention {
    /// `source` is at `..self_attn`.
    pub(crate) fn load(cfg: &ModelConfig, source: &Source) -> Result<Self> {
        let (h, eps, a) = (cfg.hidden_size, cfg.rms_norm_eps, &cfg.attention);
        let d = a.head_dim;
        let sizes = [a.num_heads * 2 * d, a.num_kv_heads * d, a.num_kv_heads * d];
        let device = source.device();
        let get = |name: &str, rows: usize| source.pp(name).matrix(rows, h, "weight");
        let parts = (get("q_proj", sizes[0])?, get("k_proj", sizes[1])?, get("v_proj", sizes[2])?);
        let (qkv_proj, [q_proj, k_proj, v_proj]) = match parts {
            (Matrix::Dense(q), Matrix::Dense(k), Matrix::Dense(v)) if !device.is_cpu() => {
                let all = Tensor::cat(&[q, k, v], 0)?;
                let rows = |start: usize, n: usize| Linear::dense(all.narrow(0, start, n)?);
                let views = [rows(0, sizes[0])?, rows(sizes[0], sizes[1])?, rows(sizes[0] + sizes[1], sizes[2])?];
                (Some(Linear::dense(all)?), views)
            }
            (Matrix::E4m3(q), Matrix::E4m3(k), Matrix::E4m3(v)) => {
                let all = E4m3Rows::stack(&[q, k, v])?.on(device)?;
                let rows = |start: usize, n: usize| all.rows(start, n).map(|rows| Linear::Dense(rows.into()));
                let views = [rows(0, sizes[0])?, rows(sizes[0], sizes[1])?, rows(sizes[0] + sizes[1], sizes[2])?];
                (Some(Linear::Dense(all.into())), views)
            }
            (q, k, v) => {
                let linear = |part: Matrix| Linear::stack(vec![part], device);
                let each = [linear(q)?, linear(k)?, linear(v)?];
                #[cfg(feature = "cuda")]
                let all = Linear::joined(&each.each_ref());
                #[cfg(not(feature = "cuda"))]
                let all = None;
                (all, each)
            }
        };
        Ok(Self {
            q_proj,
            k_proj,
            v_proj,
            qkv_proj,
            frequencies: rotary_frequencies(&a.rope_inv_freq, device)?,
            o_proj: Linear::load(&source.pp("o_proj"), a.num_heads * d, h)?,
            q_norm: RmsNorm::load(d, eps, source.pp("q_norm").dense())?,
            k_norm: RmsNorm::load(d, eps, source.pp("k_norm").dense())?,
            cfg: a.clone(),
        })
    }
}
