//! From the metadata of a GGUF file, as llama.cpp's converter writes it, to [`ModelConfig`].

use super::parse::{FULL_ATTENTION_INTERVAL, MAX_HEADS, MAX_LAYERS};
use super::rope::inv_freq;
use super::{AttentionConfig, Family, FfnKind, LayerConfig, MixerKind, ModelConfig, MoeConfig};
use crate::formats::GgufFile;
use candle_core::quantized::gguf_file::Value;
use candle_core::{bail, Result};
use candle_gdn::GdnConfig;

/// `general.architecture` and its family.
const ARCHITECTURES: &[(&str, Family)] =
    &[("qwen3next", Family::Qwen3Next), ("qwen35", Family::Qwen3_5), ("qwen35moe", Family::Qwen3_5Moe)];

impl ModelConfig {
    /// Reads the configuration of the model in a GGUF file.
    ///
    /// The output gate and the scale of the chosen experts' weights are not in the file: all models of these architectures have
    /// SiLU and weights that sum to one. Layers that predict further tokens are skipped.
    ///
    /// # Errors
    /// An unknown architecture, a missing, ill-typed or contradictory entry, or rope scaling. The message names the file,
    /// the entry, what was expected and what came.
    pub fn from_gguf(file: &GgufFile) -> Result<Self> {
        let name = file.path().display();
        let architecture = match file.value("general.architecture") {
            Some(Value::String(architecture)) => architecture.as_str(),
            _ => bail!("{name}: `general.architecture`: expected a string"),
        };
        let Some(&(_, family)) = ARCHITECTURES.iter().find(|a| a.0 == architecture) else {
            let known: Vec<_> = ARCHITECTURES.iter().map(|a| a.0).collect();
            bail!("{name}: `general.architecture`: expected one of {}, got {architecture:?}", known.join(", "))
        };
        let entries = Entries { file, architecture };
        let e = &entries;
        if let Some(Value::String(scaling)) = e.get("rope.scaling.type") {
            if scaling != "none" {
                bail!("{name}: `{}`: expected \"none\", got {scaling:?}", e.key("rope.scaling.type"))
            }
        }
        let hidden_size = e.count("embedding_length")?;
        let rms_norm_eps = e.float("attention.layer_norm_rms_epsilon")?;
        if !(rms_norm_eps > 0. && rms_norm_eps < 1.) {
            return e.wrong("attention.layer_norm_rms_epsilon", "a number in (0, 1)");
        }
        let vocab_size = match file.shape("token_embd.weight") {
            Some(&[rows, columns]) if columns == hidden_size => rows,
            Some(dims) => {
                bail!("{name}: tensor `token_embd.weight`: expected [vocabulary, {hidden_size}], got {dims:?}")
            }
            None => bail!("{name}: there is no tensor `token_embd.weight`"),
        };
        let moe = e.moe(family)?;
        let ffn = match &moe {
            Some(_) => FfnKind::Moe,
            None => FfnKind::Dense { intermediate_size: e.count("feed_forward_length")? },
        };
        let eos = ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"];
        let mut eos_token_ids: Vec<u32> =
            eos.iter().filter_map(|key| file.value(key)?.to_u64().ok()?.try_into().ok()).collect();
        eos_token_ids.dedup();
        Ok(Self {
            family,
            vocab_size,
            hidden_size,
            max_position_embeddings: e.count("context_length")?,
            rms_norm_eps,
            tie_word_embeddings: !file.contains("output.weight"),
            attention: e.attention()?,
            gdn: e.gdn(hidden_size, rms_norm_eps)?,
            moe,
            layers: e.mixers()?.into_iter().map(|mixer| LayerConfig { mixer, ffn }).collect(),
            eos_token_ids,
            fp8: None,
        })
    }
}

/// The entries of the architecture.
struct Entries<'a> {
    file: &'a GgufFile,
    architecture: &'a str,
}

