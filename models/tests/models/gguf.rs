//! Weights that are quantised: models from GGUF files against the goldens and against safetensors, quantisation and
//! dequantisation at load, and what is refused. On the CPU, but for one test of the kernels on CUDA.

use crate::gguf_writer::{dequantized, in_a_folder, load, Files, GgufOfTiny, Layout};
use crate::golden::{converted, DEMO, QWEN3_5, QWEN3_5_MOE};
use crate::model::check_goldens;
use crate::serving::steps_beside_graph;
use crate::support::{gpus, refused, rel_rms, single_stream_devices};
use crate::tiny::{self, Tiny};
use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{CausalLm, DecodeGraph, Family, GgufFile, ModelConfig, ModelState};
use candle_nn::VarBuilder;
use std::path::Path;

const CPU: Device = Device::Cpu;
const LAYOUTS: [Layout; 3] = [Layout::Qwen3Next, Layout::OldQwen3Next, Layout::Qwen3_5];
const IDS: [u32; 9] = [3, 1, 4, 1, 5, 9, 2, 6, 31];

/// Wide enough for blocks of 256, with three value heads to a key head. All experts are chosen: which ones would be is
/// a matter of rounding. Its matrices are small enough not to make much of little.
pub fn wide() -> Tiny {
    let tiny = [
        ("hidden_size", 256),
        ("intermediate_size", 256),
        ("linear_num_value_heads", 6),
        ("linear_key_head_dim", 16),
        ("linear_value_head_dim", 128),
        ("moe_intermediate_size", 256),
        ("shared_expert_intermediate_size", 256),
        ("head_dim", 64),
        ("num_experts_per_tok", 4),
    ]
    .into_iter()
    .fold(Tiny::qwen3_next(), |tiny, (field, value)| tiny.set(field, value));
    calm(tiny.fill())
}

pub fn calm(mut tiny: Tiny) -> Tiny {
    for weight in tiny.weights.values_mut().filter(|weight| weight.rank() == 2) {
        *weight = (&*weight * 0.15).expect("a product");
    }
    tiny
}

pub fn without_experts(tiny: Tiny) -> Tiny {
    let fields = ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"];
    calm(fields.into_iter().fold(tiny, Tiny::unset).fill())
}

/// Logits of every position.
fn logits(model: &CausalLm) -> Result<Vec<f32>> {
    let ids = Tensor::from_slice(&IDS, (1, IDS.len()), &CPU)?;
    model.forward(&ids, &mut model.new_state(1)?)?.flatten_all()?.to_vec1()
}

/// Logits after `ids`, which follow what the state has seen.
fn next(model: &CausalLm, state: &mut ModelState, ids: &[u32]) -> Result<Vec<f32>> {
    model.forward_last(&Tensor::from_slice(ids, (1, ids.len()), &CPU)?, state)?.squeeze(0)?.to_vec1()
}

fn last(model: &CausalLm, ids: &[u32]) -> Result<Vec<f32>> {
    next(model, &mut model.new_state(1)?, ids)
}

fn median(mut x: Vec<f64>) -> f64 {
    x.sort_by(f64::total_cmp);
    x[x.len() / 2]
}

#[test]
fn f16_files_match_the_goldens() -> Result<()> {
    for (name, goldens) in [("demo-f16", &DEMO), ("qwen3_5_tiny-f16", &QWEN3_5), ("qwen3_5_moe_tiny-f16", &QWEN3_5_MOE)]
    {
        let Some(path) = converted(&format!("{name}.gguf")) else { continue };
        check_goldens(name, &load(&path)?, goldens, 1e-2)?;
    }
    Ok(())
}

/// Relative errors of the last logits, the median of the prompts: where a router was near a tie, another expert makes
/// one prompt very different.
#[test]
fn q8_0_files_are_as_good_as_their_weights() -> Result<()> {
    for (name, goldens) in [("demo-q8_0", &DEMO), ("qwen3_5_moe_tiny-q8_0", &QWEN3_5_MOE)] {
        let Some(path) = converted(&format!("{name}.gguf")) else { continue };
        let (_dir, wide) = in_a_folder("f32.gguf");
        dequantized(&path, &wide)?;
        let (model, dense) = (load(&path)?, load(&wide)?);
        let mut errors = [(); 3].map(|_| Vec::new());
        for i in 0..goldens.prompts() {
            let g = goldens.prompt(i)?;
            let (now, dense) = (last(&model, &g.ids)?, last(&dense, &g.ids)?);
            errors[0].push(rel_rms(&dense, &g.logits_last));
            errors[1].push(rel_rms(&now, &dense));
            errors[2].push(rel_rms(&now, &g.logits_last));
        }
        let [weights, activations, both] = errors.map(median);
        println!("{name}: of the weights {weights:e}, of the activations {activations:e}, of both {both:e}");
        // 8 bits each: as much from the one as from the other, and both are independent.
        assert!(activations < 2. * weights, "{name}: activations {activations}, weights {weights}");
        assert!(both < 2. * weights.hypot(activations), "{name}: {both}");
        assert!(weights < 0.03, "{name}: {weights}");
    }
    Ok(())
}

