//! Qwen3-Next, and Qwen3.5 and later.

use super::LayerNames;

pub(super) const QWEN3_NEXT: LayerNames =
    LayerNames { gdn_inputs: |c| vec![("linear_attn.in_proj_qkvz", c.conv_channels() + c.value_size())], ..QWEN3_5 };

pub(super) const QWEN3_5: LayerNames = LayerNames {
    before: [&["input_layernorm"], &["post_attention_layernorm"]],
    behind: [&[], &[]],
    gated_norm: "linear_attn.norm.weight",
    gdn_output: "linear_attn.out_proj",
    gdn_inputs: |c| vec![("linear_attn.in_proj_qkv", c.conv_channels()), ("linear_attn.in_proj_z", c.value_size())],
};
