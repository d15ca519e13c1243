//! How many numbers an adapter has and changes.

use super::LoraAdapter;
use crate::config::{FfnKind, ModelConfig};
use std::collections::HashMap;

impl LoraAdapter {
    /// Numbers in the matrices of a model, or of a rank's shard, that the adapter changes, and in those that are stored with them as one:
    /// the sums are exact in f32 alone, so that the CPU does not keep them in 16 bits. Routers, which are kept in f32 anyway, are not
    /// counted.
    pub fn changed_parameters(&self, config: &ModelConfig) -> u64 {
        let stacks: HashMap<String, u64> =
            self.modules.iter().filter_map(|module| stack(&module.path, config)).collect();
        stacks.into_values().fold(0, u64::saturating_add)
    }

    /// Bytes of its own numbers in memory.
    pub fn size_in_bytes(&self) -> u64 {
        self.modules.iter().map(|module| 4 * (module.product.a.len() + module.product.b.len()) as u64).sum()
    }
}

/// A name for what a module's weight is stored with, and the numbers of that.
fn stack(path: &str, config: &ModelConfig) -> Option<(String, u64)> {
    let (gdn, attention, moe) = (&config.gdn, &config.attention, config.moe.as_ref());
    let (at, name) = path.rsplit_once('.').unwrap_or(("", path));
    let of_gdn = at.ends_with("linear_attn");
    let in_experts = at.split('.').any(|part| part == "experts");
    let (inner, experts) = match moe {
        Some(moe) if in_experts => (moe.intermediate_size, moe.num_experts),
        Some(moe) if at.ends_with("shared_expert") => (moe.shared_intermediate_size, 1),
        _ => (dense_width(path, config), 1),
    };
    let (stack, factors) = match name {
        "gate_proj" | "up_proj" | "gate_up_proj" => ("gate_up", [experts, 2 * inner]),
        "down_proj" => ("down", [experts, inner]),
        "out_proj" | "o_proj" if of_gdn => ("out_proj", [1, gdn.value_size()]),
        // However many the checkpoint has.
        name if of_gdn && name.contains("proj") => {
            ("in_proj", [1, 2 * (gdn.key_size() + gdn.value_size() + gdn.num_value_heads)])
        }
        "q_proj" => ("q_proj", [1, attention.query_rows()]),
        "k_proj" | "v_proj" => (name, [attention.num_kv_heads, attention.head_dim]),
        "o_proj" => ("o_proj", [attention.num_heads, attention.head_dim]),
        "lm_head" => ("lm_head", [1, config.vocab_size]),
        _ => return None,
    };
    // All experts of a layer are one.
    let at = at.split(".experts").next().unwrap_or(at);
    let numbers = factors.iter().fold(config.hidden_size as u64, |all, n| all.saturating_mul(*n as u64));
    Some((format!("{at} {stack} {in_experts}"), numbers))
}

/// The inner width of a layer's MLP; that of the last layer for the draft head's.
fn dense_width(path: &str, config: &ModelConfig) -> usize {
    let index = path.strip_prefix("layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
    match index.and_then(|i| config.layers.get(i)).or(config.layers.last()).map(|layer| layer.ffn) {
        Some(FfnKind::Dense { intermediate_size }) => intermediate_size,
        _ => 0,
    }
}
