//! How the numbers of a matrix are stored.

use super::cpu::quantized::Quantized;
#[cfg(feature = "cuda")]
use super::cuda::packed::Packed;
use super::{E4m3, Tiles};
use candle_core::quantized::QTensor;
use candle_core::{bail, DType, Result, Tensor};
use candle_gdn_core::cpu::matmul::Weights;
use candle_gdn_core::host;
use std::sync::Arc;

/// A matrix `[out, in]`, or those of all experts of a layer one below the other, ready to multiply. Clones share the numbers.
#[derive(Debug, Clone)]
pub(crate) enum Weight {
    /// In the model's dtype, on a device.
    Dense(Tensor),
    /// In f32, bf16 or f16, packed for the CPU's kernels.
    Panels(Arc<Weights>),
    /// In e4m3 with a scale for each block, on CUDA.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    E4m3(E4m3),
    /// In a ggml type, packed for the CPU's kernels.
    Quantized(Arc<Quantized>),
    /// In q8_0, q4_K or q6_K, packed for our kernels on CUDA.
    #[cfg(feature = "cuda")]
    Packed(Arc<Packed>),
    /// In any ggml type, by candle's kernels.
    Ggml(Arc<QTensor>),
    /// With columns in another order.
    Tiled(Arc<Weight>, Tiles),
    /// The rows of several weights, one below the other.
    Stacked(Arc<[Weight]>),
}

/// Inputs of a matrix in ggml's types, at most.
const MAX_GGML_INPUTS: usize = 1 << 18;

impl Weight {
    /// A dense matrix in the model's dtype: packed on the CPU, as it is elsewhere.
    pub fn dense(weight: Tensor) -> Result<Self> {
        let _ = weight.dims2()?;
        Ok(match weight.device().is_cpu() {
            true => Self::Panels(Arc::new(host::pack(&weight)?)),
            false => Self::Dense(weight),
        })
    }

    /// A matrix for candle's kernels, `[out, in]`, or `[experts, out, in]`.
    pub fn ggml(weight: Arc<QTensor>) -> Result<Self> {
        let inputs = weight.shape().dims().last().copied().unwrap_or(0);
        if inputs > MAX_GGML_INPUTS {
            bail!("quantised matrix: expected at most {MAX_GGML_INPUTS} inputs, got {inputs}")
        }
        // candle's kernels use them without a look at the processor, which ends the program.
        #[cfg(target_arch = "aarch64")]
        if weight.device().is_cpu() && !std::arch::is_aarch64_feature_detected!("dotprod") {
            bail!("quantised matrix: expected a processor with dot products of bytes (`dotprod`, ARMv8.2), got one without")
        }
        // Before any graph is captured that points to candle's buffer.
        #[cfg(feature = "cuda")]
        grow_workspace(&weight.device())?;
        Ok(Self::Ggml(weight))
    }

    /// The rows of all weights, one below the other.
    pub fn stack(mut weights: Vec<Weight>) -> Self {
        match weights.len() {
            1 => weights.remove(0),
            _ => Self::Stacked(weights.into()),
        }
    }

    pub fn outputs(&self) -> usize {
        match self {
            Self::Dense(weight) => weight.dims()[0],
            Self::Panels(weights) => weights.outputs(),
            Self::E4m3(weight) => weight.bytes.dims()[0],
            Self::Quantized(weight) => weight.rows,
            #[cfg(feature = "cuda")]
            Self::Packed(weight) => weight.outputs,
            Self::Ggml(weight) => weight.shape().dims()[0],
            Self::Tiled(weight, _) => weight.outputs(),
            Self::Stacked(weights) => weights.iter().map(Self::outputs).sum(),
        }
    }

    pub fn inputs(&self) -> usize {
        match self {
            Self::Dense(weight) => weight.dims()[1],
            Self::Panels(weights) => weights.inputs(),
            Self::E4m3(weight) => weight.bytes.dims()[1],
            Self::Quantized(weight) => weight.columns(),
            #[cfg(feature = "cuda")]
            Self::Packed(weight) => weight.inputs,
            Self::Ggml(weight) => weight.shape().dims().last().copied().unwrap_or(0),
            Self::Tiled(weight, _) => weight.inputs(),
            Self::Stacked(weights) => weights.first().map_or(0, Self::inputs),
        }
    }

