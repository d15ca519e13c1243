//! Where llama.cpp's converter puts the weights of these models, and what it does to them.

use super::{integer, GgufFile};
use crate::config::Family;
use crate::weights::Tiles;
use candle_core::quantized::gguf_file::Value as Entry;
use candle_core::{bail, Result};
use candle_gdn::GdnConfig;
use std::ops::Range;

/// Where a weight is, and the way back to what it was.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Place {
    pub tensor: String,
    /// Some of its rows, or all in another order; `None` for all as they are.
    pub rows: Option<Rows>,
    /// Its columns are in this order.
    pub columns: Option<Tiles>,
    pub value: Value,
}

/// Rows in the model's order.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Rows {
    /// So many the tensor has.
    pub of: usize,
    pub ranges: Vec<Range<usize>>,
}

/// What is stored for a number `x`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Value {
    Same,
    /// `x + 1`
    PlusOne,
    /// `-exp(x)`
    MinusExp,
}

/// The layers of a file, and their heads.
#[derive(Debug, Clone)]
pub(super) struct Heads {
    pub config: GdnConfig,
    /// Rows of softmax attention's queries with their gates, keys, and values.
    pub attention: [usize; 3],
    /// Layers of the model, draft head aside.
    pub layers: usize,
    /// Value head `h` belongs to key head `h % HK` (Qwen3.5 and later), not to `h / (HV / HK)`.
    pub tiled: bool,
}

impl GgufFile {
    /// Whether value head `h` belongs to key head `h % HK`: as an entry says that Ollama writes, else as converters have it, which put the
    /// heads of Qwen3.5 in this order and leave those of Qwen3-Next, whose projections are interleaved, as they are.
    ///
    /// # Errors
    /// An entry that is no boolean, or that contradicts the tensors.
    pub(crate) fn tiles_value_heads(&self, family: Family) -> Result<bool> {
        let Some(Entry::String(architecture)) = self.value("general.architecture") else { return Ok(false) };
        let key = format!("{architecture}.ssm.v_head_reordered");
        let interleaved =
            self.tensors().find(|name| name.ends_with(".ssm_ba.weight") || name.ends_with(".ssm_in.weight"));
        let said = match self.value(&key) {
            None => None,
            Some(Entry::Bool(said)) => Some(*said),
            Some(other) => match integer(other) {
                Some(n @ 0..=1) => Some(n == 1),
                _ => bail!("{}: `{key}`: expected true or false, got {other:?}", self.path().display()),
            },
        };
        match interleaved {
            Some(tensor) if said == Some(true) => {
                bail!("{}: `{key}`: expected false beside tensor `{tensor}`, got true", self.path().display())
            }
            _ => Ok(said.unwrap_or(family != Family::Qwen3Next && interleaved.is_none())),
        }
    }
}

/// Whether a tensor belongs to a model with so many blocks: not to a vision tower (`v.*`), not to Ollama's draft head (`mtp.*`).
pub(super) fn is_of_model(tensor: &str, blocks: usize) -> bool {
    match tensor.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((block, _)) => block.parse::<usize>().is_ok_and(|block| block < blocks),
        None => ["token_embd.", "output.", "output_norm.", "rope_"].iter().any(|start| tensor.starts_with(start)),
    }
}

