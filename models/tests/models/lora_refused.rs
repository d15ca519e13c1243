//! Adapters that cannot be merged, each refused by what is wrong with it.

use crate::fp8_files::in_fp8;
use crate::gguf::wide;
use crate::gguf_writer::{in_a_folder, GgufOfTiny, Layout};
use crate::lora::{load, Adapter, RANK};
use crate::parallel::on_ranks;
use crate::support::refused;
use crate::tiny::Tiny;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{shard_of, CausalLm, GgufFile, LoraAdapter, ModelConfig};
use serde_json::{json, Value};
use std::collections::HashMap;

const CPU: Device = Device::Cpu;
const Q: &str = "model.layers.3.self_attn.q_proj";

fn full(module: &str, half: &str) -> String {
    format!("base_model.model.{module}.lora_{half}.weight")
}

#[test]
fn keys_that_are_not_computed() {
    let adapter = Adapter::new(&Tiny::qwen3_next(), &[Q]);
    let bad = |key: &str, value: Value| {
        let dir = adapter.clone().set(key, value.clone()).write().unwrap();
        refused(LoraAdapter::open(dir.path()), &["adapter_config.json", &format!("`{key}`"), &value.to_string()]);
    };
    for key in ["use_dora", "lora_bias", "fan_in_fan_out", "use_qalora", "ensure_weight_tying", "some_new_key"] {
        bad(key, json!(true));
    }
    for (key, value) in [
        ("peft_type", json!("LOHA")),
        ("peft_type", Value::Null),
        ("bias", json!("all")),
        ("bias", json!("lora_only")),
        ("modules_to_save", json!(["lm_head"])),
        ("trainable_token_indices", json!([1, 2])),
        ("layer_replication", json!([[0, 4], [2, 5]])),
        ("alora_invocation_tokens", json!([5])),
        ("use_bdlora", json!({"nblocks": 2})),
        ("arrow_config", json!({"top_k": 3})),
        ("kasa_config", json!({"beta": 0.1})),
        ("monteclora_config", json!({"num_samples": 8})),
        ("velora_config", json!({"num_groups": 2})),
        ("megatron_config", json!({"a": 1})),
        ("some_factor", json!(2)),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("init_lora_weights", json!("olora")),
        ("init_lora_weights", json!("loftq")),
        ("init_lora_weights", json!("mica")),
        ("peft_version", json!("new")),
        ("peft_version", json!(0.18)),
        ("r", json!(0)),
        ("r", json!("8")),
        ("lora_alpha", json!("NaN")),
        ("use_rslora", json!("yes")),
        ("rank_pattern", json!([1])),
        ("alpha_pattern", json!("q_proj")),
        ("target_modules", json!([1])),
        ("target_parameters", json!("gate_up_proj")),
    ] {
        bad(key, value);
    }
    let patterns = adapter.clone().set("rank_pattern", json!({"q_proj": 0}));
    refused(patterns.open(), &["`rank_pattern.q_proj`: expected a whole number of at least 1, got 0"]);
    let patterns = adapter.clone().set("alpha_pattern", json!({"(q_proj": 1}));
    refused(patterns.open(), &["`alpha_pattern`: \"(q_proj\""]);
}

#[test]
fn keys_that_change_nothing() -> Result<()> {
    let adapter = Adapter::new(&Tiny::qwen3_next(), &[Q]);
    for (key, value) in [
        ("target_modules", json!(["q_proj"])),
        ("target_modules", json!(r"(?!x).*q_proj")),
        ("target_modules", Value::Null),
        ("exclude_modules", json!("visual")),
        ("layers_to_transform", json!([3])),
        ("lora_dropout", json!(0.1)),
        ("init_lora_weights", json!("gaussian")),
        ("init_lora_weights", json!(false)),
        ("eva_config", json!({"rho": 2.0})),
        ("auto_mapping", json!({"base_model_class": "A", "parent_library": "b"})),
        ("qalora_group_size", json!(16)),
        ("some_new_key", json!([])),
        ("some_new_key", json!(false)),
    ] {
        adapter.clone().set(key, value).open()?;
    }
    Ok(())
}

#[test]
fn files_that_are_missing_or_broken() -> Result<()> {
    let dir = Adapter::new(&Tiny::qwen3_next(), &[Q]).write()?;
    let [config, weights] = ["adapter_config.json", "adapter_model.safetensors"];
    let whole = std::fs::read(dir.path().join(weights))?;
    std::fs::write(dir.path().join(weights), &whole[..whole.len() - 1])?;
    refused(LoraAdapter::open(dir.path()), &[weights]);
    std::fs::remove_file(dir.path().join(weights))?;
    refused(LoraAdapter::open(dir.path()), &[weights, "No such file"]);
    std::fs::write(dir.path().join(config), "{")?;
    refused(LoraAdapter::open(dir.path()), &[config, "not valid JSON"]);
    std::fs::write(dir.path().join(config), "[]")?;
    refused(LoraAdapter::open(dir.path()), &[config, "expected a JSON object"]);
    std::fs::remove_file(dir.path().join(config))?;
    refused(LoraAdapter::open(dir.path()), &[config, "No such file"]);
    Ok(())
}

