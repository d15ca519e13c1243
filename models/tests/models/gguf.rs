//! Models from GGUF files against the goldens and against safetensors. On the CPU, but for one test of the kernels on CUDA.

use crate::gguf_writer::{dequantized, in_a_folder, load, Files, GgufOfTiny, Layout};
use crate::golden::{converted, DEMO, QWEN3_5, QWEN3_5_MOE};
use crate::model::check_goldens;
use crate::parallel::{check, BOUND};
use crate::serving::steps_beside_graph;
use crate::support::{gpus, refused, rel_rms, single_stream_devices};
use crate::tiny::Tiny;
use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{CausalLm, DecodeGraph, Family, GgufFile, ModelConfig, ModelState};
use std::path::Path;

const CPU: Device = Device::Cpu;
pub const LAYOUTS: [Layout; 3] = [Layout::Qwen3Next, Layout::OldQwen3Next, Layout::Qwen3_5];
pub const IDS: [u32; 9] = [3, 1, 4, 1, 5, 9, 2, 6, 31];

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
pub fn logits(model: &CausalLm) -> Result<Vec<f32>> {
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

/// As llama.cpp's converter has them with `--fuse-qkv`.
#[test]
fn queries_keys_and_values_in_one_tensor_are_those_in_three() -> Result<()> {
    for dtype in [GgmlDType::F32, GgmlDType::Q8_0] {
        let mut file = GgufOfTiny::new(&wide(), Layout::Qwen3_5)?.quantized(dtype);
        let want = logits(&file.load()?)?;
        let three = ["q", "k", "v"].map(|part| file.tensors.remove(&format!("blk.3.attn_{part}.weight")).unwrap().0);
        file.tensors.insert("blk.3.attn_qkv.weight".into(), (Tensor::cat(&three, 0)?, dtype));
        let (whole, (_dir, path)) = (file.load()?, in_a_folder("fused.gguf"));
        assert_eq!(logits(&whole)?, want, "{dtype:?}");
        for entry in ["head_count", "head_count_kv"] {
            file.metadata.remove(&format!("qwen35moe.attention.{entry}"));
        }
        file.write(&path)?;
        let opened = GgufFile::open(&path)?;
        let config = ModelConfig::from_gguf(&opened)?;
        assert_eq!(config, *whole.config());
        if dtype != GgmlDType::F32 {
            continue; // activations rounded to 8 bits
        }
        check("fused", &whole, 2, BOUND, |group| {
            CausalLm::loader(&config).group(group).load_gguf(&opened, DType::F32, &CPU)
        });
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
