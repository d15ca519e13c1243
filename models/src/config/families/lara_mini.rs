//! Lara-4-Mini: experts in all layers, and positions in those of a sliding window alone.

use super::super::parse::MAX_LAYERS;
use super::{default, Experts, Family, NormPlacement, Published, QkNorm};
use serde_json::{Map, Value};

pub(super) const LARA_MINI: Published = Published {
    family: Family::LaraMini,
    model_types: &[("lara_mini", false)],
    architectures: &["LaraMini"],
    complete,
    zero_centred_norms: false,
    norms: |_| NormPlacement::Before,
    positions: |window| window.is_some(),
    with_positions: "sliding_attention",
    positions_are_optional: false,
    partial_rotary_factor: 1.0,
    output_gate: false,
    qk_norm: QkNorm::Head,
    experts: Experts::Always { normalised: false },
    shared_expert_gate: false,
};

/// The pattern of the published layers, where the file lists none.
fn complete(text: &mut Map<String, Value>) {
    const PATTERN: [&str; 5] =
        ["linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention"];
    let layers = text.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0) as usize;
    let kinds: Vec<Value> = PATTERN.iter().cycle().take(layers.min(MAX_LAYERS)).map(|kind| (*kind).into()).collect();
    default(text, "layer_types", kinds);
    default(text, "sliding_window", 512);
}
