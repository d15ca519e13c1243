//! What `generate` is fed to make it hang, abort or take all memory: each is one sentence and exit code 1.

use crate::cli::{fails, generate, Copy};
use candle_core::{safetensors, Device};
use serde_json::json;

#[test]
fn chat_templates_end() {
    let copy = Copy::new();
    let arg = copy.arg();
    let args = ["--model", &arg, "--chat", "--prompt", "a", "-n", "1"];
    for (template, parts) in [
        ("{{ messages | tojson(indent=9223372036854775807) }}", ["tojson", "at most 64"]),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}\
             {% endfor %}",
            ["template", "fuel"],
        ),
        ("{% for a in range(99999) %}{{ 'long' * 99999 }}{% endfor %}", ["template", "at most"]),
    ] {
        copy.write("chat_template.jinja", template);
        fails("generate", &args, 1, &parts);
    }
    copy.write("chat_template.jinja", "{{ messages | tojson(indent=4) }}");
    generate(&args);
}

#[test]
fn numbers_that_no_machine_has_room_for() {
    for (args, parts) in [
        (&["--prompt-tokens", "100000"][..], &["--prompt-tokens", "max_position_embeddings"][..]),
        (&["--prompt-tokens", "1000000000000"], &["--prompt-tokens", "1 times 1000000000000"]),
        (&["--prompt-tokens", "9", "--batch", "1000000000000"], &["--prompt-tokens", "1000000000000 times 9"]),
    ] {
        fails("generate", args, 1, parts);
    }
}

#[test]
fn configurations_that_no_machine_has_room_for() {
    for field in ["head_dim", "num_attention_heads", "linear_num_value_heads", "linear_key_head_dim"] {
        let copy = Copy::new();
        copy.set("config.json", field, json!(2147483646));
        fails("generate", &["--model", &copy.arg(), "-n", "1"], 1, &["config", field, "got 2147483646"]);
    }
}

#[test]
fn a_tensor_in_two_files_is_no_choice() {
    let copy = Copy::new();
    let all = safetensors::load(copy.file("model.safetensors"), &Device::Cpu).unwrap();
    let (name, one) = all.iter().next().unwrap();
    let one = [(name.clone(), one.clone())].into_iter().collect();
    safetensors::save(&one, copy.file("other.safetensors")).unwrap();
    std::fs::rename(copy.file("model.safetensors"), copy.file("first.safetensors")).unwrap();
    let map = json!({ "weight_map": { "a": "first.safetensors", "b": "other.safetensors" } });
    copy.write("model.safetensors.index.json", map.to_string());
    fails("generate", &["--model", &copy.arg(), "-n", "1"], 1, &["first.safetensors", "other.safetensors", name]);
}
