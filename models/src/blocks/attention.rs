//! Softmax attention with an output gate, norms on queries and keys, and partial rotary positions: the weights, and the
//! CPU's kernel on them. `engine/kv.rs` runs it on the caches of a pool.

use super::norm::RmsNorm;
use crate::config::{AttentionConfig, ModelConfig};
use crate::cpu::attention::{append_all, run_all, Attention, Cache, OnCache, Positions};
use crate::formats::{place, Source};
use crate::ops::rotary_frequencies;
use crate::weights::Weight;
use candle_core::{Module, Result, Tensor};
use candle_gdn::plumbing::cpu::Element;
use candle_gdn::plumbing::host;
use candle_gdn::plumbing::products;

/// One layer's attention.
#[derive(Debug, Clone)]
pub(crate) struct GatedAttention {
    pub(crate) q_proj: Weight,
    pub(crate) k_proj: Weight,
    pub(crate) v_proj: Weight,
    pub(crate) o_proj: Weight,
    /// The rows of q_proj, k_proj and v_proj, which are views of it; not on the CPU, whose products are packed, and quantised
    /// only where one launch takes them.
    pub(crate) qkv_proj: Option<Weight>,
    pub(crate) q_norm: RmsNorm,
    pub(crate) k_norm: RmsNorm,
    /// As [`crate::ops::AttentionPrepare`] takes them.
    pub(crate) frequencies: Tensor,
    pub(crate) cfg: AttentionConfig,
}

/// What the CPU's kernel reads of the new tokens of one sequence: f32 projections.
pub(crate) struct Projections<'a> {
    pub q_gate: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    /// cos and sin of the positions, `[tokens, pairs]`.
    pub angles: [&'a [f32]; 2],
    pub tokens: usize,
}

impl GatedAttention {
    /// `source` is at `..self_attn`.
    pub(crate) fn load(cfg: &ModelConfig, source: &Source) -> Result<Self> {
        let (h, eps, a) = (cfg.hidden_size, cfg.rms_norm_eps, &cfg.attention);
        let d = a.head_dim;
        let sizes = [a.num_heads * 2 * d, a.num_kv_heads * d, a.num_kv_heads * d];
        let device = source.device();
        let get = |name: &str, rows: usize| source.pp(name).matrix(rows, h, "weight");
        let matrices = [get("q_proj", sizes[0])?, get("k_proj", sizes[1])?, get("v_proj", sizes[2])?];
        let (qkv_proj, [q_proj, k_proj, v_proj]) = place::together_and_each(matrices, device)?;
        Ok(Self {
            q_proj,
            k_proj,
            v_proj,
            qkv_proj,
            frequencies: rotary_frequencies(&a.rope_inv_freq, device)?,
            o_proj: place::load(&source.pp("o_proj"), a.num_heads * d, h)?,
            q_norm: RmsNorm::load(d, eps, source.pp("q_norm").dense())?,
            k_norm: RmsNorm::load(d, eps, source.pp("k_norm").dense())?,
            cfg: a.clone(),
        })
    }

    /// Whether candle's kernels on CUDA multiply some of its weights.
    pub(crate) fn uses_candle(&self) -> bool {
        [&self.q_proj, &self.k_proj, &self.v_proj, &self.o_proj].into_iter().any(Weight::uses_candle)
    }

    /// `x [.., hidden]` to `[rows, heads, q and gate]`, and keys and values `[rows, kv_heads, head_dim]`.
    pub(crate) fn project_cpu(&self, x: &Tensor) -> Result<[Vec<f32>; 3]> {
        let (Some(q), Some(k), Some(v)) = (self.q_proj.panels(), self.k_proj.panels(), self.v_proj.panels()) else {
            let out = |proj: &Weight| host::with_f32(&proj.forward(x)?, <[f32]>::to_vec);
            return Ok([out(&self.q_proj)?, out(&self.k_proj)?, out(&self.v_proj)?]);
        };
        host::with_f32(x, |x| products(x, [q, k, v]))
    }

    /// `x [.., hidden]` to keys and values alone.
    pub(crate) fn project_kv_cpu(&self, x: &Tensor) -> Result<[Vec<f32>; 2]> {
        let (Some(k), Some(v)) = (self.k_proj.panels(), self.v_proj.panels()) else {
            let out = |proj: &Weight| host::with_f32(&proj.forward(x)?, <[f32]>::to_vec);
            return Ok([out(&self.k_proj)?, out(&self.v_proj)?]);
        };
        host::with_f32(x, |x| products(x, [k, v]))
    }

    /// Appends the tokens of each sequence to its cache, which has room for no more than `max_tokens` in mind, and writes
    /// the gated attention, `[rows, heads, head_dim]`.
    pub(crate) fn attend_cpu<T: Element>(
        &self,
        sequences: Vec<(Projections<'_>, &mut Cache<T>, &mut [f32])>,
        max_tokens: usize,
    ) -> Result<()> {
        host::with_f32s([self.q_norm.scale(), self.k_norm.scale()], |scales| {
            let sequences = sequences.into_iter().map(|(projections, cache, out)| OnCache {
                attention: self.on_cpu(projections, scales, max_tokens),
                cache,
                out,
            });
            run_all(sequences.collect());
        })
    }

    /// [`attend_cpu`](Self::attend_cpu) without the attention.
    pub(crate) fn append_cpu<T: Element>(
        &self,
        sequences: Vec<(Projections<'_>, &mut Cache<T>)>,
        max_tokens: usize,
    ) -> Result<()> {
        host::with_f32s([self.q_norm.scale(), self.k_norm.scale()], |scales| {
            let sequences =
                sequences.into_iter().map(|(projections, cache)| (self.on_cpu(projections, scales, max_tokens), cache));
            append_all(sequences.collect());
        })
    }

    fn on_cpu<'a>(
        &self,
        projections: Projections<'a>,
        [q_scale, k_scale]: [&'a [f32]; 2],
        max_tokens: usize,
    ) -> Attention<'a> {
        let Projections { q_gate, k, v, angles: [cos, sin], tokens } = projections;
        let pairs = cos.len() / tokens.max(1);
        let positions = Positions { q_scale, k_scale, eps: self.q_norm.eps(), cos, sin, pairs };
        Attention { q_gate, k, v, positions, tokens, max_tokens }
    }
}
