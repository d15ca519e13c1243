//! A model of the Qwen3-Next family with operations that have a backward pass. It has the shape of `examples/candle_transformers`,
//! without caches and for packed sequences. candle's `rms_norm`, `softmax_last_dim` and `rope` have no backward pass, so that gradients
//! would vanish in them.

use crate::projection::Projection;
use crate::weights::text_prefix;
use candle_core::{DType, Device, Module, Result, Tensor, D};
use candle_gdn::{CuSeqlens, TrainableGatedDeltaNet};
use candle_gdn_models::{AttentionConfig, FfnKind, MixerKind, ModelConfig, MoeConfig};
use candle_nn::{ops, VarBuilder};

/// Loads the parts of one layer: its config, the scale of adapters, the tensors.
struct Load<'a> {
    config: &'a ModelConfig,
    scale: f64,
}

impl Load<'_> {
    fn projection(&self, inputs: usize, outputs: usize, vb: VarBuilder) -> Result<Projection> {
        Projection::new(vb.get((outputs, inputs), "weight")?, self.scale, &vb)
    }

    /// These norms multiply by `1 + weight`.
    fn norm(&self, size: usize, vb: VarBuilder) -> Result<RmsNorm> {
        let weight = vb.get_with_hints_dtype(size, "weight", Default::default(), DType::F32)?;
        Ok(RmsNorm { weight: (weight + 1.)?, eps: self.config.rms_norm_eps })
    }

    fn mlp(&self, size: usize, vb: VarBuilder) -> Result<Mlp> {
        let hidden = self.config.hidden_size;
        Ok(Mlp {
            gate_proj: self.projection(hidden, size, vb.pp("gate_proj"))?,
            up_proj: self.projection(hidden, size, vb.pp("up_proj"))?,
            down_proj: self.projection(size, hidden, vb.pp("down_proj"))?,
        })
    }

    fn moe(&self, moe: &MoeConfig, vb: VarBuilder) -> Result<Moe> {
        let hidden = self.config.hidden_size;
        let expert = |i| self.mlp(moe.intermediate_size, vb.pp("experts").pp(i));
        let shared = || -> Result<_> {
            let gate = self.projection(hidden, 1, vb.pp("shared_expert_gate"))?;
            Ok((self.mlp(moe.shared_intermediate_size, vb.pp("shared_expert"))?, gate))
        };
        Ok(Moe {
            router: self.projection(hidden, moe.num_experts, vb.pp("gate"))?,
            experts: (0..moe.num_experts).map(expert).collect::<Result<_>>()?,
            shared: (moe.shared_intermediate_size > 0).then(shared).transpose()?,
            experts_per_token: moe.experts_per_token,
            norm_topk_prob: moe.norm_topk_prob,
        })
    }

    fn attention(&self, vb: VarBuilder) -> Result<Attention> {
        let AttentionConfig { num_heads, num_kv_heads, head_dim, .. } = self.config.attention;
        let hidden = self.config.hidden_size;
        Ok(Attention {
            q_proj: self.projection(hidden, num_heads * 2 * head_dim, vb.pp("q_proj"))?, // for each head a query and a gate
            k_proj: self.projection(hidden, num_kv_heads * head_dim, vb.pp("k_proj"))?,
            v_proj: self.projection(hidden, num_kv_heads * head_dim, vb.pp("v_proj"))?,
            o_proj: self.projection(num_heads * head_dim, hidden, vb.pp("o_proj"))?,
            q_norm: self.norm(head_dim, vb.pp("q_norm"))?,
            k_norm: self.norm(head_dim, vb.pp("k_norm"))?,
            kv_heads: num_kv_heads,
            head_dim,
        })
    }

    fn linear_attention(&self, vb: VarBuilder) -> Result<TrainableGatedDeltaNet> {
        TrainableGatedDeltaNet::load_with(&self.config.gdn, vb.clone(), |name, linear| {
            let projection = Projection::new(linear.weight().clone(), self.scale, &vb.pp(name))?;
            Ok(candle_gdn::Projection::module(projection))
        })
    }
}

struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let wide = x.to_dtype(DType::F32)?;
        let rms = (wide.sqr()?.mean_keepdim(D::Minus1)? + self.eps)?.sqrt()?;
        wide.broadcast_div(&rms)?.broadcast_mul(&self.weight)?.to_dtype(x.dtype())
    }
}

/// Over the last dimension. The maximum only keeps numbers small: it has no gradient.
fn softmax(x: &Tensor) -> Result<Tensor> {
    let e = x.broadcast_sub(&x.detach().max_keepdim(D::Minus1)?)?.exp()?;
    e.broadcast_div(&e.sum_keepdim(D::Minus1)?)
}

/// Where the tokens of the packed sequences stand: for all layers of a pass.
struct Positions<'a> {
    sequences: &'a CuSeqlens,
    /// `[tokens, 1, half of the rotated columns]`
    cos: Tensor,
    sin: Tensor,
}

