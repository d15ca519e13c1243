//! GGUF files of other writers, with other entries, names and types: the same model, or an error that names the key.

use crate::gguf::{logits, wide, without_experts, IDS};
use crate::gguf_refused::with_type;
use crate::gguf_writer::{in_a_folder, load, GgufOfTiny, Layout};
use crate::support::{refused, rel_rms};
use crate::tiny::Tiny;
use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, DeviceLocation, Result, Tensor};
use candle_gdn_models::{CausalLm, GgufFile, MixerKind, ModelConfig};

const CPU: Device = Device::Cpu;
fn config(file: &GgufOfTiny) -> Result<ModelConfig> {
    let (_dir, path) = in_a_folder("tiny.gguf");
    file.write(&path)?;
    ModelConfig::from_gguf(&GgufFile::open(&path)?)
}

/// A file with these entries of its architecture.
fn with(file: &GgufOfTiny, entries: &[(&str, Value)]) -> GgufOfTiny {
    let mut file = file.clone();
    let Value::String(architecture) = file.metadata["general.architecture"].clone() else { panic!("no architecture") };
    for (name, value) in entries {
        file.metadata.insert(format!("{architecture}.{name}"), value.clone());
    }
    file
}

fn strings(list: &[&str]) -> Value {
    Value::Array(list.iter().map(|text| Value::String(text.to_string())).collect())
}

fn ints(list: &[i32]) -> Value {
    Value::Array(list.iter().map(|n| Value::I32(*n)).collect())
}

#[test]
fn ends_of_a_text_by_id_and_by_name() -> Result<()> {
    let mut file = GgufOfTiny::new(&Tiny::qwen3_next(), Layout::Qwen3_5)?;
    for (key, value) in [
        ("eos_token_id", Value::U32(1)),
        ("eot_token_id", Value::I32(2)),
        ("eos_token_ids", ints(&[1, 6])),
        ("eom_token_id", Value::U64(u64::from(u32::MAX))),
        ("tokens", strings(&["a", "b", "c", "<|im_end|>", "</s>", "<|endoftext|>", "d", "</s>"])),
        ("token_type", ints(&[1, 1, 1, 3, 1, 4, 1, 3])),
    ] {
        file.metadata.insert(format!("tokenizer.ggml.{key}"), value);
    }
    assert_eq!(config(&file)?.eos_token_ids, [1, 2, 3, 5, 6, 7]);
    file.metadata.insert("tokenizer.ggml.eot_token_id".into(), Value::String("x".into()));
    refused(config(&file), &["tiny.gguf", "`tokenizer.ggml.eot_token_id`", "token ids"]);
    Ok(())
}

#[test]
fn kinds_of_layers_follow_from_their_heads() -> Result<()> {
    use MixerKind::{FullAttention, LinearAttention};
    let file = GgufOfTiny::new(&Tiny::qwen3_next(), Layout::Qwen3_5)?;
    let Some(heads) = config(&file).map(|config| config.attention.num_kv_heads as i32).ok() else { panic!("no heads") };
    let kinds = |entries: &[(&str, Value)]| -> Result<Vec<_>> {
        Ok(config(&with(&file, entries))?.layers.iter().map(|layer| layer.mixer).collect())
    };
    let by_heads = ("attention.head_count_kv", ints(&[0, heads, 0, heads]));
    let want = [LinearAttention, FullAttention, LinearAttention, FullAttention];
    assert_eq!(kinds(std::slice::from_ref(&by_heads))?, want);
    let recurrent = |list: [bool; 4]| ("attention.recurrent_layers", Value::Array(list.map(Value::Bool).to_vec()));
    assert_eq!(kinds(&[by_heads.clone(), recurrent([true, false, true, false])])?, want);
    let error = kinds(&[by_heads, recurrent([true, true, true, false])]);
    refused(error, &["`qwen35moe.attention.head_count_kv`", "recurrent_layers"]);
    refused(kinds(&[("attention.head_count_kv", ints(&[0, 1, 0, 2]))]), &["one number for all layers"]);
    Ok(())
}

