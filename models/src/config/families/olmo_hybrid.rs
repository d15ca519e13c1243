//! OLMo-Hybrid: dense, Llama's norms, those of softmax layers behind the mixer and the feed-forward.

use super::{default, Experts, Family, NormPlacement, Published, QkNorm};
use crate::config::MixerKind;
use serde_json::{Map, Value};

pub(super) const OLMO_HYBRID: Published = Published {
    family: Family::OlmoHybrid,
    model_types: &[("olmo_hybrid", false)],
    architectures: &["OlmoHybrid"],
    complete,
    zero_centred_norms: false,
    norms: |mixer| match mixer {
        MixerKind::LinearAttention => NormPlacement::Before,
        _ => NormPlacement::Behind,
    },
    positions: |_| true,
    with_positions: "full_attention",
    positions_are_optional: true,
    partial_rotary_factor: 1.0,
    output_gate: false,
    qk_norm: QkNorm::Projection,
    experts: Experts::Never,
    shared_expert_gate: false,
};

/// The defaults of the configuration class in transformers; heads have no size of their own there.
fn complete(text: &mut Map<String, Value>) {
    let number = |text: &Map<String, Value>, key: &str| text.get(key).and_then(Value::as_u64);
    if let Some(heads) = number(text, "num_attention_heads").filter(|heads| *heads > 0) {
        default(text, "num_key_value_heads", heads);
        default(text, "linear_num_key_heads", heads);
        default(text, "linear_num_value_heads", heads);
        if let Some(hidden) = number(text, "hidden_size").filter(|hidden| hidden.is_multiple_of(heads)) {
            default(text, "head_dim", hidden / heads);
        }
    }
    let keys = number(text, "linear_num_key_heads").filter(|heads| *heads > 0);
    if let (Some(hidden), Some(heads)) = (number(text, "hidden_size").filter(|hidden| *hidden < 1 << 31), keys) {
        default(text, "linear_key_head_dim", 3 * hidden / 4 / heads);
    }
    if let Some(dim) = number(text, "linear_key_head_dim").filter(|dim| *dim < 1 << 31) {
        default(text, "linear_value_head_dim", 2 * dim);
    }
    default(text, "linear_conv_kernel_dim", 4);
}
