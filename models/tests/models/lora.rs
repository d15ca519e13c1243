//! Adapters in PEFT's format: what PEFT made of its own, and models whose weights were merged by hand.

use crate::gguf::{logits, IDS};
use crate::gguf_writer::{in_a_folder, GgufOfTiny, Layout};
use crate::golden::{adapted, adapters, log_softmax, max_diff};
use crate::parallel::{check, four_heads, from_files, BOUND};
use crate::support::rel_rms;
use crate::tiny::Tiny;
use candle_core::quantized::GgmlDType;
use candle_core::{safetensors, DType, Device, Result, Tensor};
use candle_gdn_models::{shard_of, CausalLm, DraftHeadChoice, GgufFile, LoraAdapter, ModelConfig};
use serde_json::{json, Value};
use std::collections::HashMap;
use tempfile::TempDir;

const CPU: Device = Device::Cpu;
pub const RANK: usize = 2;
pub const ALPHA: usize = 4;

/// An adapter to be written.
#[derive(Clone)]
pub struct Adapter {
    pub config: Value,
    pub tensors: HashMap<String, Tensor>,
}

/// Multiples of an eighth: sums of a few products of them are exact, in any order.
fn eighths(name: &str, dims: [usize; 2]) -> Tensor {
    let mut x = name.bytes().fold(7u64, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
    let data = (0..dims[0] * dims[1]).map(|_| {
        x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((x >> 33) % 17) as f32 / 8. - 1.
    });
    Tensor::from_vec(data.collect::<Vec<_>>(), &dims[..], &CPU).unwrap()
}

impl Adapter {
    /// Of modules of a model, by their full names without `base_model.model.`.
    pub fn new(tiny: &Tiny, modules: &[&str]) -> Self {
        let config = json!({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear",
            "bias": "none", "use_dora": false, "modules_to_save": null, "peft_version": "0.21.2", "target_parameters": null,
        });
        let mut adapter = Self { config, tensors: HashMap::new() };
        modules.iter().for_each(|module| {
            let (outputs, inputs) = tiny.weights[&format!("{module}.weight")].dims2().unwrap();
            adapter.add(module, RANK, [outputs, inputs]);
        });
        adapter
    }

    pub fn add(&mut self, module: &str, rank: usize, [outputs, inputs]: [usize; 2]) {
        for (half, dims) in [("A", [rank, inputs]), ("B", [outputs, rank])] {
            let name = format!("base_model.model.{module}.lora_{half}.weight");
            self.tensors.insert(name.clone(), eighths(&name, dims));
        }
    }

    pub fn set(mut self, key: &str, value: Value) -> Self {
        self.config[key] = value;
        self
    }

    fn renamed(&self, name: impl Fn(&str) -> String) -> Self {
        let tensors = self.tensors.iter().map(|(old, tensor)| (name(old), tensor.clone()));
        Self { tensors: tensors.collect(), config: self.config.clone() }
    }

    pub fn write(&self) -> Result<TempDir> {
        let dir = tempfile::tempdir()?;
        safetensors::save(&self.tensors, dir.path().join("adapter_model.safetensors"))?;
        std::fs::write(dir.path().join("adapter_config.json"), self.config.to_string())?;
        Ok(dir)
    }

    pub fn open(&self) -> Result<LoraAdapter> {
        LoraAdapter::open(self.write()?.path())
    }

    /// A and B of a module.
    pub fn factors(&self, module: &str) -> [&Tensor; 2] {
        ["A", "B"].map(|half| &self.tensors[&format!("base_model.model.{module}.lora_{half}.weight")])
    }

    /// `B A` of a module.
    fn product(&self, module: &str) -> Result<Tensor> {
        let [a, b] = self.factors(module);
        b.matmul(a)
    }
}

/// The model with `scale` times a product added to each weight, by hand.
pub fn by_hand(tiny: &Tiny, scale: f64, products: &[(String, Tensor)]) -> Result<Tiny> {
    let mut tiny = tiny.clone();
    for (name, product) in products {
        let weight = tiny.weights.get_mut(name).expect("a weight");
        *weight = (&*weight + (product * scale)?)?;
    }
    Ok(tiny)
}

pub fn merged_by_hand(tiny: &Tiny, adapter: &Adapter, modules: &[&str]) -> Result<Tiny> {
    let products = modules.iter().map(|module| Ok((format!("{module}.weight"), adapter.product(module)?)));
    by_hand(tiny, (ALPHA / RANK) as f64, &products.collect::<Result<Vec<_>>>()?)
}

pub fn load(tiny: &Tiny, adapter: &Adapter) -> Result<CausalLm> {
    load_as(tiny, adapter, DType::F32, None)
}

fn load_as(tiny: &Tiny, adapter: &Adapter, dtype: DType, quantize: Option<GgmlDType>) -> Result<CausalLm> {
    let (config, adapter) = (tiny.model_config()?, adapter.open()?);
    CausalLm::loader(&config).lora(&adapter).quantize(quantize).load(tiny.var_builder(dtype, &CPU))
}

/// A module of every kind that there is.
const MODULES: [&str; 15] = [
    "model.layers.0.linear_attn.in_proj_qkvz",
    "model.layers.0.linear_attn.in_proj_ba",
    "model.layers.0.linear_attn.out_proj",
    "model.layers.0.mlp.gate",
    "model.layers.0.mlp.shared_expert.gate_proj",
    "model.layers.0.mlp.shared_expert.up_proj",
    "model.layers.0.mlp.shared_expert.down_proj",
    "model.layers.0.mlp.shared_expert_gate",
    "model.layers.1.mlp.experts.0.gate_proj",
    "model.layers.1.mlp.experts.3.down_proj",
    "model.layers.3.self_attn.q_proj",
    "model.layers.3.self_attn.k_proj",
    "model.layers.3.self_attn.v_proj",
    "model.layers.3.self_attn.o_proj",
    "lm_head",
];

fn logprobs(model: &CausalLm, ids: &[u32]) -> Result<Vec<f32>> {
    let input = Tensor::from_slice(ids, (1, ids.len()), &CPU)?;
    let rows = model.forward(&input, &mut model.new_state(1)?)?.squeeze(0)?.to_vec2::<f32>()?;
    Ok(rows.iter().zip(&ids[1..]).map(|(row, id)| log_softmax(row, *id)).collect())
}

#[test]
fn agrees_with_peft() -> Result<()> {
    for (dir, of) in adapters() {
        let (adapter, plain) = (LoraAdapter::open(&dir)?, of.model(DType::F32, &CPU)?);
        let model = from_files(of, Some(&adapter), None)?;
        for i in 0..2 {
            let (ids, want) = adapted(&dir, i)?;
            let error = max_diff(&logprobs(&model, &ids)?, &want);
            println!("{dir}, prompt {i}: {error:e}");
            assert!(error < 5e-4, "{dir}, prompt {i}: off by {error:e}");
            assert!(max_diff(&logprobs(&plain, &ids)?, &want) > 0.5, "{dir} changes something");
        }
    }
    Ok(())
}

#[test]
fn ranks_add_to_their_shards() -> Result<()> {
    for (dir, of) in adapters() {
        let adapter = LoraAdapter::open(&dir)?;
        let whole = from_files(of, Some(&adapter), None)?;
        check(&dir, &whole, 2, BOUND, |group| from_files(of, Some(&adapter), Some(group)));
    }
    let tiny = four_heads();
    let mut fused = tiny.clone();
    fused.fuse_experts()?;
    let adapter = Adapter::new(&tiny, &MODULES).open()?;
    for tiny in [tiny, fused] {
        let config = tiny.model_config()?;
        let weights = || tiny.var_builder(DType::F32, &CPU);
        let whole = CausalLm::loader(&config).lora(&adapter).load(weights())?;
        for ranks in [2, 4] {
            check("modules", &whole, ranks, BOUND, |group| {
                let part = shard_of(weights(), &config, &*group)?;
                CausalLm::loader(&config).group(group).lora(&adapter).load(part)
            });
        }
    }
    Ok(())
}

/// To the bit: the sum is in f32 and rounded once.
#[test]
fn the_sum_is_rounded_once() -> Result<()> {
    let tiny = Tiny::qwen3_next();
    let adapter = Adapter::new(&tiny, &MODULES);
    let merged = merged_by_hand(&tiny, &adapter, &MODULES)?;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let want = logits(&merged.load(dtype)?)?;
        assert_eq!(logits(&load_as(&tiny, &adapter, dtype, None)?)?, want, "{dtype:?}");
        assert!(rel_rms(&logits(&tiny.load(dtype)?)?, &want) > 0.1);
    }
    let none = Adapter { tensors: HashMap::new(), ..adapter };
    assert_eq!(logits(&load(&tiny, &none)?)?, logits(&tiny.model()?)?);
    Ok(())
}

