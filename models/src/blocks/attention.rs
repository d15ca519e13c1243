//! Softmax attention with an output gate, norms on queries and keys, and partial rotary positions.

use crate::config::{AttentionConfig, ModelConfig};
use super::kv_cache::{DeviceCache, KvCache};
use super::norm::RmsNorm;
use super::rotary::Angles;
use crate::cpu::attention::{run_all, Attention, Cache, Call, Positions};
use candle_gdn::plumbing::cpu::Element;
use candle_gdn::plumbing::host;
use crate::blocks::linear::Linear;
use crate::ops::rotary_frequencies;
use crate::formats::{Matrix, Source};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_gdn::plumbing::products;

/// One layer's attention; the state is a [`KvCache`].
#[derive(Debug, Clone)]
pub(crate) struct GatedAttention {
    pub(crate) q_proj: Linear,
    pub(crate) k_proj: Linear,
    pub(crate) v_proj: Linear,
    pub(crate) o_proj: Linear,
    /// The rows of q_proj, k_proj and v_proj, which are views of it; not on the CPU, whose products are packed, and not
    /// quantised.
    pub(crate) qkv_proj: Option<Linear>,
    pub(crate) q_norm: RmsNorm,
    pub(crate) k_norm: RmsNorm,
    /// As [`crate::ops::AttentionPrepare`] takes them.
    pub(crate) frequencies: Tensor,
    pub(crate) cfg: AttentionConfig,
    max_positions: usize,
}

/// What the CPU's kernel reads of a call: f32 projections of one sequence, or of several of one length.
pub(crate) struct Projections<'a> {
    pub q_gate: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    /// cos and sin of the positions, `[tokens, pairs]`.
    pub angles: [&'a [f32]; 2],
    /// Tokens of a sequence.
    pub tokens: usize,
}

/// Added to the scores of later tokens. Finite, since `-inf` times a mask of 0 is NaN; `exp` gives
/// exactly 0 for it next to any score a model can have.
const MASKED: f64 = -1e30;

