//! From the metadata of a GGUF file, as llama.cpp's converter writes it, to [`ModelConfig`].

mod ends;
mod rope;

use super::parse::{FULL_ATTENTION_INTERVAL, MAX_HEADS, MAX_LAYERS};
use super::{AttentionConfig, Family, FfnKind, LayerConfig, MixerKind, ModelConfig, MoeConfig, QkNorm};
use crate::formats::{integer, GgufFile};
use candle_core::quantized::gguf_file::Value;
use candle_core::{bail, Result};
use candle_gdn::GdnConfig;

/// `general.architecture` and its family.
const ARCHITECTURES: &[(&str, Family)] =
    &[("qwen3next", Family::Qwen3Next), ("qwen35", Family::Qwen3_5), ("qwen35moe", Family::Qwen3_5Moe)];

/// Entries of the Gated DeltaNet layers; the last one concerns the order of the tensors' heads.
const SSM: [&str; 6] = ["group_count", "state_size", "time_step_rank", "inner_size", "conv_kernel", "v_head_reordered"];

impl ModelConfig {
    /// Reads the configuration of the model in a GGUF file.
    ///
    /// The output gate is not in the file: all models of these architectures have SiLU. Sizes that the metadata lacks are those of
    /// the tensors. Layers that predict further tokens are skipped. A text ends with the tokens that end one in llama.cpp.
    ///
    /// # Errors
    /// An unknown architecture, a missing, ill-typed or contradictory entry, or one that asks for what this crate does not
    /// compute. The message names the file, the entry, what was expected and what came.
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
        let e = &Entries { file, architecture };
        e.check_fixed()?;
        let hidden_size = e.count_or("embedding_length", || file.shape("token_embd.weight")?.last().copied())?;
        let rms_norm_eps = e.float("attention.layer_norm_rms_epsilon")?;
        if !(rms_norm_eps > 0. && rms_norm_eps < 1.) {
            return e.wrong("attention.layer_norm_rms_epsilon", "a number in (0, 1)");
        }
        let vocab_size = match file.shape("token_embd.weight") {
            Some(&[rows, columns]) if columns == hidden_size && SIZES.contains(&rows) => rows,
            Some(dims) => {
                bail!("{name}: tensor `token_embd.weight`: expected [vocabulary, {hidden_size}], got {dims:?}")
            }
            None => bail!("{name}: there is no tensor `token_embd.weight`"),
        };
        let moe = e.moe(family)?;
        let ffn = match &moe {
            Some(_) => FfnKind::Moe,
            None => {
                FfnKind::Dense { intermediate_size: e.count_or("feed_forward_length", || e.dim("ffn_gate.weight", 0))? }
            }
        };
        let max_position_embeddings = e.count("context_length")?;
        let (attention, positions) = e.attention(max_position_embeddings)?;
        Ok(Self {
            family,
            vocab_size,
            hidden_size,
            max_position_embeddings: positions,
            rms_norm_eps,
            zero_centred_norms: true,
            tie_word_embeddings: !file.contains("output.weight"),
            attention,
            gdn: e.gdn(hidden_size, rms_norm_eps)?,
            moe,
            layers: e.mixers()?.into_iter().map(|mixer| LayerConfig::new(mixer, ffn)).collect(),
            eos_token_ids: ends::token_ids(file, vocab_size)?,
            fp8: None,
        })
    }
}

