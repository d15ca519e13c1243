//! Sparse mixture of experts with a shared expert.

mod cpu;
mod device;
#[cfg(feature = "cuda")]
mod packed;
mod quantized;
mod weights;

use crate::config::MoeConfig;
use crate::formats::{ExpertShape, Source};
use candle_core::{Result, Tensor};
use candle_gdn::plumbing::Launch;
use candle_nn::VarBuilder;
use cpu::CpuMoe;
#[cfg(feature = "cuda")]
pub(crate) use device::asks_the_host;
use device::DeviceMoe;
#[cfg(feature = "cuda")]
use packed::PackedMoe;
use quantized::QuantizedMoe;

/// Router, routed experts, and the shared expert where there is one.
#[derive(Debug)]
pub(crate) enum SparseMoe {
    Cpu(CpuMoe),
    Device(DeviceMoe),
    #[cfg(feature = "cuda")]
    Packed(Box<PackedMoe>),
    Quantized(Box<QuantizedMoe>),
}

impl SparseMoe {
    /// `vb` is at `..mlp`.
    pub(crate) fn load(cfg: &MoeConfig, hidden: usize, vb: VarBuilder) -> Result<Self> {
        Ok(match vb.device().is_cpu() {
            true => Self::Cpu(CpuMoe::load(cfg, hidden, vb)?),
            false => Self::Device(DeviceMoe::load(cfg, hidden, vb)?),
        })
    }

    /// The same of a source, whose experts may be quantised.
    pub(crate) fn load_from(cfg: &MoeConfig, hidden: usize, source: &Source) -> Result<Self> {
        let shape = ExpertShape { experts: cfg.num_experts, intermediate: cfg.intermediate_size, hidden };
        let Some(experts) = source.pp("experts").expert_blocks(shape)? else {
            return match source.keeps_fp8() {
                true => Ok(Self::Device(DeviceMoe::load_from(cfg, hidden, source)?)),
                false => Self::load(cfg, hidden, source.dense()),
            };
        };
        #[cfg(feature = "cuda")]
        if let Some(packed) = PackedMoe::load(cfg, hidden, source, &experts)? {
            return Ok(Self::Packed(Box::new(packed)));
        }
        Ok(Self::Quantized(Box::new(QuantizedMoe::load(cfg, shape, source, &experts)?)))
    }

    /// `x [.., hidden]` to the same.
    pub(crate) fn forward(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        match self {
            Self::Cpu(moe) => moe.forward(x),
            Self::Device(moe) => moe.forward(x, launch),
            #[cfg(feature = "cuda")]
            Self::Packed(moe) => moe.forward(x, launch),
            Self::Quantized(moe) => moe.forward(x, launch),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, D};
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
        for (at, inner) in experts.chain([("shared_expert".into(), cfg.shared_intermediate_size)]) {
            add(&format!("{at}.gate_proj.weight"), inner, hidden)?;
            add(&format!("{at}.up_proj.weight"), inner, hidden)?;
            add(&format!("{at}.down_proj.weight"), hidden, inner)?;
        }
        Ok(weights)
    }

    /// The tensor ops run on the CPU as well, where nothing but this test calls them.
    #[test]
    fn tensor_ops_and_cpu_kernels_agree() -> Result<()> {
        let hidden = 24;
        for shared in [0, 20] {
            let cfg = MoeConfig {
                num_experts: 5,
                experts_per_token: 2,
                intermediate_size: 12,
                shared_intermediate_size: shared,
                norm_topk_prob: shared == 0,
            };
            let vb = VarBuilder::from_tensors(weights(&cfg, hidden)?, DType::F32, &Device::Cpu);
            let (cpu, device) = (CpuMoe::load(&cfg, hidden, vb.clone())?, DeviceMoe::load(&cfg, hidden, vb)?);
            for (batch, tokens) in [(1, 1), (2, 1), (1, 7), (2, 17)] {
                let x = Tensor::randn(0f32, 1., (batch, tokens, hidden), &Device::Cpu)?;
                let (got, want) = (cpu.forward(&x)?, device.forward(&x, &Launch::default())?);
                assert_eq!(got.dims(), want.dims());
                let error = (got - want)?.abs()?.flatten_all()?.max(D::Minus1)?.to_scalar::<f32>()?;
                assert!(error < 1e-5, "{error:e}");
            }
        }
        Ok(())
    }

