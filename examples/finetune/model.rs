//! A model of Qwen's families or OLMo-Hybrid with operations that have a backward pass. It has the shape of `examples/candle_transformers`,
//! without caches and for packed sequences. candle's `rms_norm`, `softmax_last_dim` and `rope` have no backward pass, so that gradients
//! would vanish in them.

use crate::projection::Projection;
use crate::weights::text_prefix;
use candle_core::{bail, DType, Device, Module, Result, Tensor, D};
use candle_gdn::{CuSeqlens, TrainableGatedDeltaNet};
use candle_gdn_models::{
    AttentionConfig, FfnKind, LayerConfig, MixerKind, ModelConfig, MoeConfig, NormPlacement, QkNorm,
};
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

    /// Those of Qwen's families multiply by `1 + weight`.
    fn norm(&self, size: usize, vb: VarBuilder) -> Result<RmsNorm> {
        let weight = vb.get_with_hints_dtype(size, "weight", Default::default(), DType::F32)?;
        let shift = if self.config.zero_centred_norms { 1. } else { 0. };
        Ok(RmsNorm { weight: (weight + shift)?, eps: self.config.rms_norm_eps })
    }

    /// The norms of the mixer and of the feed-forward, by the first of their names that the checkpoint has. transformers writes one
    /// of OLMo-Hybrid's that stands behind attention under the name of another.
    fn norms(&self, placement: NormPlacement, vb: &VarBuilder) -> Result<[RmsNorm; 2]> {
        let names: [&[&str]; 2] = match placement {
            NormPlacement::Before => {
                [&["input_layernorm", "attention_layer_norm"], &["post_attention_layernorm", "feedforward_layer_norm"]]
            }
            _ => [&["post_attention_layernorm", "feedforward_layer_norm"], &["post_feedforward_layernorm"]],
        };
        let [mixer, feed_forward] = names.map(|names| {
            let name = names.iter().find(|name| vb.contains_tensor(&format!("{name}.weight"))).unwrap_or(&names[0]);
            self.norm(self.config.hidden_size, vb.pp(name))
        });
        Ok([mixer?, feed_forward?])
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
        if vb.contains_tensor("experts.gate_up_proj") {
            bail!(
                "finetune: {}.experts.gate_up_proj: expected tensors of each expert, as Qwen3-Next's files have them, got one of all",
                vb.prefix()
            )
        }
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

    fn attention(&self, positions: bool, vb: VarBuilder) -> Result<Attention> {
        let AttentionConfig { num_heads, num_kv_heads, head_dim, output_gate, qk_norm, .. } = self.config.attention;
        let hidden = self.config.hidden_size;
        // For each head a query, and a gate behind it.
        let query = if output_gate { 2 * head_dim } else { head_dim };
        let normed = |heads: usize| if qk_norm == QkNorm::Head { head_dim } else { heads * head_dim };
        Ok(Attention {
            q_proj: self.projection(hidden, num_heads * query, vb.pp("q_proj"))?,
            k_proj: self.projection(hidden, num_kv_heads * head_dim, vb.pp("k_proj"))?,
            v_proj: self.projection(hidden, num_kv_heads * head_dim, vb.pp("v_proj"))?,
            o_proj: self.projection(num_heads * head_dim, hidden, vb.pp("o_proj"))?,
            q_norm: self.norm(normed(num_heads), vb.pp("q_norm"))?,
            k_norm: self.norm(normed(num_kv_heads), vb.pp("k_norm"))?,
            kv_heads: num_kv_heads,
            head_dim,
            output_gate,
            qk_norm,
            positions,
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
    /// Cosines and sines, `[tokens, 1, half of the rotated columns]`; `None` where no column is rotated.
    turn: Option<[Tensor; 2]>,
}

impl<'a> Positions<'a> {
    fn new(config: &AttentionConfig, sequences: &'a CuSeqlens, dtype: DType, device: &Device) -> Result<Self> {
        if config.rope_inv_freq.is_empty() {
            return Ok(Self { sequences, turn: None });
        }
        let positions: Vec<f32> = sequences.lengths().flat_map(|len| (0..len).map(|t| t as f32)).collect();
        let frequencies: Vec<f32> = config.rope_inv_freq.iter().map(|&f| f as f32).collect();
        let (positions, frequencies) = (Tensor::new(positions, device)?, Tensor::new(frequencies, device)?);
        let angles = positions.unsqueeze(1)?.broadcast_mul(&frequencies.unsqueeze(0)?)?.unsqueeze(1)?;
        let table = |x: Tensor| (x * config.rope_factor)?.to_dtype(dtype);
        Ok(Self { sequences, turn: Some([table(angles.cos()?)?, table(angles.sin()?)?]) })
    }

    /// `x [tokens, heads, head_dim]`, of which the last columns stay as they are.
    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let Some([cos, sin]) = &self.turn else { return Ok(x.clone()) };
        let (half, all) = (cos.dim(2)?, x.dim(2)?);
        let (a, b) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
        let turned = |p: &Tensor, q: &Tensor| p.broadcast_mul(cos)? + q.broadcast_mul(sin)?;
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
    output_gate: bool,
    qk_norm: QkNorm,
    /// Whether queries and keys have rotary positions.
    positions: bool,
}

impl Attention {
    fn forward(&self, x: &Tensor, positions: &Positions) -> Result<Tensor> {
        let (tokens, d) = (x.dim(0)?, self.head_dim);
        let by_head = |x: Tensor, width: usize| x.reshape((tokens, (), width));
        let normed = |x: Tensor, norm: &RmsNorm| match self.qk_norm {
            QkNorm::Head => x.apply(norm),
            _ => by_head(x.flatten_from(1)?.apply(norm)?, d),
        };
        let placed = |x: Tensor| if self.positions { positions.rotate(&x) } else { Ok(x) };
        let (q, gate) = match self.output_gate {
            true => {
                let both = by_head(x.apply(&self.q_proj)?, 2 * d)?;
                (both.narrow(2, 0, d)?, Some(both.narrow(2, d, d)?.flatten_from(1)?))
            }
            false => (by_head(x.apply(&self.q_proj)?, d)?, None),
        };
        let q = placed(normed(q, &self.q_norm)?)?;
        let k = placed(normed(by_head(x.apply(&self.k_proj)?, d)?, &self.k_norm)?)?;
        let v = by_head(x.apply(&self.v_proj)?, d)?;
        let (mut first, mut outputs) = (0, Vec::new());
        for len in positions.sequences.lengths().filter(|&len| len > 0) {
            let own = |x: &Tensor| x.narrow(0, first, len)?.transpose(0, 1)?.contiguous();
            outputs.push(self.attend(&own(&q)?, &own(&k)?, &own(&v)?)?);
            first += len;
        }
        let mut o = Tensor::cat(&outputs, 0)?;
        if let Some(gate) = gate {
            o = (o * ops::sigmoid(&gate)?)?;
        }
        o.apply(&self.o_proj)
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
    /// Of the mixer and of the feed-forward.
    norms: [RmsNorm; 2],
    placement: NormPlacement,
    mixer: Mixer,
    feed_forward: FeedForward,
}

impl DecoderLayer {
    /// x with one of the two parts of the layer added, with its norm.
    fn add(&self, x: &Tensor, norm: &RmsNorm, part: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        x + match self.placement {
            NormPlacement::Before => part(&x.apply(norm)?)?,
            _ => part(x)?.apply(norm)?,
        }
    }
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
        if config.layers.iter().any(|layer| layer.window.is_some()) {
            bail!(
                "finetune: config: `layer_types`: expected linear_attention and full_attention, which this example trains, got \
                 sliding_attention (Lara-4-Mini)"
            )
        }
        let load = Load { config, scale };
        let (hidden, text) = (config.hidden_size, vb.pp(text_prefix(|name| vb.contains_tensor(name))));
        let layer = |(i, layer): (usize, &LayerConfig)| {
            let vb = text.pp("layers").pp(i);
            let mlp = vb.pp("mlp");
            Ok(DecoderLayer {
                norms: load.norms(layer.norms, &vb)?,
                placement: layer.norms,
                mixer: match layer.mixer {
                    MixerKind::FullAttention => Mixer::Full(load.attention(layer.positions, vb.pp("self_attn"))?),
                    _ => Mixer::Linear(load.linear_attention(vb.pp("linear_attn"))?),
                },
                feed_forward: match (layer.ffn, &config.moe) {
                    (FfnKind::Dense { intermediate_size }, _) => FeedForward::Dense(load.mlp(intermediate_size, mlp)?),
                    (_, Some(moe)) => FeedForward::Moe(load.moe(moe, mlp)?),
                    (_, None) => bail!("layer {i}: expected sizes of its mixture of experts"),
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
            let [of_mixer, of_feed_forward] = &layer.norms;
            x = layer.add(&x, of_mixer, |x| match &layer.mixer {
                Mixer::Linear(gdn) => gdn.forward(x, Some(sequences)),
                Mixer::Full(attention) => attention.forward(x, &positions),
            })?;
            x = layer.add(&x, of_feed_forward, |x| match &layer.feed_forward {
                FeedForward::Dense(mlp) => x.apply(mlp),
                FeedForward::Moe(moe) => x.apply(moe),
            })?;
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