#[test]
fn rotary_scaling_is_read() -> Result<()> {
    let file = GgufOfTiny::new(&Tiny::qwen3_next(), Layout::Qwen3_5)?;
    let plain = config(&file)?;
    let attention = |entries: &[(&str, Value)]| Ok::<_, candle_core::Error>(config(&with(&file, entries))?.attention);
    let (factor, yarn) = (("rope.scaling.factor", Value::F32(4.)), Value::String("yarn".into()));
    // Without a type it is linear.
    for linear in [factor.clone(), ("rope.scale_linear", Value::F32(4.))] {
        let got = attention(&[linear])?;
        assert!(got.rope_inv_freq.iter().zip(&plain.attention.rope_inv_freq).all(|(x, y)| *x == y / 4.));
        assert_eq!(got.rope_factor, 1.);
    }
    for kind in ["none", "default"] {
        assert_eq!(attention(&[factor.clone(), ("rope.scaling.type", Value::String(kind.into()))])?, plain.attention);
    }
    // The same as a config.json says it.
    let (original, mut json) = (16, Tiny::qwen3_next());
    json = json.set(
        "rope_scaling",
        serde_json::json!({
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original, "beta_fast": 16.0
        }),
    );
    let entries = [
        factor,
        ("rope.scaling.type", yarn.clone()),
        ("rope.scaling.original_context_length", Value::U32(original)),
        ("rope.scaling.yarn_beta_fast", Value::F32(16.)),
    ];
    let (got, want) = (config(&with(&file, &entries))?, json.model_config()?);
    assert_eq!((&got.attention, got.max_position_embeddings), (&want.attention, want.max_position_embeddings));
    assert!(got.attention.rope_factor > 1.1 && got.attention != plain.attention);
    let scaled = with(&with(&file, &entries), &[("rope.scaling.attn_factor", Value::F32(0.5))]);
    assert_eq!(config(&scaled)?.attention.rope_factor, 0.5 * want.attention.rope_factor);
    refused(attention(&[("rope.scaling.type", yarn), ("rope.scaling.factor", Value::F32(0.5))]), &["scaling.factor"]);
    Ok(())
}

/// llama.cpp's name, and Ollama's.
#[test]
fn weights_of_experts_may_stay_as_they_are() -> Result<()> {
    let tiny = Tiny::qwen3_next();
    let file = GgufOfTiny::new(&tiny, Layout::Qwen3Next)?;
    let (normalised, plain) = (tiny.logits(&IDS)?, tiny.clone().set("norm_topk_prob", false).logits(&IDS)?);
    assert!(rel_rms(&plain, &normalised) > 1e-2);
    for name in ["expert_weights_norm", "norm_top_k_prob"] {
        for (value, want) in [(false, &plain), (true, &normalised)] {
            let file = with(&file, &[(name, Value::Bool(value))]);
            assert_eq!(config(&file)?.moe.map(|moe| moe.norm_topk_prob), Some(value), "{name}");
            let error = rel_rms(&logits(&file.load()?)?, want);
            assert!(error < 2e-5, "{name} {value}: {error:e}");
        }
    }
    Ok(())
}

/// Ollama's names and flags: heads in both orders.
#[test]
fn orders_of_heads() -> Result<()> {
    let tiny = without_experts(wide());
    let want = tiny.logits(&IDS)?;
    for (layout, moved) in [(Layout::Qwen3_5, true), (Layout::Qwen3Next, false)] {
        let mut file = GgufOfTiny::new(&tiny, layout)?;
        let names: Vec<_> = file.tensors.keys().filter(|name| name.ends_with(".ssm_dt.bias")).cloned().collect();
        for name in names {
            let bias = file.tensors.remove(&name).expect("a bias");
            file.tensors.insert(name.replace(".bias", ""), bias);
        }
        assert!(rel_rms(&logits(&file.load()?)?, &want) < 2e-5, "{layout:?}");
        let flagged = with(&file, &[("ssm.v_head_reordered", Value::Bool(moved))]);
        assert!(rel_rms(&logits(&flagged.load()?)?, &want) < 2e-5, "{layout:?}");
        let other = with(&file, &[("ssm.v_head_reordered", Value::Bool(!moved))]).load();
        match layout {
            Layout::Qwen3_5 => assert!(rel_rms(&logits(&other?)?, &want) > 0.1),
            _ => refused(other, &["`qwen3next.ssm.v_head_reordered`", "ssm_ba.weight"]),
        }
    }
    Ok(())
}

#[test]
fn tensors_without_a_use_are_refused() -> Result<()> {
    let mut file = GgufOfTiny::new(&wide(), Layout::Qwen3_5)?;
    let any = (Tensor::ones(4, candle_core::DType::F32, &CPU)?, GgmlDType::F32);
    // Of images, and of another draft head.
    for name in ["v.patch_embed.weight", "mtp.fc.weight", "blk.4.nextn.enorm.weight"] {
        file.tensors.insert(name.into(), any.clone());
    }
    file.load()?;
    for name in ["blk.3.attn_q.bias", "rope_freqs.weight", "blk.0.ffn_down_shexp.scale"] {
        let mut more = file.clone();
        more.tensors.insert(name.into(), any.clone());
        refused(more.load(), &["tiny.gguf", if name.ends_with(".scale") { "`blk.0.ffn_down_shexp" } else { name }]);
    }
    // A shared expert that the entries do not know is one all the same.
    let mut without = file.clone();
    without.metadata.remove("qwen35moe.expert_shared_feed_forward_length");
    assert_eq!(logits(&without.load()?)?, logits(&file.load()?)?);
    let none = with(&file, &[("expert_shared_feed_forward_length", Value::U32(0))]);
    refused(none.load(), &["tiny.gguf", "`blk.0.ffn_"]);
    Ok(())
}

