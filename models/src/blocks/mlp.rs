//! The dense SwiGLU feed-forward.

use crate::cpu::swiglu::{swiglu, Call, Swiglu};
use crate::host;
use crate::linear::Linear;
use crate::ops;
use crate::weights::{Matrix, Source};
use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;
use std::sync::Arc;

/// `down(silu(gate(x)) * up(x))`.
#[derive(Debug, Clone)]
pub(crate) enum Mlp {
    Cpu(Arc<Swiglu>),
    /// The gate's rows, then up's.
    Device {
        gate_up: Linear,
        down: Linear,
    },
}

impl Mlp {
    /// `vb` is at `..mlp` or `..shared_expert`.
    pub(crate) fn load(hidden: usize, intermediate: usize, vb: VarBuilder) -> Result<Self> {
        Self::load_from(hidden, intermediate, &Source::new(vb))
    }

    /// The same of a source, whose matrices may be quantised.
    pub(crate) fn load_from(hidden: usize, intermediate: usize, source: &Source) -> Result<Self> {
        let device = source.device();
        let get = |name: &str, rows: usize, columns: usize| source.pp(name).matrix(rows, columns, "weight");
        let gate_up = [get("gate_proj", intermediate, hidden)?, get("up_proj", intermediate, hidden)?];
        Ok(match (gate_up, get("down_proj", hidden, intermediate)?) {
            ([Matrix::Dense(gate), Matrix::Dense(up)], Matrix::Dense(down)) if device.is_cpu() => {
                let gate_up = host::pack(&Tensor::cat(&[gate, up], 0)?)?;
                Self::Cpu(Arc::new(Swiglu::new(gate_up, host::pack(&down)?)))
            }
            (gate_up, down) => Self::Device {
                gate_up: Linear::stack(gate_up.into(), device)?,
                down: Linear::stack(vec![down], device)?,
            },
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
            // No kernel of a pass writes a weight.
            Self::Device { gate_up, down } => down.forward_with(&gated(gate_up, x)?, true),
        }
    }
}

/// `silu(gate(x)) * up(x)`; in one kernel with the projection where one takes it.
fn gated(gate_up: &Linear, x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Linear::Device(weight) = gate_up {
        let mut dims = x.dims().to_vec();
        let hidden = dims.pop().unwrap_or(0);
        let rows = x.elem_count() / hidden.max(1);
        if let Some(y) = crate::cuda::linear::few_rows_swiglu_if_faster(&x.reshape((rows, hidden))?, weight)? {
            dims.push(weight.dim(0)? / 2);
            return y.reshape(dims);
        }
    }
    ops::Swiglu::new().overlapping().forward(&gate_up.forward_with(x, true)?)
}