impl<'a> Positions<'a> {
    fn new(config: &AttentionConfig, sequences: &'a CuSeqlens, dtype: DType, device: &Device) -> Result<Self> {
        let positions: Vec<f32> = sequences.lengths().flat_map(|len| (0..len).map(|t| t as f32)).collect();
        let frequencies: Vec<f32> = config.rope_inv_freq.iter().map(|&f| f as f32).collect();
        let (positions, frequencies) = (Tensor::new(positions, device)?, Tensor::new(frequencies, device)?);
        let angles = positions.unsqueeze(1)?.broadcast_mul(&frequencies.unsqueeze(0)?)?.unsqueeze(1)?;
        let table = |x: Tensor| (x * config.rope_factor)?.to_dtype(dtype);
        Ok(Self { sequences, cos: table(angles.cos()?)?, sin: table(angles.sin()?)? })
    }

    /// `x [tokens, heads, head_dim]`, of which the last columns stay as they are.
    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let (half, all) = (self.cos.dim(2)?, x.dim(2)?);
        let (a, b) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
        let turned = |p: &Tensor, q: &Tensor| p.broadcast_mul(&self.cos)? + q.broadcast_mul(&self.sin)?;
        let mut columns = vec![turned(&a, &b.neg()?)?, turned(&b, &a)?];
        if all > 2 * half {
            columns.push(x.narrow(2, 2 * half, all - 2 * half)?);
        }
        Tensor::cat(&columns, 2)
    }
}

struct Attention {
    q_proj: Projection,
    k_proj: Projection,
    v_proj: Projection,
    o_proj: Projection,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    kv_heads: usize,
    head_dim: usize,
}

impl Attention {
    fn forward(&self, x: &Tensor, positions: &Positions) -> Result<Tensor> {
        let (tokens, d) = (x.dim(0)?, self.head_dim);
        let by_head = |x: Tensor, width: usize| x.reshape((tokens, (), width));
        let q_gate = by_head(x.apply(&self.q_proj)?, 2 * d)?;
        let gate = q_gate.narrow(2, d, d)?.flatten_from(1)?;
        let q = positions.rotate(&q_gate.narrow(2, 0, d)?.apply(&self.q_norm)?)?;
        let k = positions.rotate(&by_head(x.apply(&self.k_proj)?, d)?.apply(&self.k_norm)?)?;
        let v = by_head(x.apply(&self.v_proj)?, d)?;
        let (mut first, mut outputs) = (0, Vec::new());
        for len in positions.sequences.lengths().filter(|&len| len > 0) {
            let own = |x: &Tensor| x.narrow(0, first, len)?.transpose(0, 1)?.contiguous();
            outputs.push(self.attend(&own(&q)?, &own(&k)?, &own(&v)?)?);
            first += len;
        }
        (Tensor::cat(&outputs, 0)? * ops::sigmoid(&gate)?)?.apply(&self.o_proj)
    }

    /// One sequence: `q [heads, tokens, head_dim]`, k and v of fewer heads, to `[tokens, heads * head_dim]`.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (heads, tokens, d) = q.dims3()?;
        // The query heads that share keys are rows of one product.
        let q = (q.reshape((self.kv_heads, (), d))? * (d as f64).powf(-0.5))?;
        let scores = q.matmul(&k.t()?)?.to_dtype(DType::F32)?.reshape((heads, tokens, tokens))?;
        let later = |i: usize| (0..tokens).map(move |j| if j > i { f32::NEG_INFINITY } else { 0. });
        let mask: Vec<f32> = (0..tokens).flat_map(later).collect();
        let mask = Tensor::from_vec(mask, (1, tokens, tokens), q.device())?;
        let p = softmax(&scores.broadcast_add(&mask)?)?.to_dtype(v.dtype())?;
        let o = p.reshape((self.kv_heads, (), tokens))?.matmul(v)?;
        o.reshape((heads, tokens, d))?.transpose(0, 1)?.flatten_from(1)
    }
}

struct Mlp {
    gate_proj: Projection,
    up_proj: Projection,
    down_proj: Projection,
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        (x.apply(&self.gate_proj)?.silu()? * x.apply(&self.up_proj)?)?.apply(&self.down_proj)
    }
}

/// A mixture of experts.
struct Moe {
    router: Projection,
    experts: Vec<Mlp>,
    /// The expert of all tokens, and its gate.
    shared: Option<(Mlp, Projection)>,
    experts_per_token: usize,
    norm_topk_prob: bool,
}

impl Module for Moe {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let p = softmax(&x.apply(&self.router)?.to_dtype(DType::F32)?)?;
        let chosen = p.detach().arg_sort_last_dim(false)?.narrow(1, 0, self.experts_per_token)?.contiguous()?;
        let mut weights = p.gather(&chosen, 1)?;
        if self.norm_topk_prob {
            weights = weights.broadcast_div(&weights.sum_keepdim(1)?)?;
        }
        let weights = weights.flatten_all()?.to_dtype(x.dtype())?;
        // For each expert, its places among the choices: those of the first token, of the second, and so on.
        let mut places = vec![vec![]; self.experts.len()];
        for (place, expert) in chosen.flatten_all()?.to_vec1::<u32>()?.into_iter().enumerate() {
            places[expert as usize].push(place as u32);
        }
        let mut y = match &self.shared {
            Some((expert, gate)) => x.apply(expert)?.broadcast_mul(&ops::sigmoid(&x.apply(gate)?)?)?,
            None => x.zeros_like()?,
        };
        for (expert, places) in self.experts.iter().zip(places).filter(|(_, places)| !places.is_empty()) {
            let tokens: Vec<u32> = places.iter().map(|place| place / self.experts_per_token as u32).collect();
            let (tokens, places) = (Tensor::new(tokens, x.device())?, Tensor::new(places, x.device())?);
            let weights = weights.index_select(&places, 0)?.unsqueeze(1)?;
            y = y.index_add(&tokens, &x.index_select(&tokens, 0)?.apply(expert)?.broadcast_mul(&weights)?, 0)?;
        }
        Ok(y)
    }
}

