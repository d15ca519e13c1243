//! The weight of the convolution, whole or as the weights of a checkpoint.

use super::GdnConfig;
use candle_core::{bail, Result, Tensor};
use candle_gdn_core::check::{check_device, check_float, check_shape};

/// The weight of the depthwise convolution of q, k and v, its tensors `[rows, width]` or with the 1 in between that checkpoints
/// have.
#[derive(Debug, Clone)]
pub enum ConvWeight {
    /// All `2 HK K + HV V` rows: q, k, v.
    Fused(Tensor),
    /// The same rows in three tensors, as in OLMo-Hybrid's checkpoints: one each of q, k and v, or wherever else they are cut.
    Separate([Tensor; 3]),
}

impl From<Tensor> for ConvWeight {
    fn from(weight: Tensor) -> Self {
        Self::Fused(weight)
    }
}

impl ConvWeight {
    /// `[channels, width]`, with the gradients of its tensors.
    pub(super) fn joined(&self) -> Result<Tensor> {
        let rows = |weight: &Tensor| match weight.dims() {
            [_, 1, _] => weight.squeeze(1),
            _ => Ok(weight.clone()),
        };
        match self {
            Self::Fused(weight) => rows(weight),
            Self::Separate([q, k, v]) => Tensor::cat(&[rows(q)?, rows(k)?, rows(v)?], 0),
        }
    }

    /// The first of its tensors: all have its dtype and device.
    pub(super) fn first(&self) -> &Tensor {
        match self {
            Self::Fused(weight) | Self::Separate([weight, ..]) => weight,
        }
    }

    pub(super) fn check(&self, op: &str, c: &GdnConfig) -> Result<()> {
        let (arg, first) = ("conv_weight", self.first());
        check_float(op, arg, first.dtype())?;
        if let Self::Separate(all) = self {
            for weight in all {
                if !matches!(weight.dims(), [_, width] | [_, 1, width] if *width == c.conv_kernel) {
                    bail!("{op}: {arg}: expected shape [rows, {}], got {:?}", c.conv_kernel, weight.dims());
                }
                if weight.dtype() != first.dtype() {
                    bail!(
                        "{op}: {arg}: expected dtype {:?} (the first one's), got {:?}",
                        first.dtype(),
                        weight.dtype()
                    );
                }
                check_device(op, arg, weight, first.device())?;
            }
        }
        check_shape(op, arg, &self.joined()?, &[c.conv_channels(), c.conv_kernel])
    }
}
