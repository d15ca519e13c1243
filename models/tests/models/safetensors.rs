//! Checkpoints in files as other writers leave them: names, sizes, scales, and tensors that nobody reads.

use crate::fp8_files::in_fp8;
use crate::gguf::logits;
use crate::parallel::{check, BOUND};
use crate::support::refused;
use crate::tiny::Tiny;
use candle_core::{safetensors, DType, Device, Result, Tensor};
use candle_gdn_models::{CausalLm, Collective, DraftHeadChoice, ModelConfig, SafetensorsFiles};
use serde_json::{json, Value};
use std::sync::Arc;

const CPU: Device = Device::Cpu;

fn load_with(tiny: &Tiny, head: DraftHeadChoice, group: Option<Arc<dyn Collective>>) -> Result<CausalLm> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("model.safetensors");
    safetensors::save(&tiny.weights, &path)?;
    // SAFETY: nobody else writes to the folder.
    let files = unsafe { SafetensorsFiles::open(&[path])? };
    let config = ModelConfig::from_safetensors(&tiny.config.to_string(), &files)?;
    CausalLm::loader(&config).draft_head(head).group(group).load_safetensors(&files, DType::F32, &CPU)
}

fn load(tiny: &Tiny) -> Result<CausalLm> {
    load_with(tiny, DraftHeadChoice::Off, None)
}

/// The weights under other names.
fn renamed(tiny: &Tiny, name: impl Fn(&str) -> String) -> Tiny {
    let weights = tiny.weights.iter().map(|(old, weight)| (name(old), weight.clone())).collect();
    Tiny { weights, config: tiny.config.clone() }
}

fn plus(tiny: &Tiny, name: &str, weight: Tensor) -> Tiny {
    let mut tiny = tiny.clone();
    tiny.weights.insert(name.into(), weight);
    tiny
}

fn ones(shape: impl Into<candle_core::Shape>, dtype: DType) -> Result<Tensor> {
    Tensor::ones(shape, DType::F32, &CPU)?.to_dtype(dtype)
}

#[test]
fn names_inside_what_others_wrapped_around() -> Result<()> {
    let tiny = Tiny::qwen3_next().with_draft_head();
    let want = logits(&tiny.model()?)?;
    let inner = |name: &str, to: &str| name.replacen("model.", to, 1);
    let names: [&dyn Fn(&str) -> String; 5] = [
        &|name| inner(name, "model.language_model."),
        &|name| format!("language_model.{name}"),
        &|name| format!("base_model.model.{name}"),
        &|name| format!("module._orig_mod.{}", inner(name, "model.language_model.")),
        &|name| name.strip_prefix("model.").unwrap_or(name).to_string(),
    ];
    for name in names {
        let model = load_with(&renamed(&tiny, name), DraftHeadChoice::On, None)?;
        assert_eq!(logits(&model)?, want, "{}", name("model.norm.weight"));
        assert!(model.has_draft_head() && model.remarks().is_empty());
    }
    refused(load(&renamed(&tiny, |name| format!("x.{name}"))), &["model.embed_tokens.weight", "x."]);
    Ok(())
}

#[test]
fn a_tensor_in_two_files_is_refused() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let paths = ["a", "b", "c"].map(|name| dir.path().join(format!("{name}.safetensors")));
    for (path, names) in paths.iter().zip([&["x", "y"][..], &["z"], &["y"]]) {
        let tensors = names.iter().map(|name| Ok((name.to_string(), ones(2, DType::F32)?)));
        safetensors::save(&tensors.collect::<Result<std::collections::HashMap<_, _>>>()?, path)?;
    }
    // SAFETY: nobody else writes to the folder.
    let open = |paths: &[std::path::PathBuf]| unsafe { SafetensorsFiles::open(paths) };
    assert_eq!(open(&paths[..2])?.names(), ["x", "y", "z"]);
    let error = open(&paths).expect_err("an error").to_string();
    assert!(
        error.contains("tensor y: expected it in one file, got it in") && !error.contains("b.safetensors"),
        "{error}"
    );
    refused(open(&paths), &["a.safetensors and", "c.safetensors"]);
    Ok(())
}