#[test]
fn configurations_are_those_of_the_checkpoints() -> Result<()> {
    for (name, goldens) in [
        ("demo-f16", &DEMO),
        ("demo-q8_0", &DEMO),
        ("qwen3_5_tiny-f16", &QWEN3_5),
        ("qwen3_5_moe_tiny-f16", &QWEN3_5_MOE),
        ("qwen3_5_moe_tiny-q8_0", &QWEN3_5_MOE),
    ] {
        let Some(path) = converted(&format!("{name}.gguf")) else { continue };
        let got = ModelConfig::from_gguf(&GgufFile::open(path)?)?;
        let mut want = goldens.config()?;
        want.eos_token_ids = got.eos_token_ids.clone();
        // "<|endoftext|>" by its id, "<|im_end|>" by its name.
        assert_eq!(got.eos_token_ids, [0, 2], "{name}");
        assert_eq!(got, want, "{name}");
    }
    Ok(())
}

#[test]
fn own_files_have_the_configuration_of_the_model() -> Result<()> {
    for (tiny, layout) in [(wide(), Layout::Qwen3Next), (wide(), Layout::Qwen3_5)] {
        let (_dir, path) = in_a_folder("tiny.gguf");
        let mut file = GgufOfTiny::new(&tiny, layout)?;
        // A layer that predicts further tokens is none of the model's.
        let architecture = if layout == Layout::Qwen3_5 { "qwen35moe" } else { "qwen3next" };
        file.metadata.insert(format!("{architecture}.block_count"), Value::U32(5));
        file.metadata.insert(format!("{architecture}.nextn_predict_layers"), Value::U32(1));
        file.metadata.insert("tokenizer.ggml.eos_token_id".into(), Value::U32(0));
        file.metadata.insert("tokenizer.ggml.eot_token_id".into(), Value::U32(7));
        file.write(&path)?;
        let got = ModelConfig::from_gguf(&GgufFile::open(&path)?)?;
        let mut want = tiny.model_config()?;
        want.family = if layout == Layout::Qwen3_5 { Family::Qwen3_5Moe } else { Family::Qwen3Next };
        assert_eq!(got, want);
    }
    Ok(())
}

/// In f32 nothing is lost but the last digit of `A_log`.
#[test]
fn every_layout_is_the_same_model() -> Result<()> {
    for tiny in [wide(), without_experts(wide())] {
        let want = tiny.logits(&IDS)?;
        for layout in LAYOUTS {
            let error = rel_rms(&logits(&GgufOfTiny::new(&tiny, layout)?.load()?)?, &want);
            assert!(error < 2e-5, "{layout:?}: {error:e}");
        }
    }
    Ok(())
}

#[test]
fn experts_in_one_tensor_are_those_in_two() -> Result<()> {
    for dtype in [GgmlDType::F32, GgmlDType::Q8_0] {
        let two = GgufOfTiny::new(&wide(), Layout::Qwen3_5)?.quantized(dtype);
        let want = logits(&two.load()?)?;
        let mut one = two;
        for layer in 0..4 {
            let [gate, up] = ["gate", "up"].map(|part| format!("blk.{layer}.ffn_{part}_exps.weight"));
            let (gate, up) = (one.tensors.remove(&gate).unwrap().0, one.tensors.remove(&up).unwrap().0);
            let both = Tensor::cat(&[gate, up], 1)?;
            one.tensors.insert(format!("blk.{layer}.ffn_gate_up_exps.weight"), (both, dtype));
        }
        assert_eq!(logits(&one.load()?)?, want, "{dtype:?}");
    }
    Ok(())
}

