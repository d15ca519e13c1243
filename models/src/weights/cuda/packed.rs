//! Launches of `cuda/gdn_quantized.h`: products with matrices in ggml's types, packed for them.

use crate::abi::quantized::{
    gdn_quantized, gdn_quantized_many, gdn_quantized_pack, gdn_quantized_rows, gdn_quantized_size,
};
use crate::abi::quantized::{PackParams, QuantizedParams, QuantizedPart, RowsParams};
use crate::abi::quantized::{GDN_Q4_K, GDN_Q6_K, GDN_Q8_0, GDN_QUANTIZED_PARTS};
use crate::cuda::apply;
use crate::weights::plan::{self, Kernel};
use crate::weights::Tiles;
use candle_core::backend::BackendStorage;
use candle_core::quantized::GgmlDType;
use candle_core::{bail, CudaStorage, DType, Device, Result, Shape, Storage, Tensor};
use candle_gdn_core::check::zeros;
use candle_gdn_core::device::cuda::{alloc, alloc_of, check, dtype_code, int, read, stream_of, write, Pointer};
use candle_gdn_core::{held, held_u32, Launch};
use std::ffi::c_void;

const OP: &str = "quantised matrix";

/// Matrices of a launch, at most.
pub(crate) const MAX_MATRICES: usize = GDN_QUANTIZED_PARTS;

/// A matrix `[outputs, inputs]` on CUDA, as many bytes as in its file.
#[derive(Debug)]
pub(crate) struct Packed {
    /// u8, in the order that `gdn_quantized_pack` gives them.
    pub bytes: Tensor,
    /// `gdn_quantized_type`
    pub kind: i32,
    pub outputs: usize,
    pub inputs: usize,
    /// 0, or the rows of a gate and of an up, which follow each other in the file and alternate 8 by 8 here.
    paired: usize,
}

/// The type, a multiple of which inputs are packed, and the most inputs. These leave room for a row of x and for the weights under way in
/// the 99 KB of shared memory that every supported card has.
fn kind_of(dtype: GgmlDType) -> Option<(i32, usize, usize)> {
    match dtype {
        GgmlDType::Q8_0 => Some((GDN_Q8_0, 128, 26 << 10)),
        GgmlDType::Q4K => Some((GDN_Q4_K, 256, 26 << 10)),
        GgmlDType::Q6K => Some((GDN_Q6_K, 256, 18 << 10)),
        _ => None,
    }
}

/// Whether a matrix of this type and so many inputs is packed on CUDA.
pub(crate) fn packs(dtype: GgmlDType, inputs: usize) -> bool {
    kind_of(dtype).is_some_and(|(_, multiple, most)| inputs <= most && inputs.is_multiple_of(multiple))
}

impl Packed {
    /// Packs the blocks of a file on `device`; `None` where the kernels do not support them.
    pub(crate) fn new(
        dtype: GgmlDType,
        (outputs, inputs): (usize, usize),
        blocks: &[u8],
        paired: usize,
        device: &Device,
    ) -> Result<Option<Self>> {
        let Some((kind, ..)) = kind_of(dtype) else { return Ok(None) };
        if !device.is_cuda() || outputs == 0 || !packs(dtype, inputs) || !paired.is_multiple_of(8) {
            return Ok(None);
        }
        let blocks = Tensor::from_slice(blocks, blocks.len(), device)?;
        let bytes = pack(&blocks, kind, (outputs, inputs), paired)?;
        Ok(Some(Self { bytes, kind, outputs, inputs, paired }))
    }

    /// Whether it has this shape, and so many rows of a gate and of up in turn.
    pub(crate) fn is(&self, outputs: usize, inputs: usize, paired: usize) -> bool {
        (self.outputs, self.inputs, self.paired) == (outputs, inputs, paired)
    }

    /// All numbers, `[outputs, inputs]` in a float dtype, in the order of the file.
    pub(crate) fn dense(&self, dtype: DType) -> Result<Tensor> {
        rows_of(&[self], None, self.outputs, dtype)
    }

    /// The rows of these numbers, `ids [n]` in u32, in a float dtype: `[n, inputs]`. One past the last is zeros.
    pub(crate) fn rows(&self, ids: &Tensor, dtype: DType) -> Result<Tensor> {
        let rows = ids.elem_count();
        if rows == 0 {
            return zeros("Packed", "rows", &[0, self.inputs], dtype, self.bytes.device());
        }
        rows_of(&[self], Some(&ids.to_dtype(DType::U32)?.contiguous()?), rows, dtype)
    }
}

