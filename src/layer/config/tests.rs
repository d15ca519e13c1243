//! Configs from `config.json`.

use super::*;

const KEYS: &str = r#""hidden_size": 64, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_num_value_heads": 4,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4"#;

fn parse(json: &str) -> std::result::Result<GdnConfig, String> {
    serde_json::from_str(json).map_err(|error| error.to_string())
}

#[test]
fn both_families_are_read() {
    let config = GdnConfig::new(64, (2, 32), (4, 16));
    assert_eq!(parse(&format!("{{{KEYS}}}")), Ok(config.clone()));
    let nested = format!("{{\"hidden_size\": 1, \"vision\": [], \"text_config\": {{{KEYS}, \"rms_norm_eps\": 1e-5}}}}");
    assert_eq!(parse(&nested), Ok(config.clone().with(|c| c.rms_norm_eps = 1e-5)));
    let sigmoid = format!("{{{KEYS}, \"output_gate_type\": \"sigmoid\"}}");
    assert_eq!(parse(&sigmoid), Ok(config.with(|c| c.output_gate = GateActivation::Sigmoid)));
}

#[test]
fn an_error_names_the_key() {
    for key in ["hidden_size", "linear_num_key_heads", "linear_value_head_dim", "linear_conv_kernel_dim"] {
        let error = parse(&format!("{{{}}}", KEYS.replace(key, "other"))).unwrap_err();
        assert!(error.contains(&format!("missing field `{key}`")), "{error}");
    }
    let wrong = |from: &str, to: &str| parse(&format!("{{{}}}", KEYS.replace(from, to))).unwrap_err();
    assert!(
        wrong("\"linear_num_value_heads\": 4", "\"linear_num_value_heads\": 3").contains("num_value_heads: expected")
    );
    assert!(parse(&format!("{{{KEYS}, \"output_gate_type\": \"x\"}}")).unwrap_err().contains("output_gate_type"));
}

/// As the published file has them, and from the defaults of its class.
#[test]
fn olmo_hybrid_has_an_epsilon_and_a_beta_of_its_own() {
    let want = GdnConfig::new(3840, (30, 96), (30, 192)).with(|c| (c.rms_norm_eps, c.beta_scale) = (1e-5, 2.0));
    let short =
        r#"{"model_type": "olmo_hybrid", "hidden_size": 3840, "num_attention_heads": 30, "rms_norm_eps": 1e-6}"#;
    assert_eq!(parse(short), Ok(want.clone()));
    let full = r#"{"model_type": "olmo_hybrid", "hidden_size": 3840, "linear_num_key_heads": 30, "linear_num_value_heads": 30,
        "linear_key_head_dim": 96, "linear_value_head_dim": 192, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
        "linear_allow_neg_eigval": false}"#;
    assert_eq!(parse(full), Ok(want.with(|c| c.beta_scale = 1.0)));
    let large = r#"{"model_type": "olmo_hybrid", "hidden_size": 9223372036854775808, "num_attention_heads": 1}"#;
    assert!(parse(large).unwrap_err().contains("key_head_dim: expected 1 to 256"));
}