#[test]
fn nothing_of_the_model_is_left_unread() -> Result<()> {
    let tiny = Tiny::qwen3_next();
    let want = logits(&tiny.model()?)?;
    for name in [
        "model.layers.3.self_attn.q_proj.bias",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.0.mlp.experts.4.up_proj.weight",
        "model.layers.0.linear_attn.out_proj.input_scale",
        "model.norm.bias",
        "lm_head.bias",
    ] {
        refused(load(&plus(&tiny, name, ones(4, DType::F32)?)), &[name]);
    }
    for (name, group) in [
        ("model.visual.blocks.0.norm.weight", "model.visual (1)"),
        ("mtp.fc.weight", "mtp.fc (1)"),
        ("model.layers.4.mlp.gate.weight", "model.layers (1)"),
    ] {
        let model = load(&plus(&tiny, name, ones(4, DType::F32)?))?;
        assert_eq!(logits(&model)?, want);
        assert!(matches!(model.remarks(), [remark] if remark.contains(group)), "{:?}", model.remarks());
    }
    let buffer = plus(&tiny, "model.layers.3.self_attn.rotary_emb.inv_freq", ones(4, DType::F32)?);
    assert!(load(&buffer)?.remarks().is_empty());
    Ok(())
}

#[test]
fn sizes_are_those_of_the_weights() -> Result<()> {
    let (sparse, dense) = (Tiny::qwen3_next(), Tiny::qwen3_next().unset("num_experts").fill());
    let mut fused = sparse.clone();
    fused.fuse_experts()?;
    let all: [(&Tiny, &[&str]); 3] = [
        (
            &sparse,
            &[
                "vocab_size",
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "linear_conv_kernel_dim",
                "linear_num_key_heads",
                "linear_num_value_heads",
                "linear_key_head_dim",
                "linear_value_head_dim",
                "num_experts",
                "moe_intermediate_size",
                "shared_expert_intermediate_size",
            ],
        ),
        (&fused, &["moe_intermediate_size"]),
        (&dense, &["intermediate_size"]),
    ];
    for (tiny, keys) in all {
        let want = logits(&tiny.model()?)?;
        for key in keys {
            assert_eq!(logits(&load(&tiny.clone().unset(key))?)?, want, "{key}");
            if *key != "num_hidden_layers" {
                let other = tiny.config[*key].as_u64().unwrap_or(0) + 2;
                refused(load(&tiny.clone().set(key, other)), &[&format!("`{key}`"), "model.", &format!("got {other}")]);
            }
        }
    }
    let fewer = sparse.clone().set("num_hidden_layers", 3).set("layer_types", vec!["linear_attention"; 3]);
    refused(load(&fewer), &["`num_hidden_layers`: expected 4", "got 3"]);
    // Other families' draft heads count on.
    let head = ["input_layernorm", "eh_proj"].map(|name| format!("model.layers.4.{name}.weight"));
    let mut headed = sparse.clone();
    for name in &head {
        headed = plus(&headed, name, ones(16, DType::F32)?);
    }
    assert!(matches!(load(&headed)?.remarks(), [remark] if remark.contains("model.layers (2)")));
    // Without the files the weights are still there.
    let lost = sparse.clone().unset("shared_expert_intermediate_size");
    refused(lost.model(), &["`shared_expert_intermediate_size`", "mlp.shared_expert.gate_proj.weight"]);
    refused(load(&sparse.set("shared_expert_intermediate_size", 0)), &["`shared_expert_intermediate_size`", "got 0"]);
    Ok(())
}

