//! OLMo-Hybrid. Layers have norms before Gated DeltaNet and behind softmax attention. transformers writes one that stands behind
//! attention under the name of another that stands before a feed-forward.

use super::LayerNames;

pub(super) const OLMO_HYBRID: LayerNames = LayerNames {
    before: [&["attention_layer_norm", "input_layernorm"], &["feedforward_layer_norm", "post_attention_layernorm"]],
    behind: [&["post_attention_layernorm", "feedforward_layer_norm"], &["post_feedforward_layernorm"]],
    gated_norm: "linear_attn.o_norm.weight",
    gdn_output: "linear_attn.o_proj",
    gdn_inputs: |c| {
        vec![
            ("linear_attn.q_proj", c.key_size()),
            ("linear_attn.k_proj", c.key_size()),
            ("linear_attn.v_proj", c.value_size()),
            ("linear_attn.g_proj", c.value_size()),
        ]
    },
};