/// Each tensor in a type of its own, projections that are read together above all. That a projection is right to the
/// last digit is a unit test of its own.
#[test]
fn types_may_be_mixed() -> Result<()> {
    use GgmlDType::*;
    for layout in LAYOUTS {
        for tiny in [wide(), without_experts(wide())] {
            let file = GgufOfTiny::new(&tiny, layout)?.typed(|name| {
                let (_, name) = name.split_once(".").filter(|_| name.starts_with("blk."))?;
                Some(match name.split_once('.')?.1 {
                    "attn_qkv.weight" | "ssm_in.weight" => Q8_0,
                    "attn_gate.weight" => Q6K,
                    "ssm_beta.weight" => F16,
                    "ssm_ba.weight" | "ssm_alpha.weight" => BF16,
                    "ssm_out.weight" => Q6K,
                    "attn_q.weight" => Q6K,
                    "attn_k.weight" => F16,
                    "attn_v.weight" => Q8_0,
                    "attn_output.weight" => Q8_0,
                    "ffn_gate_exps.weight" | "ffn_up.weight" => Q6K,
                    "ffn_up_exps.weight" | "ffn_gate.weight" => Q8_0,
                    "ffn_down_exps.weight" | "ffn_gate_shexp.weight" => Q8_0,
                    "ffn_up_shexp.weight" | "ffn_down.weight" => F16,
                    "ffn_down_shexp.weight" => Q6K,
                    _ => return None,
                })
            });
            let file = file.files()?;
            let [got, dense] = [&file.path, &file.wide].map(|path| logits(&load(path)?));
            let (got, dense) = (got?, dense?);
            let (error, of_weights) = (rel_rms(&got, &dense), rel_rms(&dense, &tiny.logits(&IDS)?));
            println!("{layout:?}: of the weights {of_weights:e}, of the activations {error:e}");
            assert!(of_weights < 0.1 && error > 0. && error < 2. * of_weights, "{layout:?}: {error:e}, {of_weights:e}");
        }
    }
    Ok(())
}

#[test]
fn quantised_embeddings_are_dequantised_rows() -> Result<()> {
    let tied = without_experts(wide()).set("tie_word_embeddings", true);
    for (tiny, name) in [(without_experts(wide()), "untied"), (tied, "tied")] {
        let mut file = GgufOfTiny::new(&tiny, Layout::Qwen3Next)?;
        if name == "tied" {
            file.tensors.remove("output.weight");
        }
        let file = file.typed(|name| (name == "token_embd.weight").then_some(GgmlDType::Q8_0));
        let file = file.files()?;
        let (model, dense) = (load(&file.path)?, load(&file.wide)?);
        assert_eq!(model.config().tie_word_embeddings, name == "tied");
        let error = rel_rms(&logits(&model)?, &logits(&dense)?);
        // The same numbers go in; tied, the head rounds its input.
        let bound = if name == "tied" { 1e-2 } else { 1e-6 };
        assert!(error < bound, "{name}: {error:e}");
    }
    Ok(())
}

#[test]
fn half_precision_activations() -> Result<()> {
    let files = GgufOfTiny::new(&without_experts(wide()), Layout::Qwen3_5)?.quantized(GgmlDType::Q8_0).files()?;
    let error = |path: &Path, dtype| {
        let file = GgufFile::open(path)?;
        let config = ModelConfig::from_gguf(&file)?;
        let [model, f32] = [dtype, DType::F32].map(|dtype| CausalLm::load_gguf(&config, &file, dtype, &CPU));
        let model = model?;
        assert_eq!(model.dtype(), dtype);
        Ok::<_, candle_core::Error>(rel_rms(&logits(&model)?, &logits(&f32?)?))
    };
    for dtype in [DType::BF16, DType::F16] {
        let (quantized, dense) = (error(&files.path, dtype)?, error(&files.wide, dtype)?);
        println!("{dtype:?}: {quantized:e}, of dense weights {dense:e}");
        // What is a little different is rounded to other 8 bits.
        assert!(quantized < 2. * dense.hypot(0.1), "{dtype:?}: {quantized:e}, of dense weights {dense:e}");
    }
    Ok(())
}

/// One sequence whole, in parts, and beside another one: through the paths that serving takes.
#[test]
fn sequences_of_a_quantised_model() -> Result<()> {
    let model = GgufOfTiny::new(&wide(), Layout::Qwen3_5)?.quantized(GgmlDType::Q8_0).load()?;
    assert!(model.is_quantized() && !wide().model()?.is_quantized());
    let want = last(&model, &IDS)?;
    let mut state = model.new_state(1)?;
    next(&model, &mut state, &IDS[..4])?;
    let split = next(&model, &mut state, &IDS[4..])?;
    let mut pool = model.new_sequences(2, 32)?;
    let (one, two) = (pool.begin()?, pool.begin()?);
    let both = model.feed(&mut pool, &[(one, &IDS[..]), (two, &IDS[..5])])?;
    for got in [split, both.get(0)?.to_vec1::<f32>()?] {
        assert!(rel_rms(&got, &want) < 1e-4, "{:e}", rel_rms(&got, &want));
    }
    Ok(())
}