/// The place of the weight that transformers calls `name`; `has` says which tensors the file contains.
pub(super) fn place(name: &str, heads: &Heads, has: impl Fn(&str) -> bool) -> Option<Place> {
    let whole = |tensor: &str| Place { tensor: tensor.into(), rows: None, columns: None, value: Value::Same };
    let norm = |tensor: &str| Place { value: Value::PlusOne, ..whole(tensor) };
    // The draft head is one more block.
    let head = heads.layers.to_string();
    if let Some(name) = name.strip_prefix("mtp.layers.0.") {
        return place(&format!("model.layers.{head}.{name}"), heads, has);
    }
    let of_head = |tensor: &str| format!("blk.{head}.nextn.{tensor}.weight");
    let Some(in_layer) = name.strip_prefix("model.layers.") else {
        return match name {
            "mtp.fc.weight" => Some(whole(&of_head("eh_proj"))),
            "mtp.pre_fc_norm_embedding.weight" => Some(norm(&of_head("enorm"))),
            "mtp.pre_fc_norm_hidden.weight" => Some(norm(&of_head("hnorm"))),
            "mtp.norm.weight" => Some(norm(&of_head("shared_head_norm"))),
            "model.embed_tokens.weight" => Some(whole("token_embd.weight")),
            "model.norm.weight" => Some(norm("output_norm.weight")),
            "lm_head.weight" => Some(whole("output.weight")),
            _ => None,
        };
    };
    let (layer, name) = in_layer.split_once('.')?;
    let at = |tensor: &str| format!("blk.{layer}.{tensor}");
    if let Some(name) = name.strip_prefix("linear_attn.") {
        return heads.place(name, at, has);
    }
    // llama.cpp's converter puts all three into one tensor where it is told to (`--fuse-qkv`).
    let attention = |tensor: &str, section: usize| {
        let (tensor, fused) = (at(tensor), at("attn_qkv.weight"));
        if has(&tensor) || !has(&fused) {
            return whole(&tensor);
        }
        let first = heads.attention[..section].iter().sum();
        let rows = Range { start: first, end: first + heads.attention[section] };
        Place { rows: Some(Rows { of: heads.attention.iter().sum(), ranges: Vec::from([rows]) }), ..whole(&fused) }
    };
    Some(match name {
        "input_layernorm.weight" => norm(&at("attn_norm.weight")),
        "post_attention_layernorm.weight" => norm(&at("post_attention_norm.weight")),
        "self_attn.q_norm.weight" => norm(&at("attn_q_norm.weight")),
        "self_attn.k_norm.weight" => norm(&at("attn_k_norm.weight")),
        "self_attn.q_proj.weight" => attention("attn_q.weight", 0),
        "self_attn.k_proj.weight" => attention("attn_k.weight", 1),
        "self_attn.v_proj.weight" => attention("attn_v.weight", 2),
        "self_attn.o_proj.weight" => whole(&at("attn_output.weight")),
        "mlp.gate_proj.weight" => whole(&at("ffn_gate.weight")),
        "mlp.up_proj.weight" => whole(&at("ffn_up.weight")),
        "mlp.down_proj.weight" => whole(&at("ffn_down.weight")),
        "mlp.gate.weight" => whole(&at("ffn_gate_inp.weight")),
        "mlp.experts.gate_proj" => whole(&at("ffn_gate_exps.weight")),
        "mlp.experts.up_proj" => whole(&at("ffn_up_exps.weight")),
        "mlp.experts.gate_up_proj" => whole(&at("ffn_gate_up_exps.weight")),
        "mlp.experts.down_proj" => whole(&at("ffn_down_exps.weight")),
        "mlp.shared_expert_gate.weight" => whole(&at("ffn_gate_inp_shexp.weight")),
        "mlp.shared_expert.gate_proj.weight" => whole(&at("ffn_gate_shexp.weight")),
        "mlp.shared_expert.up_proj.weight" => whole(&at("ffn_up_shexp.weight")),
        "mlp.shared_expert.down_proj.weight" => whole(&at("ffn_down_shexp.weight")),
        _ => return None,
    })
}