#[test]
fn sums_are_quantised() -> Result<()> {
    let tiny = Tiny::qwen3_next().set("hidden_size", 32).set("moe_intermediate_size", 32).fill();
    let mut fused = tiny.clone();
    fused.fuse_experts()?;
    let adapter = Adapter::new(&tiny, &MODULES);
    let merged = merged_by_hand(&tiny, &adapter, &MODULES)?;
    let config = merged.model_config()?;
    let want = CausalLm::loader(&config).quantize(GgmlDType::Q8_0).load(merged.var_builder(DType::F32, &CPU))?;
    let want = logits(&want)?;
    for tiny in [tiny, fused] {
        let model = load_as(&tiny, &adapter, DType::F32, Some(GgmlDType::Q8_0))?;
        assert!(model.is_quantized());
        assert_eq!(logits(&model)?, want);
    }
    Ok(())
}

#[test]
fn scales_and_patterns() -> Result<()> {
    let tiny = Tiny::qwen3_next();
    let modules = ["model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.o_proj"];
    let [q, o] = modules;
    let mut adapter = Adapter::new(&tiny, &modules);
    adapter.add(q, 4, [64, 16]);
    let base = adapter.clone().set("rank_pattern", json!({"q_proj": 4}));
    let weight = |module: &str| format!("{module}.weight");
    for (adapter, [of_q, of_o]) in [
        (base.clone(), [1., 2.]),
        (base.clone().set("alpha_pattern", json!({"^model.layers.3.*q_proj": 2})), [0.5, 2.]),
        (base.clone().set("alpha_pattern", json!({"layers.3.self_attn.o_proj|in_proj": 1.0})), [1., 0.5]),
        // Neither is a whole part of the name.
        (base.clone().set("alpha_pattern", json!({"_proj": 2, "self_attn": 2})), [1., 2.]),
        (base.clone().set("use_rslora", json!(true)), [2., 4. / 2f64.sqrt()]),
        (base.set("rank_pattern", json!({"a": 1, "self_attn.q_proj": 4, "z": 2})), [1., 2.]),
    ] {
        let once = by_hand(&tiny, of_q, &[(weight(q), adapter.product(q)?)])?;
        let merged = by_hand(&once, of_o, &[(weight(o), adapter.product(o)?)])?;
        let error = rel_rms(&logits(&load(&tiny, &adapter)?)?, &logits(&merged.model()?)?);
        assert!(error < 1e-6, "{}: {error:e}", adapter.config);
    }
    Ok(())
}