/// On CUDA candle's kernels round what they multiply with to 8 bits as on the CPU, in other blocks and sums: next to the same
/// numbers unrounded, the model is as far off as on the CPU. Steps and graphs agree with the prompt.
#[test]
fn quantised_models_on_cuda() -> Result<()> {
    for device in &gpus(single_stream_devices()) {
        use GgmlDType::{Q4K, Q6K, Q8_0};
        for (dtype, experts) in [(Q8_0, false), (Q4K, false), (Q8_0, true), (Q4K, true), (Q6K, true)] {
            let tiny = if experts { wide() } else { without_experts(wide()) };
            let Files { path, wide, .. } = &GgufOfTiny::new(&tiny, Layout::Qwen3_5)?.quantized(dtype).files()?;
            let want = last(&load(wide)?, &IDS)?;
            let on_cpu = rel_rms(&last(&load(path)?, &IDS)?, &want);
            let file = GgufFile::open(path)?;
            let config = ModelConfig::from_gguf(&file)?;
            for activations in [DType::F32, DType::BF16] {
                let dense = CausalLm::load_gguf(&config, &GgufFile::open(wide)?, activations, &CPU)?;
                let bound = 2. * on_cpu.hypot(rel_rms(&last(&dense, &IDS)?, &want));
                assert!(bound < 0.6, "{dtype:?}: {on_cpu:e} tells nothing"); // what is wrong is off by 1 and more
                let model = CausalLm::load_gguf(&config, &file, activations, device)?;
                let near = |got: &[f32], what: &str| {
                    let (error, what) =
                        (rel_rms(got, &want), format!("{dtype:?}, experts {experts}, {activations:?}, {what}"));
                    println!("{what}: {error:e}, on the CPU {on_cpu:e}");
                    assert!(error < bound, "{what}: {error:e}, at most {bound:e}");
                };
                near(&last(&model, &IDS)?, "prompt");
                let mut pool = model.new_sequences(2, 32)?;
                let s = [pool.begin()?, pool.begin()?];
                let (first, rest) = IDS.split_at(3);
                model.feed_only(&mut pool, &[(s[0], first), (s[1], first)])?;
                let mut graph = DecodeGraph::capture(&model, &mut pool, 1)?;
                let (mut eager, mut graphed) = (vec![], vec![]);
                for id in rest {
                    eager = model.feed(&mut pool, &[(s[0], &[*id])])?.get(0)?.to_vec1::<f32>()?;
                    graphed = graph.step(&model, &mut pool, &[(s[1], *id)])?.get(0)?.to_vec1::<f32>()?;
                }
                near(&eager, "steps");
                near(&graphed, "graph");
                assert!(rel_rms(&graphed, &eager) < 1e-5, "{dtype:?}: {:e}", rel_rms(&graphed, &eager));
                match activations {
                    DType::F32 => {
                        let nine = DecodeGraph::capture(&model, &mut pool, 9);
                        refused(nine, &["at most 8 rows of this quantised model, got 9"]);
                    }
                    _ => many_graphed(&model)?,
                }
            }
        }
    }
    Ok(())
}

/// Steps of 20 sequences by a graph are those without.
fn many_graphed(model: &CausalLm) -> Result<()> {
    const COUNT: usize = 20;
    let prompts: Vec<Vec<u32>> = (0..COUNT).map(|i| vec![IDS[i % IDS.len()]; 1 + i % 5]).collect();
    let token = |i: usize, step: usize| (IDS[step] + (i * step) as u32) % 8;
    steps_beside_graph(model, &prompts, IDS.len(), token, |got, want, what| {
        let error = rel_rms(&got.concat(), &want.concat());
        assert!(error < 1e-5, "{what}: {error:e}");
    })?;
    let mut pool = model.new_sequences(1, 32)?;
    refused(DecodeGraph::capture(model, &mut pool, 129), &["at most 128 rows of this quantised model, got 129"]);
    Ok(())
}

#[test]
fn split_files_are_one() -> Result<()> {
    let file = GgufOfTiny::new(&Tiny::qwen3_next(), Layout::Qwen3Next)?;
    let (dir, first) = in_a_folder("tiny-00001-of-00002.gguf");
    let second = dir.path().join("tiny-00002-of-00002.gguf");
    let in_first = |name: &str| name.starts_with("blk.0") || name.starts_with("token");
    file.write_some(&first, in_first)?;
    refused(GgufFile::open(&first), &["cannot open", "tiny-00002-of-00002.gguf"]);
    let rest = GgufOfTiny { metadata: Default::default(), ..file.clone() };
    rest.write_some(&second, |name| !in_first(name))?;
    let (_dir, whole) = in_a_folder("tiny.gguf");
    file.write(&whole)?;
    let want = logits(&load(&whole)?)?;
    for part in [&first, &second] {
        assert_eq!(logits(&load(part)?)?, want);
        assert_eq!(GgufFile::open(part)?.path(), first);
    }
    Ok(())
}

