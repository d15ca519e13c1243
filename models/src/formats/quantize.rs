//! Quantisation of dense matrices as they are loaded.

use super::{Blocks, Matrix, Source};
use candle_core::quantized::GgmlDType;
use candle_core::{bail, Result, Tensor};
use std::sync::{Mutex, PoisonError};

/// How [`CausalLm::load_with`](crate::CausalLm::load_with) and its likes load.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LoadOptions {
    /// Quantises the matrices of all projections, embeddings aside, to this type, one by one as they are read: memory
    /// holds the quantised model and one tensor of the checkpoint at a time. `None` leaves them as they are.
    ///
    /// A matrix whose width is not whole blocks of the type (32 values, 256 for the K types) becomes
    /// [`Q8_0`](GgmlDType::Q8_0), or stays dense where 32 does not divide it either;
    /// [`CausalLm::other_types`](crate::CausalLm::other_types) tells which did. The decay and beta
    /// projections of Gated DeltaNet layers, a few rows that all else hangs on, become `Q8_0` whatever is asked for.
    /// Norms, the convolution and the router of experts are never quantised.
    ///
    /// A rank of several quantises its part of each matrix, whose width is what counts then.
    pub quantize: Option<GgmlDType>,
}

/// A matrix that could not be quantised to the type that was asked for, or whose part could not keep that of its file.
#[derive(Debug, Clone, PartialEq)]
pub struct OtherType {
    /// Full name in the checkpoint.
    pub name: String,
    /// The type it has; `None` is dense.
    pub dtype: Option<GgmlDType>,
}

/// A list of them that grows while a model is loaded.
#[derive(Debug, Default)]
pub(super) struct Others(Mutex<Vec<OtherType>>);

impl Others {
    pub(super) fn add(&self, name: &str, dtype: Option<GgmlDType>) {
        let other = OtherType { name: name.to_string(), dtype };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(other);
    }

    pub(super) fn all(&self) -> Vec<OtherType> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What [`LoadOptions::quantize`] asks for, and where it could not be done.
#[derive(Debug)]
pub(crate) struct Quantizer {
    dtype: GgmlDType,
    others: Others,
}

const TYPES: &[GgmlDType] = &[
    GgmlDType::Q4_0,
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q8_0,
    GgmlDType::Q2K,
    GgmlDType::Q3K,
    GgmlDType::Q4K,
    GgmlDType::Q5K,
    GgmlDType::Q6K,
];

impl Quantizer {
    pub(crate) fn new(dtype: GgmlDType) -> Result<Self> {
        if !TYPES.contains(&dtype) {
            bail!("quantize: expected one of {TYPES:?}, got {dtype:?}")
        }
        Ok(Self { dtype, others: Others::default() })
    }

    /// The matrices that have another type.
    pub(super) fn others(&self) -> Vec<OtherType> {
        self.others.all()
    }

    /// The type for `columns`, noted where it is not the one that was asked for.
    pub(crate) fn dtype_for(&self, path: &str, columns: usize) -> Option<GgmlDType> {
        let fits = |dtype: &GgmlDType| columns.is_multiple_of(dtype.block_size());
        let dtype = [self.dtype, GgmlDType::Q8_0].into_iter().find(fits);
        if dtype != Some(self.dtype) {
            self.others.add(path, dtype);
        }
        dtype
    }

    /// `dense`, staged, as `source` keeps it.
    pub(super) fn matrix(&self, path: &str, dense: Tensor, source: &Source) -> Result<Matrix> {
        let (_, columns) = dense.dims2()?;
        let gates = [".in_proj_b.weight", ".in_proj_a.weight", ".in_proj_ba.weight"];
        let dtype = match self.dtype_for(path, columns) {
            // Less would save nothing.
            Some(_) if gates.iter().any(|gate| path.ends_with(gate)) => Some(GgmlDType::Q8_0),
            dtype => dtype,
        };
        Ok(match dtype {
            Some(dtype) => Matrix::Blocks(Blocks::quantize(&dense, dtype)?),
            None => Matrix::Dense(dense.to_device(source.device())?.to_dtype(source.dtype())?),
        })
    }
}
