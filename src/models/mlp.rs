//! The dense SwiGLU feed-forward.

use super::linear::Linear;
use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

/// `down(silu(gate(x)) * up(x))`.
#[derive(Debug, Clone)]
pub(crate) struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Mlp {
    /// `vb` is at `..mlp` or `..shared_expert`.
    pub(crate) fn load(hidden: usize, intermediate: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            gate: Linear::load(hidden, intermediate, vb.pp("gate_proj"))?,
            up: Linear::load(hidden, intermediate, vb.pp("up_proj"))?,
            down: Linear::load(intermediate, hidden, vb.pp("down_proj"))?,
        })
    }

    /// `x [.., hidden]` to the same.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let inner = (self.gate.forward(x)?.silu()? * self.up.forward(x)?)?;
        self.down.forward(&inner)
    }
}
