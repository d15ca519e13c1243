use super::*;
use serde_json::json;

fn read(q: &Value) -> Result<Option<Fp8Config>> {
    fp8(&Fields::root(&json!({"quantization_config": q}))?)
}

#[track_caller]
fn fails(q: Value, parts: &[&str]) {
    let message = read(&q).unwrap_err().to_string();
    parts.iter().for_each(|part| assert!(message.contains(part), "expected {part:?} in {message:?}"));
}

fn of_compressed(weights: Value) -> Value {
    json!({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}, "ignore": ["lm_head"]})
}

#[test]
fn fp8_of_all_writers() -> Result<()> {
    let per_tensor = json!({"type": "float", "num_bits": 8, "strategy": "tensor"});
    for (q, block, list) in [
        (json!({"quant_method": "fp8", "weight_block_size": [128, 64]}), Some([128, 64]), vec![]),
        (json!({"quant_method": "fp8", "weight_block_size": null, "ignored_layers": ["a"]}), None, vec!["a"]),
        (json!({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["b*"]}), None, vec!["b*"]),
        (of_compressed(per_tensor), None, vec!["lm_head"]),
    ] {
        let got = read(&q)?.unwrap();
        assert_eq!(
            (got.weight_block_size, got.modules_to_not_convert),
            (block, list.into_iter().map(String::from).collect())
        );
    }
    fails(json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}), &["`quantization_config.quant_algo`", "NVFP4"]);
    let group = "quantization_config.config_groups.group_0.weights";
    fails(of_compressed(json!({"type": "int", "num_bits": 8})), &[&format!("`{group}.type`"), "int"]);
    fails(of_compressed(json!({"type": "float", "num_bits": 4})), &[&format!("`{group}.num_bits`"), "got 4"]);
    let packed = json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}});
    fails(packed, &["`quantization_config.format`", "pack-quantized"]);
    let mlx = json!({"group_size": 64, "bits": 4, "mode": "affine"});
    fails(mlx.clone(), &["`quantization_config`", "MLX", "4 bits", "GGUF"]);
    let root = json!({"quantization": mlx});
    assert!(fp8(&Fields::root(&root)?).unwrap_err().to_string().starts_with("config: `quantization`: expected"));
    Ok(())
}

/// Rows that share a scale, as each writer says it.
#[test]
fn scales_of_rows_are_known() -> Result<()> {
    let compressed = |strategy: &str| of_compressed(json!({"type": "float", "num_bits": 8, "strategy": strategy}));
    for (q, rows) in [
        (json!({"quant_method": "fp8", "weight_block_size": [128, 128]}), 128),
        (json!({"quant_method": "fp8", "weight_block_size": [192, 128]}), 64),
        (json!({"quant_method": "fp8"}), 128),
        (json!({"quant_method": "fbgemm_fp8"}), 1),
        (json!({"quant_method": "modelopt", "quant_algo": "FP8"}), 128),
        (json!({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}), 1),
        (compressed("tensor"), 128),
        (compressed("channel"), 1),
    ] {
        assert_eq!(read(&q)?.map(|config| config.block_rows()), Some(rows), "{q}");
    }
    Ok(())
}

/// Python has look-around; what such a pattern matches the tensors say.
#[test]
fn patterns_of_python_are_left_unknown() -> Result<()> {
    let config = read(&json!({"quant_method": "fp8", "ignore": ["re:^(?!.*mlp).*$", "re:("]}))?.unwrap();
    assert_eq!(config.unknown_patterns(), ["re:^(?!.*mlp).*$", "re:("]);
    assert!(config.converts("model.layers.0.self_attn.q_proj"));
    Ok(())
}

#[test]
fn lists_have_names_globs_and_expressions() -> Result<()> {
    let list = ["re:.*mlp\\.up_proj", "re:model.layers.1.self_attn", "*layers.2.*", "model.layers.3.mlp"];
    let config = Fp8Config::new(None, list.map(String::from).to_vec());
    for (module, converts) in [
        ("model.layers.0.mlp.up_proj", false),
        ("model.layers.0.mlp.down_proj", true),
        ("model.language_model.layers.1.self_attn.q_proj", false),
        ("model.layers.2.mlp.down_proj", false),
        ("layers.3.mlp.down_proj", false),
        ("model.layers.3.self_attn.q_proj", true),
    ] {
        assert_eq!(config.converts(module), converts, "{module}");
    }
    Ok(())
}