/// Bytes of f32 scores held at a time; longer prompts are taken in blocks of queries.
const SCORE_BYTES_CPU: usize = 32 << 20;
const SCORE_BYTES_GPU: usize = 512 << 20;

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
            (q, k, v) => {
                let linear = |part: Matrix| Linear::stack(vec![part], device);
                (None, [linear(q)?, linear(k)?, linear(v)?])
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
            max_positions: cfg.max_position_embeddings,
        })
    }

    /// `x [batch, tokens, hidden]` to the same; the tokens follow those in `cache`.
    pub(crate) fn forward(&self, x: &Tensor, angles: &Angles, cache: &mut KvCache) -> Result<Tensor> {
        match cache {
            KvCache::Device(cache) => self.forward_device(x, angles, cache),
            KvCache::F32(cache) => self.forward_cpu(x, angles, cache),
            KvCache::BF16(cache) => self.forward_cpu(x, angles, cache),
            KvCache::F16(cache) => self.forward_cpu(x, angles, cache),
        }
    }

    /// Everything between the projections is one kernel.
    fn forward_cpu<T: Element>(&self, x: &Tensor, angles: &Angles, cache: &mut Cache<T>) -> Result<Tensor> {
        let (b, t, _) = x.dims3()?;
        let width = self.cfg.num_heads * self.cfg.head_dim;
        let [q_gate, k, v] = self.project_cpu(x)?;
        let mut o = vec![0f32; b * t * width];
        let (cos, sin) = angles.tables();
        host::with_f32s([cos, sin], |angles| {
            let call = Projections { q_gate: &q_gate, k: &k, v: &v, angles, tokens: t };
            self.attend_cpu(vec![(call, cache, &mut o[..])], self.max_positions)
        })??;
        self.o_proj.forward(&host::tensor(o, (b, t, width), x.dtype())?)
    }

    /// `x [.., hidden]` to `[rows, heads, q and gate]`, and keys and values `[rows, kv_heads, head_dim]`.
    pub(crate) fn project_cpu(&self, x: &Tensor) -> Result<[Vec<f32>; 3]> {
        let (Some(q), Some(k), Some(v)) = (self.q_proj.packed(), self.k_proj.packed(), self.v_proj.packed()) else {
            let out = |proj: &Linear| host::with_f32(&proj.forward(x)?, <[f32]>::to_vec);
            return Ok([out(&self.q_proj)?, out(&self.k_proj)?, out(&self.v_proj)?]);
        };
        host::with_f32(x, |x| products(x, [q, k, v]))
    }

    /// Appends each call's tokens to its cache, which has room for no more than `max_tokens` in mind, and writes the gated
    /// attention, `[rows, heads, head_dim]`.
    pub(crate) fn attend_cpu<T: Element>(
        &self,
        calls: Vec<(Projections<'_>, &mut Cache<T>, &mut [f32])>,
        max_tokens: usize,
    ) -> Result<()> {
        host::with_f32s([self.q_norm.scale(), self.k_norm.scale()], |[q_scale, k_scale]| {
            let calls = calls.into_iter().map(|(call, cache, out)| {
                let Projections { q_gate, k, v, angles: [cos, sin], tokens } = call;
                let pairs = cos.len() / tokens.max(1);
                let positions = Positions { q_scale, k_scale, eps: self.q_norm.eps(), cos, sin, pairs };
                Call { attention: Attention { q_gate, k, v, positions, tokens, max_tokens }, cache, out }
            });
            run_all(calls.collect());
        })
    }

    fn forward_device(&self, x: &Tensor, angles: &Angles, cache: &mut DeviceCache) -> Result<Tensor> {
        let (b, t, _) = x.dims3()?;
        let (nq, nkv, d) = (self.cfg.num_heads, self.cfg.num_kv_heads, self.cfg.head_dim);
        // A row of q_proj's output is [q | gate] per head.
        let q_gate = self.q_proj.forward(x)?.reshape((b, t, nq, 2 * d))?;
        let gate = q_gate.narrow(3, d, d)?;
        let q = self.positioned(&self.q_norm, &q_gate.narrow(3, 0, d)?, angles)?;
        let k = self.k_proj.forward(x)?.reshape((b, t, nkv, d))?;
        let k = self.positioned(&self.k_norm, &k, angles)?;
        let v = self.v_proj.forward(x)?.reshape((b, t, nkv, d))?;
        let v = v.transpose(1, 2)?.contiguous()?;

        // Scaling q in f32, before it is rounded, keeps f16 scores far from overflow.
        let q = (q * (d as f64).powf(-0.5))?.to_dtype(x.dtype())?;
        let (k, v) = cache.append(&k.to_dtype(x.dtype())?.contiguous()?, &v)?;
        let o = causal_attention(&q, &k, &v)?;

        let o = o.transpose(1, 2)?.reshape((b, t, nq * d))?;
        let gate = gate.to_dtype(DType::F32)?.reshape((b, t, nq * d))?;
        let gated = (o.to_dtype(DType::F32)? * candle_nn::ops::sigmoid(&gate)?)?;
        self.o_proj.forward(&gated.to_dtype(x.dtype())?)
    }

    /// Norm and rotation: `[b, t, heads, d]` to f32 `[b, heads, t, d]`.
    fn positioned(&self, norm: &RmsNorm, x: &Tensor, angles: &Angles) -> Result<Tensor> {
        angles.apply(&norm.forward_f32(x)?.transpose(1, 2)?)
    }
}

