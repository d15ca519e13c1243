//! Where weights come from: a [`VarBuilder`] or a GGUF file, quantised on the way or not, under transformers' names.

mod blocks;
mod e4m3;
mod experts;
mod fp8;
mod gguf;
mod quantize;
mod quantized;

pub(crate) use blocks::Blocks;
pub(crate) use e4m3::{E4m3Rows, ExpertRows};
pub(crate) use experts::{ExpertBlocks, ExpertShape};
pub(crate) use fp8::{dequantized, KeptFp8};
pub use gguf::GgufFile;
pub(crate) use gguf::GgufWeights;
pub use quantize::OtherType;
pub(crate) use quantize::Quantizer;
pub(crate) use quantized::Quantized;

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::VarBuilder;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// A matrix that a projection is made of.
#[derive(Debug, Clone)]
pub(crate) enum Matrix {
    /// On the model's device, in its dtype.
    Dense(Tensor),
    /// In e4m3, on the host.
    E4m3(E4m3Rows),
    /// On the host.
    Blocks(Blocks),
    /// The same with columns in the order of [`Tiles`].
    Tiled(Blocks, Tiles),
}

/// Pieces `[groups, per_group]` that stand transposed, `[per_group, groups]`: the value heads in GGUF files.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Tiles {
    pub groups: usize,
    pub per_group: usize,
    /// Of a piece.
    pub size: usize,
}

impl Tiles {
    /// Where the pieces of some groups stand, group by group.
    fn grouped(self, groups: Range<usize>) -> Vec<Range<usize>> {
        groups.flat_map(|group| (0..self.per_group).map(move |i| self.places(i, group..group + 1))).collect()
    }

    /// The same in the order in which they stand.
    fn stored(self, groups: Range<usize>) -> Vec<Range<usize>> {
        (0..self.per_group).map(|i| self.places(i, groups.clone())).collect()
    }

    /// Of piece `i` of each group.
    fn places(self, i: usize, groups: Range<usize>) -> Range<usize> {
        (i * self.groups + groups.start) * self.size..(i * self.groups + groups.end) * self.size
    }
}

/// A place among the weights of a model. Every part of a model loads from one.
#[derive(Clone)]
pub(crate) struct Source<'a> {
    /// Any weight, dense; its dtype and device are the model's.
    dense: VarBuilder<'a>,
    /// Matrices that are quantised in their file.
    gguf: Option<Arc<GgufWeights<'a>>>,
    /// What becomes of the others.
    quantizer: Option<Arc<Quantizer>>,
    /// Set where matrices in fp8 stay so.
    kept_fp8: Option<KeptFp8>,
    /// Set where a quantised matrix was taken that is not packed for our kernels on CUDA, so that candle's take it.
    for_candle: Arc<AtomicBool>,
}

impl<'a> Source<'a> {
    /// Dense weights.
    pub(crate) fn new(dense: VarBuilder<'a>) -> Self {
        Self { dense, gguf: None, quantizer: None, kept_fp8: None, for_candle: Default::default() }
    }

    /// Matrices in fp8 stay as they are where the kernels take them.
    pub(crate) fn keeping_fp8(self, kept: KeptFp8) -> Self {
        Self { kept_fp8: Some(kept), ..self }
    }

    /// Those of a GGUF file.
    pub(crate) fn gguf(weights: GgufWeights<'a>, dtype: DType, device: &Device) -> Self {
        let dense = VarBuilder::from_backend(Box::new(weights.clone()), dtype, device.clone());
        Self { gguf: Some(Arc::new(weights)), ..Self::new(dense) }
    }

    /// Its dense matrices are quantised.
    pub(crate) fn quantized(self, quantizer: Arc<Quantizer>) -> Self {
        Self { quantizer: Some(quantizer), ..self }
    }

    /// Whether some matrices in fp8 may stay so.
    pub(crate) fn keeps_fp8(&self) -> bool {
        self.kept_fp8.is_some()
    }

    /// The place `name` below this one.
    pub(crate) fn pp(&self, name: impl ToString) -> Self {
        Self { dense: self.dense.pp(name), ..self.clone() }
    }

    /// The matrices that could not have the type that was asked for, or that of their file.
    pub(crate) fn other_types(&self) -> Vec<OtherType> {
        let of_file = self.gguf.iter().flat_map(|gguf| gguf.others());
        of_file.chain(self.quantizer.iter().flat_map(|quantizer| quantizer.others())).collect()
    }

