//! Checks of arguments, shared by the ops, and the layouts they find. Every refusal names the op, the argument, what was
//! expected and what came.

use crate::cpu;
use crate::device::Working;
use crate::CuSeqlens;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{bail, CpuStorage, CudaDevice, CudaStorage, DType, Device, Layout, Result, Shape, Storage, Tensor};

/// Where the rows of a tensor `[sequence, token, head, dim]` lie, in elements of its storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadsLayout {
    pub offset: usize,
    pub seq_stride: usize,
    pub token_stride: usize,
    pub head_stride: usize,
}

/// The rows in a slice.
pub fn heads<T>(data: &[T], layout: HeadsLayout) -> cpu::Heads<'_, T> {
    cpu::Heads {
        data: &data[layout.offset.min(data.len())..],
        seq_stride: layout.seq_stride,
        token_stride: layout.token_stride,
        head_stride: layout.head_stride,
    }
}

/// An argument of an op as candle gives it on the CPU, and on CUDA.
pub type CpuArg<'a> = (&'a CpuStorage, &'a Layout);
pub type CudaArg<'a> = (&'a CudaStorage, &'a Layout);

/// What an op returns to candle.
pub type CpuOutput = Result<(CpuStorage, Shape)>;
pub type CudaOutput = Result<(CudaStorage, Shape)>;

pub fn storage_dtype(storage: &CpuStorage) -> DType {
    BackendStorage::dtype(storage)
}

/// An argument of an op on whichever device it lies: what the op's one check of a call needs.
#[derive(Clone, Copy)]
pub struct Arg<'a> {
    pub name: &'a str,
    pub dtype: DType,
    pub layout: &'a Layout,
    /// Where the storage lies: equal for tensors that share one.
    storage: usize,
    /// `None` on the CPU.
    device: Option<&'a CudaDevice>,
}

impl<'a> Arg<'a> {
    pub fn cpu(name: &'a str, (storage, layout): (&CpuStorage, &'a Layout)) -> Self {
        let key = std::ptr::from_ref(storage).addr();
        Self { name, dtype: storage_dtype(storage), layout, storage: key, device: None }
    }

    #[cfg(feature = "cuda")]
    pub fn cuda(name: &'a str, (storage, layout): CudaArg<'a>) -> Self {
        let key = std::ptr::from_ref(storage).addr();
        Self { name, dtype: storage.dtype(), layout, storage: key, device: Some(storage.device()) }
    }

    pub fn tensor(name: &'a str, tensor: &'a Tensor) -> Self {
        let device = match tensor.device() {
            Device::Cuda(device) => Some(device),
            _ => None,
        };
        Self { name, dtype: tensor.dtype(), layout: tensor.layout(), storage: storage_key(tensor), device }
    }

    /// Where it lies.
    pub fn device(&self) -> Device {
        self.device.map_or(Device::Cpu, |device| Device::Cuda(device.clone()))
    }

    /// On `device`, and in no storage of a tensor that the op writes in place, given with its name.
    pub fn check_place(&self, op: &str, device: &Device, written: &[(&str, &Tensor)]) -> Result<()> {
        let fits = match (self.device, device) {
            (None, device) => !device.is_cuda(),
            (Some(own), Device::Cuda(device)) => own.same_device(device),
            _ => false,
        };
        if !fits {
            let own = self.device().location();
            bail!("{op}: {}: expected a tensor on {:?}, got one on {own:?}", self.name, device.location());
        }
        for (name, tensor) in written {
            check_not_in(op, self.name, self.storage, name, tensor)?;
        }
        Ok(())
    }
}

/// The dimensions in front of the heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lead {
    /// `[batch]`: one token each.
    Decode,
    /// `[batch, tokens]`
    Batched,
    /// `[tokens]` of all sequences, one after the other.
    Packed,
}

impl Lead {
    /// Of any number of tokens a sequence.
    pub fn of_tokens(cu_seqlens: Option<&CuSeqlens>) -> Self {
        if cu_seqlens.is_some() {
            Lead::Packed
        } else {
            Lead::Batched
        }
    }

