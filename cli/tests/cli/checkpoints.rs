//! Checkpoints as other programs leave them.

use crate::cli::{fails, generate, run, Copy, DEMO, PROMPT};
use candle_core::{DType, Tensor};
use serde_json::json;

fn text(copy: &Copy) -> String {
    generate(&["--model", &copy.arg(), "--prompt", PROMPT, "-n", "16"]).stdout
}

#[test]
fn a_whole_file_beside_an_old_index() {
    let copy = Copy::new();
    let index = json!({"weight_map": {"model.embed_tokens.weight": "model-00001-of-00009.safetensors"}});
    copy.write("model.safetensors.index.json", index.to_string());
    assert_eq!(text(&copy), generate(&["--model", DEMO, "--prompt", PROMPT, "-n", "16"]).stdout);
    copy.remove(&["model.safetensors"]);
    fails("generate", &["--model", &copy.arg()], 1, &["model-00001-of-00009.safetensors"]);
}

/// Modelopt writes the format of the weights beside config.json.
#[test]
fn fp8_by_the_file_beside_the_configuration() {
    let (fp8, wide) = (Copy::new(), Copy::new());
    let scale = 1f64 / 512.;
    let converts = |name: &str| name.ends_with("_proj.weight");
    let numbers = |weight: &Tensor| -> candle_core::Result<Tensor> {
        (weight.to_dtype(DType::F32)? / scale)?.to_dtype(DType::F8E4M3)
    };
    fp8.weights(|all| {
        for name in all.keys().filter(|name| converts(name)).cloned().collect::<Vec<_>>() {
            let weight = numbers(&all[&name]).expect("numbers");
            let scale = Tensor::new(scale as f32, weight.device()).expect("a scale");
            all.insert(format!("{name}_scale"), scale);
            all.insert(name, weight);
        }
    });
    wide.weights(|all| {
        for (_, weight) in all.iter_mut().filter(|(name, _)| converts(name)) {
            let rounded = numbers(weight).and_then(|x| x.to_dtype(DType::F32)? * scale);
            *weight = rounded.expect("numbers");
        }
    });
    let says = |algo: &str| json!({"quantization": {"quant_algo": algo, "exclude_modules": ["lm_head"]}}).to_string();
    fp8.write("hf_quant_config.json", says("FP8"));
    assert_eq!(text(&fp8), text(&wide));
    fp8.write("hf_quant_config.json", says("NVFP4"));
    fails("generate", &["--model", &fp8.arg()], 1, &["hf_quant_config.json", "`quantization.quant_algo`", "NVFP4"]);
}

/// As Python's json writes and reads them.
#[test]
fn a_byte_order_mark_and_what_is_no_number() {
    let copy = Copy::new();
    for name in ["config.json", "generation_config.json"] {
        let json = std::fs::read_to_string(copy.file(name)).expect("a file");
        copy.write(name, format!("\u{feff}{}", json.replacen('{', "{\"of_training\": NaN,", 1)));
    }
    assert_eq!(text(&copy), generate(&["--model", DEMO, "--prompt", PROMPT, "-n", "16"]).stdout);
}

/// The tokenizer of older checkpoints.
#[test]
fn added_tokens_are_objects() {
    let copy = Copy::new();
    copy.remove(&["tokenizer.json"]);
    copy.write("vocab.json", r#"{"a": 0}"#);
    copy.write("merges.txt", "#version: 0.2\n");
    copy.set("tokenizer_config.json", "added_tokens_decoder", json!({"1": "<|endoftext|>"}));
    let parts = ["tokenizer_config.json: `added_tokens_decoder`: 1: expected an object, got \"<|endoftext|>\""];
    fails("generate", &["--model", &copy.arg(), "--prompt", PROMPT], 1, &parts);
}

#[test]
fn only_the_hub_has_revisions() {
    for model in [DEMO, "nowhere"] {
        let says = format!("--revision: expected --model to be a name on the hub, got {model} and revision v1");
        fails("generate", &["--model", model, "--revision", "v1"], 1, &[&says]);
    }
    fails("generate", &["--model", DEMO, "--revision", ""], 2, &["--revision"]);
}

#[test]
fn programs_say_their_own_names() {
    for program in ["generate", "perplexity"] {
        let version = run(program, &["--version"]).good();
        assert_eq!(version.stdout, format!("{program} {}\n", env!("CARGO_PKG_VERSION")));
    }
}

#[test]
fn what_is_left_unread_is_said() {
    let copy = Copy::new();
    copy.weights(|all| {
        let any = all["model.norm.weight"].clone();
        all.insert("model.visual.merger.norm.weight".into(), any.clone());
        all.insert("model.layers.0.mlp.shared_expert.up_proj.bias".into(), any);
    });
    let args = ["--model", &copy.arg(), "--prompt", PROMPT, "-n", "1"];
    fails("generate", &args, 1, &["model.layers.0.mlp.shared_expert.up_proj.bias"]);
    copy.weights(|all| drop(all.remove("model.layers.0.mlp.shared_expert.up_proj.bias")));
    generate(&args).says(&["model.visual (1)"]);
}
