//! Models whose matrices stay in fp8 on CUDA, next to the same numbers in f32 on the CPU and in 16 bits on CUDA; and what they take
//! there, as told beforehand.

use crate::fp8_files::in_fp8;
use crate::gguf::{wide, without_experts};
use crate::golden::{self, log_softmax};
use crate::moe::{id, logits_in_parts, TOKENS};
use crate::serving::steps_beside_graph;
use crate::support::{gpus, rel_rms, single_stream_devices, soak};
use crate::tiny::{Tiny, VOCAB};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{CausalLm, ModelConfig};

fn load(tiny: &Tiny, dtype: DType, device: &Device) -> Result<CausalLm> {
    CausalLm::load(&tiny.model_config()?, tiny.var_builder(dtype, device))
}

/// Logits of every position, fed in parts of these lengths.
fn logits(model: &CausalLm, parts: &[usize]) -> Result<Vec<f32>> {
    Ok(logits_in_parts(model, parts)?.concat())
}

/// With experts, all of which every token takes, and without.
fn models() -> [Tiny; 2] {
    [wide(), without_experts(wide())].map(|tiny| tiny.set("max_position_embeddings", 128))
}

/// The bytes that are kept multiply as exactly as rounded weights do, and more so for few rows.
#[test]
fn logits_are_those_of_the_dequantised_model() -> Result<()> {
    for device in &gpus(single_stream_devices()) {
        for tiny in models() {
            let (fp8, wide) = in_fp8(&tiny, [128, 128])?;
            let want = logits(&load(&wide, DType::F32, &Device::Cpu)?, &[TOKENS])?;
            for dtype in [DType::BF16, DType::F16] {
                let (kept, dense) = (load(&fp8, dtype, device)?, load(&wide, dtype, device)?);
                for parts in [&[TOKENS][..], &[17, 1, 2, 33, 7], &[1; TOKENS]] {
                    let [kept, dense] = [logits(&kept, parts)?, logits(&dense, parts)?].map(|got| rel_rms(&got, &want));
                    println!("{dtype:?} {parts:?}: {kept:e}, dequantised {dense:e}");
                    assert!(dense < 0.1 && kept < 1.2 * dense, "{dtype:?} {parts:?}: {kept:e}, dequantised {dense:e}");
                }
            }
        }
    }
    Ok(())
}

/// The demo with its weights in f32.
fn demo() -> Result<Tiny> {
    let dir = golden::DEMO.dir();
    let config = std::fs::read_to_string(format!("{dir}/config.json"))?;
    let weights = candle_core::safetensors::load(format!("{dir}/model.safetensors"), &Device::Cpu)?;
    let f32s = weights.into_iter().map(|(name, weight)| Ok((name, weight.to_dtype(DType::F32)?)));
    let config = serde_json::from_str(&config).map_err(candle_core::Error::wrap)?;
    Ok(Tiny { config, weights: f32s.collect::<Result<_>>()? })
}

/// Mean negative log-likelihood of the texts' tokens from the second on, fed `part` at a time.
fn mean_nll(model: &CausalLm, texts: &[Vec<u32>], part: usize) -> Result<f64> {
    let (mut sum, mut count) = (0., 0);
    for ids in texts {
        let mut state = model.new_state(1)?;
        let mut first = 0;
        for inputs in ids[..ids.len() - 1].chunks(part) {
            let x = Tensor::new(inputs, model.device())?.unsqueeze(0)?;
            let logits = model.forward(&x, &mut state)?.to_dtype(DType::F32)?.squeeze(0)?.to_vec2::<f32>()?;
            for (i, logits) in logits.iter().enumerate() {
                sum -= f64::from(log_softmax(logits, ids[first + i + 1]));
            }
            first += inputs.len();
        }
        count += first;
    }
    Ok(sum / count as f64)
}

