//! The dense SwiGLU feed-forward.

use crate::blocks::linear::Linear;
use crate::cpu::swiglu::{swiglu, MlpRows, Swiglu};
use crate::formats::{Matrix, Source};
use crate::ops::Swiglu as SwigluOp;
use candle_core::{Result, Tensor};
use candle_gdn::plumbing::host;
use candle_gdn::plumbing::{BlockScaled, Launch};
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
    /// `source` is at `..mlp` or `..shared_expert`; its matrices may be quantised, or in fp8.
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

    /// Both matrices, where they are in e4m3.
    pub(crate) fn e4m3(&self) -> Option<[&BlockScaled; 2]> {
        match self {
            Self::Device { gate_up, down } => Some([gate_up.e4m3()?, down.e4m3()?]),
            Self::Cpu(_) => None,
        }
    }

    pub(crate) fn load_cpu(hidden: usize, intermediate: usize, vb: VarBuilder) -> Result<Arc<Swiglu>> {
        let get = |name: &str, out: usize, in_: usize| vb.pp(name).get((out, in_), "weight");
        let gate_up = [get("gate_proj", intermediate, hidden)?, get("up_proj", intermediate, hidden)?];
        let gate_up = host::pack(&Tensor::cat(&gate_up, 0)?)?;
        Ok(Arc::new(Swiglu::new(gate_up, host::pack(&get("down_proj", hidden, intermediate)?)?)))
    }

    /// `x [.., hidden]` to the same. No kernel of a pass writes a weight, so that its launches may overlap.
    pub(crate) fn forward(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        match self {
            Self::Cpu(mlps) => {
                let mut out = vec![0f32; x.elem_count()];
                let call = MlpRows { mlps, index: 0, rows: None, out: &mut out };
                host::with_f32(x, |x| swiglu(x, &mut [call]))?;
                host::tensor(out, x.dims(), x.dtype())
            }
            Self::Device { gate_up, down } => down.forward_launched(&gated(gate_up, x, launch)?, launch),
        }
    }
}

/// `silu(gate(x)) * up(x)`; in one kernel with the projection where one takes it.
fn gated(gate_up: &Linear, x: &Tensor, launch: &Launch) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    {
        let mut dims = x.dims().to_vec();
        let hidden = dims.pop().unwrap_or(0);
        let rows = x.reshape((x.elem_count() / hidden.max(1), hidden))?;
        let fused = match gate_up {
            Linear::Dense(projection) => projection.swiglu_if_faster(&rows, launch)?,
            Linear::Quantized(projection) => projection.swiglu(&rows, launch)?,
        };
        if let Some(y) = fused {
            dims.push(y.dim(1)?);
            return y.reshape(dims);
        }
    }
    SwigluOp::new().launched(launch).forward(&gate_up.forward_launched(x, launch)?)
}