    pub fn rank(self) -> usize {
        match self {
            Lead::Decode | Lead::Packed => 1,
            Lead::Batched => 2,
        }
    }

    pub fn names(self) -> &'static str {
        match self {
            Lead::Decode => "batch",
            Lead::Batched => "batch, tokens",
            Lead::Packed => "tokens",
        }
    }

    /// (sequence stride, token stride)
    fn strides(self, stride: &[usize]) -> (usize, usize) {
        match self {
            Lead::Decode => (stride[0], 0),
            Lead::Batched => (stride[0], stride[1]),
            Lead::Packed => (0, stride[0]),
        }
    }
}

/// Layout of `[lead.., heads, dim]`, or of the same with the last two dimensions merged.
pub fn heads_layout(
    op: &str,
    arg: &str,
    layout: &Layout,
    lead: Lead,
    lead_dims: &[usize],
    (heads, dim): (usize, usize),
) -> Result<HeadsLayout> {
    let (dims, stride, r) = (layout.dims(), layout.stride(), lead.rank());
    let fits = dims.len() > r && dims[..r] == *lead_dims && (dims[r..] == [heads, dim] || dims[r..] == [heads * dim]);
    if !fits {
        let split: Vec<_> = lead_dims.iter().copied().chain([heads, dim]).collect();
        let merged: Vec<_> = lead_dims.iter().copied().chain([heads * dim]).collect();
        bail!("{op}: {arg}: expected shape {split:?} or {merged:?}, got {dims:?}");
    }
    let merged = dims.len() == r + 1;
    let last = stride[dims.len() - 1];
    if last != 1 && dims[dims.len() - 1] > 1 {
        bail!("{op}: {arg}: expected a contiguous last dimension, got strides {stride:?}; call contiguous() first");
    }
    let (seq_stride, token_stride) = lead.strides(stride);
    let head_stride = if merged { dim } else { stride[r] };
    Ok(HeadsLayout { offset: layout.start_offset(), seq_stride, token_stride, head_stride })
}

/// Layout of `[lead.., heads]`, one value a head, any strides.
pub fn gate_layout(
    op: &str,
    arg: &str,
    layout: &Layout,
    lead: Lead,
    lead_dims: &[usize],
    heads: usize,
) -> Result<HeadsLayout> {
    let want: Vec<_> = lead_dims.iter().copied().chain([heads]).collect();
    if layout.dims() != want {
        bail!("{op}: {arg}: expected shape {want:?}, got {:?}", layout.dims());
    }
    let (seq_stride, token_stride) = lead.strides(layout.stride());
    let head_stride = layout.stride()[lead.rank()];
    Ok(HeadsLayout { offset: layout.start_offset(), seq_stride, token_stride, head_stride })
}

/// One of the dtypes the kernels read.
pub fn check_float(op: &str, arg: &str, dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::BF16 | DType::F16 => Ok(()),
        _ => bail!("{op}: {arg}: expected dtype f32, bf16 or f16, got {dtype:?}"),
    }
}

pub fn check_dtype(op: &str, arg: &str, dtype: DType, want: DType) -> Result<()> {
    if dtype != want {
        bail!("{op}: {arg}: expected dtype {want:?}, got {dtype:?}");
    }
    Ok(())
}

/// One of the dtypes a recurrent state may be stored in.
pub fn check_state_dtype(op: &str, arg: &str, dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::BF16 => Ok(()),
        _ => bail!("{op}: {arg}: expected dtype f32 or bf16, got {dtype:?}"),
    }
}

/// The op's dtype, or f32: what weights may be kept in.
pub fn check_weight_dtype(op: &str, arg: &str, dtype: DType, io: DType) -> Result<()> {
    match dtype {
        DType::F32 => Ok(()),
        _ if dtype == io => Ok(()),
        _ if io == DType::F32 => check_dtype(op, arg, dtype, io),
        _ => bail!("{op}: {arg}: expected dtype {io:?} or F32, got {dtype:?}"),
    }
}

