use super::config::AdapterConfig;
use super::products::Product;
use super::{LoraAdapter, Module};
use crate::config::ModelConfig;
use candle_core::Result;

fn config(entries: &str) -> Result<AdapterConfig> {
    AdapterConfig::parse(&format!("{{\"peft_type\": \"LORA\", \"r\": 8, \"lora_alpha\": 16, {entries}}}"))
}

#[test]
fn the_first_pattern_that_matches_whole_parts_counts() -> Result<()> {
    let config = config(
        r#""rank_pattern": {"layers.1.linear_attn.out_proj": 16, "q_proj": 2, "^v_proj": 3},
        "alpha_pattern": {".*\\.gate_up_proj": 8, "q_proj|k_proj": 1.5}"#,
    )?;
    for (name, want) in [
        ("model.layers.0.self_attn.q_proj", (2, 0.75)),
        ("model.layers.0.self_attn.k_proj", (8, 1.5 / 8.)),
        ("model.layers.0.self_attn.xq_proj", (8, 2.)),
        ("q_proj", (2, 0.75)),
        ("v_proj", (3, 16. / 3.)),
        ("model.layers.0.self_attn.v_proj", (8, 2.)),
        ("model.layers.1.linear_attn.out_proj", (16, 1.)),
        ("model.layers.11.linear_attn.out_proj", (8, 2.)),
        ("model.layers.1.mlp.experts.gate_up_proj", (8, 1.)),
    ] {
        assert_eq!(config.rank_and_scale(name), want, "{name}");
    }
    Ok(())
}

#[test]
fn parameters_are_named_by_their_ends() -> Result<()> {
    let config = config(r#""target_parameters": ["down_proj", "model.language_model.layers.1.mlp.gate.weight"]"#)?;
    for name in ["model.layers.0.mlp.experts.down_proj", "down_proj", "model.layers.1.mlp.gate.weight"] {
        assert!(config.has_parameter(name), "{name}");
    }
    for name in ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.11.mlp.gate.weight", "x.up_down_proj"] {
        assert!(!config.has_parameter(name), "{name}");
    }
    Ok(())
}

/// A by expert, B by rank.
#[test]
fn a_product_of_all_experts_is_taken_apart() {
    let [a, b] = [(0..8).map(|x| x as f32).collect(), (0..12).map(|x| x as f32).collect()];
    let all = Product { tensor: "t".into(), rank: 4, inputs: 2, outputs: 3, a, b };
    let second = all.expert(1, 2);
    assert_eq!((second.rank, second.inputs, second.outputs), (2, 2, 3));
    assert_eq!((second.a, second.b), (vec![4., 5., 6., 7.], vec![1., 3., 5., 7., 9., 11.]));
}

fn changed(config: &ModelConfig, paths: &[&str]) -> u64 {
    let product = Product { tensor: "t".into(), rank: 1, inputs: 1, outputs: 1, a: vec![0.], b: vec![0.] };
    let module = |path: &&str| Module { path: path.to_string(), product: product.clone(), experts: None };
    let modules = paths.iter().map(module).collect();
    LoraAdapter { modules, of_vision: 0, experts_in_out: false }.changed_parameters(config)
}

/// Whatever a checkpoint's projections are, the layer multiplies with one matrix.
#[test]
fn changed_numbers_of_other_layouts() -> Result<()> {
    let olmo = ModelConfig::from_json(include_str!("../../../../examples/generate/configs/olmo-hybrid-7b.json"))?;
    let lara = ModelConfig::from_json(include_str!("../../../../examples/generate/configs/lara-4-mini.json"))?;
    let inputs =
        |c: &ModelConfig| (2 * (c.gdn.key_size() + c.gdn.value_size() + c.gdn.num_value_heads) * c.hidden_size) as u64;
    let outputs = |c: &ModelConfig| (c.gdn.value_size() * c.hidden_size) as u64;
    let queries = |c: &ModelConfig| (c.attention.num_heads * c.attention.head_dim * c.hidden_size) as u64;
    let each = ["q", "k", "v", "g", "b", "a"].map(|name| format!("layers.0.linear_attn.{name}_proj"));
    for path in &each {
        assert_eq!(changed(&olmo, &[path]), inputs(&olmo), "{path}");
    }
    assert_eq!(changed(&olmo, &each.each_ref().map(|path| &**path)), inputs(&olmo));
    assert_eq!(changed(&olmo, &["layers.0.linear_attn.o_proj"]), outputs(&olmo));
    assert_eq!(changed(&olmo, &["layers.3.self_attn.q_proj"]), queries(&olmo));
    assert_eq!(changed(&lara, &["layers.0.linear_attn.in_proj"]), inputs(&lara));
    assert_eq!(changed(&lara, &["layers.0.linear_attn.out_proj"]), outputs(&lara));
    assert_eq!(changed(&lara, &["layers.1.self_attn.q_proj"]), queries(&lara));
    Ok(())
}

/// What is stored as one is counted once.
#[test]
fn changed_numbers() -> Result<()> {
    let json = include_str!("../../../../examples/generate/demo/config.json");
    let config = ModelConfig::from_json(json)?;
    let experts = 8 * 64 * 192;
    for (paths, want) in [
        (&["layers.0.linear_attn.in_proj_ba"][..], (1536 + 8) * 192),
        (&["layers.0.linear_attn.in_proj_ba", "layers.0.linear_attn.in_proj_qkvz"], (1536 + 8) * 192),
        (&["layers.0.linear_attn.out_proj", "layers.1.linear_attn.out_proj"], 2 * 512 * 192),
        (&["layers.3.self_attn.q_proj", "layers.3.self_attn.k_proj"], (512 + 128) * 192),
        (&["layers.3.self_attn.v_proj", "layers.3.self_attn.o_proj"], (128 + 256) * 192),
        (&["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"], 3 * experts),
        (&["layers.0.mlp.experts.0.gate_proj", "layers.0.mlp.experts.7.up_proj"], 2 * experts),
        (&["layers.0.mlp.experts.0.down_proj", "layers.1.mlp.experts.0.down_proj"], 2 * experts),
        (&["layers.0.mlp.shared_expert.up_proj", "layers.0.mlp.shared_expert.down_proj"], 3 * 64 * 192),
        (&["layers.0.mlp.gate", "layers.0.mlp.shared_expert_gate"], 0),
        (&["lm_head"], 1024 * 192),
    ] {
        assert_eq!(changed(&config, paths), want, "{paths:?}");
    }
    Ok(())
}
