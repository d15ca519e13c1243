//! Sparse mixture of experts with a shared expert.

mod cpu;
mod device;

use super::config::MoeConfig;
use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use cpu::CpuMoe;
use device::DeviceMoe;
#[cfg(feature = "cuda")]
pub(super) use device::FEW;

/// Router, routed experts, and the shared expert where there is one.
#[derive(Debug)]
pub(crate) enum SparseMoe {
    Cpu(CpuMoe),
    Device(DeviceMoe),
}

impl SparseMoe {
    /// `vb` is at `..mlp`.
    pub(crate) fn load(cfg: &MoeConfig, hidden: usize, vb: VarBuilder) -> Result<Self> {
        Ok(match vb.device().is_cpu() {
            true => Self::Cpu(CpuMoe::load(cfg, hidden, vb)?),
            false => Self::Device(DeviceMoe::load(cfg, hidden, vb)?),
        })
    }

    /// `x [.., hidden]` to the same.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Cpu(moe) => moe.forward(x),
            Self::Device(moe) => moe.forward(x),
        }
    }
}

/// `weight [rows, hidden]` of the router or of the shared expert's gate, in f32: which experts a token takes should not
/// depend on the dtype of the model.
fn gate_weight(rows: usize, hidden: usize, vb: VarBuilder) -> Result<Tensor> {
    vb.get_with_hints_dtype((rows, hidden), "weight", Default::default(), DType::F32)
}

/// All experts of a layer, stacked: `[experts * 2 * intermediate, hidden]`, per expert the gate's rows, then up's, and
/// `[experts * hidden, intermediate]`. `vb` is at `..experts`, which holds either one tensor for all experts or one per
/// expert.
fn stacked_experts(cfg: &MoeConfig, hidden: usize, vb: VarBuilder) -> Result<(Tensor, Tensor)> {
    let (n, inner) = (cfg.num_experts, cfg.intermediate_size);
    let (gate_up, down) = if vb.contains_tensor("gate_up_proj") {
        (vb.get((n, 2 * inner, hidden), "gate_up_proj")?, vb.get((n, hidden, inner), "down_proj")?)
    } else {
        // Filled in place: a list of all experts and then one `cat` would hold them twice.
        let zeros = |shape: (usize, usize)| Tensor::zeros(shape, vb.dtype(), vb.device());
        let gate_up = zeros((n * 2 * inner, hidden))?;
        let down = zeros((n * hidden, inner))?;
        for j in 0..n {
            let vb = vb.pp(j);
            let get = |name, out, in_| vb.pp(name).get((out, in_), "weight");
            gate_up.slice_set(&get("gate_proj", inner, hidden)?, 0, 2 * j * inner)?;
            gate_up.slice_set(&get("up_proj", inner, hidden)?, 0, (2 * j + 1) * inner)?;
            down.slice_set(&get("down_proj", hidden, inner)?, 0, j * hidden)?;
        }
        (gate_up, down)
    };
    Ok((gate_up.reshape((n * 2 * inner, hidden))?, down.reshape((n * hidden, inner))?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, D};
    use std::collections::HashMap;

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
            let mut weights = HashMap::new();
            let mut add = |name: &str, rows: usize, columns: usize| -> Result<()> {
                weights.insert(name.to_string(), Tensor::randn(0f32, 0.3, (rows, columns), &Device::Cpu)?);
                Ok(())
            };
            add("gate.weight", 5, hidden)?;
            add("shared_expert_gate.weight", 1, hidden)?;
            let experts = (0..5).map(|j| (format!("experts.{j}"), 12));
            for (at, inner) in experts.chain([("shared_expert".into(), 20)]) {
                add(&format!("{at}.gate_proj.weight"), inner, hidden)?;
                add(&format!("{at}.up_proj.weight"), inner, hidden)?;
                add(&format!("{at}.down_proj.weight"), hidden, inner)?;
            }
            let vb = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
            let (cpu, device) = (CpuMoe::load(&cfg, hidden, vb.clone())?, DeviceMoe::load(&cfg, hidden, vb)?);
            for (batch, tokens) in [(1, 1), (2, 1), (1, 7), (2, 17)] {
                let x = Tensor::randn(0f32, 1., (batch, tokens, hidden), &Device::Cpu)?;
                let (got, want) = (cpu.forward(&x)?, device.forward(&x)?);
                assert_eq!(got.dims(), want.dims());
                let error = (got - want)?.abs()?.flatten_all()?.max(D::Minus1)?.to_scalar::<f32>()?;
                assert!(error < 1e-5, "{error:e}");
            }
        }
        Ok(())
    }
}