impl Entries<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.file.value(&self.key(name))
    }

    fn wrong<T>(&self, name: &str, expected: &str) -> Result<T> {
        let (file, key) = (self.file.path().display(), self.key(name));
        match self.get(name) {
            Some(value) => bail!("{file}: `{key}`: expected {expected}, got {value:?}"),
            None => bail!("{file}: `{key}` is missing: expected {expected}"),
        }
    }

    /// A positive integer, which must be there.
    fn count(&self, name: &str) -> Result<usize> {
        match self.opt_uint(name)? {
            None | Some(0) => self.wrong(name, "a positive integer"),
            Some(n) => Ok(n),
        }
    }

    /// Heads, or values of one.
    fn heads(&self, name: &str) -> Result<usize> {
        match self.count(name)? {
            n if n > MAX_HEADS => self.wrong(name, &format!("a positive integer up to {MAX_HEADS}")),
            n => Ok(n),
        }
    }

    fn opt_uint(&self, name: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let signed = match value {
            Value::I32(n) => u64::try_from(*n).ok(),
            value => value.to_u64().ok(),
        };
        match signed {
            Some(n) if n < 1 << 31 => Ok(Some(n as usize)),
            _ => self.wrong(name, "an integer from 0 to 2^31 - 1"),
        }
    }

    /// The same number as in config.json: the shortest decimal that rounds to this f32.
    fn float(&self, name: &str) -> Result<f64> {
        match self.get(name) {
            Some(Value::F32(x)) if x.is_finite() => Ok(x.to_string().parse().unwrap_or(f64::from(*x))),
            Some(Value::F64(x)) if x.is_finite() => Ok(*x),
            _ => self.wrong(name, "a number"),
        }
    }

    fn attention(&self) -> Result<AttentionConfig> {
        let num_heads = self.heads("attention.head_count")?;
        let num_kv_heads = match self.get("attention.head_count_kv") {
            // A number a layer, 0 for layers without softmax attention.
            Some(Value::Array(list)) => {
                let mut counts: Vec<u64> = list.iter().filter_map(|v| v.to_u64().ok()).filter(|n| *n > 0).collect();
                counts.dedup();
                match *counts {
                    [n] if n <= MAX_HEADS as u64 => n as usize,
                    _ => return self.wrong("attention.head_count_kv", "one number for all layers"),
                }
            }
            _ => self.heads("attention.head_count_kv")?,
        };
        if !num_heads.is_multiple_of(num_kv_heads) {
            return self.wrong("attention.head_count_kv", &format!("a divisor of the head count, {num_heads}"));
        }
        let head_dim = self.heads("attention.key_length")?;
        if self.opt_uint("attention.value_length")?.is_some_and(|n| n != head_dim) {
            return self.wrong("attention.value_length", &format!("the key length, {head_dim}"));
        }
        let rotary_dim = self.count("rope.dimension_count")?;
        if rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
            return self.wrong("rope.dimension_count", &format!("an even number up to the key length, {head_dim}"));
        }
        let theta = self.float("rope.freq_base")?;
        if theta <= 1. {
            return self.wrong("rope.freq_base", "a number above 1");
        }
        let rope_inv_freq = inv_freq(theta, rotary_dim, None);
        Ok(AttentionConfig { num_heads, num_kv_heads, head_dim, rope_inv_freq, rope_factor: 1. })
    }

    fn gdn(&self, hidden_size: usize, rms_norm_eps: f64) -> Result<GdnConfig> {
        let (num_key_heads, num_value_heads) = (self.heads("ssm.group_count")?, self.heads("ssm.time_step_rank")?);
        if !num_value_heads.is_multiple_of(num_key_heads) {
            return self.wrong("ssm.time_step_rank", &format!("a multiple of the group count, {num_key_heads}"));
        }
        let inner = self.count("ssm.inner_size")?;
        if !inner.is_multiple_of(num_value_heads) {
            return self.wrong("ssm.inner_size", &format!("a multiple of the time step rank, {num_value_heads}"));
        }
        let key_heads = (num_key_heads, self.heads("ssm.state_size")?);
        let config = GdnConfig::new(hidden_size, key_heads, (num_value_heads, inner / num_value_heads));
        let conv_kernel = self.heads("ssm.conv_kernel")?;
        Ok(config.with(|c| (c.conv_kernel, c.rms_norm_eps) = (conv_kernel, rms_norm_eps)))
    }

    fn moe(&self, family: Family) -> Result<Option<MoeConfig>> {
        let num_experts = match family {
            Family::Qwen3_5Moe => self.count("expert_count")?,
            _ => self.opt_uint("expert_count")?.unwrap_or(0),
        };
        if num_experts == 0 {
            return Ok(None);
        }
        let experts_per_token = self.count("expert_used_count")?;
        if experts_per_token > num_experts {
            return self.wrong("expert_used_count", &format!("at most the expert count, {num_experts}"));
        }
        Ok(Some(MoeConfig {
            num_experts,
            experts_per_token,
            intermediate_size: self.count("expert_feed_forward_length")?,
            shared_intermediate_size: self.opt_uint("expert_shared_feed_forward_length")?.unwrap_or(0),
            norm_topk_prob: true,
        }))
    }

    /// The kinds of the layers, without those that predict further tokens, which come last.
    fn mixers(&self) -> Result<Vec<MixerKind>> {
        let (all, nextn) = (self.count("block_count")?, self.opt_uint("nextn_predict_layers")?.unwrap_or(0));
        if nextn >= all {
            return self.wrong("nextn_predict_layers", &format!("fewer than the blocks, {all}"));
        }
        let layers = all - nextn;
        if layers > MAX_LAYERS {
            return self.wrong("block_count", &format!("at most {MAX_LAYERS} layers"));
        }
        if let Some(list) = self.get("attention.recurrent_layers") {
            let list: Option<Vec<bool>> = match list {
                Value::Array(list) => list.iter().map(|v| v.to_bool().ok()).collect(),
                _ => None,
            };
            let kind = |linear: &bool| if *linear { MixerKind::LinearAttention } else { MixerKind::FullAttention };
            return match list {
                Some(list) if list.len() >= layers => Ok(list[..layers].iter().map(kind).collect()),
                _ => self.wrong("attention.recurrent_layers", &format!("{layers} booleans")),
            };
        }
        let interval = match self.get("full_attention_interval") {
            None => FULL_ATTENTION_INTERVAL,
            Some(_) => self.count("full_attention_interval")?,
        };
        Ok(MixerKind::by_interval(layers, interval))
    }
}