/// Softmax attention of the last `tq` of `tk` tokens, each over itself and all before it.
///
/// `q [b, nq, tq, d]`, already scaled; `k`, `v` `[b, nkv, tk, d]`, query head `h` reads key head
/// `h / (nq / nkv)`. Returns `[b, nq, tq, d]` in `q`'s dtype; scores and softmax are f32.
fn causal_attention(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (b, nq, tq, _) = q.dims4()?;
    let tk = k.dim(2)?;
    let out_dtype = q.dtype();
    // candle has no half-precision arithmetic of its own on the CPU: widen once for all blocks.
    let wide = |x: &Tensor| match x.device() {
        Device::Cpu => x.to_dtype(DType::F32),
        _ => Ok(x.clone()),
    };
    let (q, k, v) = (wide(q)?, wide(k)?, wide(v)?);
    let budget = match q.device() {
        Device::Cpu => SCORE_BYTES_CPU,
        _ => SCORE_BYTES_GPU,
    };
    let block = (budget / (4 * b * nq * tk)).clamp(1, tq);
    let mut blocks = Vec::with_capacity(tq.div_ceil(block));
    let mut start = 0;
    while start < tq {
        let len = block.min(tq - start);
        // Keys after the block's last query are masked for all of it: leave them out.
        let seen = tk - tq + start + len;
        let o = attention_block(&q.narrow(2, start, len)?, &k.narrow(2, 0, seen)?, &v.narrow(2, 0, seen)?)?;
        blocks.push(o.to_dtype(out_dtype)?);
        start += len;
    }
    match blocks.as_slice() {
        [one] => Ok(one.clone()),
        many => Tensor::cat(many, 2),
    }
}

/// One block: its last query is the last token of `k`.
fn attention_block(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (b, nq, tq, d) = q.dims4()?;
    let (_, nkv, tk, _) = k.dims4()?;
    let r = nq / nkv;
    // The query heads of a key head stand together, so they are rows of one matrix.
    let q = q.contiguous()?.reshape((b, nkv, r * tq, d))?;
    let mut scores = q.matmul(&k.transpose(2, 3)?)?.to_dtype(DType::F32)?;
    if tq > 1 {
        let shape = (b, nkv * r, tq, tk);
        scores =
            scores.reshape(shape)?.broadcast_add(&causal_mask(tq, tk, q.device())?)?.reshape((b, nkv, r * tq, tk))?;
    }
    let p = candle_nn::ops::softmax_last_dim(&scores)?;
    p.to_dtype(v.dtype())?.matmul(v)?.reshape((b, nq, tq, d))
}

/// `[tq, tk]` in f32: [`MASKED`] where key `j` comes after query `tk - tq + i`, else 0.
fn causal_mask(tq: usize, tk: usize, device: &Device) -> Result<Tensor> {
    let first = (tk - tq) as u32;
    let rows = Tensor::arange(first, first + tq as u32, device)?.reshape((tq, 1))?;
    let cols = Tensor::arange(0, tk as u32, device)?.reshape((1, tk))?;
    cols.broadcast_gt(&rows)?.to_dtype(DType::F32)? * MASKED
}

#[cfg(test)]
mod tests {
    use crate::blocks::kv_cache::CacheShape;
    use crate::blocks::rotary::Rotary;
    use super::*;
    use candle_core::D;
    use candle_nn::VarBuilder;
    use std::collections::HashMap;

    /// The definition, one query at a time.
    fn naive(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (b, nq, tq, d) = q.dims4()?;
        let (nkv, tk) = (k.dim(1)?, k.dim(2)?);
        let mut out = vec![0f32; b * nq * tq * d];
        for i in 0..b {
            let k: Vec<Vec<Vec<f32>>> = k.get(i)?.to_vec3()?;
            let v: Vec<Vec<Vec<f32>>> = v.get(i)?.to_vec3()?;
            let q: Vec<Vec<Vec<f32>>> = q.get(i)?.to_vec3()?;
            for h in 0..nq {
                let g = h / (nq / nkv);
                for t in 0..tq {
                    let seen = tk - tq + t + 1;
                    let s: Vec<f64> = (0..seen)
                        .map(|j| {
                            let dot = q[h][t].iter().zip(&k[g][j]);
                            dot.map(|(a, b)| (a * b) as f64).sum::<f64>().exp()
                        })
                        .collect();
                    let total: f64 = s.iter().sum();
                    for c in 0..d {
                        let o: f64 = (0..seen).map(|j| s[j] / total * v[g][j][c] as f64).sum();
                        out[((i * nq + h) * tq + t) * d + c] = o as f32;
                    }
                }
            }
        }
        Tensor::from_vec(out, (b, nq, tq, d), &Device::Cpu)
    }