#[test]
fn names_with_and_without_what_is_around_a_model() -> Result<()> {
    let tiny = Tiny::qwen3_next();
    let adapter = Adapter::new(&tiny, &MODULES);
    let want = logits(&load(&tiny, &adapter)?)?;
    let wrapped = |name: &str| match name.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None => name.to_string(),
    };
    let names: [&dyn Fn(&str) -> String; 4] = [
        &|name| name.replacen("base_model.model.", "", 1),
        &|name| name.replacen("model.model.layers", "model.model.language_model.layers", 1),
        &|name| name.replacen("base_model.model.model.layers", "base_model.model.layers", 1),
        &|name| name.replacen("base_model.model.", "base_model.model.language_model.", 1),
    ];
    let weights = tiny.weights.iter().map(|(name, weight)| (wrapped(name), weight.clone()));
    let in_wrapper = Tiny { weights: weights.collect(), config: tiny.config.clone() };
    for name in names {
        let renamed = adapter.renamed(name);
        for tiny in [&tiny, &in_wrapper] {
            assert_eq!(logits(&load(tiny, &renamed)?)?, want);
        }
    }
    Ok(())
}

/// An adapter of all experts of a layer as PEFT fuses them, with the products of each by hand. `in_out`: as before 0.19.1, where they are of
/// the transposed matrices.
fn fused_adapter(tiny: &Tiny, in_out: bool) -> Result<(Adapter, Vec<(String, Tensor)>)> {
    let (mut adapter, mut products) = (Adapter::new(tiny, &[]), Vec::new());
    adapter = adapter.set("target_parameters", json!(["mlp.experts.gate_up_proj", "down_proj", "gate.weight"]));
    adapter.config["rank_pattern"] = json!({r".*\.gate_up_proj": 4, "gate.weight": 1});
    adapter.config["alpha_pattern"] = json!({r".*\.gate_up_proj": 8, "gate.weight": 2});
    let inner = tiny.config["moe_intermediate_size"].as_u64().expect("a number") as usize;
    let (experts, hidden) = (4, 16);
    let at = "model.layers.1.mlp";
    for (module, name, rank, [outputs, inputs]) in
        [("experts.base_layer", "gate_up_proj", 4, [2 * inner, hidden]), ("experts", "down_proj", 2, [hidden, inner])]
    {
        let shape = if in_out { [inputs, outputs] } else { [outputs, inputs] };
        adapter.add(&format!("{at}.{module}"), rank * experts, shape);
        let [a, b] = adapter.factors(&format!("{at}.{module}"));
        for expert in 0..experts {
            let columns = Tensor::from_iter((0..rank).map(|j| (j * experts + expert) as u32), &CPU)?;
            let product = b.index_select(&columns, 1)?.matmul(&a.narrow(0, expert * rank, rank)?)?;
            let product = if in_out { product.t()?.contiguous()? } else { product };
            let names = if name == "down_proj" { vec![name] } else { vec!["gate_proj", "up_proj"] };
            for (part, product) in names.iter().zip(product.chunk(names.len(), 0)?) {
                products.push((format!("{at}.experts.{expert}.{part}.weight"), product));
            }
        }
    }
    adapter.add(&format!("{at}.gate"), 1, [experts, hidden]);
    products.push((format!("{at}.gate.weight"), adapter.product(&format!("{at}.gate"))?));
    Ok((adapter, products))
}