/// Sizes are multiplied: a larger one is no model's.
const SIZES: std::ops::Range<usize> = 1..1 << 31;

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

    /// A positive integer, or where there is none what the tensors say.
    fn count_or(&self, name: &str, of_tensors: impl Fn() -> Option<usize>) -> Result<usize> {
        match (self.get(name), of_tensors()) {
            (None, Some(n)) if SIZES.contains(&n) => Ok(n),
            _ => self.count(name),
        }
    }

    /// Heads or values of one, or where there are none what the tensors say.
    fn heads_or(&self, name: &str, of_tensors: impl Fn() -> Option<usize>) -> Result<usize> {
        match (self.get(name), of_tensors()) {
            (None, Some(n @ 1..=MAX_HEADS)) => Ok(n),
            _ => self.heads(name),
        }
    }

    /// A dimension of a tensor of the first layer that has it, if it is a size that a model may have.
    fn dim(&self, tensor: &str, dim: usize) -> Option<usize> {
        self.shape(tensor)?.get(dim).copied().filter(|n| SIZES.contains(n))
    }

    fn shape(&self, tensor: &str) -> Option<&[usize]> {
        (0..self.blocks()).find_map(|i| self.file.shape(&format!("blk.{i}.{tensor}")))
    }

    fn blocks(&self) -> usize {
        self.opt_uint("block_count").ok().flatten().unwrap_or(0).min(MAX_LAYERS)
    }

    /// One integer, or one for each layer, which must agree where they are not 0: the layers without what is counted.
    fn opt_uint(&self, name: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let list = match value {
            Value::Array(list) => list.as_slice(),
            one => std::slice::from_ref(one),
        };
        let numbers: Option<Vec<i64>> = list.iter().map(integer).collect();
        let mut numbers = numbers.unwrap_or_else(|| vec![-1]);
        numbers.dedup();
        if numbers.len() > 1 {
            numbers.retain(|n| *n != 0);
            numbers.dedup();
        }
        match *numbers {
            [n] if (0..1 << 31).contains(&n) => Ok(Some(n as usize)),
            [_, _, ..] => self.wrong(name, "one number for all layers"),
            _ => self.wrong(name, "an integer from 0 to 2^31 - 1"),
        }
    }

    /// The same number as in config.json.
    fn float(&self, name: &str) -> Result<f64> {
        match self.opt_float(name)? {
            Some(x) => Ok(x),
            None => self.wrong(name, "a number"),
        }
    }

    fn opt_float(&self, name: &str) -> Result<Option<f64>> {
        match (self.get(name), self.file.number(&self.key(name))) {
            (Some(_), None) => self.wrong(name, "a number"),
            (_, number) => Ok(number),
        }
    }

    /// Entries with one value for which the model is what is computed here.
    fn check_fixed(&self) -> Result<()> {
        // 1: softmax.
        for (name, value) in [("expert_weights_scale", 1.), ("expert_gating_func", 1.), ("logit_scale", 1.)] {
            if !matches!(self.opt_float(name)?, None | Some(0.)) && self.opt_float(name)? != Some(value) {
                return self.wrong(name, &format!("{value}"));
            }
        }
        let prefix = self.key("ssm.");
        let names = self.file.keys().filter_map(|key| key.strip_prefix(&prefix));
        match names.filter(|name| !SSM.contains(name)).min() {
            Some(name) => self.wrong(&format!("ssm.{name}"), &format!("no entries of ssm but {}", SSM.join(", "))),
            None => Ok(()),
        }
    }

    /// And how many positions it has where the file says `max_positions`.
    fn attention(&self, max_positions: usize) -> Result<(AttentionConfig, usize)> {
        let head_dim = self.heads_or("attention.key_length", || self.dim("attn_k_norm.weight", 0))?;
        let num_heads =
            self.heads_or("attention.head_count", || Some(self.dim("attn_output.weight", 1)? / head_dim))?;
        // Of keys, or of queries with their gates, keys and values, which Gated DeltaNet layers have too.
        let keys = || {
            let layer = (0..self.blocks()).find(|i| self.file.contains(&format!("blk.{i}.attn_output.weight")))?;
            let all = self.file.shape(&format!("blk.{layer}.attn_qkv.weight"))?.first()?;
            Some(all.checked_sub(2 * num_heads * head_dim)? / 2)
        };
        let num_kv_heads =
            self.heads_or("attention.head_count_kv", || Some(self.dim("attn_k.weight", 0).or_else(keys)? / head_dim))?;
        if !num_heads.is_multiple_of(num_kv_heads) {
            return self.wrong("attention.head_count_kv", &format!("a divisor of the head count, {num_heads}"));
        }
        if self.opt_uint("attention.value_length")?.is_some_and(|n| n != head_dim) {
            return self.wrong("attention.value_length", &format!("the key length, {head_dim}"));
        }
        let scale = self.opt_float("attention.scale")?.filter(|scale| *scale != 0.);
        if scale.is_some_and(|scale| (scale * scale * head_dim as f64 - 1.).abs() > 1e-3) {
            return self.wrong("attention.scale", &format!("1 / sqrt({head_dim}), by the key length"));
        }
        let rotary_dim = self.count("rope.dimension_count")?;
        if rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
            return self.wrong("rope.dimension_count", &format!("an even number up to the key length, {head_dim}"));
        }
        let (rope_inv_freq, rope_factor, positions) = self.rope(rotary_dim, max_positions)?;
        let (output_gate, qk_norm) = (true, QkNorm::Head);
        let attention =
            AttentionConfig { num_heads, num_kv_heads, head_dim, rope_inv_freq, rope_factor, output_gate, qk_norm };
        Ok((attention, positions))
    }

    fn gdn(&self, hidden_size: usize, rms_norm_eps: f64) -> Result<GdnConfig> {
        let num_value_heads = self.heads_or("ssm.time_step_rank", || self.dim("ssm_a", 0))?;
        let inner = self.count_or("ssm.inner_size", || self.dim("ssm_out.weight", 1))?;
        // Channels of the convolution: queries, keys and values. Of the two factors of the keys one must be known.
        let keys = || Some(self.dim("ssm_conv1d.weight", 0)?.checked_sub(inner)? / 2);
        let by = |factor: &str| Some(keys()? / self.opt_uint(factor).ok()??.max(1));
        let num_key_heads = self.heads_or("ssm.group_count", || by("ssm.state_size"))?;
        if !num_value_heads.is_multiple_of(num_key_heads) {
            return self.wrong("ssm.time_step_rank", &format!("a multiple of the group count, {num_key_heads}"));
        }
        if !inner.is_multiple_of(num_value_heads) {
            return self.wrong("ssm.inner_size", &format!("a multiple of the time step rank, {num_value_heads}"));
        }
        let key_heads = (num_key_heads, self.heads_or("ssm.state_size", || by("ssm.group_count"))?);
        let config = GdnConfig::new(hidden_size, key_heads, (num_value_heads, inner / num_value_heads));
        let conv_kernel = self.heads_or("ssm.conv_kernel", || self.dim("ssm_conv1d.weight", 1))?;
        Ok(config.with(|c| (c.conv_kernel, c.rms_norm_eps) = (conv_kernel, rms_norm_eps)))
    }

    fn moe(&self, family: Family) -> Result<Option<MoeConfig>> {
        let num_experts = match (self.opt_uint("expert_count")?, self.dim("ffn_gate_inp.weight", 0)) {
            (None, Some(n)) => n,
            (None, None) if family == Family::Qwen3_5Moe => self.count("expert_count")?,
            (n, _) => n.unwrap_or(0),
        };
        if num_experts == 0 {
            return Ok(None);
        }
        let experts_per_token = self.count("expert_used_count")?;
        if experts_per_token > num_experts {
            return self.wrong("expert_used_count", &format!("at most the expert count, {num_experts}"));
        }
        let mut norm_topk_prob = true;
        // llama.cpp's name, and Ollama's.
        for name in ["expert_weights_norm", "norm_top_k_prob"] {
            match self.get(name) {
                None | Some(Value::Bool(true)) => {}
                Some(Value::Bool(false)) if family == Family::Qwen3Next => norm_topk_prob = false,
                Some(_) => return self.wrong(name, "true"),
            }
        }
        let shared = || self.dim("ffn_gate_shexp.weight", 0);
        let shared_intermediate_size = match self.get("expert_shared_feed_forward_length") {
            None => shared().unwrap_or(0),
            Some(_) => self.opt_uint("expert_shared_feed_forward_length")?.unwrap_or(0),
        };
        Ok(Some(MoeConfig {
            num_experts,
            experts_per_token,
            intermediate_size: self.count_or("expert_feed_forward_length", || self.dim("ffn_down_exps.weight", 2))?,
            shared_intermediate_size,
            norm_topk_prob,
            shared_gate: true,
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
        if let Some(layer) = self.file.layer_from(layers) {
            let nextn_key = self.key("nextn_predict_layers");
            let expected = format!(
                "{layers} layers and then draft heads, {nextn} by `{nextn_key}`, but there is no `blk.{layer}.nextn.eh_proj.weight`"
            );
            return self.wrong("block_count", &expected);
        }
        let kind = |linear: bool| if linear { MixerKind::LinearAttention } else { MixerKind::FullAttention };
        let list = |name: &str, linear: fn(&Value) -> Option<bool>| match self.get(name) {
            Some(Value::Array(list)) => {
                let kinds: Option<Vec<_>> = list.iter().take(layers).map(|value| linear(value).map(kind)).collect();
                kinds.filter(|kinds| kinds.len() == layers)
            }
            _ => None,
        };
        let recurrent = list("attention.recurrent_layers", |v| v.to_bool().ok().or_else(|| Some(integer(v)? != 0)));
        if recurrent.is_none() && self.get("attention.recurrent_layers").is_some() {
            return self.wrong("attention.recurrent_layers", &format!("{layers} booleans"));
        }
        // Layers without softmax attention have no heads of keys.
        let by_heads = list("attention.head_count_kv", |v| Some(integer(v)? == 0))
            .filter(|kinds| kinds.contains(&MixerKind::LinearAttention));
        if by_heads.is_some() && recurrent.is_some() && by_heads != recurrent {
            return self.wrong("attention.head_count_kv", "0 for just those of `attention.recurrent_layers`");
        }
        let interval = match self.get("full_attention_interval") {
            None => FULL_ATTENTION_INTERVAL,
            Some(_) => self.count("full_attention_interval")?,
        };
        Ok(recurrent.or(by_heads).unwrap_or_else(|| MixerKind::by_interval(layers, interval)))
    }
}