/// The codes of `IQ4_NL`, whose blocks have the bytes of `Q4_0`.
const IQ4: [f32; 16] = [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];

fn iq4(blocks: &[u8], scale: f32) -> Vec<f32> {
    let block = |block: &[u8]| {
        let d = scale * half_to_f32([block[0], block[1]]);
        let low = block[2..].iter().map(move |code| d * IQ4[usize::from(code & 15)]);
        low.chain(block[2..].iter().map(move |code| d * IQ4[usize::from(code >> 4)])).collect::<Vec<_>>()
    };
    blocks.chunks_exact(18).flat_map(block).collect()
}

fn half_to_f32(bytes: [u8; 2]) -> f32 {
    let tensor = Tensor::from_raw_buffer(&bytes, DType::F16, &[1], &CPU).expect("a number");
    tensor.to_dtype(DType::F32).and_then(|x| x.get(0)?.to_scalar()).expect("a number")
}

fn on_gpu(file: &GgufFile, dtype: DType, quantize: Option<GgmlDType>) -> Result<u64> {
    Ok(file.weight_bytes(&ModelConfig::from_gguf(file)?, dtype, quantize, DeviceLocation::Cuda { gpu_id: 0 }, 1))
}

/// Each tensor counts as what it becomes, whatever it is in the file.
#[test]
fn weights_are_counted_as_they_are_loaded() -> Result<()> {
    let (_dir, path) = in_a_folder("tiny.gguf");
    let plain = GgufOfTiny::new(&without_experts(wide()), Layout::Qwen3_5)?;
    let of = |dtype: GgmlDType| -> Result<GgufFile> {
        plain.clone().quantized(dtype).write(&path)?;
        GgufFile::open(&path)
    };
    let (halves, blocks) = (of(GgmlDType::BF16)?, of(GgmlDType::Q8_0)?);
    let config = ModelConfig::from_gguf(&halves)?;
    assert_eq!(on_gpu(&halves, DType::F32, None)?, 4 * config.parameters());
    let table = (config.vocab_size * config.hidden_size) as u64;
    assert!(!config.tie_word_embeddings);
    let on_cpu = halves.weight_bytes(&config, DType::F32, None, DeviceLocation::Cpu, 1);
    assert_eq!(on_cpu - on_gpu(&halves, DType::BF16, None)?, 2 * table, "halves stay, but for the table");
    let as_stored = on_gpu(&blocks, DType::F32, None)?;
    for dst in [GgmlDType::Q4K, GgmlDType::Q8_0] {
        assert_eq!(
            (blocks.converted(&config, dst), on_gpu(&blocks, DType::F32, Some(dst))?),
            (0, as_stored),
            "{dst:?}"
        );
    }
    let quantised = on_gpu(&halves, DType::F32, Some(GgmlDType::Q8_0))?;
    assert!(halves.converted(&config, GgmlDType::Q8_0) > 10);
    assert_eq!(quantised, as_stored + 4 * table - table / 32 * 34, "all but the table");
    Ok(())
}

/// Neither a vision tower nor Ollama's draft head is read.
#[test]
fn what_is_not_of_the_model_is_not_counted() -> Result<()> {
    let (_dir, path) = in_a_folder("tiny.gguf");
    let mut file = GgufOfTiny::new(&without_experts(wide()), Layout::Qwen3_5)?.quantized(GgmlDType::BF16);
    let told = |file: &GgufOfTiny| -> Result<_> {
        file.write(&path)?;
        let opened = GgufFile::open(&path)?;
        let config = ModelConfig::from_gguf(&opened)?;
        load(&path)?;
        let converted = opened.converted(&config, GgmlDType::Q8_0);
        Ok((on_gpu(&opened, DType::F32, None)?, converted, opened.is_quantized(&config)))
    };
    let want = told(&file)?;
    for (name, dtype) in [("v.blk.0.attn_q.weight", GgmlDType::Q8_0), ("mtp.fc.weight", GgmlDType::BF16)] {
        file.tensors.insert(name.into(), (Tensor::ones((8, 32), DType::F32, &CPU)?, dtype));
    }
    assert_eq!(told(&file)?, want);
    assert!(!want.2);
    Ok(())
}

