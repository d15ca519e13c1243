//! Qwen3-Next as a candle-transformers model. In three of four layers Gated DeltaNet mixes the tokens, in the others
//! softmax attention with an output gate; each has a mixture of experts after it.

use candle_core::{Context, DType, Device, Result, Tensor};
use candle_gdn::{GatedDeltaNet, GdnConfig, GdnState};
use candle_nn::{func, kv_cache::KvCache, ops, rotary_emb::rope, Func, RmsNorm, VarBuilder};
use candle_transformers::models::with_tracing::{linear_no_bias, Embedding, Linear};
use candle_transformers::utils::{build_additive_causal_mask, repeat_kv};

/// `config.json`
#[derive(Debug, Clone, serde::Deserialize)]
pub struct Config {
    vocab_size: usize,
    hidden_size: usize,
    num_hidden_layers: usize,
    rms_norm_eps: f64,
    tie_word_embeddings: bool,
    pub eos_token_id: u32,
    pub max_position_embeddings: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    /// Files written by transformers 5 have them here,
    rope_parameters: Option<RopeParameters>,
    /// older ones among the other fields.
    #[serde(flatten)]
    rope: Option<RopeParameters>,
    linear_num_key_heads: usize,
    linear_num_value_heads: usize,
    linear_key_head_dim: usize,
    linear_value_head_dim: usize,
    linear_conv_kernel_dim: usize,
    num_experts: usize,
    num_experts_per_tok: usize,
    norm_topk_prob: bool,
    moe_intermediate_size: usize,
    shared_expert_intermediate_size: usize,
}

#[derive(Debug, Clone, Copy, serde::Deserialize)]
struct RopeParameters {
    rope_theta: f64,
    /// The share of each head that is rotated.
    partial_rotary_factor: f64,
}

impl Config {
    fn linear_attention(&self) -> GdnConfig {
        let key_heads = (self.linear_num_key_heads, self.linear_key_head_dim);
        let value_heads = (self.linear_num_value_heads, self.linear_value_head_dim);
        let config = GdnConfig::new(self.hidden_size, key_heads, value_heads);
        config.with(|c| (c.conv_kernel, c.rms_norm_eps) = (self.linear_conv_kernel_dim, self.rms_norm_eps))
    }
}

/// The norms of Qwen3-Next multiply by `1 + weight`, but for the one inside the linear attention.
fn rms_norm(size: usize, cfg: &Config, vb: VarBuilder) -> Result<RmsNorm> {
    Ok(RmsNorm::new((vb.get(size, "weight")? + 1.)?, cfg.rms_norm_eps))
}

/// cos and sin, `[positions, half of the rotated columns]`.
fn rotary_tables(cfg: &Config, dtype: DType, device: &Device) -> Result<[Tensor; 2]> {
    let rope = cfg.rope_parameters.or(cfg.rope).context("config.json has no rope_theta")?;
    let dim = (cfg.head_dim as f64 * rope.partial_rotary_factor) as usize;
    let frequency = |i| rope.rope_theta.powf(-(i as f64) / dim as f64) as f32;
    let frequencies: Vec<f32> = (0..dim).step_by(2).map(frequency).collect();
    let positions = Tensor::arange(0u32, cfg.max_position_embeddings as u32, device)?.to_dtype(DType::F32)?;
    let angles = positions.unsqueeze(1)?.matmul(&Tensor::new(frequencies, device)?.unsqueeze(0)?)?;
    Ok([angles.cos()?.to_dtype(dtype)?, angles.sin()?.to_dtype(dtype)?])
}

/// `x [batch, heads, tokens, head_dim]`, of which the last columns stay as they are.
fn rotate(x: &Tensor, [cos, sin]: &[Tensor; 2]) -> Result<Tensor> {
    let dim = 2 * cos.dim(1)?;
    let rotated = rope(&x.narrow(3, 0, dim)?.contiguous()?, cos, sin)?;
    Tensor::cat(&[rotated, x.narrow(3, dim, x.dim(3)? - dim)?], 3)
}

struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    head_dim: usize,
    cache: KvCache,
}