pub fn check_device(op: &str, arg: &str, tensor: &Tensor, want: &Device) -> Result<()> {
    if !tensor.device().same_device(want) {
        bail!("{op}: {arg}: expected a tensor on {:?}, got one on {:?}", want.location(), tensor.device().location());
    }
    Ok(())
}

pub fn check_shape(op: &str, arg: &str, tensor: &Tensor, want: &[usize]) -> Result<()> {
    if tensor.dims() != want {
        bail!("{op}: {arg}: expected shape {want:?}, got {:?}", tensor.dims());
    }
    Ok(())
}

pub fn check_contiguous(op: &str, arg: &str, tensor: &Tensor) -> Result<()> {
    check_dense(op, arg, tensor.layout(), tensor.dims())
}

/// A contiguous tensor of this shape.
pub fn check_dense(op: &str, arg: &str, layout: &Layout, want: &[usize]) -> Result<()> {
    if layout.dims() != want {
        bail!("{op}: {arg}: expected shape {want:?}, got {:?}", layout.dims());
    }
    if !layout.is_contiguous() {
        bail!("{op}: {arg}: expected a contiguous tensor, got strides {:?}", layout.stride());
    }
    Ok(())
}

/// An op without a backward pass: a gradient that is asked for must not vanish in silence.
pub fn check_untracked(op: &str, arg: &str, tensor: &Tensor) -> Result<()> {
    if tensor.track_op() {
        let instead = trained_by(op).map_or_else(String::new, |other| format!("; to train, use {other}"));
        bail!(
            "{op}: {arg}: expected a tensor without gradients, as there is no backward pass, got one that is a variable or \
             was computed from one{instead}; without training, pass {arg}.detach()"
        );
    }
    Ok(())
}

/// What has gradients and computes the same.
fn trained_by(op: &str) -> Option<&'static str> {
    match op {
        "gdn_prefill" | "gdn_decode" => Some("gdn_gates and gdn_rule_diff"),
        "causal_conv1d" => Some("causal_conv1d_diff"),
        "gdn_step" => Some("causal_conv1d_diff, gdn_gates, gdn_rule_diff and gated_rms_norm"),
        "GatedDeltaNet" => Some("TrainableGatedDeltaNet"),
        "GdnState" => Some("TrainableGatedDeltaNet::forward_with_state with a TrainingState"),
        "DenseWeight" => Some("Projection::new with a candle_nn::Linear"),
        _ => None,
    }
}

/// The gradients of those arguments that are tracked: candle needs these, and adds whatever it is given.
pub fn tracked<const N: usize>(args: [&Tensor; N], gradients: [Tensor; N]) -> [Option<Tensor>; N] {
    let mut args = args.into_iter();
    gradients.map(|gradient| args.next().is_some_and(Tensor::track_op).then_some(gradient))
}

/// Zeros in memory of their own, or an error where there is not enough: candle's sizes wrap, and its memory on the CPU
/// aborts the process.
pub fn zeros(op: &str, arg: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let bytes = shape.iter().try_fold(dtype.size_in_bytes(), |bytes, n| bytes.checked_mul(*n));
    // A program's addresses have 47 bits.
    let Some(bytes) = bytes.filter(|bytes| (*bytes as u64) < 1 << 47) else {
        bail!("{op}: {arg}: expected a size that memory can hold, got shape {shape:?} in {dtype:?}");
    };
    if device.is_cpu() && Vec::<u8>::new().try_reserve_exact(bytes).is_err() {
        bail!("{op}: {arg}: out of memory: shape {shape:?} in {dtype:?} needs {bytes} bytes");
    }
    let _working = Working::new(device);
    if bytes == 0 {
        // CUDA has no empty allocation: an empty view of one element.
        return Tensor::zeros(1, dtype, device)?.narrow(0, 0, 0)?.reshape(shape);
    }
    Tensor::zeros(shape, dtype, device).map_err(|e| e.context(format!("{op}: {arg}: shape {shape:?} in {dtype:?}")))
}

