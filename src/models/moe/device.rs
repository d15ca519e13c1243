//! The mixture of experts out of tensor ops.

use super::super::config::MoeConfig;
use super::super::mlp::Mlp;
use super::super::routing::Routing;
use super::{gate_weight, stacked_experts};
use crate::linear::{matmul_t, Linear};
use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;

#[derive(Debug, Clone)]
pub(crate) struct DeviceMoe {
    router: Linear,
    experts: Experts,
    shared: Option<SharedExpert>,
    cfg: MoeConfig,
}

/// An MLP for every token, scaled by a sigmoid.
#[derive(Debug, Clone)]
struct SharedExpert {
    mlp: Mlp,
    gate: Linear,
}

/// All experts of a layer, stacked.
#[derive(Debug, Clone)]
struct Experts {
    /// `[experts * 2 * intermediate, hidden]`, per expert the gate's rows, then up's.
    gate_up: Tensor,
    /// `[experts * hidden, intermediate]`
    down: Tensor,
    hidden: usize,
    intermediate: usize,
}

impl DeviceMoe {
    /// `vb` is at `..mlp`.
    pub(crate) fn load(cfg: &MoeConfig, hidden: usize, vb: VarBuilder) -> Result<Self> {
        let gate = |name: &str, rows: usize| Linear::from_weight(gate_weight(rows, hidden, vb.pp(name))?);
        let shared = match cfg.shared_intermediate_size {
            0 => None,
            size => Some(SharedExpert {
                mlp: Mlp::load(hidden, size, vb.pp("shared_expert"))?,
                gate: gate("shared_expert_gate", 1)?,
            }),
        };
        Ok(Self {
            router: gate("gate", cfg.num_experts)?,
            experts: Experts::load(cfg, hidden, vb.pp("experts"))?,
            shared,
            cfg: cfg.clone(),
        })
    }

    /// `x [.., hidden]` to the same. Up to [`FEW`] tokens stay on the device, as a captured graph must: each has its
    /// experts gathered. For more the router's choice is read back to the host, so that each expert runs once over its
    /// tokens.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let h = self.experts.hidden;
        let tokens = x.elem_count() / h;
        let flat = x.reshape((tokens, h))?;
        let x32 = flat.to_dtype(DType::F32)?;
        let p = candle_nn::ops::softmax_last_dim(&self.router.forward(&x32)?)?;
        let mut y = if tokens <= FEW {
            self.experts.gathered(&flat, &p, &self.cfg)?
        } else {
            let p = p.flatten_all()?.to_vec1::<f32>()?;
            self.experts.forward(&flat, &Routing::top_k(&p, &self.cfg))?
        };
        if let Some(shared) = &self.shared {
            let gate = candle_nn::ops::sigmoid(&shared.gate.forward(&x32)?)?;
            let s = shared.mlp.forward(&flat)?.to_dtype(DType::F32)?;
            y = (y + s.broadcast_mul(&gate)?)?;
        }
        y.to_dtype(x.dtype())?.reshape(x.dims())
    }
}

/// Tokens whose experts are chosen and gathered on the device. A gathered weight is read twice and written once, where
/// the host's way costs one wait and several launches an expert.
pub(in crate::models) const FEW: usize = 32;

/// Bytes of gathered weights at a time; few in tests, so that there are several times.
const GATHER_BYTES: usize = if cfg!(test) { 16 << 10 } else { 256 << 20 };

impl Experts {
    /// `vb` is at `..experts`.
    fn load(cfg: &MoeConfig, hidden: usize, vb: VarBuilder) -> Result<Self> {
        let (gate_up, down) = stacked_experts(cfg, hidden, vb)?;
        Ok(Self { gate_up, down, hidden, intermediate: cfg.intermediate_size })
    }

    /// `x [tokens, hidden]` to the weighted sum of each token's experts, same shape, f32.
    fn forward(&self, x: &Tensor, routing: &Routing) -> Result<Tensor> {
        let device = x.device();
        let (tokens, k) = (x.dim(0)?, routing.experts_per_token());
        let index = |v: &[u32]| Tensor::new(v, device);
        // Rows sorted by expert: each expert reads and writes one contiguous range.
        let rows = x.index_select(&index(routing.token_of_row())?, 0)?;
        let mut outs = Vec::new();
        for (expert, range) in routing.ranges() {
            outs.push(self.one(expert, &rows.narrow(0, range.start, range.len())?)?);
        }
        let out = Tensor::cat(&outs, 0)?.to_dtype(DType::F32)?;
        let weights = Tensor::new(routing.weight_of_row(), device)?.reshape((tokens * k, 1))?;
        out.broadcast_mul(&weights)?
            .index_select(&index(routing.row_of_choice())?, 0)?
            .reshape((tokens, k, self.hidden))?
            .sum(1)
    }

    /// The same with the choice made on the device, from the router's probabilities `p [tokens, experts]`: nothing is
    /// asked of the host. Which of two experts with equal probability is taken is left open.
    fn gathered(&self, x: &Tensor, p: &Tensor, cfg: &MoeConfig) -> Result<Tensor> {
        let (n, k, h, i) = (cfg.num_experts, cfg.experts_per_token, self.hidden, self.intermediate);
        let tokens = x.dim(0)?;
        let chosen = p.arg_sort_last_dim(false)?.narrow(1, 0, k)?.contiguous()?;
        let mut weights = p.gather(&chosen, 1)?;
        if cfg.norm_topk_prob {
            weights = weights.broadcast_div(&weights.sum_keepdim(1)?)?;
        }
        let (gate_up, down) = (self.gate_up.reshape((n, 2 * i, h))?, self.down.reshape((n, h, i))?);
        let at_once = (GATHER_BYTES / (3 * k * i * h * x.dtype().size_in_bytes())).clamp(1, tokens);
        let mut outs = Vec::with_capacity(tokens.div_ceil(at_once));
        for first in (0..tokens).step_by(at_once) {
            let count = at_once.min(tokens - first);
            let experts = chosen.narrow(0, first, count)?.flatten_all()?;
            let rows = x.narrow(0, first, count)?.unsqueeze(1)?.expand((count, k, h))?.reshape((count * k, 1, h))?;
            let gate_up = rows.matmul(&gate_up.index_select(&experts, 0)?.transpose(1, 2)?)?;
            let gate = gate_up.narrow(2, 0, i)?.contiguous()?.silu()?;
            let inner = (gate * gate_up.narrow(2, i, i)?)?;
            let out = inner.matmul(&down.index_select(&experts, 0)?.transpose(1, 2)?)?;
            let out = out.to_dtype(DType::F32)?.reshape((count, k, h))?;
            outs.push(out.broadcast_mul(&weights.narrow(0, first, count)?.unsqueeze(2)?)?.sum(1)?);
        }
        match outs.as_slice() {
            [one] => Ok(one.clone()),
            many => Tensor::cat(many, 0),
        }
    }

    fn one(&self, expert: usize, x: &Tensor) -> Result<Tensor> {
        let (h, i) = (self.hidden, self.intermediate);
        let gate_up = matmul_t(x, &self.gate_up.narrow(0, expert * 2 * i, 2 * i)?)?;
        let gate = gate_up.narrow(1, 0, i)?.contiguous()?.silu()?;
        let inner = (gate * gate_up.narrow(1, i, i)?)?;
        matmul_t(&inner, &self.down.narrow(0, expert * h, h)?)
    }
}
