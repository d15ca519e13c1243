//! Launches of `cuda/gdn_quantized.h`: products with matrices in ggml's types, packed for them.

use crate::abi::quantized::{
    gdn_quantized, gdn_quantized_many, gdn_quantized_pack, gdn_quantized_rows, gdn_quantized_size,
};
use crate::abi::quantized::{PackParams, QuantizedParams, QuantizedPart, RowsParams};
use crate::abi::quantized::{GDN_Q4_K, GDN_Q6_K, GDN_Q8_0, GDN_QUANTIZED_PARTS};
use crate::formats::Tiles;
use candle_core::backend::BackendStorage;
use candle_core::quantized::GgmlDType;
use candle_core::{bail, CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Result, Shape, Storage, Tensor};
use candle_gdn::plumbing::cuda::{alloc, alloc_of, check, dtype_code, int, read, stream_of, write};
use candle_gdn::plumbing::{apply1, Launch};
use candle_gdn::{held, held_u32};
use std::ffi::c_void;

const OP: &str = "quantised matrix";

/// Up to so many rows of x go to `gdn_quantized`, which reads the weights once for 8. In that kernel each row costs time, and with Q4_K the most;
/// in `gdn_quantized_many` all rows together cost what making numbers of the weights does (cuda/quantized/README.md).
pub(crate) const FEW: usize = 8;
const FEW_OF_Q4_K: usize = 6;

/// Up to so many rows go to `gdn_quantized_many`, which reads the weights once for them. For more rows the numbers are stored, once for all.
pub(crate) const MANY: usize = 128;

/// What multiplies: a kernel that reads the packed numbers, or cuBLAS with all of them dequantised.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Few,
    Many,
    Dense,
}

fn way(x: &Tensor, parts: &[&Packed]) -> Result<Way> {
    let f32 = x.dtype() == DType::F32;
    let few = if !f32 && parts.iter().all(|part| part.kind == GDN_Q4_K) { FEW_OF_Q4_K } else { FEW };
    Ok(match x.dim(0)? {
        rows if rows <= few => Way::Few,
        rows if rows <= MANY && !f32 => Way::Many,
        _ => Way::Dense,
    })
}

/// Inputs that leave room for x, and for the weights under way, in the memory of a multiprocessor.
const MOST_INPUTS: usize = 1 << 15;

/// Matrices of a launch, at most.
pub(crate) const PARTS: usize = GDN_QUANTIZED_PARTS;

/// A matrix `[outputs, inputs]` on CUDA, as many bytes as in its file.
#[derive(Debug)]
pub(crate) struct Packed {
    /// u8, in the order that `gdn_quantized_pack` gives them.
    bytes: Tensor,
    kind: i32,
    outputs: usize,
    inputs: usize,
    /// 0, or: the rows are those of gates and ups, so many of each in turn, of which 8 alternate here.
    paired: usize,
}

/// The type, and a multiple of which inputs are packed.
fn kind_of(dtype: GgmlDType) -> Option<(i32, usize)> {
    match dtype {
        GgmlDType::Q8_0 => Some((GDN_Q8_0, 128)),
        GgmlDType::Q4K => Some((GDN_Q4_K, 256)),
        GgmlDType::Q6K => Some((GDN_Q6_K, 256)),
        _ => None,
    }
}

/// Whether a matrix of this type and so many inputs is packed on CUDA.
pub(crate) fn packs(dtype: GgmlDType, inputs: usize) -> bool {
    kind_of(dtype).is_some_and(|(_, multiple)| inputs <= MOST_INPUTS && inputs.is_multiple_of(multiple))
}