/// Perplexity of the demo: of a passage that it has not seen, and of verses that it knows. models/README.md has what this prints.
#[test]
fn perplexity_is_that_of_the_dequantised_model() -> Result<()> {
    let demo = demo()?;
    let (fp8, wide) = in_fp8(&demo, [128, 128])?;
    let prompts: Vec<_> = (0..golden::DEMO.prompts()).map(|i| golden::DEMO.prompt(i)).collect::<Result<_>>()?;
    let unseen = prompts.iter().map(|prompt| prompt.ids.clone()).max_by_key(Vec::len).into_iter().collect::<Vec<_>>();
    let known: Vec<_> = prompts[..4].iter().map(|prompt| [&prompt.ids[..], &prompt.greedy].concat()).collect();
    let texts = [unseen, known];
    let tell = |what: &str, nll: [f64; 2]| println!("{what}: perplexity {:.3}, {:.4}", nll[0].exp(), nll[1].exp());
    let both = |model: &CausalLm, part: usize| -> Result<[f64; 2]> {
        Ok([mean_nll(model, &texts[0], part)?, mean_nll(model, &texts[1], part)?])
    };

    let on_cpu = |tiny: &Tiny| both(&load(tiny, DType::F32, &Device::Cpu)?, usize::MAX);
    let (trained, dense, kept) = (on_cpu(&demo)?, on_cpu(&wide)?, on_cpu(&fp8)?);
    tell("CPU, f32, as trained", trained);
    tell("CPU, f32, dequantised", dense);
    tell("CPU, f32, fp8", kept);
    assert_eq!(kept, dense);
    assert!(dense != trained && dense.iter().zip(trained).all(|(a, b)| (a - b).abs() < 0.1), "{dense:?} {trained:?}");
    for device in &gpus(single_stream_devices()) {
        for dtype in [DType::BF16, DType::F16] {
            let [kept, wide] = [load(&fp8, dtype, device)?, load(&wide, dtype, device)?];
            // Under a sanitizer each token would take seconds.
            let parts =
                if soak().is_some_and(|n| n < 400) { &[usize::MAX, 64, 16][..] } else { &[usize::MAX, 64, 16, 1] };
            for &part in parts {
                let got = [both(&wide, part)?, both(&kept, part)?];
                let name = |what: &str| format!("CUDA, {dtype:?}, {part} tokens at a time, {what}");
                tell(&name("dequantised"), got[0]);
                tell(&name("fp8"), got[1]);
                for i in 0..2 {
                    let [rounded, kept] = got.map(|nll| (nll[i] - dense[i]).abs());
                    assert!(rounded < 0.05 && kept < 0.05, "{dtype:?}, {part} at a time: {rounded} and {kept} off");
                }
            }
        }
    }
    Ok(())
}

/// Few sequences, as many as one launch does not take, and those that a product of the dequantised weight takes.
#[test]
fn graphs_give_what_passes_give() -> Result<()> {
    for device in &gpus(single_stream_devices()) {
        for tiny in models() {
            let model = load(&in_fp8(&tiny, [128, 128])?.0, DType::BF16, device)?;
            for count in [1, 8, 20, 50] {
                let token = |i: usize, step: usize| (id(i) + 5 * step as u32) % VOCAB as u32;
                steps_beside_graph(&model, &vec![vec![]; count], 4, token, |got, want, what| {
                    let error = rel_rms(&got.concat(), &want.concat());
                    assert!(error < 2e-2, "{what}: {error:e}");
                })?;
            }
        }
    }
    Ok(())
}

/// Of each matrix a byte a number, and its scales.
#[test]
fn bytes_are_told() -> Result<()> {
    for tiny in models() {
        let (fp8, _) = in_fp8(&tiny, [128, 128])?;
        let config = fp8.model_config()?;
        let count = |scales: bool| -> usize {
            let kept = fp8.weights.iter().filter(|(name, weight)| match scales {
                true => name.ends_with("_scale_inv"),
                false => weight.dtype() == DType::F8E4M3,
            });
            kept.map(|(_, weight)| weight.elem_count()).sum()
        };
        let (numbers, scales) = (count(false) as u64, count(true) as u64);
        assert!(numbers > 0 && scales > 0);
        for dtype in [DType::BF16, DType::F32] {
            let size = dtype.size_in_bytes() as u64;
            let want = config.weight_bytes(dtype) - (size - 1) * numbers + 4 * scales;
            assert_eq!(config.fp8_weight_bytes(dtype), want, "{dtype:?}");
        }
        let plain = tiny.model_config()?;
        assert_eq!(plain.fp8_weight_bytes(DType::BF16), plain.weight_bytes(DType::BF16));
        // Other blocks are dequantised.
        let config = ModelConfig::from_json(&in_fp8(&tiny, [5, 7])?.0.config.to_string())?;
        assert_eq!(config.fp8_weight_bytes(DType::BF16), config.weight_bytes(DType::BF16));
    }
    Ok(())
}
