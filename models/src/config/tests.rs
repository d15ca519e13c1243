use super::{Family, FfnKind, MixerKind, ModelConfig, NormPlacement, QkNorm};
use candle_gdn::GateActivation;
use serde_json::{json, Value};

fn qwen3_next() -> Value {
    json!({
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "vocab_size": 1024,
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 40,
        "eos_token_id": 5
    })
}

fn with(field: &str, value: Value) -> Value {
    let mut config = qwen3_next();
    config[field] = value;
    config
}

fn without(field: &str) -> Value {
    let mut config = qwen3_next();
    config.as_object_mut().unwrap().remove(field);
    config
}

fn parse(config: &Value) -> ModelConfig {
    ModelConfig::from_json(&config.to_string()).unwrap()
}

#[track_caller]
fn fails(config: &Value, parts: &[&str]) {
    let message = ModelConfig::from_json(&config.to_string()).unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "expected {part:?} in {message:?}");
    }
}

#[test]
fn reads_every_field() {
    let c = parse(&qwen3_next());
    assert_eq!(c.family, Family::Qwen3Next);
    assert_eq!((c.vocab_size, c.hidden_size, c.max_position_embeddings), (1024, 192, 4096));
    assert_eq!((c.rms_norm_eps, c.tie_word_embeddings), (1e-5, false));
    assert_eq!((c.attention.num_heads, c.attention.num_kv_heads, c.attention.head_dim), (4, 2, 64));
    assert_eq!(c.attention.rope_inv_freq.len(), 8);
    assert_eq!(c.attention.rope_inv_freq[0], 1.);
    assert!((c.attention.rope_inv_freq[4] - 1e7f64.powf(-0.5)).abs() < 1e-12);
    assert_eq!((c.gdn.num_key_heads, c.gdn.num_value_heads, c.gdn.conv_kernel), (2, 4, 4));
    assert_eq!((c.gdn.key_head_dim, c.gdn.value_head_dim), (128, 64));
    assert_eq!((c.gdn.output_gate, c.gdn.beta_scale, c.gdn.rms_norm_eps), (GateActivation::Silu, 1., 1e-5));
    let moe = c.moe.unwrap();
    assert_eq!((moe.num_experts, moe.experts_per_token, moe.norm_topk_prob), (8, 2, true));
    assert_eq!((moe.intermediate_size, moe.shared_intermediate_size), (48, 40));
    assert_eq!(c.eos_token_ids, [5]);
    let full: Vec<_> = c.layers.iter().map(|l| l.mixer == MixerKind::FullAttention).collect();
    assert_eq!(full, [false, false, false, true, false, false, false, true]);
    assert!(c.layers.iter().all(|l| l.ffn == FfnKind::Moe));
}

#[test]
fn weights_of_experts_are_normalised_where_the_config_says_so() {
    for (config, want) in [
        (with("norm_topk_prob", false.into()), false),
        (with("norm_topk_prob", true.into()), true),
        (without("norm_topk_prob"), true),
    ] {
        assert_eq!(parse(&config).moe.unwrap().norm_topk_prob, want);
    }
}

#[test]
fn older_rope_fields() {
    let mut old = without("rope_parameters");
    old["rope_theta"] = 1e4.into();
    old["partial_rotary_factor"] = 0.5.into();
    old["rope_scaling"] = Value::Null;
    let c = parse(&old);
    assert_eq!(c.attention.rope_inv_freq.len(), 16);
    assert!((c.attention.rope_inv_freq[8] - 1e-2).abs() < 1e-12);
    old["rope_scaling"] = json!({"type": "mrope", "mrope_section": [1, 1, 2]});
    assert_eq!(parse(&old), c);
}

#[test]
fn dense_and_sparse_layers() {
    let mut c = with("mlp_only_layers", json!([3]));
    c["decoder_sparse_step"] = 2.into();
    let sparse: Vec<_> = parse(&c).layers.iter().map(|l| l.ffn == FfnKind::Moe).collect();
    assert_eq!(sparse, [false, true, false, false, false, true, false, true]);
    let all = with("mlp_only_layers", json!([0, 1, 2, 3, 4, 5, 6, 7]));
    assert_eq!(parse(&all).moe, None);
}

