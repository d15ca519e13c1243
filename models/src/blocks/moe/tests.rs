use super::*;
use candle_core::{Device, D};
use candle_nn::VarBuilder;
use std::collections::HashMap;

/// Of every name that a layer has, random; `hidden` wide.
fn weights(cfg: &MoeConfig, hidden: usize) -> Result<HashMap<String, Tensor>> {
    let mut weights = HashMap::new();
    let mut add = |name: &str, rows: usize, columns: usize| -> Result<()> {
        weights.insert(name.to_string(), Tensor::randn(0f32, 0.3, (rows, columns), &Device::Cpu)?);
        Ok(())
    };
    add("gate.weight", cfg.num_experts, hidden)?;
    add("shared_expert_gate.weight", 1, hidden)?;
    let experts = (0..cfg.num_experts).map(|j| (format!("experts.{j}"), cfg.intermediate_size));
    let shared = ("shared_expert".to_string(), cfg.shared_intermediate_size);
    for (at, inner) in experts.chain([shared]).filter(|(_, inner)| *inner > 0) {
        add(&format!("{at}.gate_proj.weight"), inner, hidden)?;
        add(&format!("{at}.up_proj.weight"), inner, hidden)?;
        add(&format!("{at}.down_proj.weight"), hidden, inner)?;
    }
    Ok(weights)
}

/// A layer as it is where neither our kernels nor those of the CPU support it.
fn general(cfg: &MoeConfig, hidden: usize, source: &Source) -> Result<SparseMoe> {
    let shape = ExpertShape { experts: cfg.num_experts, intermediate: cfg.intermediate_size, hidden };
    let [gate_up, down] = dense_experts(shape, &source.pp("experts").dense)?;
    let mut router = source.get((cfg.num_experts, hidden), "gate.weight")?;
    let mut shared = None;
    if cfg.shared_intermediate_size > 0 {
        router = Tensor::cat(&[router, source.get((1, hidden), "shared_expert_gate.weight")?], 0)?;
        shared = Some(Mlp::load(hidden, cfg.shared_intermediate_size, &source.pp("shared_expert"))?);
    }
    let dense = |experts: Tensor| experts.flatten(0, 1).map(Weight::Dense);
    Ok(SparseMoe {
        router: Router::General(Weight::dense(router)?),
        experts: Experts::Stacked(Mlp { gate_up: dense(gate_up)?, down: dense(down)? }),
        shared,
        ungated: None,
        cfg: cfg.clone(),
        hidden,
    })
}

/// The general way runs on the CPU as well, where dense experts are packed for the CPU's kernels otherwise.
#[test]
fn general_and_cpu_kernels_agree() -> Result<()> {
    let hidden = 24;
    for shared in [0, 20] {
        let cfg = MoeConfig {
            num_experts: 5,
            experts_per_token: 2,
            intermediate_size: 12,
            shared_intermediate_size: shared,
            norm_topk_prob: shared == 0,
            shared_gate: true,
        };
        let vb = VarBuilder::from_tensors(weights(&cfg, hidden)?, DType::F32, &Device::Cpu);
        let source = Source::new(vb);
        let (cpu, general) = (SparseMoe::load(&cfg, hidden, &source)?, general(&cfg, hidden, &source)?);
        for (batch, tokens) in [(1, 1), (2, 1), (1, 7), (2, 17)] {
            let x = Tensor::randn(0f32, 1., (batch, tokens, hidden), &Device::Cpu)?;
            let (got, want) = (cpu.forward(&x, &Launch::default())?, general.forward(&x, &Launch::default())?);
            assert_eq!(got.dims(), want.dims());
            let error = (got - want)?.abs()?.flatten_all()?.max(D::Minus1)?.to_scalar::<f32>()?;
            assert!(error < 1e-5, "{error:e}");
        }
    }
    Ok(())
}

/// Of one expert a token, as many as there are different best scores; a token twice adds none.
#[test]
fn chosen_experts_are_counted_once() -> Result<()> {
    let (hidden, experts) = (8, 8);
    for shared in [0, 4] {
        let cfg = MoeConfig {
            num_experts: experts,
            experts_per_token: 1,
            intermediate_size: 4,
            shared_intermediate_size: shared,
            norm_topk_prob: true,
            shared_gate: true,
        };
        let mut weights = weights(&cfg, hidden)?;
        // Input j scores expert j.
        weights.insert("gate.weight".into(), Tensor::eye(experts, DType::F32, &Device::Cpu)?);
        let source = Source::new(VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu));
        let inputs = Tensor::eye(hidden, DType::F32, &Device::Cpu)?;
        for layer in [SparseMoe::load(&cfg, hidden, &source)?, general(&cfg, hidden, &source)?] {
            for (tokens, want) in [(vec![3u32], 1), (vec![3, 3, 3], 1), (vec![0, 5, 3, 5], 3)] {
                let x = inputs.index_select(&Tensor::new(&tokens[..], &Device::Cpu)?, 0)?;
                let (y, chosen) = experts_chosen(|| {
                    layer.forward(&x, &Launch::default())?;
                    layer.forward(&x, &Launch::default())
                })?;
                assert_eq!(chosen, 2 * want, "two passes of {tokens:?}");
                assert_eq!(y.to_vec2::<f32>()?, layer.forward(&x, &Launch::default())?.to_vec2::<f32>()?);
            }
        }
    }
    Ok(())
}