#[test]
fn tensors_that_are_no_product() -> Result<()> {
    let adapter = Adapter::new(&Tiny::qwen3_next(), &[Q]);
    for (this, other) in [("A", "B"), ("B", "A")] {
        let mut half = adapter.clone();
        half.tensors.remove(&full(Q, other));
        refused(half.open(), &[&full(Q, this), "beside it", &full(Q, other)]);
    }
    for name in [
        "base_model.model.model.layers.3.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.3.self_attn.q_proj.lora_B.bias",
        "base_model.model.model.layers.3.self_attn.q_proj.lora_A.default.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.lm_head.modules_to_save.weight",
    ] {
        let mut adapter = adapter.clone();
        adapter.tensors.insert(name.into(), Tensor::ones(3, DType::F32, &CPU)?);
        refused(adapter.open(), &[name, "adapter_model.safetensors"]);
    }
    let replaced = |half: &str, tensor: Tensor| {
        let mut adapter = adapter.clone();
        adapter.tensors.insert(full(Q, half), tensor);
        adapter.open()
    };
    let ones = |dims: &[usize]| Tensor::ones(dims, DType::F32, &CPU);
    refused(replaced("A", ones(&[RANK, 4, 4])?), &[&full(Q, "A"), "expected a matrix"]);
    refused(replaced("A", ones(&[RANK, 16])?.to_dtype(DType::U8)?), &[&full(Q, "A"), "F32, BF16 or F16"]);
    refused(replaced("A", ones(&[3, 16])?), &[&full(Q, "B"), "expected [out, 3]"]);
    refused(adapter.clone().set("r", json!(1)).open(), &[&full(Q, "A"), "expected rank 1", "got 2 rows"]);
    let mut of_vision = Adapter { tensors: HashMap::new(), ..adapter.clone() };
    of_vision.add("model.visual.blocks.0.attn.proj", RANK, [32, 16]);
    refused(of_vision.open(), &[&full("model.visual.blocks.0.attn.proj", "A"), "tensors of a text model"]);
    refused(adapter.clone().set("rank_pattern", json!({"q_proj": 4})).open(), &["expected rank 4"]);
    // More than any memory holds, and refused before it is read.
    let dir = adapter.write()?;
    let header = json!({"w": {"dtype": "F32", "shape": [1u64 << 38], "data_offsets": [0, 1u64 << 40]}}).to_string();
    let path = dir.path().join("adapter_model.safetensors");
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat())?;
    std::fs::OpenOptions::new().write(true).open(path)?.set_len(8 + header.len() as u64 + (1 << 40))?;
    refused(LoraAdapter::open(dir.path()), &["tensor w: expected one whose name ends with"]);
    let mut twice = adapter.clone();
    twice.add("model.language_model.layers.3.self_attn.q_proj", RANK, [64, 16]);
    refused(twice.open(), &["layers.3.self_attn.q_proj", "got another one"]);
    Ok(())
}

#[test]
fn adapters_of_another_model() -> Result<()> {
    let tiny = Tiny::qwen3_next();
    let with = |module: &str, dims: [usize; 2]| {
        let mut adapter = Adapter::new(&tiny, &[]);
        adapter.add(module, RANK, dims);
        load(&tiny, &adapter)
    };
    for dims in [[64, 15], [63, 16], [16, 64]] {
        refused(with(Q, dims), &["lora: ", &full(Q, "A"), "expected a product [64, 16]", &format!("{dims:?}")]);
    }
    for module in [
        "model.layers.4.self_attn.q_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.linear_attn.in_proj_qkv",
        "model.layers.0.mlp.experts.4.up_proj",
        "model.layers.0.mlp.gate_proj",
        "mtp.fc",
    ] {
        refused(with(module, [16, 16]), &["lora: ", &full(module, "A"), "the model has no weight"]);
    }
    for module in ["model.embed_tokens", "transformer.h.0.attn"] {
        refused(with(module, [32, 16]), &["lora: ", &full(module, "A"), "expected one of a layer's projections"]);
    }
    // The weight is there, and the model does not read it.
    let headed = tiny.clone().with_draft_head();
    refused(load(&headed, &Adapter::new(&headed, &["mtp.fc"])), &["lora: ", &full("mtp.fc", "A"), "does not"]);
    let tied = tiny.clone().set("tie_word_embeddings", true).fill();
    let mut tied = Tiny { weights: tied.weights, ..tied };
    tied.remove("lm_head.weight");
    refused(load(&tied, &Adapter::new(&tiny, &["lm_head"])), &[&full("lm_head", "A"), "no weight lm_head.weight"]);
    let config = tiny.model_config()?;
    let other = Adapter::new(&Tiny::qwen3_next().set("head_dim", 16).fill(), &[Q]).open()?;
    for rank in on_ranks(2, |group| {
        let part = shard_of(tiny.var_builder(DType::F32, &CPU), &config, &*group)?;
        CausalLm::loader(&config).group(group).lora(&other).load(part).map(drop)
    }) {
        refused(rank, &[&full(Q, "A"), "expected a product [64, 16]", "[128, 16]"]);
    }
    Ok(())
}

