//! The mixture of experts on the CPU: all experts of all tokens in two parallel products.

use super::weights::{gate_weight, stacked_experts};
use crate::blocks::mlp::Mlp;
use crate::blocks::routing::Routing;
use crate::config::MoeConfig;
use crate::cpu::moe::{softmax, Combine, Shares};
use crate::cpu::swiglu::{swiglu, MlpRows, Swiglu};
use candle_core::{Result, Tensor};
use candle_gdn::plumbing::cpu::matmul::Weights;
use candle_gdn::plumbing::host;
use candle_gdn::plumbing::products;
use candle_nn::VarBuilder;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct CpuMoe {
    /// A row for each expert and, where there is a shared expert, one for its gate.
    router: Weights,
    experts: Swiglu,
    shared: Option<Arc<Swiglu>>,
    cfg: MoeConfig,
}

impl CpuMoe {
    /// `vb` is at `..mlp`.
    pub(crate) fn load(cfg: &MoeConfig, hidden: usize, vb: VarBuilder) -> Result<Self> {
        let mut gates = vec![gate_weight(cfg.num_experts, hidden, vb.pp("gate"))?];
        let (gate_up, down) = stacked_experts(cfg, hidden, vb.pp("experts"))?;
        let (n, inner) = (cfg.num_experts, cfg.intermediate_size);
        let gate_up = host::pack(&gate_up.reshape((n, 2 * inner, hidden))?)?;
        let experts = Swiglu::new(gate_up, host::pack(&down.reshape((n, hidden, inner))?)?);
        let mut shared = None;
        if cfg.shared_intermediate_size > 0 {
            gates.push(gate_weight(1, hidden, vb.pp("shared_expert_gate"))?);
            shared = Some(Mlp::load_cpu(hidden, cfg.shared_intermediate_size, vb.pp("shared_expert"))?);
        }
        Ok(Self { router: host::pack(&Tensor::cat(&gates, 0)?)?, experts, shared, cfg: cfg.clone() })
    }

    /// `x [.., hidden]` to the same.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        host::tensor(host::with_f32(x, |x| self.run(x))?, x.dims(), x.dtype())
    }

    /// `x [tokens, hidden]` to the same.
    fn run(&self, x: &[f32]) -> Vec<f32> {
        let (n, hidden) = (self.cfg.num_experts, self.experts.hidden());
        let [scores] = products(x, [&self.router]);
        let stride = self.router.outputs();
        let routing = Routing::top_k(&softmax(&scores, stride, n), &self.cfg);

        let mut expert_outs = vec![0f32; routing.token_of_row().len() * hidden];
        let mut shared_out = vec![0f32; if self.shared.is_some() { x.len() } else { 0 }];
        // Rows sorted by expert: each expert writes one contiguous range.
        let mut calls = Vec::with_capacity(n.min(routing.token_of_row().len()) + 1);
        let mut rest = expert_outs.as_mut_slice();
        for (index, range) in routing.ranges() {
            let (out, tail) = rest.split_at_mut(range.len() * hidden);
            rest = tail;
            calls.push(MlpRows { mlps: &self.experts, index, rows: Some(&routing.token_of_row()[range]), out });
        }
        if let Some(mlps) = &self.shared {
            calls.push(MlpRows { mlps, index: 0, rows: None, out: &mut shared_out });
        }
        swiglu(x, &mut calls);

        let mut out = vec![0f32; x.len()];
        Combine {
            experts: &expert_outs,
            weights: routing.weight_of_row(),
            choices: routing.row_of_choice(),
            per_token: routing.experts_per_token(),
            shared: self.shared.as_ref().map(|_| Shares { out: &shared_out, gates: &scores[n..], stride }),
            hidden,
        }
        .run(&mut out);
        out
    }
}
