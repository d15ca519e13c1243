//! Matrices that are quantised as they are loaded.

use crate::gguf::{logits, wide, without_experts, IDS};
use crate::gguf_writer::{load, GgufOfTiny, Layout};
use crate::support::{refused, rel_rms};
use crate::tiny::Tiny;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result};
use candle_gdn_models::CausalLm;

const CPU: Device = Device::Cpu;

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
