//! RMS norm, as every norm of these models but the gated one.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod op;

pub use op::AddRmsNorm;

use crate::config::ModelConfig;
use candle_core::{DType, Result, Tensor};
use candle_gdn_core::Launch;
use candle_nn::VarBuilder;

/// `x / sqrt(mean(x²) + eps) * scale` over the last dimension, computed in f32.
#[derive(Debug, Clone)]
pub(crate) struct RmsNorm {
    /// The weight, or `1 + weight`, `[dim]` in f32: the sum has more digits than a bf16 weight can hold.
    pub scale: Tensor,
    pub eps: f32,
}

impl RmsNorm {
    /// Reads `weight [dim]` at `vb`.
    pub(crate) fn load(dim: usize, config: &ModelConfig, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get_with_hints_dtype(dim, "weight", Default::default(), DType::F32)?;
        let scale = if config.zero_centred_norms { (weight + 1.0)? } else { weight };
        Ok(Self { scale, eps: config.rms_norm_eps as f32 })
    }

    /// `x [.., dim]` to the same shape and dtype. The launch may overlap: no kernel of a pass writes a scale.
    pub(crate) fn forward(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        self.op(launch)?.norm(x, &self.scale)
    }

    /// `x + h`, and its norm.
    pub(crate) fn forward_sum(&self, x: &Tensor, h: &Tensor, launch: &Launch) -> Result<(Tensor, Tensor)> {
        self.op(launch)?.forward(x, h, &self.scale)
    }

    fn op(&self, launch: &Launch) -> Result<AddRmsNorm> {
        let mut op = AddRmsNorm::new(self.eps.into())?;
        op.launch = launch.clone();
        Ok(op)
    }
}