/// `x [rows, inputs]` times the transpose of all weights, whose columns are in the order of `tiles`: their outputs side by side,
/// in x's dtype. Weights are [`MAX_MATRICES`] at most.
pub(crate) fn product(x: &Tensor, weights: &[&Packed], tiles: Option<Tiles>, launch: &Launch) -> Result<Tensor> {
    let kernel = kernel(x, weights)?;
    let (x, tiles) = match tiles {
        Some(tiles) if kernel != Kernel::Few => (tiles.apply(x)?, None),
        _ => (x.clone(), tiles),
    };
    if kernel != Kernel::Dequantised {
        return as_packed(kernel, &x, weights, tiles, false, launch);
    }
    let rows = weights.iter().map(|weight| weight.outputs).sum();
    x.matmul(&rows_of(weights, None, rows, x.dtype())?.t()?)
}

/// `silu(x gate^T) * (x up^T)`, the weight's rows being those of the gate, then up's; `None` where there are too many rows
/// of x or none.
pub(crate) fn swiglu(x: &Tensor, weight: &Packed, launch: &Launch) -> Result<Option<Tensor>> {
    let kernel = kernel(x, &[weight])?;
    let supported = kernel != Kernel::Dequantised && x.dim(0)? > 0 && weight.outputs.is_multiple_of(32);
    supported.then(|| as_packed(kernel, x, &[weight], None, true, launch)).transpose()
}

fn kernel(x: &Tensor, weights: &[&Packed]) -> Result<Kernel> {
    Ok(plan::packed(x.dim(0)?, x.dtype(), weights.iter().all(|weight| weight.kind == GDN_Q4_K)))
}

