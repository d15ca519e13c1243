//! A projection without bias: dense by candle-gdn's kernels, or quantised by candle's.

use crate::formats::{Matrix, Quantized, Source};
use candle_core::quantized::QTensor;
use candle_core::{Device, Module, Result, Tensor};
use candle_gdn::plumbing::cpu::matmul::Weights;
use candle_gdn::plumbing::{Launch, Weight};
use candle_gdn::Projection;
use std::sync::Arc;

/// `y = x wᵀ`, the weight `[out, in]` in the model's dtype or quantised.
#[derive(Debug, Clone)]
pub(crate) enum Linear {
    Dense(candle_gdn::Linear),
    /// In ggml's types, all or some of its rows.
    Quantized(Quantized),
}

impl Linear {
    /// The projection whose `weight [outputs, inputs]` stands at `source`.
    pub fn load(source: &Source, inputs: usize, outputs: usize) -> Result<Self> {
        Self::stack(vec![source.matrix(outputs, inputs, "weight")?], source.device())
    }

    pub fn dense(weight: Tensor) -> Result<Self> {
        candle_gdn::Linear::new(weight).map(Self::Dense)
    }

    /// One projection of the rows of all parts, one below the other.
    pub fn stack(parts: Vec<Matrix>, device: &Device) -> Result<Self> {
        let dense = parts.iter().map(|part| match part {
            Matrix::Dense(weight) => Some(weight),
            _ => None,
        });
        match dense.collect::<Option<Vec<_>>>() {
            Some(weights) => match *weights {
                [weight] => Self::dense(weight.clone()),
                ref weights => Self::dense(Tensor::cat(weights, 0)?),
            },
            None => Quantized::new(parts, device).map(Self::Quantized),
        }
    }

    /// Of a quantised weight `[out, in]` that is in use elsewhere, too.
    pub fn shared(weight: Arc<QTensor>) -> Result<Self> {
        Quantized::shared(weight).map(Self::Quantized)
    }

    /// The weight where it is packed for the CPU.
    pub fn packed(&self) -> Option<&Arc<Weights>> {
        match self {
            Self::Dense(linear) => match linear.weight() {
                Weight::Packed(weights) => Some(weights),
                Weight::Tensor(_) | Weight::BlockScaled(_) => None,
            },
            Self::Quantized(_) => None,
        }
    }

    /// The weight where it is a dense tensor on a device.
    #[cfg(feature = "cuda")]
    pub fn tensor(&self) -> Option<&Tensor> {
        match self {
            Self::Dense(linear) => match linear.weight() {
                Weight::Tensor(weight) => Some(weight),
                Weight::Packed(_) | Weight::BlockScaled(_) => None,
            },
            Self::Quantized(_) => None,
        }
    }

    /// As [`candle_gdn::Linear::forward_launched`].
    pub fn forward_launched(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        match self {
            Self::Dense(linear) => linear.forward_launched(x, launch),
            Self::Quantized(weight) => weight.forward(x),
        }
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_launched(x, &Launch::default())
    }
}

impl From<Linear> for Projection {
    fn from(linear: Linear) -> Self {
        match linear {
            Linear::Dense(linear) => linear.into(),
            Linear::Quantized(weight) => Self::module(weight),
        }
    }
}

/// `a [n, k]` times the transpose of `b [m, k]`.
pub(crate) fn matmul_t(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.matmul(&b.t()?)
}