impl Attention {
    fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let (hidden, d) = (cfg.hidden_size, cfg.head_dim);
        let (heads, kv_heads) = (cfg.num_attention_heads, cfg.num_key_value_heads);
        Ok(Self {
            q_proj: linear_no_bias(hidden, heads * 2 * d, vb.pp("q_proj"))?, // for each head a query and a gate
            k_proj: linear_no_bias(hidden, kv_heads * d, vb.pp("k_proj"))?,
            v_proj: linear_no_bias(hidden, kv_heads * d, vb.pp("v_proj"))?,
            o_proj: linear_no_bias(heads * d, hidden, vb.pp("o_proj"))?,
            q_norm: rms_norm(d, cfg, vb.pp("q_norm"))?,
            k_norm: rms_norm(d, cfg, vb.pp("k_norm"))?,
            head_dim: d,
            cache: KvCache::new(2, 512),
        })
    }

    fn forward(&mut self, x: &Tensor, mask: &Tensor, rotary: &[Tensor; 2]) -> Result<Tensor> {
        let (b, l, _) = x.dims3()?;
        let d = self.head_dim;
        let by_head = |x: Tensor| x.reshape((b, l, (), d))?.transpose(1, 2)?.contiguous();
        let q_gate = x.apply(&self.q_proj)?.reshape((b, l, (), 2 * d))?;
        let gate = q_gate.narrow(3, d, d)?.flatten_from(2)?;
        let q = by_head(q_gate.narrow(3, 0, d)?)?.apply(&self.q_norm)?;
        let k = by_head(x.apply(&self.k_proj)?)?.apply(&self.k_norm)?;
        let v = by_head(x.apply(&self.v_proj)?)?;
        let (k, v) = self.cache.append(&rotate(&k, rotary)?, &v)?;

        let groups = q.dim(1)? / k.dim(1)?;
        let (k, v) = (repeat_kv(k, groups)?.contiguous()?, repeat_kv(v, groups)?.contiguous()?);
        let scores = (rotate(&q, rotary)?.matmul(&k.t()?)? * (d as f64).powf(-0.5))?.broadcast_add(mask)?;
        let o = ops::softmax_last_dim(&scores)?.matmul(&v)?.transpose(1, 2)?.flatten_from(2)?;
        (o * ops::sigmoid(&gate)?)?.apply(&self.o_proj)
    }
}

fn mlp(hidden: usize, size: usize, vb: VarBuilder) -> Result<Func<'static>> {
    let gate_proj = linear_no_bias(hidden, size, vb.pp("gate_proj"))?;
    let up_proj = linear_no_bias(hidden, size, vb.pp("up_proj"))?;
    let down_proj = linear_no_bias(size, hidden, vb.pp("down_proj"))?;
    Ok(func(move |x| (x.apply(&gate_proj)?.silu()? * x.apply(&up_proj)?)?.apply(&down_proj)))
}

fn sparse_moe(cfg: &Config, vb: VarBuilder) -> Result<Func<'static>> {
    let (hidden, k, norm_topk_prob) = (cfg.hidden_size, cfg.num_experts_per_tok, cfg.norm_topk_prob);
    let gate = linear_no_bias(hidden, cfg.num_experts, vb.pp("gate"))?;
    let expert = |i| mlp(hidden, cfg.moe_intermediate_size, vb.pp("experts").pp(i));
    let experts = (0..cfg.num_experts).map(expert).collect::<Result<Vec<_>>>()?;
    let shared_expert = mlp(hidden, cfg.shared_expert_intermediate_size, vb.pp("shared_expert"))?;
    let shared_expert_gate = linear_no_bias(hidden, 1, vb.pp("shared_expert_gate"))?;
    Ok(func(move |x| {
        let shape = x.shape();
        let x = x.reshape(((), hidden))?;
        let p = ops::softmax_last_dim(&x.apply(&gate)?.to_dtype(DType::F32)?)?;
        let chosen = p.arg_sort_last_dim(false)?.narrow(1, 0, k)?.contiguous()?;
        let mut weights = p.gather(&chosen, 1)?;
        if norm_topk_prob {
            weights = weights.broadcast_div(&weights.sum_keepdim(1)?)?;
        }
        // For each expert, the tokens that it serves and their weights.
        let mut served = vec![(vec![], vec![]); experts.len()];
        for (token, (chosen, weights)) in chosen.to_vec2::<u32>()?.iter().zip(weights.to_vec2::<f32>()?).enumerate() {
            for (&expert, weight) in chosen.iter().zip(weights) {
                served[expert as usize].0.push(token as u32);
                served[expert as usize].1.push(weight);
            }
        }
        let shared_weights = ops::sigmoid(&x.apply(&shared_expert_gate)?)?;
        let mut y = x.apply(&shared_expert)?.broadcast_mul(&shared_weights)?;
        for (expert, (tokens, weights)) in experts.iter().zip(served).filter(|(_, served)| !served.0.is_empty()) {
            let tokens = Tensor::new(tokens, x.device())?;
            let weights = Tensor::new(weights, x.device())?.unsqueeze(1)?.to_dtype(x.dtype())?;
            y = y.index_add(&tokens, &x.index_select(&tokens, 0)?.apply(expert)?.broadcast_mul(&weights)?, 0)?;
        }
        y.reshape(shape)
    }))
}

