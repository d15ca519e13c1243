//! The memory line that is printed before a model is loaded.

use crate::cli::{command, fails, generate, Copy, Run, DEMO};
use crate::tiny::Tiny;
use candle_core::quantized::GgmlDType;
use candle_core::{safetensors, DType, Device, DeviceLocation, Result, Shape, Tensor};
use candle_gdn_cli::dummy::Dummy;
use candle_gdn_models::{CausalLm, ModelConfig, StateLayout};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use serde_json::json;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

const CONFIGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/generate/configs");

/// Published models, the billions of parameters of their names (Lara's has none), and the KiB of a sequence's recurrent states.
const PUBLISHED: [(&str, f64, u64); 10] = [
    ("qwen3-next-80b-a3b", 80., 72 << 10),
    ("qwen3-next-80b-a3b-fp8", 80., 72 << 10),
    ("qwen3.5-0.8b", 0.8, 18 << 10),
    ("qwen3.5-4b", 4., 48 << 10),
    ("qwen3.5-27b", 27., 144 << 10),
    ("qwen3.5-35b-a3b", 35., 60 << 10),
    ("qwen3.5-35b-a3b-fp8", 35., 60 << 10),
    ("qwen3.8-27b", 27., 144 << 10),
    ("olmo-hybrid-7b", 7., 51_840),
    ("lara-4-mini", 7.3, 14 << 10),
];