#[test]
fn token_ids_and_gates() {
    assert_eq!(parse(&with("eos_token_id", json!([3, 4]))).eos_token_ids, [3, 4]);
    assert!(parse(&with("eos_token_id", Value::Null)).eos_token_ids.is_empty());
    assert_eq!(parse(&with("output_gate_type", "sigmoid".into())).gdn.output_gate, GateActivation::Sigmoid);
}

#[test]
fn nested_text_models() {
    let mut text = qwen3_next();
    for field in ["model_type", "architectures"] {
        text.as_object_mut().unwrap().remove(field);
    }
    let wrapped = json!({
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": text,
        "tie_word_embeddings": true,
        "vision_config": {"hidden_act": "gelu"}
    });
    let c = parse(&wrapped);
    assert_eq!((c.family, c.hidden_size, c.tie_word_embeddings), (Family::Qwen3_5Moe, 192, true));
    fails(&json!({"model_type": "qwen3_5"}), &["`text_config` is missing"]);
    let mut bad = wrapped.clone();
    bad["text_config"]["hidden_size"] = "wide".into();
    fails(&bad, &["`text_config.hidden_size`", "\"wide\""]);
    let mut none = wrapped;
    none["text_config"].as_object_mut().unwrap().remove("num_experts");
    fails(&none, &["`text_config.num_experts` is missing"]);
}

#[test]
fn what_is_no_configuration() {
    let error = |text: &str| ModelConfig::from_json(text).unwrap_err().to_string();
    assert!(error("{").contains("not valid JSON"));
    assert!(error("[]").contains("expected a JSON object"));
    fails(&without("model_type"), &["`model_type` is missing"]);
    fails(&with("model_type", "llama".into()), &["`model_type`", "qwen3_next", "\"llama\""]);
    fails(&with("architectures", json!(["LlamaForCausalLM"])), &["`architectures`", "LlamaForCausalLM"]);
}

#[test]
fn missing_fields_are_named() {
    for field in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "linear_conv_kernel_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "num_experts_per_tok",
        "moe_intermediate_size",
    ] {
        let mut config = without(field);
        config["mlp_only_layers"] = json!([0]);
        fails(&config, &[&format!("`{field}` is missing"), "a positive integer"]);
        config[field] = 0.into();
        fails(&config, &[&format!("`{field}`"), "a positive integer", "got 0"]);
        config[field] = (-1).into();
        fails(&config, &[&format!("`{field}`"), "got -1"]);
        config[field] = "12".into();
        fails(&config, &[&format!("`{field}`"), "got \"12\""]);
    }
    fails(&without("rope_parameters"), &["`rope_theta` is missing"]);
}

#[test]
fn contradictions_are_named() {
    fails(&with("num_key_value_heads", 3.into()), &["`num_key_value_heads`", "(4)", "got 3"]);
    fails(&with("linear_num_key_heads", 3.into()), &["`linear_num_key_heads`", "(4)", "got 3"]);
    fails(&with("num_experts_per_tok", 9.into()), &["`num_experts_per_tok`", "(8)", "got 9"]);
    fails(&with("mlp_only_layers", json!([8])), &["`mlp_only_layers`", "(8)", "got 8"]);
    fails(&with("layer_types", json!(["full_attention"])), &["`layer_types`", "(8)", "got 1"]);
    fails(&with("num_hidden_layers", 100000.into()), &["`num_hidden_layers`", "4096", "100000"]);
    fails(&with("head_dim", 4.into()), &["`partial_rotary_factor`", "head of 4", "gives 1"]);
    fails(&with("rms_norm_eps", (-1.).into()), &["`rms_norm_eps`", "-1"]);
}

