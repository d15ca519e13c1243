//! Qwen3-Next, and Qwen3.5 and later.

use super::{Experts, Family, NormPlacement, Published, QkNorm};

pub(super) const QWEN3_NEXT: Published = Published {
    family: Family::Qwen3Next,
    model_types: &[("qwen3_next", false)],
    architectures: &["Qwen3Next"],
    complete: |_| {},
    zero_centred_norms: true,
    norms: |_| NormPlacement::Before,
    positions: |_| true,
    with_positions: "full_attention",
    positions_are_optional: false,
    partial_rotary_factor: 0.25,
    output_gate: true,
    qk_norm: QkNorm::Head,
    experts: Experts::Optional,
    shared_expert_gate: true,
};

pub(super) const QWEN3_5: Published = Published {
    family: Family::Qwen3_5,
    model_types: &[("qwen3_5", true), ("qwen3_5_text", false)],
    architectures: &["Qwen3_5", "Qwen3_5Text"],
    ..QWEN3_NEXT
};

pub(super) const QWEN3_5_MOE: Published = Published {
    family: Family::Qwen3_5Moe,
    model_types: &[("qwen3_5_moe", true), ("qwen3_5_moe_text", false)],
    architectures: &["Qwen3_5Moe", "Qwen3_5MoeText"],
    experts: Experts::Always { normalised: true },
    ..QWEN3_NEXT
};
