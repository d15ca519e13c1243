//! GGUF files that are damaged, or are no model: what is wrong is named.

use crate::gguf::LAYOUTS;
use crate::gguf_writer::{in_a_folder, load, GgufOfTiny, Layout};
use crate::support::refused;
use crate::tiny::{self, Tiny};
use candle_core::quantized::gguf_file::Value;
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{GgufFile, ModelConfig};

const CPU: Device = Device::Cpu;

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

#[test]
fn a_vocabulary_of_no_tokens_is_refused() -> Result<()> {
    let (_dir, path) = in_a_folder("tiny.gguf");
    GgufOfTiny::new(&Tiny::qwen3_next(), Layout::Qwen3Next)?.write(&path)?;
    let mut bytes = std::fs::read(&path)?;
    let name = b"token_embd.weight";
    let at = bytes.windows(name.len()).position(|part| part == name).expect("the tensor") + name.len();
    // The number of dimensions, then the columns, then the rows.
    bytes[at + 4 + 8..at + 4 + 16].fill(0);
    std::fs::write(&path, &bytes)?;
    refused(
        ModelConfig::from_gguf(&GgufFile::open(&path)?),
        &["tiny.gguf", "`token_embd.weight`: expected [vocabulary", "got [0,"],
    );
    Ok(())
}

/// As where a tensor's type has other sizes than here.
#[test]
fn tensors_that_overlap_are_refused() -> Result<()> {
    let (_dir, path) = in_a_folder("tiny.gguf");
    let file = GgufOfTiny::new(&Tiny::qwen3_next(), Layout::Qwen3Next)?;
    file.write(&path)?;
    let mut bytes = std::fs::read(&path)?;
    let place = |bytes: &[u8], tensor: &str| {
        let at = bytes.windows(tensor.len()).position(|part| part == tensor.as_bytes()).expect("the tensor");
        // The number and sizes of two dimensions, and the type.
        at + tensor.len() + 4 + 16 + 4
    };
    let [q, k] = ["blk.3.attn_q.weight", "blk.3.attn_k.weight"].map(|tensor| place(&bytes, tensor));
    bytes.copy_within(k..k + 8, q);
    std::fs::write(&path, &bytes)?;
    refused(GgufFile::open(&path), &["tiny.gguf", "`blk.3.attn_q.weight`", "`blk.3.attn_k.weight`", "ends at byte"]);
    Ok(())
}

/// A block that is counted as a draft head may be missing, but not be one of the model's layers.
#[test]
fn layers_that_the_entries_do_not_count_are_named() -> Result<()> {
    let whole = GgufOfTiny::new(&Tiny::qwen3_next(), Layout::Qwen3_5)?;
    let [blocks, heads] = ["block_count", "nextn_predict_layers"].map(|name| format!("qwen35moe.{name}"));
    for (entry, count) in [(&heads, 1), (&blocks, 3)] {
        let mut file = whole.clone();
        file.metadata.insert(entry.clone(), Value::U32(count));
        refused(file.load(), &["tiny.gguf", &blocks, &heads, "`blk.3.nextn.eh_proj.weight`"]);
        file.tensors.retain(|name, _| !name.starts_with("blk.3."));
        assert_eq!(file.load()?.config().layers.len(), 3);
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