#[test]
fn what_is_not_computed_is_refused() {
    let kinds = vec!["chunked_attention"; 8];
    fails(&with("layer_types", json!(kinds)), &["`layer_types`", "full_attention", "chunked_attention"]);
    fails(&with("hidden_act", "gelu".into()), &["`hidden_act`", "silu", "gelu"]);
    fails(&with("attention_bias", true.into()), &["`attention_bias`", "expected false", "true"]);
    fails(&with("attn_output_gate", false.into()), &["`attn_output_gate`", "expected true"]);
    fails(&with("output_gate_type", "tanh".into()), &["`output_gate_type`", "sigmoid", "tanh"]);
    let awq = json!({"quant_method": "awq", "bits": 4});
    fails(&with("quantization_config", awq), &["`quantization_config.quant_method`", "fp8", "awq"]);
    fails(&with("quantization_config", json!({})), &["`quantization_config.quant_method`", "missing"]);
    fails(&with("decoder_sparse_step", 0.into()), &["`decoder_sparse_step`", "positive", "got 0"]);
    fails(&with("full_attention_interval", 0.into()), &["`full_attention_interval`", "got 0"]);
    fails(&with("tie_word_embeddings", "yes".into()), &["`tie_word_embeddings`", "yes"]);
    fails(&with("eos_token_id", "end".into()), &["`eos_token_id`", "end"]);
    fails(&with("rope_scaling", json!({"type": "linear"})), &["`rope_scaling.type`", "yarn", "linear"]);
}

/// Qwen3.8's dense model is Qwen3.5's, and names the gate that this has.
#[test]
fn the_output_gate_may_be_named() {
    let json = include_str!("../../../examples/generate/configs/qwen3.8-27b.json");
    let gate = |json: &str| {
        let c = ModelConfig::from_json(json).unwrap();
        (c.family, c.gdn.output_gate)
    };
    assert_eq!(gate(json), (Family::Qwen3_5, GateActivation::Silu));
    assert_eq!(gate(&json.replace("swish", "sigmoid")), (Family::Qwen3_5, GateActivation::Sigmoid));
}

#[test]
fn olmo_hybrid() {
    let json = include_str!("../../../examples/generate/configs/olmo-hybrid-7b.json");
    let c = ModelConfig::from_json(json).unwrap();
    assert_eq!((c.family, c.zero_centred_norms, c.moe.as_ref()), (Family::OlmoHybrid, false, None));
    assert_eq!((c.gdn.key_head_dim, c.gdn.value_head_dim, c.gdn.beta_scale, c.gdn.rms_norm_eps), (96, 192, 2., 1e-5));
    let a = &c.attention;
    assert_eq!((a.head_dim, a.output_gate, a.qk_norm), (128, false, QkNorm::Projection));
    assert!(a.rope_inv_freq.is_empty() && c.rms_norm_eps == 1e-6);
    let norms: Vec<_> = c.layers[..4].iter().map(|layer| layer.norms == NormPlacement::Behind).collect();
    assert_eq!(norms, [false, false, false, true]);
    // All that the class in transformers completes.
    let mut short: Value = serde_json::from_str(json).unwrap();
    for key in ["num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"] {
        short.as_object_mut().unwrap().remove(key);
    }
    for key in ["linear_value_head_dim", "linear_conv_kernel_dim", "linear_allow_neg_eigval", "rope_parameters"] {
        short.as_object_mut().unwrap().remove(key);
    }
    assert_eq!(parse(&short), c);
    short["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 500000});
    assert_eq!(parse(&short).attention.rope_inv_freq.len(), 64);
    short["num_experts"] = 4.into();
    fails(&short, &["`num_experts`", "dense"]);
}

#[test]
fn lara_mini() {
    let json = include_str!("../../../examples/generate/configs/lara-4-mini.json");
    let c = ModelConfig::from_json(json).unwrap();
    assert_eq!((c.family, c.zero_centred_norms, c.tie_word_embeddings), (Family::LaraMini, false, true));
    let layers: Vec<_> = c.layers[..5].iter().map(|layer| (layer.mixer, layer.window, layer.positions)).collect();
    let (linear, full) = (MixerKind::LinearAttention, MixerKind::FullAttention);
    let sliding = (full, Some(512), true);
    assert_eq!(layers, [(linear, None, false), sliding, (linear, None, false), (full, None, false), sliding]);
    let moe = c.moe.clone().unwrap();
    assert_eq!((moe.num_experts, moe.experts_per_token, moe.shared_gate, moe.norm_topk_prob), (128, 4, false, true));
    let mut short: Value = serde_json::from_str(json).unwrap();
    short.as_object_mut().unwrap().remove("sliding_window");
    assert_eq!(parse(&short), c);
    short["attn_output_gate"] = true.into();
    fails(&short, &["`attn_output_gate`", "false"]);
    let mut windowless = qwen3_next();
    windowless["layer_types"] = json!(vec!["sliding_attention"; 8]);
    fails(&windowless, &["`sliding_window` is missing"]);
}