    /// A view of `count` rows from `first` on; `None` where the storage has no such views.
    pub fn rows(&self, first: usize, count: usize) -> Result<Option<Self>> {
        Ok(match self {
            Self::Dense(weight) => Some(Self::Dense(weight.narrow(0, first, count)?)),
            Self::E4m3(weight) => Some(Self::E4m3(weight.rows(first, count)?)),
            _ => None,
        })
    }

    /// The numbers where they are packed for the CPU.
    pub fn panels(&self) -> Option<&Arc<Weights>> {
        match self {
            Self::Panels(weights) => Some(weights),
            _ => None,
        }
    }

    /// Whether candle's kernels on CUDA multiply some of it.
    pub fn uses_candle(&self) -> bool {
        match self {
            Self::Ggml(weight) => weight.device().is_cuda(),
            Self::Tiled(weight, _) => weight.uses_candle(),
            Self::Stacked(weights) => weights.iter().any(Self::uses_candle),
            _ => false,
        }
    }

    /// The rows `ids [n]` of a table, `[n, in]` in `dtype`. Those past the end are zeros, but for [`Weight::Dense`] and
    /// [`Weight::Ggml`], which have no such rows.
    pub fn lookup(&self, ids: &Tensor, dtype: DType) -> Result<Tensor> {
        match self {
            Self::Dense(table) => table.index_select(ids, 0),
            Self::Panels(weights) => self.read_rows(ids, dtype, |row, dst| weights.read_row(row, dst)),
            Self::Quantized(weight) => self.read_rows(ids, dtype, |row, dst| weight.read_row(row, dst)),
            #[cfg(feature = "cuda")]
            Self::Packed(table) => table.rows(ids, dtype),
            Self::Ggml(table) => table.embedding(ids)?.to_dtype(dtype),
            Self::E4m3(_) | Self::Tiled(..) | Self::Stacked(_) => bail!("table: expected one matrix, got {self:?}"),
        }
    }

    fn read_rows(&self, ids: &Tensor, dtype: DType, read: impl Fn(usize, &mut [f32])) -> Result<Tensor> {
        let (count, columns) = (self.outputs(), self.inputs());
        let ids = ids.to_dtype(DType::U32)?.to_vec1::<u32>()?;
        let mut rows = vec![0f32; ids.len() * columns];
        for (id, row) in ids.iter().zip(rows.chunks_exact_mut(columns)) {
            if (*id as usize) < count {
                read(*id as usize, row);
            }
        }
        host::tensor(rows, (ids.len(), columns), dtype)
    }
}

/// candle's products of up to 8 rows share a buffer of the device, which grows with them and moves when it does. Captured
/// graphs point to it: it gets the size of the widest product, 2.4 MB, once.
#[cfg(feature = "cuda")]
fn grow_workspace(device: &candle_core::Device) -> Result<()> {
    use candle_core::cuda_backend::DeviceId;
    use candle_core::quantized::GgmlDType;
    use std::sync::{Mutex, PoisonError};
    static GROWN: Mutex<Vec<DeviceId>> = Mutex::new(Vec::new());
    let candle_core::Device::Cuda(cuda) = device else { return Ok(()) };
    let mut grown = GROWN.lock().unwrap_or_else(PoisonError::into_inner);
    if !grown.contains(&cuda.id()) {
        // Eight rows: the kernels for that many columns of x multiply two rows at a time, and there must be both.
        let wide = |device| Tensor::zeros((8, MAX_GGML_INPUTS), DType::F32, device);
        wide(device)?.apply_op1_no_bwd(&QTensor::quantize(&wide(device)?, GgmlDType::Q8_0)?)?;
        grown.push(cuda.id());
    }
    Ok(())
}