#[test]
fn what_is_no_whole_file_is_refused() -> Result<()> {
    let (dir, path) = in_a_folder("tiny.gguf");
    refused(GgufFile::open(&path), &["cannot open", "tiny.gguf"]);
    std::fs::write(&path, b"safetensors, perhaps")?;
    refused(GgufFile::open(&path), &["tiny.gguf", "no GGUF file", "magic"]);
    GgufOfTiny::new(&Tiny::qwen3_next(), Layout::Qwen3Next)?.write(&path)?;
    let bytes = std::fs::read(&path)?;
    let cut = dir.path().join("cut.gguf");
    for (len, parts) in [
        (bytes.len() - 33, ["cut.gguf is cut off", "tensor `", "ends at byte"]),
        (bytes.len() / 2, ["cut.gguf is cut off", "tensor `", "ends at byte"]),
        (1000, ["cut.gguf", "or is cut off", "remaining"]),
        (0, ["cut.gguf", "or is cut off", ""]),
    ] {
        std::fs::write(&cut, &bytes[..len])?;
        refused(GgufFile::open(&cut), &parts);
    }
    // A type that came later, and one that is none of weights.
    for (number, what) in [(99, "type number 99"), (24, "type I8")] {
        std::fs::write(&path, with_type(&bytes, "token_embd.weight", 0, number))?;
        refused(load(&path), &["tiny.gguf", "`token_embd.weight`", what]);
    }
    // Neither magic nor version alone make a file; version 3 in the other order of bytes.
    let begin = |version: u32| [&b"GGUF"[..], &version.to_le_bytes(), &[0xff; 24]].concat();
    for (version, what) in [(4, "version 1, 2 or 3, got 4"), (3 << 24, "big-endian"), (3, "remaining")] {
        std::fs::write(&path, begin(version))?;
        refused(GgufFile::open(&path), &["tiny.gguf", what]);
    }
    Ok(())
}

/// The bytes of a file in which a matrix is of another type, whose number follows the name and two dimensions.
pub fn with_type(bytes: &[u8], tensor: &str, old: u32, new: u32) -> Vec<u8> {
    let (name, mut bytes) = (tensor.as_bytes(), bytes.to_vec());
    let at = bytes.windows(name.len()).position(|part| part == name).expect("the tensor") + name.len() + 4 + 16;
    assert_eq!(bytes[at..at + 4], old.to_le_bytes());
    bytes[at..at + 4].copy_from_slice(&new.to_le_bytes());
    bytes
}

#[test]
fn every_missing_or_misshapen_tensor_is_named() -> Result<()> {
    let (_dir, path) = in_a_folder("tiny.gguf");
    for layout in LAYOUTS {
        let whole = GgufOfTiny::new(&Tiny::qwen3_next(), layout)?;
        // The layers repeat themselves: one of each kind. Without a head the embeddings are it.
        let skipped = |name: &str| name.starts_with("blk.1.") || name.starts_with("blk.2.") || name == "output.weight";
        for name in whole.tensors.keys().filter(|name| !skipped(name)) {
            let mut missing = whole.clone();
            missing.tensors.remove(name);
            missing.write(&path)?;
            // Without its own names, the layout is another one.
            let named = match name.as_str() {
                "blk.0.ssm_in.weight" => "blk.0.attn_qkv.weight",
                "blk.0.ssm_ba.weight" => "blk.0.ssm_beta.weight",
                "blk.0.ffn_gate_exps.weight" => "blk.0.ffn_gate",
                "blk.3.ffn_gate_exps.weight" => "blk.3.ffn_gate",
                name => name,
            };
            refused(load(&path), &["tiny.gguf", named]);
            let mut misshapen = whole.clone();
            let (tensor, _) = misshapen.tensors.get_mut(name).unwrap();
            let mut dims = tensor.dims().to_vec();
            dims[0] += 1;
            *tensor = Tensor::zeros(dims.clone(), DType::F32, &CPU)?;
            misshapen.write(&path)?;
            let result = load(&path);
            // A vocabulary of another size would be another model's.
            if name != "token_embd.weight" {
                refused(result, &["tiny.gguf", name, &format!("{dims:?}")]);
            }
        }
    }
    Ok(())
}