/// A state must be addressable as slot, then one dense block.
pub fn check_state_strides(op: &str, arg: &str, layout: &Layout) -> Result<()> {
    let (dims, stride) = (layout.dims(), layout.stride());
    let mut dense = 1;
    for i in (1..dims.len()).rev() {
        if stride[i] != dense && dims[i] > 1 {
            bail!("{op}: {arg}: expected every slot to be contiguous, got strides {stride:?}");
        }
        dense *= dims[i];
    }
    // A single slot may carry any stride.
    if dims[0] > 1 && stride[0] < dense {
        bail!("{op}: {arg}: expected slots that do not overlap, got strides {stride:?}");
    }
    Ok(())
}

/// Where the storage of a tensor lies in memory: equal for tensors that share one. No lock is held after.
pub fn storage_key(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(s) => std::ptr::from_ref(s).addr(),
        Storage::Cuda(s) => std::ptr::from_ref(s).addr(),
        Storage::Metal(s) => std::ptr::from_ref(s).addr(),
    }
}

/// What is written in place is read by no other argument: no argument may share the storage of `tensor`.
pub fn check_not_in(op: &str, arg: &str, key: usize, name: &str, tensor: &Tensor) -> Result<()> {
    if key == storage_key(tensor) {
        bail!("{op}: {arg}: shares its storage with {name}, which is written in place; pass a copy");
    }
    Ok(())
}

/// The same of the argument `written`, whose storage is `storage`, where it is the one to blame.
pub fn check_not_written(op: &str, (arg, key): (&str, usize), (written, storage): (&str, usize)) -> Result<()> {
    if key == storage {
        bail!("{op}: {written}: shares its storage with {arg}; it is written in place: pass a tensor of its own");
    }
    Ok(())
}

/// A view whose last dimension is contiguous: the tensor itself wherever possible.
pub fn dense_rows(tensor: &Tensor) -> Result<Tensor> {
    match tensor.stride().last() {
        Some(1) | None => Ok(tensor.clone()),
        Some(_) if tensor.dims().last() == Some(&1) => Ok(tensor.clone()),
        Some(_) => tensor.contiguous(),
    }
}

/// The stride with which the leading dimensions count through as one, if there is such a stride.
pub fn token_stride(dims: &[usize], stride: &[usize]) -> Option<usize> {
    let mut counted: Option<(usize, usize)> = None; // (innermost stride, tokens so far)
    for (&dim, &stride) in dims.iter().zip(stride).rev() {
        match counted {
            _ if dim == 1 => {}
            None => counted = Some((stride, dim)),
            Some((inner, tokens)) if stride == inner * tokens => counted = Some((inner, tokens * dim)),
            Some(_) => return None,
        }
    }
    Some(counted.map_or(0, |(inner, _)| inner))
}

/// The tensor itself where its rows are dense and its `lead` first dimensions count through, otherwise a copy.
pub fn uniform_tokens(tensor: &Tensor, lead: usize) -> Result<Tensor> {
    let tensor = dense_rows(tensor)?;
    let lead = lead.min(tensor.rank());
    if token_stride(&tensor.dims()[..lead], &tensor.stride()[..lead]).is_some() {
        Ok(tensor)
    } else {
        tensor.contiguous()
    }
}

#[cfg(test)]
mod tests {
    use super::token_stride;

    #[test]
    fn leading_dimensions_that_count_through() {
        assert_eq!(token_stride(&[2, 5], &[50, 10]), Some(10));
        assert_eq!(token_stride(&[2, 5], &[60, 10]), None);
        assert_eq!(token_stride(&[1, 5], &[7, 10]), Some(10));
        assert_eq!(token_stride(&[3, 1], &[20, 9]), Some(20));
        assert_eq!(token_stride(&[], &[]), Some(0));
    }
}