    /// Whether candle's kernels on CUDA take a quantised matrix from here.
    pub(crate) fn needs_candle(&self) -> bool {
        self.for_candle.load(Ordering::Relaxed)
    }

    /// From now on [`needs_candle`](Self::needs_candle), on CUDA.
    pub(crate) fn leave_to_candle(&self) {
        self.for_candle.store(self.device().is_cuda(), Ordering::Relaxed)
    }

    /// The matrix, of which is noted whether our kernels on CUDA take it.
    fn noted(&self, matrix: Matrix) -> Matrix {
        #[cfg(feature = "cuda")]
        if let Matrix::Blocks(blocks) | Matrix::Tiled(blocks, _) = &matrix {
            if self.device().is_cuda() && !crate::cuda::quantized::packs(blocks.dtype(), blocks.columns()) {
                self.leave_to_candle();
            }
        }
        matrix
    }

    /// All weights below this place, dense.
    pub(crate) fn dense(&self) -> VarBuilder<'a> {
        self.dense.clone()
    }

    pub(crate) fn prefix(&self) -> String {
        self.dense.prefix()
    }

    /// Of activations and of dense weights.
    pub(crate) fn dtype(&self) -> DType {
        self.dense.dtype()
    }

    pub(crate) fn device(&self) -> &Device {
        self.dense.device()
    }

    /// Whether all is in a GGUF file, whose errors name it.
    pub(crate) fn is_gguf(&self) -> bool {
        self.gguf.is_some()
    }

    /// Whether some matrices are quantised where they come from.
    pub(crate) fn is_quantized(&self) -> bool {
        self.gguf.as_ref().is_some_and(|gguf| gguf.is_quantized())
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.dense.contains_tensor(name)
    }

    /// A weight in the model's dtype and on its device; another shape is an error that names the tensor.
    pub(crate) fn get(&self, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
        self.dense.get(shape, name)
    }

    /// A matrix `[rows, columns]` for a projection.
    pub(crate) fn matrix(&self, rows: usize, columns: usize, name: &str) -> Result<Matrix> {
        let path = self.path(name);
        if let Some(gguf) = &self.gguf {
            if let Some(quantized) = gguf.matrix(&path, &[rows, columns])? {
                return Ok(self.noted(quantized));
            }
        }
        if let Some(stored) = self.e4m3(&[rows, columns], name)? {
            return Ok(Matrix::E4m3(stored));
        }
        self.matrix_of(&path, || self.staged((rows, columns), name))
    }

    /// A matrix that is quantised in its file and can be taken row by row on the model's device.
    pub(crate) fn stored_blocks(&self, rows: usize, columns: usize, name: &str) -> Result<Option<Blocks>> {
        let Some(gguf) = &self.gguf else { return Ok(None) };
        Ok(match gguf.matrix(&self.path(name), &[rows, columns])?.map(|matrix| self.noted(matrix)) {
            // candle has no CUDA kernel for the others.
            Some(Matrix::Blocks(blocks)) => {
                let activations = matches!(blocks.dtype(), GgmlDType::Q8_1 | GgmlDType::Q8K);
                Some(blocks).filter(|_| self.device().is_cpu() || !activations)
            }
            _ => None,
        })
    }

    /// Whether dense matrices are quantised.
    pub(crate) fn quantizes(&self) -> bool {
        self.quantizer.is_some()
    }

    /// What a projection has of a matrix that `make` puts together out of [`staged`](Self::staged) weights.
    pub(crate) fn matrix_of(&self, path: &str, make: impl FnOnce() -> Result<Tensor>) -> Result<Matrix> {
        match &self.quantizer {
            Some(quantizer) => quantizer.matrix(path, make()?, self).map(|matrix| self.noted(matrix)),
            None => Ok(Matrix::Dense(make()?)),
        }
    }

    /// A dense weight where it is to be worked on: if it is quantised next, on the host and in f32.
    pub(crate) fn staged(&self, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
        match self.quantizer {
            Some(_) => {
                let host = self.dense.clone().set_device(Device::Cpu);
                host.get_with_hints_dtype(shape, name, Default::default(), DType::F32)
            }
            None => self.get(shape, name),
        }
    }

    /// The full name of a weight.
    pub(crate) fn path(&self, name: &str) -> String {
        match self.prefix() {
            prefix if prefix.is_empty() => name.to_string(),
            prefix => format!("{prefix}.{name}"),
        }
    }
}
