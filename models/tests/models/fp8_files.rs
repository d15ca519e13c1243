//! Checkpoints in fp8, and what the CPU makes of them.

use crate::gguf::{logits, wide, IDS};
use crate::gguf_writer::in_a_folder;
use crate::support::{refused, rel_rms};
use crate::tiny::Tiny;
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::CausalLm;
use candle_nn::VarBuilder;

const CPU: Device = Device::Cpu;

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
    // What a pattern with look-around matches only the tensors can say.
    let mut vague = fp8.clone();
    vague.config["quantization_config"]["modules_to_not_convert"] = vec!["re:^(?!.*mlp).*$"].into();
    refused(from_safetensors(&vague, DType::F32), &["cannot find tensor", "self_attn.o_proj", "re:^(?!.*mlp).*$"]);
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