    /// 16 bits on CUDA against f32 on the CPU, of the same x and weights: both choose the same experts.
    #[cfg(feature = "cuda")]
    #[test]
    fn cuda_kernels_and_cpu_kernels_agree() -> Result<()> {
        let Some(cuda) = candle_gdn::plumbing::cuda::testing::device() else { return Ok(()) };
        let norm = |x: &Tensor| x.sqr()?.sum_all()?.to_scalar::<f32>();
        for (dtype, bound) in [(DType::BF16, 6e-3), (DType::F16, 8e-4)] {
            for (hidden, shared) in [(128, 64), (320, 0), (2112, 128)] {
                let cfg = MoeConfig {
                    num_experts: 12,
                    experts_per_token: 3,
                    intermediate_size: 192,
                    shared_intermediate_size: shared,
                    norm_topk_prob: shared > 0,
                };
                let round = |x: &Tensor| x.to_dtype(dtype)?.to_dtype(DType::F32);
                let weights = weights(&cfg, hidden)?.into_iter().filter(|(_, w)| w.elem_count() > 0);
                let weights = weights.map(|(name, w)| Ok((name, round(&w)?))).collect::<Result<HashMap<_, _>>>()?;
                let of = |dtype, device| VarBuilder::from_tensors(weights.clone(), dtype, device);
                let cpu = CpuMoe::load(&cfg, hidden, of(DType::F32, &Device::Cpu))?;
                let device = DeviceMoe::load(&cfg, hidden, of(dtype, &cuda))?;
                for (batch, tokens) in [(1, 1), (2, 1), (1, 9), (4, 8), (1, 33), (2, 100)] {
                    let x = round(&Tensor::randn(0f32, 1., (batch, tokens, hidden), &Device::Cpu)?)?;
                    let got = device.forward(&x.to_device(&cuda)?.to_dtype(dtype)?, &Launch::default())?;
                    let got = got.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                    let want = cpu.forward(&x)?;
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
        let Some(cuda) = candle_gdn::plumbing::cuda::testing::device() else { return Ok(()) };
        let norm = |x: &Tensor| x.sqr()?.sum_all()?.to_scalar::<f32>();
        for (dtype, bound) in [(DType::BF16, 6e-3), (DType::F16, 8e-4)] {
            for (kind, shared) in [(Q4K, 256), (Q6K, 0), (Q8_0, 512)] {
                let cfg = MoeConfig {
                    num_experts: 12,
                    experts_per_token: 3,
                    intermediate_size: 256,
                    shared_intermediate_size: shared,
                    norm_topk_prob: shared > 0,
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
                let cpu = CpuMoe::load(&cfg, hidden, VarBuilder::from_tensors(meant, DType::F32, &Device::Cpu))?;
                let source = Source::new(VarBuilder::from_tensors(stored, dtype, &cuda));
                let source = source.quantized(Quantizer::new(kind)?.into());
                let moe = SparseMoe::load_from(&cfg, hidden, &source)?;
                assert!(matches!(moe, SparseMoe::Packed(_)), "{kind:?} {dtype:?}: {moe:?}");
                for tokens in [1, 2, 9, 16, 17, 100, 256, 257] {
                    let x = Tensor::randn(0f32, 1., (tokens, hidden), &Device::Cpu)?;
                    let x = x.to_dtype(dtype)?.to_dtype(DType::F32)?;
                    let got = moe.forward(&x.to_device(&cuda)?.to_dtype(dtype)?, &Launch::default())?;
                    let got = got.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                    let want = cpu.forward(&x)?;
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
}