#[test]
fn every_wrong_entry_is_named() -> Result<()> {
    let (_dir, path) = in_a_folder("tiny.gguf");
    let whole = GgufOfTiny::new(&Tiny::qwen3_next(), Layout::Qwen3_5)?;
    let with = |key: &str, value: Option<Value>| {
        let mut file = whole.clone();
        match value {
            Some(value) => file.metadata.insert(key.into(), value),
            None => file.metadata.remove(key),
        };
        file.write(&path)?;
        ModelConfig::from_gguf(&GgufFile::open(&path)?)
    };
    assert_eq!(with("some.entry", Some(Value::Bool(true)))?.vocab_size, tiny::VOCAB);
    let llama = Some(Value::String("llama".into()));
    refused(with("general.architecture", llama), &["tiny.gguf", "`general.architecture`", "qwen35moe", "llama"]);
    refused(with("general.architecture", None), &["tiny.gguf", "`general.architecture`"]);
    // What has a default, may be absent, or follows from the tensors.
    let optional = ["full_attention_interval", "value_length", "feed_forward", "expert_count", "attention.", "ssm."];
    let optional = |key: &str| {
        !key.ends_with("epsilon")
            && (optional.iter().any(|name| key.contains(name)) || key.ends_with("embedding_length"))
    };
    let config = with("some.entry", None)?;
    let keys: Vec<_> = whole.metadata.keys().filter(|key| key.starts_with("qwen35moe.")).collect();
    assert!(keys.len() > 15);
    for key in keys {
        match optional(key) {
            true => assert_eq!(with(key, None)?, config, "{key}"),
            false => refused(with(key, None), &["tiny.gguf", key, "is missing"]),
        }
        if !key.contains("feed_forward_length") || key.contains("expert_feed") {
            refused(with(key, Some(Value::String("x".into()))), &["tiny.gguf", key, "expected", "\"x\""]);
        }
    }
    let u32 = |n: u32| Some(Value::U32(n));
    let of = |key: &str| format!("qwen35moe.{key}");
    for (key, value, expected) in [
        ("attention.head_count_kv", u32(3), "a divisor"),
        ("ssm.time_step_rank", u32(3), "a multiple of the group count"),
        ("ssm.inner_size", u32(33), "a multiple of the time step rank"),
        ("rope.dimension_count", u32(9), "an even number up to the key length, 8"),
        ("rope.dimension_count", u32(10), "an even number up to the key length, 8"),
        ("expert_used_count", u32(5), "at most the expert count, 4"),
        ("nextn_predict_layers", u32(4), "fewer than the blocks, 4"),
        ("block_count", u32(5000), "at most 4096 layers"),
        ("attention.value_length", u32(16), "the key length, 8"),
        ("rope.scaling.type", Some(Value::String("longrope".into())), "\"yarn\""),
        ("rope.scaling.low_freq_factor", u32(2), "no such setting"),
        ("rope.scaling.yarn_beta_fast", u32(2), "no such setting"),
        ("ssm.dt_b_c_rms", Some(Value::Bool(true)), "no entries of ssm but"),
        ("attention.scale", Some(Value::F32(0.9)), "1 / sqrt(8)"),
        ("expert_gating_func", u32(2), "expected 1"),
        ("norm_top_k_prob", Some(Value::Bool(false)), "expected true"),
        ("attention.recurrent_layers", Some(Value::Array(vec![Value::Bool(true); 3])), "4 booleans"),
        ("attention.layer_norm_rms_epsilon", Some(Value::F32(0.)), "a number in (0, 1)"),
    ] {
        refused(with(&of(key), value), &["tiny.gguf", &of(key), expected]);
    }
    let linear = [false, true, true, true].map(Value::Bool).to_vec();
    let first = with(&of("attention.recurrent_layers"), Some(Value::Array(linear)))?;
    assert_eq!(first.layers[0].mixer, candle_gdn_models::MixerKind::FullAttention);
    Ok(())
}

fn quantize(tiny: &Tiny, to: GgmlDType) -> Result<CausalLm> {
    let vb = tiny.var_builder(DType::F32, &CPU);
    let config = tiny.model_config()?;
    let mut layers = 0;
    let progress = |done, of| {
        layers += 1;
        assert_eq!((done, of), (layers, 4));
    };
    let model = CausalLm::loader(&config).quantize(to).progress(progress).load(vb)?;
    assert_eq!(layers, 4);
    Ok(model)
}