impl Heads {
    fn place(&self, name: &str, at: impl Fn(&str) -> String, has: impl Fn(&str) -> bool) -> Option<Place> {
        let c = &self.config;
        let (key, value, keys) = (c.key_head_dim, c.value_head_dim, c.num_key_heads * c.key_head_dim);
        let whole = |tensor: &str| Place { tensor: at(tensor), rows: None, columns: None, value: Value::Same };
        let part = |tensor: &str, of: usize, ranges: Vec<Range<usize>>| Place {
            rows: Some(Rows { of, ranges }),
            ..whole(tensor)
        };
        let rows = |tensor: &str, ranges: Vec<Range<usize>>| part(tensor, ranges.iter().map(Range::len).sum(), ranges);
        let q_k_and = |v: Vec<Range<usize>>| std::iter::once(0..2 * keys).chain(v).collect();
        // The converter split them; before, both were interleaved by key head.
        let one_tensor = !has(&at("attn_qkv.weight")) && has(&at("ssm_in.weight"));
        let (r, heads, both) = (self.per_key_head(), c.num_value_heads, has(&at("ssm_ba.weight")));
        let (stride, v_rows) = (2 * (key + r * value), r * value);
        let by_key_head = |stride: usize, first: usize, n: usize| {
            (0..c.num_key_heads).map(move |head| head * stride + first..head * stride + first + n)
        };
        Some(match name {
            "in_proj_qkv.weight" if one_tensor => {
                let [q, k] = [0, key].map(|first| by_key_head(stride, first, key));
                let v = by_key_head(stride, 2 * key, v_rows);
                part("ssm_in.weight", c.num_key_heads * stride, q.chain(k).chain(v).collect())
            }
            "in_proj_z.weight" if one_tensor => {
                let z = by_key_head(stride, 2 * key + v_rows, v_rows);
                part("ssm_in.weight", c.num_key_heads * stride, z.collect())
            }
            "in_proj_qkv.weight" => rows("attn_qkv.weight", q_k_and(self.of_heads(2 * keys, value))),
            "in_proj_z.weight" => rows("attn_gate.weight", self.of_heads(0, value)),
            // Qwen3-Next: per key head b, then a.
            "in_proj_b.weight" if both => part("ssm_ba.weight", 2 * heads, by_key_head(2 * r, 0, r).collect()),
            "in_proj_a.weight" if both => part("ssm_ba.weight", 2 * heads, by_key_head(2 * r, r, r).collect()),
            "in_proj_b.weight" => rows("ssm_beta.weight", self.of_heads(0, 1)),
            "in_proj_a.weight" => rows("ssm_alpha.weight", self.of_heads(0, 1)),
            "conv1d.weight" => rows("ssm_conv1d.weight", q_k_and(self.of_heads(2 * keys, value))),
            "A_log" => Place { value: Value::MinusExp, ..rows("ssm_a", self.of_heads(0, 1)) },
            // Ollama's name.
            "dt_bias" if has(&at("ssm_dt")) => rows("ssm_dt", self.of_heads(0, 1)),
            "dt_bias" => rows("ssm_dt.bias", self.of_heads(0, 1)),
            "norm.weight" => whole("ssm_norm.weight"),
            "out_proj.weight" => {
                let tiles = Tiles { groups: c.num_key_heads, per_group: r, size: value };
                Place { columns: self.is_moved().then_some(tiles), ..whole("ssm_out.weight") }
            }
            _ => return None,
        })
    }

    /// Value heads of a key head.
    fn per_key_head(&self) -> usize {
        self.config.num_value_heads / self.config.num_key_heads
    }

    /// Whether the file has the value heads in another order than the model.
    fn is_moved(&self) -> bool {
        self.tiled && self.per_key_head() > 1 && self.config.num_key_heads > 1
    }

    /// The rows of the value heads, each of `size`, from `first` on, in the model's order.
    fn of_heads(&self, first: usize, size: usize) -> Vec<Range<usize>> {
        let (heads, r) = (self.config.num_key_heads, self.per_key_head());
        let stored = |head: usize| match self.tiled {
            true => head % r * heads + head / r,
            false => head,
        };
        let range = |head: usize| first + stored(head) * size..first + (stored(head) + 1) * size;
        (0..self.config.num_value_heads).map(range).collect()
    }
}

#[cfg(test)]
mod tests;