fn config(name: &str) -> ModelConfig {
    let text = std::fs::read_to_string(format!("{CONFIGS}/{name}.json")).unwrap();
    ModelConfig::from_json(&text).unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[test]
fn published_models_have_the_size_of_their_names() {
    assert_eq!(std::fs::read_dir(CONFIGS).unwrap().count(), PUBLISHED.len());
    for (name, billions, kib) in PUBLISHED {
        let config = config(name);
        let got = config.parameters() as f64 / 1e9;
        assert!((got / billions - 1.).abs() < 0.07, "{name}: {got} billions");
        assert_eq!(config.sequence_bytes(DType::BF16).recurrent, kib << 10, "{name}");
        assert_eq!(config.weight_bytes(DType::F32), 4 * config.parameters(), "{name}");
        let (halves, least) = (config.weight_bytes(DType::BF16), 2 * config.parameters());
        assert!(halves >= least && (halves as f64) < 1.01 * least as f64, "{name}: {halves} and {least}");
        // 4.5 bits a weight, and the table.
        let table = 2. * (config.vocab_size * config.hidden_size) as f64;
        let rest = config.parameters() as f64 - if config.tie_word_embeddings { 0. } else { table / 2. };
        // OLMo's o_proj has 5,760 columns, no whole blocks of 256: q8_0.
        let wider = if name == "olmo-hybrid-7b" { 24. * 3840. * 5760. * (8.5 - 4.5) / 8. } else { 0. };
        let quarter = config.quantized_weight_bytes(DType::BF16, GgmlDType::Q4K) as f64 - wider;
        assert!((quarter / (table + rest * 4.5 / 8.) - 1.).abs() < 0.005, "{name}: {quarter}");
    }
    // By hand: 12 layers of 2 heads of 256, keys and values; 36 layers of 8192 channels.
    let bytes = config("qwen3-next-80b-a3b").sequence_bytes(DType::BF16);
    assert_eq!((bytes.kv_per_token, bytes.conv), (12 * 2 * 2 * 256 * 2, 36 * 3 * 8192 * 2));
    assert_eq!(bytes.total(1000), bytes.recurrent + bytes.conv + 1000 * bytes.kv_per_token);
    // 24 layers of 30 heads with K 96 and V 192: keys and inputs in bf16, updates and decays in f32.
    let olmo = config("olmo-hybrid-7b");
    let row = 30 * 96 * 2 + 30 * (96 + 96 + 192) * 2 + 30 * (192 + 1) * 4;
    assert_eq!(olmo.sequence_bytes(DType::BF16).ring, 24 * 32 * row);
    assert!(StateLayout::Auto.has_ring(&olmo, DeviceLocation::Cuda { gpu_id: 0 }));
}

/// As it is published: all in fp8 but embeddings, head, gates, and the projections of decays and betas.
#[test]
fn a_model_in_fp8_takes_a_byte_a_number() {
    let config = config("qwen3-next-80b-a3b-fp8");
    let [kept, halves] =
        [config.fp8_weight_bytes(DType::BF16), config.weight_bytes(DType::BF16)].map(|n| n as f64 / 1e9);
    assert!((79.7..81.).contains(&kept) && halves > 159., "{kept} and {halves} GB");
    // On the CPU all of them are dequantised.
    let dequantised = config.fp8_parameters() as f64 / 1e9;
    assert!((77. ..79.7).contains(&dequantised), "{dequantised} billions");
    // A scale for each row is one for each 128 numbers here.
    let text = std::fs::read_to_string(format!("{CONFIGS}/qwen3-next-80b-a3b-fp8.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let list = json["quantization_config"]["modules_to_not_convert"].clone();
    json["quantization_config"] = json!({"quant_method": "fbgemm_fp8", "modules_to_not_convert": list});
    let by_row = ModelConfig::from_json(&json.to_string()).unwrap().fp8_weight_bytes(DType::BF16) as f64 / 1e9;
    let more = (by_row - kept) / dequantised * 128. / 4.;
    assert!((0.98..1.).contains(&more), "{by_row} and {kept} GB");
    // Of 8 ranks experts have 64 inner columns: half a block, which is dequantised.
    let part = config.split(8).unwrap().fp8_weight_bytes(DType::BF16) as f64 / 1e9;
    assert!((18. ..20.5).contains(&part), "{part} GB");
}

#[test]
fn parameters_are_those_of_the_files() -> Result<()> {
    let text = std::fs::read_to_string(format!("{DEMO}/config.json"))?;
    let weights = safetensors::load(format!("{DEMO}/model.safetensors"), &Device::Cpu)?;
    // The draft head is not of the model.
    let of_model = weights.iter().filter(|(name, _)| !name.starts_with("mtp."));
    let count: usize = of_model.map(|(_, weight)| weight.elem_count()).sum();
    assert_eq!(ModelConfig::from_json(&text)?.parameters(), count as u64);
    let tiny = Tiny::qwen3_next();
    let variants = [
        tiny.clone(),
        tiny.clone().set("mlp_only_layers", vec![1, 2]),
        tiny.clone().set("decoder_sparse_step", 2),
        tiny.clone().set("shared_expert_intermediate_size", 0),
        tiny.clone().set("linear_value_head_dim", 6).set("linear_num_value_heads", 8).set("head_dim", 16),
        tiny.unset("num_experts"),
    ];
    for tiny in variants {
        let tiny = tiny.fill();
        let count: usize = tiny.weights.values().map(Tensor::elem_count).sum();
        let config = tiny.model_config()?;
        assert_eq!(config.parameters(), count as u64, "{}", tiny.config);
    }
    Ok(())
}

/// Counts what the model asks for.
struct Counting(Dummy, Arc<AtomicU64>);

impl SimpleBackend for Counting {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        // Scales are no parameters.
        if !name.ends_with("_scale_inv") {
            self.1.fetch_add(shape.elem_count() as u64, Ordering::Relaxed);
        }
        self.0.get(shape, name, init, dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.0.get_unchecked(name, dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains_tensor(name)
    }
}

/// The published configurations with small numbers.
fn small(name: &str) -> ModelConfig {
    let text = std::fs::read_to_string(format!("{CONFIGS}/{name}.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    for (field, value) in [
        ("hidden_size", 32),
        ("intermediate_size", 48),
        ("moe_intermediate_size", 16),
        ("shared_expert_intermediate_size", 24),
        ("num_hidden_layers", 4),
        ("vocab_size", 100),
        ("head_dim", 32),
        ("linear_key_head_dim", 8),
        ("linear_value_head_dim", 8),
        ("max_position_embeddings", 64),
    ] {
        // That of OLMo-Hybrid's heads follows from the width, which its 30 heads do not divide here.
        if json.get(field).is_some() || field == "head_dim" {
            json[field] = json!(value);
        }
    }
    ModelConfig::from_json(&json.to_string()).unwrap()
}

#[test]
fn random_weights_make_a_model_of_each_family() -> Result<()> {
    for (name, ..) in PUBLISHED {
        let config = small(name);
        let asked = Arc::new(AtomicU64::new(0));
        let load = || {
            let backend = Counting(Dummy::new(&config), asked.clone());
            CausalLm::load(&config, VarBuilder::from_backend(Box::new(backend), DType::F32, Device::Cpu))
        };
        let model = load()?;
        assert_eq!(config.parameters(), asked.load(Ordering::Relaxed), "{name}");

        let pool = model.new_sequences(3, 64)?;
        let bytes = config.sequence_bytes(DType::F32);
        assert_eq!(bytes.total(64), pool.bytes_per_sequence() as u64, "{name}");
        let ring = model.new_sequences_with(3, 64, StateLayout::Ring)?;
        assert_eq!(bytes.total(64) + bytes.ring, ring.bytes_per_sequence() as u64, "{name}, with rings");

        let ids = Tensor::arange(0u32, 60, &Device::Cpu)?.reshape((1, 60))?;
        let logits = |model: &CausalLm| model.forward(&ids, &mut model.new_state(1)?)?.flatten_all()?.to_vec1::<f32>();
        let values = logits(&model)?;
        let rms = (values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32).sqrt();
        assert!((0.3..3.).contains(&rms), "{name}: {rms}");
        assert_eq!(logits(&load()?)?, values, "{name}: the same every time");
    }
    Ok(())
}

#[test]
fn random_weights_are_made_in_pieces() -> Result<()> {
    let dummy = Dummy::new(&config("qwen3.5-4b"));
    let get = |dims: &[usize], name: &str| {
        dummy
            .get(Shape::from(dims), name, Init::default(), DType::BF16, &Device::Cpu)?
            .flatten_all()?
            .to_dtype(DType::F32)
    };
    // More than a piece, and no multiple of it.
    let x = get(&[5, 1001, 1003], "model.layers.0.mlp.experts.gate_up_proj")?;
    let variance = x.sqr()?.mean_all()?.to_scalar::<f32>()? * 1003.;
    assert!((variance - 1.).abs() < 0.01, "{variance}");
    let x = x.to_vec1::<f32>()?;
    assert!(x[x.len() - 1000..].iter().all(|x| *x != 0.) && x[..1000] != x[x.len() - 1000..]);
    let gated = get(&[64], "model.layers.0.linear_attn.norm.weight")?.to_vec1::<f32>()?;
    assert!(gated.iter().all(|x| (0.85..=1.1).contains(x)), "{gated:?}");
    let norm = get(&[64], "model.norm.weight")?.to_vec1::<f32>()?;
    assert!(norm.iter().all(|x| x.abs() <= 0.11), "{norm:?}");
    for name in ["lm_head.weight", "model.norm.bias", "model.layers.0.linear_attn.in_proj_qkvz.weight"] {
        assert!(get(&[64], name).unwrap_err().to_string().contains(name), "{name}");
    }
    Ok(())
}

#[test]
fn dummy_models_are_timed() {
    let run = |args: &[&str]| generate(&[&["--load-format", "dummy", "-n", "6"], args].concat());
    // The demo's tokenizer is there, so random weights complete a text.
    let text = run(&["--prompt", "In the beginning"]);
    assert!(!text.stdout.is_empty() && text.stderr.contains("loaded random F32"), "{text:?}");
    // Without: figures alone, whether it is a directory or a file that is named.
    let copy = Copy::new();
    copy.remove(&["tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"]);
    let (dir, file) = (copy.arg(), copy.file("config.json").display().to_string());
    for model in [&dir, &file] {
        let run = run(&["--model", model, "--prompt-tokens", "70"]);
        assert_eq!(run.stdout, "");
        run.says(&["prompt: 70 tokens", "decode: 5 tokens", "stopped: 6 tokens (-n)"]);
    }
    let run = run(&["--model", &dir, "--prompt-tokens", "70", "--batch", "3", "--draft", "2"]);
    assert_eq!(run.stdout, "");
    run.says(&["prompt: 210 tokens", "decode: 15 tokens"]);
    assert!(!run.stderr.contains("prompt 1:"), "{run:?}");

    let no_text: [&[&str]; 4] = [&[], &["--prompt", "a"], &["--chat", "--prompt", "a"], &["--prompt-file", &file]];
    for args in no_text {
        let args = [&["--load-format", "dummy", "--model", &dir], args].concat();
        fails("generate", &args, 1, &["no tokenizer.json", "--prompt-tokens"]);
    }
}

/// Real weights can be timed as well: made-up tokens, and nothing ends them.
#[test]
fn made_up_prompts_have_no_end() {
    let copy = Copy::new();
    copy.set("generation_config.json", "eos_token_id", json!((0..1024).collect::<Vec<u32>>()));
    let run = generate(&["--model", &copy.arg(), "--prompt-tokens", "9", "-n", "30"]);
    assert_eq!(run.stdout, "");
    run.says(&["decode: 29 tokens"]);
}

#[test]
fn bad_dummies() {
    let dummy = |args: &[&str], code: i32, parts: &[&str]| {
        fails("generate", &[&["--load-format", "dummy"], args].concat(), code, parts);
    };
    dummy(&["--model", "qwen9"], 1, &["--model", "qwen9", "qwen3.5-0.8b", "qwen3-next-80b-a3b"]);
    dummy(&["--model", "/nowhere/config.json"], 1, &["--model", "/nowhere/config.json"]);
    dummy(&["--model", "../configs/qwen3.5-4b"], 1, &["--model"]);
    dummy(&["--prompt-tokens", "0"], 2, &["--prompt-tokens", "at least 1"]);
    dummy(&["--prompt-tokens", "4", "--prompt", "a"], 2, &["--prompt"]);
    dummy(&["--prompt-tokens", "999999"], 1, &["--prompt-tokens", "max_position_embeddings"]);
    dummy(&["--prompt-tokens", "40", "--max-seq-len", "30"], 1, &["--prompt-tokens", "--max-seq-len (30)"]);
    fails("generate", &["--load-format", "zeros"], 2, &["--load-format", "dummy"]);
    fails("generate", &["--model", "Qwen3.5-4B"], 1, &["--model", "--load-format dummy"]);
    let copy = Copy::new();
    dummy(&["--model", &copy.arg_of("config.json", "{}")], 1, &["config.json", "`model_type`"]);
    fails("perplexity", &["--load-format", "dummy", "--model", "qwen3.5-0.8b", "--file", "a"], 1, &["--file"]);
}

#[test]
fn what_cannot_fit_is_refused_before_it_is_loaded() {
    let dummy = ["--load-format", "dummy", "--prompt-tokens", "10", "--model"];
    let fails_with = |model: &str, more: &[&str], parts: &[&str]| {
        fails("generate", &[&dummy[..], &[model], more].concat(), 1, parts);
    };
    let copy = Copy::new();
    let at = copy.arg();
    // Sequences of a petabyte, weights of an exabyte, and numbers that no integer holds.
    fails_with(&at, &["--batch", "1000000", "-n", "30000"], &["GiB", "states", "free; it fits with --batch "]);
    copy.set("config.json", "vocab_size", json!(2147483647));
    copy.set("config.json", "hidden_size", json!(2147483647));
    fails_with(&at, &[], &["GiB weights", "free; no option makes it fit: the weights alone take"]);
    for field in ["head_dim", "linear_key_head_dim", "linear_num_key_heads", "moe_intermediate_size", "num_experts"] {
        copy.set("config.json", field, json!(2147483646));
        copy.set("config.json", "linear_num_value_heads", json!(2147483646));
        fails_with(&at, &[], &["error: "]);
    }

    let told = generate(&["-n", "1", "--mtp", "off"]);
    let [memory, loaded] =
        ["memory: ", "loaded "].map(|start| told.stderr.lines().position(|line| line.starts_with(start)));
    assert!(memory.is_some() && memory < loaded, "{told:?}");
    // 3.1 million weights of two bytes, which the files have and the packed ones keep.
    assert!(told.stderr.contains("6.3 MiB weights"), "{told:?}");
    // And 0.5 million of the draft head.
    let with_head = generate(&["-n", "1"]);
    assert!(with_head.stderr.contains("7.4 MiB weights"), "{with_head:?}");
}

/// MiB that a memory line says, of `what` or in all.
pub fn said(run: &Run, what: &str) -> f64 {
    let line = run.stderr.lines().find_map(|line| line.strip_prefix("memory: ")).expect("a memory line");
    let words: Vec<&str> = line.split([' ', ',']).filter(|word| !word.is_empty()).collect();
    let at = words.iter().position(|word| *word == what).map_or(0, |i| i - 2);
    words[at].parse::<f64>().expect("a number") * if words[at + 1] == "GiB" { 1024. } else { 1. }
}

/// All ranks share the memory of the machine.
#[test]
fn ranks_on_the_cpu_are_counted_together() {
    let weights = |n: &str| said(&generate(&["--tensor-parallel", n, "-n", "2"]), "weights");
    let (one, two) = (weights("1"), weights("2"));
    assert!((0.95 * one..1.3 * one).contains(&two), "{one} and {two} MiB");
}

/// MiB that a program had at most at once.
#[cfg(target_os = "linux")]
fn peak(args: &[&str]) -> (Run, f64) {
    use std::process::Stdio;
    let mut child = command("generate").args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut most = 0.;
    while child.try_wait().unwrap().is_none() {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        if let Some(peak) = status.lines().find_map(|line| line.strip_prefix("VmHWM:")) {
            most = peak.trim().trim_end_matches(" kB").parse::<f64>().unwrap() / 1024.;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    (Run::end(child).good(), most)
}

/// What is said before the weights are read bounds what the program takes, and is not far above. Without weights it takes 20 MiB.
#[cfg(target_os = "linux")]
#[test]
fn the_memory_line_is_true() {
    let dir = tempfile::tempdir().unwrap();
    let config = |name: &str, layers: usize| {
        let text = std::fs::read_to_string(format!("{CONFIGS}/{name}.json")).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        (json["num_hidden_layers"], json["vocab_size"]) = (layers.into(), 24000.into());
        if json.get("num_experts").is_some() {
            json["num_experts"] = 8.into();
        }
        let path = dir.path().join(format!("{name}.json"));
        std::fs::write(&path, json.to_string()).unwrap();
        path.display().to_string()
    };
    let (dense, mixture) = (config("qwen3.5-0.8b", 2), config("qwen3.5-35b-a3b", 2));
    let fp8 = config("qwen3.5-35b-a3b-fp8", 2);
    let quantised = ["--dtype", "bf16", "--quantize", "q4k"];
    let cases: [(&String, &[&str]); 8] = [
        (&dense, &[]),
        (&dense, &["--quantize", "q8_0"]),
        (&dense, &["--quantize", "q6k"]),
        (&dense, &quantised[2..]),
        (&dense, &quantised),
        (&mixture, &quantised[2..]),
        (&fp8, &[]),
        (&fp8, &quantised[..2]),
    ];
    for (model, args) in cases {
        let all = ["--load-format", "dummy", "--prompt-tokens", "64", "-n", "2", "--model", model];
        let (run, peak) = peak(&[&all[..], args].concat());
        let said = said(&run, "");
        assert!(peak < 1.03 * said + 40. && said < 1.4 * peak + 60., "{model} {args:?}: {said} said, {peak} MiB taken");
    }
}