/// The same blocks as in a file, and so the same logits.
#[test]
fn quantising_at_load_is_loading_quantised() -> Result<()> {
    let mut experts = wide();
    // What is left of a logarithm in the file. A step of the last place may move the rounding of an activation to 8 bits.
    for (_, a_log) in experts.weights.iter_mut().filter(|(name, _)| name.ends_with("A_log")) {
        for _ in 0..4 {
            *a_log = a_log.exp()?.log()?;
        }
    }
    let mut fused = experts.clone();
    fused.fuse_experts()?;
    for tiny in [&experts, &fused, &without_experts(experts.clone())] {
        let of = if tiny.weights.len() == fused.weights.len() { &experts } else { tiny };
        for dtype in [GgmlDType::Q8_0, GgmlDType::Q4K] {
            let file = GgufOfTiny::new(of, Layout::Qwen3Next)?.quantized(dtype).typed(|name| match name {
                "token_embd.weight" => Some(GgmlDType::F32),
                name if name.contains("ssm_ba") => Some(GgmlDType::Q8_0),
                _ => None,
            });
            let file = file.files()?;
            let model = quantize(tiny, dtype)?;
            assert_eq!(model.other_types(), []);
            let (got, dense) = (logits(&model)?, tiny.logits(&IDS)?);
            let of_file = rel_rms(&got, &logits(&load(&file.path)?)?);
            assert!(of_file < 1e-5, "{dtype:?}: {of_file:e}");
            let of_dense = rel_rms(&got, &dense);
            println!("{dtype:?}: {of_file:e} of the file, {of_dense:e} of dense");
            let of_weights = rel_rms(&logits(&load(&file.wide)?)?, &dense);
            assert!(of_dense < 2. * of_weights.hypot(0.1), "{dtype:?}: {of_dense:e}, of the weights {of_weights:e}");
            assert!(of_dense > 1e-3);
        }
    }
    Ok(())
}

#[test]
fn what_does_not_divide_into_blocks_is_told() -> Result<()> {
    // 16, 12, 20, 24, 32: only the output projections of a head size of 8 with 4 heads have whole blocks.
    let model = quantize(&Tiny::qwen3_next(), GgmlDType::Q8_0)?;
    let others: Vec<_> = model.other_types().iter().map(|other| (other.name.as_str(), other.dtype)).collect();
    for name in [
        "model.layers.0.linear_attn.in_proj_qkvz.weight",
        "model.layers.3.self_attn.q_proj.weight",
        "model.layers.2.mlp.experts.gate_up_proj",
        "lm_head.weight",
    ] {
        assert!(others.contains(&(name, None)), "{name} in {others:?}");
    }
    let has = |name: &str| others.iter().any(|other| other.0 == name);
    assert!(!has("model.layers.0.linear_attn.out_proj.weight") && !has("model.layers.0.mlp.gate.weight"));
    // Where Q4K does not fit, Q8_0 does.
    let model = quantize(&Tiny::qwen3_next(), GgmlDType::Q4K)?;
    let out = model.other_types().iter().find(|o| o.name == "model.layers.0.linear_attn.out_proj.weight").unwrap();
    assert_eq!(out.dtype, Some(GgmlDType::Q8_0));
    // Nothing divides: nothing changes.
    let odd = without_experts(Tiny::qwen3_next().set("linear_value_head_dim", 6).set("head_dim", 12));
    let odd = odd.set("rope_theta", 100.0).set("partial_rotary_factor", 0.5).fill();
    assert_eq!(logits(&quantize(&odd, GgmlDType::Q4K)?)?, odd.logits(&IDS)?);
    for dtype in [GgmlDType::F16, GgmlDType::Q8K, GgmlDType::Q8_1] {
        refused(quantize(&odd, dtype), &["quantize", "Q4K", &format!("got {dtype:?}")]);
    }
    Ok(())
}

#[test]
fn tied_heads_are_quantised_and_embeddings_not() -> Result<()> {
    let mut tied = without_experts(wide()).set("tie_word_embeddings", true);
    tied.remove("lm_head.weight");
    let mut same = tied.clone().set("tie_word_embeddings", false);
    same.weights.insert("lm_head.weight".into(), tied.weights["model.embed_tokens.weight"].clone());
    let [tied, same] = [tied, same].map(|tiny| logits(&quantize(&tiny, GgmlDType::Q8_0)?));
    assert_eq!(tied?, same?);
    Ok(())
}

/// `[n, k]` with a scale for each block, spread out.
fn spread(scales: &Tensor, block: [usize; 2], (n, k): (usize, usize)) -> Result<Tensor> {
    let (rows, columns) = scales.dims2()?;
    let all = scales.reshape((rows, 1, columns, 1))?.broadcast_as((rows, block[0], columns, block[1]))?;
    all.reshape((rows * block[0], columns * block[1]))?.narrow(0, 0, n)?.narrow(1, 0, k)
}