enum Mixer {
    Full(Attention),
    Linear(TrainableGatedDeltaNet),
}

enum FeedForward {
    Dense(Mlp),
    Moe(Moe),
}

struct DecoderLayer {
    input_norm: RmsNorm,
    mixer: Mixer,
    post_attention_norm: RmsNorm,
    feed_forward: FeedForward,
}

/// The model of one pass: its tensors are computed from the variables as they are when it is made.
pub struct Model<'a> {
    config: &'a ModelConfig,
    embed_tokens: Tensor,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    lm_head: Projection,
}

impl<'a> Model<'a> {
    /// `scale` is that of the adapters, where `vb` has some.
    ///
    /// # Errors
    /// When a tensor is missing or its shape does not fit the config.
    pub fn new(config: &'a ModelConfig, scale: f64, vb: VarBuilder) -> Result<Self> {
        if !config.zero_centred_norms {
            candle_core::bail!(
                "finetune: config: `model_type`: expected one of Qwen's, whose layers this example has, got {:?}",
                config.family
            )
        }
        let load = Load { config, scale };
        let (hidden, text) = (config.hidden_size, vb.pp(text_prefix(|name| vb.contains_tensor(name))));
        let layer = |(i, layer): (usize, &candle_gdn_models::LayerConfig)| {
            let vb = text.pp("layers").pp(i);
            let mlp = vb.pp("mlp");
            Ok(DecoderLayer {
                input_norm: load.norm(hidden, vb.pp("input_layernorm"))?,
                mixer: match layer.mixer {
                    MixerKind::FullAttention => Mixer::Full(load.attention(vb.pp("self_attn"))?),
                    _ => Mixer::Linear(load.linear_attention(vb.pp("linear_attn"))?),
                },
                post_attention_norm: load.norm(hidden, vb.pp("post_attention_layernorm"))?,
                feed_forward: match (layer.ffn, &config.moe) {
                    (FfnKind::Dense { intermediate_size }, _) => FeedForward::Dense(load.mlp(intermediate_size, mlp)?),
                    (_, Some(moe)) => FeedForward::Moe(load.moe(moe, mlp)?),
                    (_, None) => candle_core::bail!("layer {i}: expected sizes of its mixture of experts"),
                },
            })
        };
        let embed_tokens = text.get((config.vocab_size, hidden), "embed_tokens.weight")?;
        Ok(Self {
            config,
            layers: config.layers.iter().enumerate().map(layer).collect::<Result<_>>()?,
            norm: load.norm(hidden, text.pp("norm"))?,
            lm_head: match config.tie_word_embeddings {
                true => Projection::new(embed_tokens.clone(), scale, &vb.pp("lm_head"))?,
                false => load.projection(hidden, config.vocab_size, vb.pp("lm_head"))?,
            },
            embed_tokens,
        })
    }

    /// The packed tokens `ids [tokens]` of some sequences to `[tokens, vocab_size]` logits. Nothing crosses a sequence's border.
    pub fn forward(&self, ids: &Tensor, sequences: &CuSeqlens) -> Result<Tensor> {
        let mut x = self.embed_tokens.index_select(ids, 0)?;
        let positions = Positions::new(&self.config.attention, sequences, x.dtype(), x.device())?;
        for layer in &self.layers {
            let h = x.apply(&layer.input_norm)?;
            let h = match &layer.mixer {
                Mixer::Linear(gdn) => gdn.forward(&h, Some(sequences))?,
                Mixer::Full(attention) => attention.forward(&h, &positions)?,
            };
            x = (x + h)?;
            let h = x.apply(&layer.post_attention_norm)?;
            x = match &layer.feed_forward {
                FeedForward::Dense(mlp) => x + h.apply(mlp)?,
                FeedForward::Moe(moe) => x + h.apply(moe)?,
            }?;
        }
        x.apply(&self.norm)?.apply(&self.lm_head)
    }
}

/// The sum of the targets' negative log-probabilities (natural logarithm), in f32: `logits [tokens, vocab_size]`, `targets [tokens]`.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let logits = logits.to_dtype(DType::F32)?;
    let max = logits.detach().max_keepdim(1)?;
    let log_sum = (logits.broadcast_sub(&max)?.exp()?.sum_keepdim(1)?.log()? + max)?;
    (log_sum - logits.gather(&targets.unsqueeze(1)?, 1)?)?.sum_all()
}