fn as_packed(
    kernel: Kernel,
    x: &Tensor,
    weights: &[&Packed],
    tiles: Option<Tiles>,
    swiglu: bool,
    launch: &Launch,
) -> Result<Tensor> {
    let (layout, size) = (x.layout(), x.dtype().size_in_bytes());
    let [_, inputs] = *layout.dims() else { bail!("{OP}: x: expected shape [rows, in], got {:?}", layout.dims()) };
    if weights.len() > MAX_MATRICES || weights.iter().any(|weight| weight.inputs != inputs) {
        let widths = weights.iter().map(|weight| weight.inputs).collect::<Vec<_>>();
        bail!("{OP}: x: expected {widths:?} inputs of at most {MAX_MATRICES} weights, got {inputs}")
    }
    let aligned = layout.stride()[1] == 1 && ((layout.stride()[0] | layout.start_offset()) * size).is_multiple_of(16);
    let x = if aligned { x.clone() } else { x.force_contiguous()? };
    apply(OP, launch.arena.as_ref(), &x, |x, layout| {
        let (rows, inputs) = layout.shape().dims2()?;
        let all: usize = weights.iter().map(|weight| weight.outputs).sum();
        let width = if swiglu { all / 2 } else { all };
        let (dtype, size, stream) = (x.dtype(), x.dtype().size_in_bytes(), &*stream_of(x)?);
        let mut out = alloc(launch.arena.as_ref(), x, &[rows, width])?;
        let x = read(x, stream)?;
        let y = write(&mut out, stream)?;
        let guards: Vec<_> = weights.iter().map(|weight| weight.bytes.storage_and_layout().0).collect();
        let pointers = guards.iter().map(|guard| match &**guard {
            Storage::Cuda(storage) => read(storage, stream),
            _ => bail!("{OP}: expected a CUDA tensor"),
        });
        let pointers = pointers.collect::<Result<Vec<_>>>()?;
        let matrix = |(weight, pointer): (&&Packed, &Pointer<'_>)| {
            let outputs = int(OP, "outputs", weight.outputs)?;
            Ok(QuantizedPart { w: pointer.at::<c_void>(0, 1).cast_const(), r#type: weight.kind, outputs })
        };
        let matrices = weights.iter().zip(&pointers).map(matrix).collect::<Result<Vec<_>>>()?;
        let params = QuantizedParams {
            x: x.at::<c_void>(layout.start_offset(), size).cast_const(),
            parts: matrices.as_ptr(),
            y: y.at(0, size),
            x_stride: layout.stride()[0] as i64,
            y_stride: width as i64,
            rows: int(OP, "rows", rows)?,
            num_parts: int(OP, "weights", matrices.len())?,
            inputs: int(OP, "inputs", inputs)?,
            swiglu: swiglu.into(),
            groups: int(OP, "groups", tiles.map_or(0, |tiles| tiles.groups))?,
            per_group: int(OP, "groups", tiles.map_or(0, |tiles| tiles.per_group))?,
            dtype: dtype_code(dtype),
            overlap: launch.overlap.into(),
        };
        // SAFETY: the launcher reads the parameters and the parts; the kernel reads the rows of x and the matrices, whose sizes are
        // those they were packed with, and writes the rows of y; the guards outlive the launch.
        let launcher = if kernel == Kernel::Few { gdn_quantized } else { gdn_quantized_many };
        check(OP, unsafe { launcher(&params, stream.cu_stream().cast::<c_void>()) })?;
        drop(y);
        Ok((out, Shape::from((rows, width))))
    })
}

fn pack(blocks: &Tensor, kind: i32, (outputs, inputs): (usize, usize), paired: usize) -> Result<Tensor> {
    apply(OP, None, blocks, |blocks, layout| {
        let (device, stream) = (blocks.device(), &*stream_of(blocks)?);
        let mut params = PackParams {
            from: std::ptr::null(),
            to: std::ptr::null_mut(),
            r#type: kind,
            outputs: int(OP, "outputs", outputs)?,
            inputs: int(OP, "inputs", inputs)?,
            paired: int(OP, "paired", paired)?,
        };
        let mut bytes = 0;
        // SAFETY: the launcher reads the parameters and writes the one number.
        check(OP, unsafe { gdn_quantized_size(&params, &mut bytes) })?;
        let bytes = usize::try_from(bytes).unwrap_or(0);
        // SAFETY: the kernel writes every byte.
        let mut out = CudaStorage::wrap_cuda_slice(unsafe { device.alloc::<u8>(bytes)? }, device.clone());
        let (from, to) = (read(blocks, stream)?, write(&mut out, stream)?);
        params.from = from.at::<c_void>(layout.start_offset(), 1).cast_const();
        params.to = to.at(0, 1);
        // SAFETY: `from` has the blocks of so many rows, `to` as many bytes as the launcher said.
        check(OP, unsafe { gdn_quantized_pack(&params, stream.cu_stream().cast::<c_void>()) })?;
        drop(to);
        Ok((out, Shape::from(bytes)))
    })
}

/// The numbers of all weights, one below the other, or those of the rows `ids` of one: `[rows, inputs]`.
fn rows_of(weights: &[&Packed], ids: Option<&Tensor>, rows: usize, dtype: DType) -> Result<Tensor> {
    let Some(first) = weights.first() else { bail!("{OP}: expected a weight") };
    apply("dequantize", None, &first.bytes, |storage, _| {
        let (inputs, stream) = (first.inputs, &*stream_of(storage)?);
        let mut out = alloc_of(storage.device(), dtype, &[rows, inputs])?;
        let y = write(&mut out, stream)?;
        held_u32!(ids_at, ids, stream);
        let mut done = 0;
        for weight in weights {
            held!(w, weight.bytes, stream);
            let count = if ids.is_some() { rows } else { weight.outputs };
            let params = RowsParams {
                w: w.at::<c_void>(0, 1).cast_const(),
                ids: ids_at,
                y: y.at(done * inputs, dtype.size_in_bytes()),
                y_stride: inputs as i64,
                r#type: weight.kind,
                outputs: int(OP, "outputs", weight.outputs)?,
                inputs: int(OP, "inputs", inputs)?,
                rows: int(OP, "rows", count)?,
                paired: int(OP, "paired", weight.paired)?,
                dtype: dtype_code(dtype),
            };
            // SAFETY: the launcher reads the parameters; the kernel reads the matrix and the ids and writes so many rows of y; the
            // guards outlive the launch.
            check(OP, unsafe { gdn_quantized_rows(&params, stream.cu_stream().cast::<c_void>()) })?;
            done += count;
        }
        drop(y);
        Ok((out, Shape::from((rows, inputs))))
    })
}