#[test]
fn a_head_beside_tied_embeddings() -> Result<()> {
    let untied = Tiny::qwen3_next();
    let tied = untied.clone().set("tie_word_embeddings", true);
    let want = logits(&untied.model()?)?;
    for model in [load(&tied)?, tied.model()?] {
        assert_eq!(logits(&model)?, want);
        assert!(matches!(model.remarks(), [remark] if remark.contains("lm_head.weight")), "{:?}", model.remarks());
        assert!(!model.config().tie_word_embeddings);
    }
    let same = plus(&tied, "lm_head.weight", tied.weights["model.embed_tokens.weight"].clone());
    let mut none = tied.clone();
    none.remove("lm_head.weight");
    for model in [load(&same)?, load(&none)?, same.model()?] {
        assert_eq!(logits(&model)?, logits(&none.model()?)?);
        assert!(model.remarks().is_empty() && model.config().tie_word_embeddings);
    }
    Ok(())
}

#[test]
fn wide_numbers_are_those_of_the_text_model() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("model.safetensors");
    let tiny = Tiny::qwen3_next();
    let config = tiny.model_config()?;
    let wide = |kept: &[&str], more: &[&str]| -> Result<u64> {
        let narrow = |(name, weight): (&String, &Tensor)| {
            let dtype = if kept.contains(&name.as_str()) { DType::F32 } else { DType::BF16 };
            Ok((name.clone(), weight.to_dtype(dtype)?))
        };
        let mut weights = tiny.weights.iter().map(narrow).collect::<Result<std::collections::HashMap<_, _>>>()?;
        for name in more {
            weights.insert(name.to_string(), ones((3, 5), DType::F32)?);
        }
        safetensors::save(&weights, &path)?;
        // SAFETY: nobody else writes to the folder.
        Ok(unsafe { SafetensorsFiles::open(&[&path])? }.wide_parameters(&config))
    };
    let up = "model.layers.0.mlp.shared_expert.up_proj.weight";
    let of_up = tiny.weights[up].elem_count() as u64;
    for (kept, more, want) in [
        (&[][..], &[][..], 0),
        (&["model.layers.0.mlp.gate.weight", "model.norm.weight", "model.embed_tokens.weight"], &[], 0),
        (&[], &["model.visual.merger.weight", "model.layers.0.mlp.up_proj.weight_scale_inv"], 0),
        (&[up], &[], of_up),
        (&[up], &["mtp.fc.weight"], of_up + 15),
    ] {
        assert_eq!(wide(kept, more)?, want, "{kept:?} {more:?}");
    }
    Ok(())
}

#[test]
fn a_draft_head_is_where_a_loader_finds_it() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("model.safetensors");
    for (at, want) in [("", true), ("model.", true), ("language_model.", true), ("model.language_model.", false)] {
        safetensors::save(
            &plus(&Tiny::qwen3_next(), &format!("{at}mtp.fc.weight"), ones(4, DType::F32)?).weights,
            &path,
        )?;
        // SAFETY: nobody else writes to the folder.
        assert_eq!(unsafe { SafetensorsFiles::open(&[&path])? }.has_draft_head(), want, "{at}");
    }
    Ok(())
}

/// Dimensions of a matrix's scales, and rows and columns of a block.
type Scales = (Vec<usize>, [usize; 2]);