/// A projection in e4m3, and a scale for each block, in bf16 as some releases have it.
pub fn to_fp8(weight: &Tensor, block: [usize; 2]) -> Result<(Tensor, Tensor)> {
    let (n, k) = weight.dims2()?;
    let mut scales = Vec::new();
    for i in (0..n).step_by(block[0]) {
        for j in (0..k).step_by(block[1]) {
            let part = weight.narrow(0, i, block[0].min(n - i))?.narrow(1, j, block[1].min(k - j))?;
            scales.push(part.abs()?.max_all()?.to_scalar::<f32>()? / 440.);
        }
    }
    let scales = Tensor::from_vec(scales, (n.div_ceil(block[0]), k.div_ceil(block[1])), &CPU)?;
    let scales = scales.to_dtype(DType::BF16)?;
    let wide = spread(&scales.to_dtype(DType::F32)?, block, (n, k))?;
    Ok(((weight / wide)?.to_dtype(DType::F8E4M3)?, scales))
}

/// The model in fp8, and the same with the numbers that its weights stand for.
pub fn in_fp8(tiny: &Tiny, block: [usize; 2]) -> Result<(Tiny, Tiny)> {
    let plain = ["lm_head", "model.embed_tokens", "model.layers.3.self_attn.o_proj", "mlp.gate"];
    let config = serde_json::json!({
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block,
        "modules_to_not_convert": plain,
    });
    let mut fp8 = tiny.clone().set("quantization_config", config);
    let mut wide = tiny.clone();
    for (name, weight) in &tiny.weights {
        let projection = name.ends_with("_proj.weight") || name.ends_with("in_proj_qkvz.weight");
        if projection && !plain.iter().any(|module| name.contains(&format!("{module}."))) {
            let (weight, scales) = to_fp8(weight, block)?;
            let scale = spread(&scales.to_dtype(DType::F32)?, block, weight.dims2()?)?;
            wide.weights.insert(name.clone(), (weight.to_dtype(DType::F32)? * scale)?);
            fp8.weights.insert(name.clone(), weight);
            fp8.weights.insert(format!("{name}_scale_inv"), scales);
        }
    }
    Ok((fp8, wide))
}

fn from_safetensors(tiny: &Tiny, dtype: DType) -> Result<CausalLm> {
    let (_dir, path) = in_a_folder("model.safetensors");
    candle_core::safetensors::save(&tiny.weights, &path)?;
    // SAFETY: nobody else writes to the folder.
    let vb = unsafe { VarBuilder::from_mmaped_safetensors(&[&path], dtype, &CPU)? };
    CausalLm::load(&tiny.model_config()?, vb)
}

/// On the CPU.
#[test]
fn fp8_checkpoints_are_dequantised() -> Result<()> {
    // The second divides neither rows nor columns.
    for (tiny, block) in [(wide(), [128, 128]), (Tiny::qwen3_next(), [5, 7])] {
        let (fp8, wide) = in_fp8(&tiny, block)?;
        assert_eq!(fp8.weights.values().filter(|weight| weight.dtype() == DType::F8E4M3).count(), 3 * 2 + 3 + 4 * 15);
        let want = wide.logits(&IDS)?;
        assert_eq!(logits(&from_safetensors(&fp8, DType::F32)?)?, want);
        assert_ne!(want, tiny.logits(&IDS)?);
        let error = rel_rms(&logits(&from_safetensors(&fp8, DType::BF16)?)?, &want);
        assert!(error < 0.1, "{error:e}");
    }
    Ok(())
}

#[test]
fn fp8_without_its_scales_is_refused() -> Result<()> {
    let (fp8, _) = in_fp8(&Tiny::qwen3_next(), [8, 8])?;
    for name in ["linear_attn.in_proj_qkvz", "linear_attn.out_proj", "mlp.experts.2.down_proj"] {
        let mut without = fp8.clone();
        let scale = format!("model.layers.1.{name}.weight_scale_inv");
        without.remove(&scale);
        refused(from_safetensors(&without, DType::F32), &["cannot find tensor", &scale, "modules_to_not_convert"]);
        let mut misshapen = fp8.clone();
        misshapen.weights.insert(scale.clone(), Tensor::ones((1, 9), DType::F32, &CPU)?);
        refused(from_safetensors(&misshapen, DType::F32), &["shape mismatch", &scale]);
    }
    let with = |field: &str, value: serde_json::Value| {
        let mut tiny = fp8.clone();
        tiny.config["quantization_config"][field] = value;
        tiny.model_config()
    };
    refused(with("quant_method", "awq".into()), &["quantization_config.quant_method", "fp8", "awq"]);
    refused(with("fmt", "e5m2".into()), &["quantization_config.fmt", "e4m3", "e5m2"]);
    for sizes in [serde_json::json!([128]), serde_json::json!([128, 0])] {
        let name = "quantization_config.weight_block_size";
        refused(with("weight_block_size", sizes), &[name, "two positive integers"]);
    }
    Ok(())
}