    #[test]
    fn blocks_agree_with_the_definition() -> Result<()> {
        for (b, nq, nkv, tq, tk) in [(1, 4, 2, 5, 9), (2, 6, 2, 7, 7), (2, 4, 4, 1, 6)] {
            let rand = |h, t| Tensor::randn(0f32, 1., (b, h, t, 8), &Device::Cpu);
            let (q, k, v) = (rand(nq, tq)?, rand(nkv, tk)?, rand(nkv, tk)?);
            let want = naive(&q, &k, &v)?;
            let whole = causal_attention(&q, &k, &v)?;
            let mut parts = Vec::new();
            for t in 0..tq {
                let seen = tk - tq + t + 1;
                parts.push(attention_block(&q.narrow(2, t, 1)?, &k.narrow(2, 0, seen)?, &v.narrow(2, 0, seen)?)?);
            }
            for got in [whole, Tensor::cat(&parts, 2)?] {
                let err = (got - &want)?.abs()?.flatten_all()?.max(D::Minus1)?;
                assert!(err.to_scalar::<f32>()? < 1e-5);
            }
        }
        Ok(())
    }

    /// The tensor ops run on the CPU as well, where nothing but these tests calls them.
    #[test]
    fn tensor_ops_and_cpu_kernel_agree() -> Result<()> {
        let json = serde_json::json!({
            "model_type": "qwen3_next", "vocab_size": 8, "hidden_size": 20, "intermediate_size": 8,
            "num_hidden_layers": 1, "layer_types": ["full_attention"], "num_attention_heads": 6,
            "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
            "tie_word_embeddings": true, "linear_conv_kernel_dim": 4, "linear_num_key_heads": 1,
            "linear_num_value_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        });
        let cfg = ModelConfig::from_json(&json.to_string())?;
        let AttentionConfig { num_heads, num_kv_heads, head_dim, .. } = cfg.attention;
        let mut weights = HashMap::new();
        for (name, rows, columns) in [
            ("q_proj.weight", 2 * num_heads * head_dim, 20),
            ("k_proj.weight", num_kv_heads * head_dim, 20),
            ("v_proj.weight", num_kv_heads * head_dim, 20),
            ("o_proj.weight", 20, num_heads * head_dim),
        ] {
            weights.insert(name.to_string(), Tensor::randn(0f32, 0.5, (rows, columns), &Device::Cpu)?);
        }
        for name in ["q_norm.weight", "k_norm.weight"] {
            weights.insert(name.to_string(), Tensor::randn(0f32, 0.2, head_dim, &Device::Cpu)?);
        }
        let attention =
            GatedAttention::load(&cfg, &Source::new(VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu)))?;
        let rotary = Rotary::new(&cfg.attention.rope_inv_freq, 64, &Device::Cpu)?;
        let shape = CacheShape {
            batch: 2,
            heads: num_heads,
            kv_heads: num_kv_heads,
            head_dim,
            max_len: 64,
            dtype: DType::F32,
            device: Device::Cpu,
        };
        let (mut cpu, mut device) = (KvCache::new(&shape), KvCache::Device(DeviceCache::new(shape)));
        let mut position = 0;
        for tokens in [9, 1, 1, 30] {
            let x = Tensor::randn(0f32, 1., (2, tokens, 20), &Device::Cpu)?;
            let angles = rotary.angles(position, tokens)?;
            let got = attention.forward(&x, &angles, &mut cpu)?;
            let want = attention.forward(&x, &angles, &mut device)?;
            assert_eq!(got.dims(), want.dims());
            let error = (got - want)?.abs()?.flatten_all()?.max(D::Minus1)?.to_scalar::<f32>()?;
            assert!(error < 2e-5, "{error:e} at {position}");
            position += tokens;
        }
        Ok(())
    }

    #[test]
    fn mask_hides_only_later_tokens() -> Result<()> {
        let mask = causal_mask(2, 3, &Device::Cpu)?.to_vec2::<f32>()?;
        assert_eq!(mask[0][..2], [0., 0.]);
        assert_eq!(mask[0][2], MASKED as f32);
        assert_eq!(mask[1], [0., 0., 0.]);
        Ok(())
    }
}