enum Mixer {
    Full(Attention),
    /// The layer holds weights only; the state is what it knows of the tokens so far.
    Linear(GatedDeltaNet, Option<GdnState>),
}

struct DecoderLayer {
    input_norm: RmsNorm,
    mixer: Mixer,
    post_attention_norm: RmsNorm,
    moe: Func<'static>,
}

pub struct ModelForCausalLM {
    embed_tokens: Embedding,
    rotary: [Tensor; 2],
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    lm_head: Linear,
}

impl ModelForCausalLM {
    pub fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let (hidden, vb_m) = (cfg.hidden_size, vb.pp("model"));
        let linear_attention = cfg.linear_attention();
        let layer = |i| {
            let vb = vb_m.pp("layers").pp(i);
            Ok(DecoderLayer {
                input_norm: rms_norm(hidden, cfg, vb.pp("input_layernorm"))?,
                mixer: match vb.contains_tensor("linear_attn.A_log") {
                    true => Mixer::Linear(GatedDeltaNet::load(&linear_attention, vb.pp("linear_attn"))?, None),
                    false => Mixer::Full(Attention::new(cfg, vb.pp("self_attn"))?),
                },
                post_attention_norm: rms_norm(hidden, cfg, vb.pp("post_attention_layernorm"))?,
                moe: sparse_moe(cfg, vb.pp("mlp"))?,
            })
        };
        let embed_tokens = Embedding::new(cfg.vocab_size, hidden, vb_m.pp("embed_tokens"))?;
        Ok(Self {
            layers: (0..cfg.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            norm: rms_norm(hidden, cfg, vb_m.pp("norm"))?,
            lm_head: match cfg.tie_word_embeddings {
                true => Linear::from_weights(embed_tokens.embeddings().clone(), None),
                false => linear_no_bias(hidden, cfg.vocab_size, vb.pp("lm_head"))?,
            },
            embed_tokens,
            rotary: rotary_tables(cfg, vb.dtype(), vb.device())?,
        })
    }

    /// Feeds `ids [batch, tokens]`, a prompt or any number of tokens after the `offset` tokens fed before, and gives the
    /// logits of the last one, `[batch, vocab_size]`. An offset of 0 begins new sequences.
    pub fn forward(&mut self, ids: &Tensor, offset: usize) -> Result<Tensor> {
        let (b, l) = ids.dims2()?;
        let mut x = ids.apply(&self.embed_tokens)?;
        let rotary = [self.rotary[0].narrow(0, offset, l)?, self.rotary[1].narrow(0, offset, l)?];
        let mask = build_additive_causal_mask(l, offset, None, x.device(), x.dtype())?;
        for layer in &mut self.layers {
            let h = x.apply(&layer.input_norm)?;
            let h = match &mut layer.mixer {
                Mixer::Linear(gdn, state) => {
                    if offset == 0 {
                        *state = Some(gdn.new_state(b)?);
                    }
                    gdn.forward(&h, state.as_mut().context("the first tokens have offset 0")?)?
                }
                Mixer::Full(attention) => {
                    if offset == 0 {
                        attention.cache.reset();
                    }
                    attention.forward(&h, &mask, &rotary)?
                }
            };
            x = (x + h)?;
            x = (&x + x.apply(&layer.post_attention_norm)?.apply(&layer.moe)?)?;
        }
        x.narrow(1, l - 1, 1)?.squeeze(1)?.apply(&self.norm)?.apply(&self.lm_head)
    }
}