/// Half of 256 columns are no whole blocks of a K type.
#[test]
fn shards_are_counted_as_they_are_loaded() -> Result<()> {
    let (_dir, path) = in_a_folder("tiny.gguf");
    let tiny = without_experts(wide());
    GgufOfTiny::new(&tiny, Layout::Qwen3_5)?.quantized(GgmlDType::Q4K).write(&path)?;
    let file = GgufFile::open(&path)?;
    let config = ModelConfig::from_gguf(&file)?;
    let bytes = |ranks| file.weight_bytes(&config, DType::BF16, None, DeviceLocation::Cuda { gpu_id: 0 }, ranks);
    let by_columns = tiny.weights.iter().filter(|(name, _)| {
        ["mlp.down_proj.weight", "self_attn.o_proj.weight", "out_proj.weight"].iter().any(|end| name.ends_with(end))
    });
    let numbers: usize = by_columns.map(|(_, weight)| weight.elem_count()).sum();
    // From 144 bytes of 256 numbers to 34 of 32.
    assert_eq!(bytes(2), (bytes(1) + (numbers / 256 * (8 * 34 - 144)) as u64).div_ceil(2));
    Ok(())
}

type Decode = fn(&[u8], f32) -> Vec<f32>;

/// Four codes a byte, in half as many blocks as of `Q4_0`.
fn q2_0(blocks: &[u8], scale: f32) -> Vec<f32> {
    let block = |block: &[u8]| {
        let d = scale * half_to_f32([block[0], block[1]]);
        let codes = block[2..].iter().flat_map(|byte| [byte % 4, byte / 4 % 4, byte / 16 % 4, byte / 64]);
        codes.map(|code| d * (f32::from(code) - 1.)).collect::<Vec<_>>()
    };
    blocks[..blocks.len() / 2].chunks_exact(18).flat_map(block).collect()
}

fn quantised(file: &GgufFile) -> Result<Vec<f32>> {
    let config = ModelConfig::from_gguf(file)?;
    let loader = CausalLm::loader(&config).quantize(GgmlDType::Q6K);
    logits(&loader.load_gguf(file, candle_core::DType::F32, &CPU)?)
}

/// Types that candle does not know, with and without a scale beside the tensor, and quantised on the way.
#[test]
fn types_that_are_decoded() -> Result<()> {
    const NAME: &str = "blk.0.ffn_down.weight";
    let (dir, path) = in_a_folder("tiny.gguf");
    let exact = dir.path().join("exact.gguf");
    let plain = GgufOfTiny::new(&without_experts(wide()), Layout::Qwen3_5)?;
    let typed = plain.clone().typed(|name| (name == NAME).then_some(GgmlDType::Q4_0));
    let (down, _) = &plain.tensors[NAME];
    let blocks = QTensor::quantize(down, GgmlDType::Q4_0)?.data()?.to_vec();
    let half = (Tensor::full(0.5f32, 1, &CPU)?, GgmlDType::F32);
    let types: [(u32, &str, Decode); 2] = [(20, "IQ4_NL", iq4), (42, "Q2_0", q2_0)];
    for (number, kind, decode) in types {
        for scale in [1., 0.5] {
            let (mut file, mut want) = (typed.clone(), plain.clone());
            if scale != 1. {
                file.tensors.insert("blk.0.ffn_down.scale".into(), half.clone());
                file.tensors.insert("blk.0.ffn_down.input_scale".into(), half.clone());
            }
            // The codes are small numbers here: what they stand for is not.
            let decoded = Tensor::from_vec(decode(&blocks, scale), down.dims(), &CPU)?;
            want.tensors.insert(NAME.into(), (decoded, GgmlDType::F32));
            want.write(&exact)?;
            let want = logits(&load(&exact)?)?;
            file.write(&path)?;
            std::fs::write(&path, with_type(&std::fs::read(&path)?, NAME, 2, number))?;
            let opened = GgufFile::open(&path)?;
            assert_eq!(opened.kept_types(&ModelConfig::from_gguf(&opened)?), [(kind, GgmlDType::Q8_0, 1)]);
            let (bytes, of_scales) = (on_gpu(&opened, DType::F32, None)?, if scale == 1. { 0 } else { 2 * 4 });
            let others = 4 * (ModelConfig::from_gguf(&opened)?.parameters() - 256 * 256);
            assert_eq!(bytes, others + 256 * 256 / 32 * 34 + of_scales);
            let got = logits(&load(&path)?)?;
            assert!(rel_rms(&got, &want) < 2e-2, "{kind}, {scale}: {:e}", rel_rms(&got, &want));
            let [own, of_exact] = [opened, GgufFile::open(&exact)?].map(|file| quantised(&file));
            let own = own?;
            let error = rel_rms(&own, &of_exact?);
            assert!(error < 0.1 && own != got, "{kind}, {scale}: {error:e}");
        }
    }
    let mut beside = plain.typed(|name| (name == NAME).then_some(GgmlDType::Q8_0));
    beside.tensors.insert("blk.0.ffn_down.scale".into(), half);
    let path = dir.path().join("scaled.gguf");
    beside.write(&path)?;
    refused(load(&path), &["scaled.gguf", NAME, "no `.scale`"]);
    Ok(())
}