#[test]
fn experts_together_and_apart() -> Result<()> {
    let tiny = Tiny::qwen3_next();
    let (adapter, products) = fused_adapter(&tiny, false)?;
    let merged = by_hand(&tiny, 2., &products)?;
    let apart = ["gate_proj", "up_proj", "down_proj"].map(|name| format!("model.layers.0.mlp.experts.2.{name}"));
    let apart = apart.each_ref().map(String::as_str);
    let one = Adapter::new(&tiny, &apart);
    let mut only_down = adapter.clone().set("target_parameters", json!(["experts.down_proj"]));
    only_down.tensors.retain(|name, _| name.contains("experts.lora"));
    let down: Vec<_> = products.iter().filter(|(name, _)| name.contains("down_proj")).cloned().collect();
    for (adapter, merged) in
        [(&adapter, merged), (&one, merged_by_hand(&tiny, &one, &apart)?), (&only_down, by_hand(&tiny, 2., &down)?)]
    {
        let mut fused = (tiny.clone(), merged.clone());
        fused.0.fuse_experts()?;
        fused.1.fuse_experts()?;
        for (tiny, merged) in [(&tiny, &merged), (&fused.0, &fused.1)] {
            assert_eq!(logits(&load(tiny, adapter)?)?, logits(&merged.model()?)?);
        }
    }
    Ok(())
}

