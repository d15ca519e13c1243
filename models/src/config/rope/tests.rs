use crate::config::ModelConfig;
use serde_json::{json, Value};

/// Of 16 rotated values with base 10,000, flat in a Qwen3-Next of 4,096 positions or in the text model of a Qwen3.5.
fn with(rope: Value, flat: bool) -> Value {
    let mut text = json!({
        "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 4096, "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    });
    text.as_object_mut().unwrap().extend(rope.as_object().unwrap().clone());
    match flat {
        true => text["model_type"] = "qwen3_next".into(),
        false => return json!({"model_type": "qwen3_5", "text_config": text}),
    }
    text
}

fn read(config: &Value) -> candle_core::Result<ModelConfig> {
    ModelConfig::from_json(&config.to_string())
}

#[track_caller]
fn fails(config: &Value, parts: &[&str]) {
    let message = read(config).unwrap_err().to_string();
    parts.iter().for_each(|part| assert!(message.contains(part), "expected {part:?} in {message:?}"));
}

/// Values of transformers 5.24, which has them in f32.
#[test]
fn yarn_is_that_of_transformers() {
    let block = |settings: Value| {
        let mut block = json!({"rope_type": "yarn", "rope_theta": 1e4});
        block.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        block
    };
    let cases: [(Value, [f64; 8], f64, usize); 4] = [
        (
            json!({"factor": 4.0, "original_max_position_embeddings": 1024}),
            [1., 0.31622776, 0.08125, 0.019764237, 0.004375, 0.00079056947, 0.00025, 7.905694e-05],
            1.138629436111989,
            4096,
        ),
        (
            json!({
                "factor": 4, "original_max_position_embeddings": 1024, "truncate": false, "beta_fast": 16, "beta_slow": 2,
            }),
            [1., 0.31622776, 0.1, 0.018701805, 0.0025, 0.00079056947, 0.00025, 7.905694e-05],
            1.138629436111989,
            4096,
        ),
        (
            json!({"factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.2}),
            [1., 0.31622776, 0.1, 0.024705295, 0.005625, 0.001087033, 0.000125, 3.952847e-05],
            0.9167912505456107,
            8 * 4096,
        ),
        (
            json!({"factor": null, "original_max_position_embeddings": 512, "attention_factor": 0.9}),
            [1., 0.24705294, 0.05625, 0.01087033, 0.00125, 0.00039528473, 0.000125, 3.952847e-05],
            0.9,
            4096,
        ),
    ];
    for (settings, frequencies, factor, positions) in cases {
        for (place, flat) in [("rope_parameters", true), ("rope_scaling", true), ("rope_parameters", false)] {
            let c = read(&with(json!({place: block(settings.clone())}), flat)).unwrap();
            for (got, want) in c.attention.rope_inv_freq.iter().zip(frequencies) {
                assert!((got - want).abs() < 1e-6 * want, "{settings}: {got} {want}");
            }
            assert!((c.attention.rope_factor - factor).abs() < 1e-12, "{settings}");
            assert_eq!((c.max_position_embeddings, c.attention.rope_inv_freq.len()), (positions, 8), "{settings}");
        }
    }
}

#[test]
fn settings_at_any_level_are_one() {
    let plain = read(&with(json!({"rope_theta": 1e6}), true)).unwrap().attention;
    assert_eq!(plain.rope_factor, 1.);
    let block = json!({"rope_type": "default", "type": "mrope", "rope_theta": 1e6, "mrope_section": [1, 1, 2]});
    for place in [
        json!({"rope_scaling": block}),
        json!({"rope_parameters": block, "rope_theta": 1e6}),
        json!({"rope_parameters": {"full_attention": block, "linear_attention": {"rope_theta": 1}}}),
    ] {
        assert_eq!(read(&with(place.clone(), false)).unwrap().attention, plain, "{place}");
    }
    let mut top = with(json!({}), false);
    top["rope_parameters"] = block.clone();
    assert_eq!(read(&top).unwrap().attention, plain);
    top["text_config"]["rope_theta"] = 1e4.into();
    fails(&top, &["`text_config.rope_theta`", "`rope_parameters.rope_theta`", "1000000", "10000"]);
    let mut yarn = with(json!({"rope_parameters": block}), false);
    yarn["rope_parameters"] = json!({"rope_type": "yarn", "factor": 4.0});
    fails(&yarn, &["`text_config.rope_parameters.rope_type`", "`rope_parameters.rope_type`", "yarn", "default"]);
    yarn["rope_parameters"] = json!({"type": "yarn", "factor": 4.0});
    fails(&yarn, &["`rope_parameters.type`", "`text_config.rope_parameters.type`"]);
}

#[test]
fn no_setting_is_passed_over() {
    let of = |block: Value| with(json!({"rope_theta": 1e6, "rope_scaling": block}), true);
    fails(&of(json!({"factor": 4.0})), &["`rope_scaling.factor`", "4.0"]);
    fails(&of(json!({"rope_type": "yarn"})), &["`rope_scaling.rope_type`", "`factor`"]);
    fails(&of(json!({"rope_type": "yarn", "factor": 0.5})), &["`factor`", "0.5"]);
    fails(&of(json!({"rope_type": "yarn", "factor": 4, "short_factor": [1]})), &["`rope_scaling.short_factor`"]);
    fails(&of(json!({"rope_type": "yarn", "factor": 4, "beta_fast": 0.5})), &["`beta_fast`", "`beta_slow` (1)"]);
    fails(&of(json!({"rope_type": "yarn", "factor": 4, "attention_factor": 0})), &["`rope_scaling.attention_factor`"]);
    fails(&of(json!({"rope_type": "yarn", "type": "default", "factor": 4})), &["`rope_scaling.type`"]);
    fails(&of(json!({"sliding_attention": {"rope_theta": 1e4}})), &["`rope_scaling.sliding_attention`"]);
    for kind in ["linear", "dynamic", "llama3", "longrope", "proportional"] {
        fails(&of(json!({"rope_type": kind, "factor": 2})), &["`rope_scaling.rope_type`", kind]);
    }
    assert!(read(&of(json!({"rope_type": "default", "factor": 1.0}))).is_ok());
}