#[test]
fn experts_of_another_model() -> Result<()> {
    let tiny = Tiny::qwen3_next();
    let mut fused = tiny.clone();
    fused.fuse_experts()?;
    let [inner, outer] = ["experts.base_layer", "experts"].map(|name| format!("model.layers.1.mlp.{name}"));
    let with = |parameters: &[&str], modules: &[(&str, usize, [usize; 2])]| {
        let mut adapter = Adapter::new(&tiny, &[]).set("target_parameters", json!(parameters));
        modules.iter().for_each(|(module, experts, dims)| adapter.add(module, RANK * experts, *dims));
        adapter
    };
    let both = ["gate_up_proj", "down_proj"];
    let (gate_up, down) = ((inner.as_str(), 4, [24, 16]), (outer.as_str(), 4, [16, 12]));
    load(&tiny, &with(&both, &[gate_up, down]))?;
    // Which parameter a product is of must be known.
    for (parameters, modules) in
        [(&both[..1], &[gate_up][..]), (&both[1..], &[gate_up, down][..]), (&[][..], &[down][..])]
    {
        refused(with(parameters, modules).open(), &["model.layers.1.mlp.experts", "`target_parameters`"]);
    }
    let three = with(&both[1..], &[(&outer, 3, [16, 12])]);
    let odd = with(&both[..1], &[(&outer, 4, [23, 16])]);
    let swapped = with(&both[1..], &[(&outer, 4, [24, 16])]);
    let five = with(&[], &[("model.layers.1.mlp.experts.4.up_proj", 1, [12, 16])]);
    for tiny in [&tiny, &fused] {
        refused(load(tiny, &three), &[&full(&outer, "A"), "a product of 4 experts, got one of 3"]);
        refused(load(tiny, &odd), &[&full(&outer, "A"), "as many rows for gates as for ups, got 23"]);
        refused(load(tiny, &swapped), &[&full(&outer, "A"), "expected a product [16, 12]", "[24, 16]"]);
        refused(load(tiny, &five), &[&full("model.layers.1.mlp.experts.4.up_proj", "A")]);
    }
    let dense = Tiny::qwen3_next().unset("num_experts").fill();
    refused(load(&dense, &with(&both[1..], &[down])), &[&full(&outer, "A"), "a product of 0 experts, got one of 4"]);
    Ok(())
}

#[test]
fn weights_in_fp8() -> Result<()> {
    let tiny = wide();
    let (fp8, dense) = in_fp8(&tiny, [128, 128])?;
    let adapter = Adapter::new(&tiny, &[Q]);
    refused(load(&fp8, &adapter), &[&format!("lora: weight {Q}.weight: expected a dense one"), "got it in fp8"]);
    load(&dense, &adapter)?;
    // Not all of such a checkpoint is in fp8.
    load(&fp8, &Adapter::new(&tiny, &["model.layers.3.self_attn.o_proj"]))?;
    Ok(())
}

#[test]
fn quantised_tensors_of_a_gguf_file() -> Result<()> {
    let tiny = wide();
    let load = |file: &GgufOfTiny, adapter: &Adapter, quantize: Option<GgmlDType>| {
        let (_dir, path) = in_a_folder("tiny.gguf");
        file.write(&path)?;
        let (file, adapter) = (GgufFile::open(&path)?, adapter.open()?);
        let config = ModelConfig::from_gguf(&file)?;
        CausalLm::loader(&config).quantize(quantize).lora(&adapter).load_gguf(&file, DType::F32, &CPU)
    };
    let file = GgufOfTiny::new(&tiny, Layout::Qwen3Next)?.quantized(GgmlDType::Q8_0);
    let of_experts = "model.layers.1.mlp.experts.0.gate_proj";
    for quantize in [None, Some(GgmlDType::Q4K)] {
        for (module, weight) in
            [(Q, format!("{Q}.weight")), (of_experts, "model.layers.1.mlp.experts.gate_up_proj".into())]
        {
            let adapter = Adapter::new(&tiny, &[module]);
            refused(load(&file, &adapter, quantize), &[&format!("lora: weight {weight}: "), "got it in Q8_0"]);
        }
        // Routers are not quantised.
        load(&file, &Adapter::new(&tiny, &["model.layers.1.mlp.gate"]), quantize)?;
    }
    let in_halves = GgufOfTiny::new(&tiny, Layout::Qwen3Next)?.typed(|_| None);
    load(&in_halves, &Adapter::new(&tiny, &[Q, of_experts]), Some(GgmlDType::Q4K))?;
    Ok(())
}