/// The shapes tell them, and where gates and ups of an expert are square the version does.
#[test]
fn experts_of_the_first_versions_of_peft() -> Result<()> {
    let square = Tiny::qwen3_next().set("moe_intermediate_size", 8).fill();
    for (tiny, in_out, version) in [
        (Tiny::qwen3_next(), true, json!("0.18.1")),
        (Tiny::qwen3_next(), true, json!("0.19.1")),
        (Tiny::qwen3_next(), false, json!("0.18.1")),
        (square.clone(), true, json!("0.19.0")),
        (square.clone(), true, Value::Null),
        (square.clone(), false, json!("0.19.1.dev0@abc")),
        (square, false, json!("0.20.0")),
    ] {
        let (adapter, products) = fused_adapter(&tiny, in_out)?;
        let adapter = adapter.set("peft_version", version.clone());
        let (mut fused, mut merged) = (tiny.clone(), by_hand(&tiny, 2., &products)?);
        fused.fuse_experts()?;
        let want = logits(&merged.model()?)?;
        assert_eq!(logits(&load(&tiny, &adapter)?)?, want, "{version}");
        merged.fuse_experts()?;
        assert_eq!(logits(&load(&fused, &adapter)?)?, logits(&merged.model()?)?, "{version}");
    }
    Ok(())
}

/// The text model has no use for a vision tower.
#[test]
fn modules_of_a_vision_tower_are_left_out() -> Result<()> {
    let tiny = Tiny::qwen3_next();
    let mut adapter = Adapter::new(&tiny, &MODULES);
    let want = load(&tiny, &adapter)?;
    adapter.add("model.visual.blocks.0.attn.qkv", RANK, [48, 16]);
    let patches = "base_model.model.model.visual.patch_embed.proj.lora_A.weight";
    adapter.tensors.insert(patches.into(), Tensor::ones((RANK, 3, 2, 4, 4), DType::F32, &CPU)?);
    let model = load(&tiny, &adapter)?;
    assert_eq!(logits(&model)?, logits(&want)?);
    assert_eq!(want.remarks(), [""; 0]);
    assert_eq!(model.remarks(), ["tensors of the adapter that the text model does not have: visual.* (3)"]);
    Ok(())
}

/// What a GGUF file has in a float type.
#[test]
fn dense_tensors_of_a_gguf_file() -> Result<()> {
    let tiny = Tiny::qwen3_next();
    let file = GgufOfTiny::new(&tiny, Layout::Qwen3Next)?;
    let modules: Vec<&str> = MODULES.into_iter().filter(|module| !module.contains("in_proj")).collect();
    let adapter = Adapter::new(&tiny, &modules);
    let (_dir, path) = in_a_folder("tiny.gguf");
    file.write(&path)?;
    let (file, adapter_) = (GgufFile::open(&path)?, adapter.open()?);
    let config = ModelConfig::from_gguf(&file)?;
    let model = CausalLm::loader(&config).lora(&adapter_).load_gguf(&file, DType::F32, &CPU)?;
    let want = logits(&merged_by_hand(&tiny, &adapter, &modules)?.model()?)?;
    let error = rel_rms(&logits(&model)?, &want);
    assert!(error < 1e-5, "{error:e}");
    Ok(())
}

#[test]
fn the_draft_head_has_one_too() -> Result<()> {
    let tiny = Tiny::qwen3_next().with_draft_head();
    let modules = ["mtp.fc", "mtp.layers.0.self_attn.q_proj"];
    let adapter = Adapter::new(&tiny, &modules);
    let (config, opened) = (tiny.model_config()?, adapter.open()?);
    let first = |model: &CausalLm| -> Result<Vec<f32>> {
        let mut pool = model.new_sequences(1, 32)?;
        let sequence = pool.begin()?;
        model.feed_only(&mut pool, &[(sequence, &IDS)])?;
        model.draft(&mut pool, &[(sequence, 6, 2)])?.1.flatten_all()?.to_vec1()
    };
    let merged = merged_by_hand(&tiny, &adapter, &modules)?.load_with(DType::F32, DraftHeadChoice::On)?;
    let loader = CausalLm::loader(&config).draft_head(DraftHeadChoice::On).lora(&opened);
    assert_eq!(first(&loader.load(tiny.var_builder(DType::F32, &CPU))?)?, first(&merged)?);
    Ok(())
}
