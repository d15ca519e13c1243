//! A projection without bias: dense by candle-gdn's kernels, or quantised.

use crate::cpu::bytes::Bytes;
#[cfg(feature = "cuda")]
use crate::cuda::quantized::Packed;
#[cfg(feature = "cuda")]
use crate::formats::Blocks;
use crate::formats::{E4m3Rows, Matrix, Quantized, Source};
#[cfg(feature = "cuda")]
use candle_core::quantized::GgmlDType;
use candle_core::quantized::QTensor;
#[cfg(feature = "cuda")]
use candle_core::DType;
use candle_core::{bail, Device, Module, Result, Tensor};
use candle_gdn::plumbing::cpu::matmul::Weights;
use candle_gdn::plumbing::{BlockScaled, Launch, Launched, Weight};
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
        if parts.iter().any(|part| matches!(part, Matrix::E4m3(_))) {
            return Self::block_scaled(parts, device);
        }
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

    /// The same of parts of which some are in e4m3: all stay as they are where the dense ones are last.
    fn block_scaled(parts: Vec<Matrix>, device: &Device) -> Result<Self> {
        let (mut stored, mut below, mut in_order) = (Vec::new(), Vec::new(), true);
        for part in &parts {
            match part {
                Matrix::E4m3(rows) => {
                    in_order &= below.is_empty();
                    stored.push(rows.clone());
                }
                Matrix::Dense(rows) => below.push(rows.clone()),
                part => bail!("a projection in e4m3: expected its other rows dense, got {part:?}"),
            }
        }
        let Some(dtype) = below.first().map(Tensor::dtype) else {
            return Ok(Self::Dense(E4m3Rows::stack(&stored)?.on(device)?.into()));
        };
        if in_order {
            let weight = E4m3Rows::stack(&stored)?.on(device)?;
            return Ok(Self::Dense(weight.with_rows_below(Tensor::cat(&below, 0)?)?.into()));
        }
        let dense = parts.into_iter().filter_map(|part| match part {
            Matrix::E4m3(rows) => Some(rows.dense(dtype, device)),
            Matrix::Dense(rows) => Some(Ok(rows)),
            _ => None,
        });
        Self::dense(Tensor::cat(&dense.collect::<Result<Vec<_>>>()?, 0)?)
    }

    /// The weight where it is in e4m3, all of it.
    pub fn e4m3(&self) -> Option<&BlockScaled> {
        match self {
            Self::Dense(linear) => match linear.weight() {
                Weight::BlockScaled(weight) if weight.below().is_none() => Some(weight),
                _ => None,
            },
            Self::Quantized(_) => None,
        }
    }

    /// Of a quantised weight `[out, in]` that is in use elsewhere, too.
    pub fn shared(weight: Arc<QTensor>) -> Result<Self> {
        Quantized::shared(weight).map(Self::Quantized)
    }

    /// The same in q8_0, half of the bytes to read; `None` where it has no more already, or no kernel of ours takes it so.
    #[cfg(feature = "cuda")]
    pub fn rounded(&self) -> Result<Option<Self>> {
        const CHUNK: usize = 1 << 14;
        let Some(weight) = self.tensor().filter(|w| matches!(w.dtype(), DType::BF16 | DType::F16)) else {
            return Ok(None);
        };
        let (rows, columns) = weight.dims2()?;
        if !columns.is_multiple_of(GgmlDType::Q8_0.block_size()) {
            return Ok(None);
        }
        let chunk = |first| Blocks::quantize(&weight.narrow(0, first, CHUNK.min(rows - first))?, GgmlDType::Q8_0);
        let chunks = (0..rows).step_by(CHUNK).map(chunk).collect::<Result<Vec<_>>>()?;
        let packed = Blocks::one(chunks).map(|blocks| blocks.packed(weight.device())).transpose()?;
        Ok(packed.flatten().map(|packed| Self::packed_blocks(Arc::new(packed))))
    }

    /// Of bytes that are in use elsewhere, too.
    pub fn of_bytes(bytes: Arc<Bytes>) -> Self {
        Self::Quantized(Quantized::of_bytes(bytes))
    }

    /// One projection of the rows of all, which share their weights; `None` where no launch takes quantised ones so.
    #[cfg(feature = "cuda")]
    pub fn joined(all: &[&Self]) -> Option<Self> {
        let quantized = all.iter().map(|each| match each {
            Self::Quantized(weight) => Some(weight),
            Self::Dense(_) => None,
        });
        Quantized::joined(&quantized.collect::<Option<Vec<_>>>()?).map(Self::Quantized)
    }

    /// Of a quantised weight that is packed for CUDA, and in use elsewhere, too.
    #[cfg(feature = "cuda")]
    pub fn packed_blocks(weight: Arc<Packed>) -> Self {
        Self::Quantized(Quantized::packed(weight))
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
            Self::Quantized(weight) => weight.forward_launched(x, launch),
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
            Linear::Quantized(weight) => Self::Launched(Arc::new(weight)),
        }
    }
}

/// `a [n, k]` times the transpose of `b [m, k]`.
pub(crate) fn matmul_t(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.matmul(&b.t()?)
}
