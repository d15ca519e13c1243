//! What `generate` is fed to make it hang, abort or take all memory: each is one sentence and exit code 1.

use crate::cli::{fails, generate, run, tokenizer, Copy};
use candle_core::{safetensors, DType, Device, Tensor};
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

/// The library that reads the file panics over it.
#[test]
fn a_damaged_normalizer_is_an_error() {
    let copy = Copy::new();
    copy.set("tokenizer.json", "normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}));
    let run = run("generate", &["--model", &copy.arg(), "--prompt", "a"]);
    assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""), "{run:?}");
    run.says(&["precompiled_charsmap", "error: ", "tokenizer.json: tokenizers cannot read it"]);
}

#[test]
fn numbers_that_no_machine_has_room_for() {
    for (args, parts) in [
        (&["--prompt-tokens", "100000"][..], &["--prompt-tokens", "max_position_embeddings"][..]),
        (&["--prompt-tokens", "1000000000000"], &["--prompt-tokens", "1 times 1000000000000"]),
        (&["--prompt-tokens", "9", "--batch", "1000000000000"], &["--prompt-tokens", "1000000000000 times 9"]),
        (&["--prompt-tokens", "1", "--batch", "268435456"], &["--prompt-tokens", "268435456 times 1"]),
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

/// A word whose embedding is not finite: the prompt that has it fails, and the others go on.
#[test]
fn a_failed_prompt_ends_no_run() {
    let copy = Copy::new();
    let prompts = ["In the beginning", "Jesus wept.", "Blessed are the poor"];
    let ids = |text: &str| tokenizer().encode(text, false).unwrap().get_ids().to_vec();
    let plain = generate(&["--prompt", prompts[0], "--prompt", prompts[2], "-n", "9"]);
    let all = ids(&(prompts[0].to_string() + " " + prompts[2] + &plain.stdout));
    let word = ids(prompts[1]).into_iter().find(|id| !all.contains(id)).expect("a token of its own");
    copy.weights(|weights| {
        let name = "model.embed_tokens.weight";
        let table = weights[name].to_dtype(DType::F32).unwrap();
        let rows = table.dims()[0] as u32;
        let row = |id: u32| if id == word { f32::INFINITY } else { 0. };
        let more = Tensor::from_iter((0..rows).map(row), &Device::Cpu).unwrap().reshape((rows as usize, 1)).unwrap();
        weights.insert(name.into(), table.broadcast_add(&more).unwrap());
    });
    let model = copy.arg();
    let args = ["--model", &model, "--prompt", prompts[0], "--prompt", prompts[1], "--prompt", prompts[2], "-n", "9"];
    for more in [&[][..], &["--tensor-parallel", "2"]] {
        let run = run("generate", &[&args, more].concat());
        run.says(&["prompt 1: stopped: 9 tokens", "prompt 2: stopped: failed: the model gave", "prompt 3: stopped: 9"]);
        run.says(&["1 of 3 prompts failed: the model gave"]);
        assert_eq!(run.code, Some(1), "{run:?}");
        let others = plain.stdout.replace("==> prompt 2 <==", "==> prompt 2 <==\n\n==> prompt 3 <==");
        assert_eq!(run.stdout, others);
    }
}