impl Packed {
    /// Of the blocks of a file, on `device`; `None` where the kernels do not take them.
    pub(crate) fn new(
        dtype: GgmlDType,
        (outputs, inputs): (usize, usize),
        blocks: &[u8],
        paired: usize,
        device: &Device,
    ) -> Result<Option<Self>> {
        let Some((kind, _)) = kind_of(dtype) else { return Ok(None) };
        if !device.is_cuda() || outputs == 0 || !packs(dtype, inputs) || !paired.is_multiple_of(8) {
            return Ok(None);
        }
        let blocks = Tensor::from_slice(blocks, blocks.len(), device)?;
        let bytes = apply1(&Pack { kind, outputs, inputs, paired }, None, &blocks)?;
        Ok(Some(Self { bytes, kind, outputs, inputs, paired }))
    }

    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }

    pub(crate) fn inputs(&self) -> usize {
        self.inputs
    }

    /// Whether it has this shape, and so many rows of a gate and of up in turn.
    pub(crate) fn is(&self, outputs: usize, inputs: usize, paired: usize) -> bool {
        (self.outputs, self.inputs, self.paired) == (outputs, inputs, paired)
    }

    /// The packed bytes, and their `gdn_quantized_type`.
    pub(crate) fn bytes(&self) -> (&Tensor, i32) {
        (&self.bytes, self.kind)
    }

    /// All numbers, `[outputs, inputs]` in a float dtype, in the order of the file.
    pub(crate) fn dense(&self, dtype: DType) -> Result<Tensor> {
        apply1(&Rows { parts: &[self], ids: None, rows: self.outputs, dtype }, None, &self.bytes)
    }

    /// The rows of these numbers, `ids [n]` in u32, in a float dtype: `[n, inputs]`. One past the last is zeros.
    pub(crate) fn rows(&self, ids: &Tensor, dtype: DType) -> Result<Tensor> {
        let ids = ids.to_dtype(DType::U32)?.contiguous()?;
        let rows = ids.elem_count();
        match rows {
            0 => Tensor::zeros((0, self.inputs), dtype, self.bytes.device()),
            _ => apply1(&Rows { parts: &[self], ids: Some(&ids), rows, dtype }, None, &self.bytes),
        }
    }
}

/// `x [rows, inputs]`, whose pieces are in the weights' order but for `tiles`, times the transpose of all parts: their outputs side by
/// side, in x's dtype. Parts are [`PARTS`] at most.
pub(crate) fn product(x: &Tensor, parts: &[&Packed], tiles: Option<Tiles>, launch: &Launch) -> Result<Tensor> {
    let way = way(x, parts)?;
    let (x, tiles) = match tiles {
        Some(tiles) if way != Way::Few => (tiles.apply(x)?, None),
        _ => (x.clone(), tiles),
    };
    if way != Way::Dense {
        return packed_product(way, &x, parts, tiles, false, launch);
    }
    let rows = parts.iter().map(|part| part.outputs).sum();
    let Some(first) = parts.first() else { bail!("{OP}: expected a part") };
    let dense = apply1(&Rows { parts, ids: None, rows, dtype: x.dtype() }, None, &first.bytes)?;
    x.matmul(&dense.t()?)
}

/// `silu(x gate^T) * (x up^T)`, the weight's rows being those of the gate, then up's; `None` where there are too many rows
/// of x or none.
pub(crate) fn swiglu(x: &Tensor, weight: &Packed, launch: &Launch) -> Result<Option<Tensor>> {
    let way = way(x, &[weight])?;
    let takes = way != Way::Dense && x.dim(0)? > 0 && weight.outputs.is_multiple_of(32);
    takes.then(|| packed_product(way, x, &[weight], None, true, launch)).transpose()
}

fn packed_product(
    way: Way,
    x: &Tensor,
    parts: &[&Packed],
    tiles: Option<Tiles>,
    swiglu: bool,
    launch: &Launch,
) -> Result<Tensor> {
    let (layout, size) = (x.layout(), x.dtype().size_in_bytes());
    let [_, inputs] = *layout.dims() else { bail!("{OP}: x: expected shape [rows, in], got {:?}", layout.dims()) };
    if parts.len() > PARTS || parts.iter().any(|part| part.inputs != inputs) {
        bail!("{OP}: x: expected {:?} inputs, got {inputs}", parts.iter().map(|part| part.inputs).collect::<Vec<_>>())
    }
    let whole = layout.stride()[1] == 1 && ((layout.stride()[0] | layout.start_offset()) * size).is_multiple_of(16);
    let x = if whole { x.clone() } else { x.force_contiguous()? };
    apply1(&Product { way, parts, tiles, swiglu, launch }, launch.arena.as_ref(), &x)
}

struct Product<'a> {
    way: Way,
    parts: &'a [&'a Packed],
    tiles: Option<Tiles>,
    swiglu: bool,
    launch: &'a Launch,
}

