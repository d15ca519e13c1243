//! Lara-4-Mini.

use super::{qwen, LayerNames};

pub(super) const LARA_MINI: LayerNames = LayerNames {
    gated_norm: "linear_attn.out_norm.weight",
    gdn_inputs: |c| vec![("linear_attn.in_proj", c.conv_channels() + c.value_size())],
    ..qwen::QWEN3_5
};