/// 16 bits on CUDA against f32 on the CPU, of the same x and weights: both choose the same experts.
#[cfg(feature = "cuda")]
#[test]
fn cuda_kernels_and_cpu_kernels_agree() -> Result<()> {
    let Some(cuda) = candle_gdn_core::device::cuda::testing::device() else { return Ok(()) };
    let norm = |x: &Tensor| x.sqr()?.sum_all()?.to_scalar::<f32>();
    for (dtype, bound) in [(DType::BF16, 6e-3), (DType::F16, 8e-4)] {
        for (hidden, shared) in [(128, 64), (320, 0), (2112, 128)] {
            let cfg = MoeConfig {
                num_experts: 12,
                experts_per_token: 3,
                intermediate_size: 192,
                shared_intermediate_size: shared,
                norm_topk_prob: shared > 0,
                shared_gate: true,
            };
            let round = |x: &Tensor| x.to_dtype(dtype)?.to_dtype(DType::F32);
            let weights = weights(&cfg, hidden)?.into_iter().filter(|(_, w)| w.elem_count() > 0);
            let weights = weights.map(|(name, w)| Ok((name, round(&w)?))).collect::<Result<HashMap<_, _>>>()?;
            let of = |dtype, device| VarBuilder::from_tensors(weights.clone(), dtype, device);
            let cpu = SparseMoe::load(&cfg, hidden, &Source::new(of(DType::F32, &Device::Cpu)))?;
            let device = SparseMoe::load(&cfg, hidden, &Source::new(of(dtype, &cuda)))?;
            for (batch, tokens) in [(1, 1), (2, 1), (1, 9), (4, 8), (1, 33), (2, 100)] {
                let x = round(&Tensor::randn(0f32, 1., (batch, tokens, hidden), &Device::Cpu)?)?;
                let got = device.forward(&x.to_device(&cuda)?.to_dtype(dtype)?, &Launch::default())?;
                let got = got.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                let want = cpu.forward(&x, &Launch::default())?;
                assert_eq!(got.dims(), want.dims());
                let error = (norm(&(got - &want)?)? / norm(&want)?).sqrt();
                assert!(error < bound, "{dtype:?} {hidden} {shared} {batch}x{tokens}: {error:e}");
            }
        }
    }
    Ok(())
}

/// Quantised experts on CUDA, few tokens at a time and many, against f32 on the CPU with the numbers they stand for.
#[cfg(feature = "cuda")]
#[test]
fn packed_experts_and_cpu_kernels_agree() -> Result<()> {
    use crate::formats::{Blocks, Quantizer};
    use candle_core::quantized::GgmlDType::{Q4K, Q6K, Q8_0};
    let Some(cuda) = candle_gdn_core::device::cuda::testing::device() else { return Ok(()) };
    let norm = |x: &Tensor| x.sqr()?.sum_all()?.to_scalar::<f32>();
    for (dtype, bound) in [(DType::BF16, 6e-3), (DType::F16, 8e-4)] {
        for (kind, shared) in [(Q4K, 256), (Q6K, 0), (Q8_0, 512)] {
            let cfg = MoeConfig {
                num_experts: 12,
                experts_per_token: 3,
                intermediate_size: 256,
                shared_intermediate_size: shared,
                norm_topk_prob: shared > 0,
                shared_gate: true,
            };
            let hidden = 512;
            let weights = weights(&cfg, hidden)?.into_iter().filter(|(_, w)| w.elem_count() > 0);
            let (mut stored, mut meant) = (HashMap::new(), HashMap::new());
            for (name, weight) in weights {
                let weight = (weight * 0.3)?;
                let numbers = match name.contains("proj") {
                    true => Blocks::quantize(&weight, kind)?.tensor()?,
                    false => weight.clone(),
                };
                meant.insert(name.clone(), numbers);
                stored.insert(name, weight);
            }
            let dense = Source::new(VarBuilder::from_tensors(meant, DType::F32, &Device::Cpu));
            let cpu = SparseMoe::load(&cfg, hidden, &dense)?;
            let source = Source::new(VarBuilder::from_tensors(stored, dtype, &cuda));
            let source = Source { quantizer: Some(Arc::new(Quantizer::new(kind)?)), ..source };
            let moe = SparseMoe::load(&cfg, hidden, &source)?;
            let Experts::Stacked(experts) = &moe.experts else { panic!("{kind:?} {dtype:?}: {moe:?}") };
            assert!(matches!(experts.down, Weight::Packed(_)), "{kind:?} {dtype:?}: {moe:?}");
            for tokens in [1, 2, 9, 16, 17, 100, 256, 257] {
                let x = Tensor::randn(0f32, 1., (tokens, hidden), &Device::Cpu)?;
                let x = x.to_dtype(dtype)?.to_dtype(DType::F32)?;
                let got = moe.forward(&x.to_device(&cuda)?.to_dtype(dtype)?, &Launch::default())?;
                let got = got.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                let want = cpu.forward(&x, &Launch::default())?;
                assert_eq!(got.dims(), want.dims());
                let error = (norm(&(got - &want)?)? / norm(&want)?).sqrt();
                // Of many tokens the numbers are rounded to this dtype too, gates, ups and downs.
                let bound = if tokens > 256 { 1.5 * bound } else { bound };
                assert!(error < bound, "{kind:?} {dtype:?} {tokens}: {error:e}");
            }
        }
    }
    Ok(())
}