/// Matrices in e4m3 whose scales are of another shape, and the same dequantised.
fn scaled(tiny: &Tiny, shape: impl Fn(usize, usize) -> Scales, end: &str) -> Result<(Tiny, Tiny)> {
    let (mut fp8, mut wide) = (tiny.clone(), tiny.clone());
    for (name, weight) in in_fp8(tiny, [8, 8])?.0.weights {
        if weight.dtype() != DType::F8E4M3 {
            continue;
        }
        let (n, k) = weight.dims2()?;
        let (dims, [rows, columns]) = shape(n, k);
        let scales: Vec<f32> = (0..dims.iter().product::<usize>()).map(|i| 1e-3 * (1. + (i % 7) as f32)).collect();
        let of = |i: usize, j: usize| scales[i / rows * k.div_ceil(columns) + j / columns];
        let numbers = weight.to_dtype(DType::F32)?.to_vec2::<f32>()?;
        let numbers =
            numbers.iter().enumerate().flat_map(|(i, row)| row.iter().enumerate().map(move |(j, x)| (i, j, *x)));
        let numbers: Vec<f32> = numbers.map(|(i, j, x)| x * of(i, j)).collect();
        wide.weights.insert(name.clone(), Tensor::from_vec(numbers, (n, k), &CPU)?);
        let scales = match &dims[..] {
            [] => Tensor::new(scales[0], &CPU)?,
            dims => Tensor::from_vec(scales, dims, &CPU)?,
        };
        fp8.weights.insert(format!("{name}{end}"), scales);
        fp8.weights.insert(format!("{}input_scale", name.trim_end_matches("weight")), ones(1, DType::F32)?);
        fp8.weights.insert(name, weight);
    }
    Ok((fp8, wide))
}

#[test]
fn scales_of_tensors_rows_and_blocks() -> Result<()> {
    let tiny = Tiny::qwen3_next();
    let shapes: [fn(usize, usize) -> Scales; 5] = [
        |n, k| (vec![], [n, k]),
        |n, k| (vec![1], [n, k]),
        |n, _| (vec![n, 1], [1, usize::MAX]),
        |n, _| (vec![n], [1, usize::MAX]),
        |n, k| (vec![n / 4, 1, k / 4, 1], [4, 4]),
    ];
    let plain = ["lm_head", "model.layers.3.self_attn.o_proj"];
    let modelopt = json!({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": plain});
    let per_tensor = json!({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": plain});
    for (i, shape) in shapes.into_iter().enumerate() {
        let (fp8, wide) = scaled(&tiny, shape, ["_scale", "_scale_inv"][i % 2])?;
        let want = logits(&wide.model()?)?;
        for config in [Value::Null, modelopt.clone(), per_tensor.clone()] {
            let fp8 = fp8.clone().set("quantization_config", config);
            for model in [load(&fp8)?, fp8.model()?] {
                assert_eq!(logits(&model)?, want, "{i}");
            }
        }
        check("fp8 of files", &wide.model()?, 2, BOUND, |group| load_with(&fp8, DraftHeadChoice::Off, Some(group)));
    }
    Ok(())
}

#[test]
fn numbers_without_their_meaning_are_refused() -> Result<()> {
    let tiny = Tiny::qwen3_next();
    let module = "model.layers.1.linear_attn.out_proj";
    let weight = format!("{module}.weight");
    let (fp8, _) = scaled(&tiny, |n, k| (vec![1], [n, k]), "_scale")?;
    let mut lost = fp8.clone();
    lost.remove(&format!("{weight}_scale"));
    refused(load(&lost), &[&weight, "F8_E4M3", "scale"]);
    for other in ["weight_scale_2", "weight_global_scale", "scales", "weight.absmax", "SCB"] {
        let other = format!("{module}.{other}");
        for tiny in [&tiny, &fp8] {
            let tiny = plus(tiny, &other, ones(1, DType::F32)?);
            refused(load(&tiny), &[&other]);
            refused(tiny.model(), &[&other]);
        }
    }
    let dims = tiny.weights[&weight].dims();
    refused(load(&plus(&tiny, &weight, ones(dims, DType::U8)?)), &[&weight, "U8"]);
    refused(load(&plus(&tiny, &format!("{weight}_scale"), ones(1, DType::F32)?)), &[&weight, "F8_E4M3", "F32"]);
    refused(load(&plus(&fp8, &format!("{weight}_scale"), ones(3, DType::F32)?)), &[&weight, "[3]"]);
    let mut packed = renamed(&tiny, |name| name.replace(&weight, &format!("{module}.qweight")));
    packed = plus(&packed, &format!("{module}.qzeros"), ones(1, DType::F32)?);
    refused(load(&packed), &[&weight, "qweight", "qzeros"]);
    Ok(())
}
