//! The dense SwiGLU feed-forward.

use crate::cpu::swiglu::{swiglu, Call, Swiglu};
use crate::host;
use crate::linear::Linear;
use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;
use std::sync::Arc;

/// `down(silu(gate(x)) * up(x))`.
#[derive(Debug, Clone)]
pub(crate) enum Mlp {
    Cpu(Arc<Swiglu>),
    Device { gate: Linear, up: Linear, down: Linear },
}

impl Mlp {
    /// `vb` is at `..mlp` or `..shared_expert`.
    pub(crate) fn load(hidden: usize, intermediate: usize, vb: VarBuilder) -> Result<Self> {
        if vb.device().is_cpu() {
            return Ok(Self::Cpu(Self::load_cpu(hidden, intermediate, vb)?));
        }
        Ok(Self::Device {
            gate: Linear::load(hidden, intermediate, vb.pp("gate_proj"))?,
            up: Linear::load(hidden, intermediate, vb.pp("up_proj"))?,
            down: Linear::load(intermediate, hidden, vb.pp("down_proj"))?,
        })
    }

    pub(crate) fn load_cpu(hidden: usize, intermediate: usize, vb: VarBuilder) -> Result<Arc<Swiglu>> {
        let get = |name: &str, out: usize, in_: usize| vb.pp(name).get((out, in_), "weight");
        let gate_up = [get("gate_proj", intermediate, hidden)?, get("up_proj", intermediate, hidden)?];
        let gate_up = host::pack(&Tensor::cat(&gate_up, 0)?)?;
        Ok(Arc::new(Swiglu::new(gate_up, host::pack(&get("down_proj", hidden, intermediate)?)?)))
    }

    /// `x [.., hidden]` to the same.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Cpu(mlps) => {
                let mut out = vec![0f32; x.elem_count()];
                let call = Call { mlps, index: 0, rows: None, out: &mut out };
                host::with_f32(x, |x| swiglu(x, &mut [call]))?;
                host::tensor(out, x.dims(), x.dtype())
            }
            Self::Device { gate, up, down } => {
                let inner = (gate.forward(x)?.silu()? * up.forward(x)?)?;
                down.forward(&inner)
            }
        }
    }
}