impl CustomOp1 for Product<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("{OP}: x: expected a CUDA tensor")
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let Self { way, parts, tiles, swiglu, launch } = self;
        let (rows, inputs) = layout.shape().dims2()?;
        let all: usize = parts.iter().map(|part| part.outputs).sum();
        let width = if *swiglu { all / 2 } else { all };
        let (dtype, size, stream) = (x.dtype(), x.dtype().size_in_bytes(), &*stream_of(x)?);
        let mut out = alloc(launch.arena.as_ref(), x, &[rows, width])?;
        let x = read(x, stream)?;
        let y = write(&mut out, stream)?;
        let guards: Vec<_> = parts.iter().map(|part| part.bytes.storage_and_layout().0).collect();
        let pointers = guards.iter().map(|guard| match &**guard {
            Storage::Cuda(storage) => read(storage, stream),
            _ => bail!("{OP}: expected a CUDA tensor"),
        });
        let pointers = pointers.collect::<Result<Vec<_>>>()?;
        let of = |(part, pointer): (&&Packed, &candle_gdn::plumbing::cuda::Pointer<'_>)| {
            let outputs = int(OP, "outputs", part.outputs)?;
            Ok(QuantizedPart { w: pointer.at::<c_void>(0, 1).cast_const(), r#type: part.kind, outputs })
        };
        let of_parts = parts.iter().zip(&pointers).map(of).collect::<Result<Vec<_>>>()?;
        let params = QuantizedParams {
            x: x.at::<c_void>(layout.start_offset(), size).cast_const(),
            parts: of_parts.as_ptr(),
            y: y.at(0, size),
            x_stride: layout.stride()[0] as i64,
            y_stride: width as i64,
            rows: int(OP, "rows", rows)?,
            num_parts: int(OP, "parts", of_parts.len())?,
            inputs: int(OP, "inputs", inputs)?,
            swiglu: (*swiglu).into(),
            groups: int(OP, "groups", tiles.map_or(0, |tiles| tiles.groups))?,
            per_group: int(OP, "groups", tiles.map_or(0, |tiles| tiles.per_group))?,
            dtype: dtype_code(dtype),
            overlap: launch.overlap.into(),
        };
        // SAFETY: the launcher reads the parameters and the parts; the kernel reads the rows of x and the matrices, whose sizes are
        // those they were packed with, and writes the rows of y; the guards outlive the launch.
        let kernel = if *way == Way::Few { gdn_quantized } else { gdn_quantized_many };
        check(OP, unsafe { kernel(&params, stream.cu_stream().cast::<c_void>()) })?;
        drop(y);
        Ok((out, Shape::from((rows, width))))
    }
}

struct Pack {
    kind: i32,
    outputs: usize,
    inputs: usize,
    paired: usize,
}

impl CustomOp1 for Pack {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("{OP}: expected a CUDA tensor")
    }

    fn cuda_fwd(&self, blocks: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (device, stream) = (blocks.device(), &*stream_of(blocks)?);
        let mut params = PackParams {
            from: std::ptr::null(),
            to: std::ptr::null_mut(),
            r#type: self.kind,
            outputs: int(OP, "outputs", self.outputs)?,
            inputs: int(OP, "inputs", self.inputs)?,
            paired: int(OP, "paired", self.paired)?,
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
    }
}

/// The numbers of all parts, one below the other, or of some rows of one.
struct Rows<'a> {
    parts: &'a [&'a Packed],
    ids: Option<&'a Tensor>,
    rows: usize,
    dtype: DType,
}

impl CustomOp1 for Rows<'_> {
    fn name(&self) -> &'static str {
        "dequantize"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("dequantize: expected a CUDA tensor")
    }

    /// `first` is the storage of the first part.
    fn cuda_fwd(&self, first: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let Self { parts, ids, rows, dtype } = self;
        let inputs = parts.first().map_or(0, |part| part.inputs);
        let stream = &*stream_of(first)?;
        let mut out = alloc_of(first.device(), *dtype, &[*rows, inputs])?;
        let y = write(&mut out, stream)?;
        held_u32!(ids_at, *ids, stream);
        let mut at = 0;
        for part in *parts {
            held!(w, part.bytes, stream);
            let count = if ids.is_some() { *rows } else { part.outputs };
            let params = RowsParams {
                w: w.at::<c_void>(0, 1).cast_const(),
                ids: ids_at,
                y: y.at(at * inputs, dtype.size_in_bytes()),
                y_stride: inputs as i64,
                r#type: part.kind,
                outputs: int(OP, "outputs", part.outputs)?,
                inputs: int(OP, "inputs", inputs)?,
                rows: int(OP, "rows", count)?,
                paired: int(OP, "paired", part.paired)?,
                dtype: dtype_code(*dtype),
            };
            // SAFETY: the launcher reads the parameters; the kernel reads the matrix and the ids and writes so many rows of y; the
            // guards outlive the launch.
            check(OP, unsafe { gdn_quantized_rows(&params, stream.cu_stream().cast::<c_void>()) })?;
            at += count;
        }
        drop(y);
        Ok((out, Shape::from((*rows, inputs))))
    }
}
