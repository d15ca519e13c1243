//! The Rust side of `cuda/gdn.h`: candle storages in, parameter structs out, statuses into errors.
//!
//! Pointers are taken through cudarc's guards, so that its stream events hold; they are released after the launch.
//! No launch allocates anything but its output and, for the rule, the workspace that its kernel asks for.

pub(crate) mod attention;
mod ffi;
pub(crate) mod linear;
pub(crate) mod model;
pub(crate) mod moe;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
pub(crate) mod outputs;
#[cfg(feature = "profile")]
pub(crate) mod profile;
pub(crate) mod step;
#[cfg(test)]
pub(crate) mod testing;

use crate::ops::{Algo, ConvPlan, Gates, HeadsLayout, NormPlan, RulePlan, SequencePlan, Slots};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{self, CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use candle_core::{bail, CudaStorage, DType, InplaceOp1, Layout, Result, Storage, Tensor};
use half::{bf16, f16};
use std::cell::RefCell;
use std::ffi::{c_int, c_void, CStr};
use std::sync::Arc;

/// A device address and the guard that orders its use on the stream.
struct Pointer<'a> {
    address: u64,
    _order: SyncOnDrop<'a>,
}

impl Pointer<'_> {
    /// The address of element `offset`, of `size` bytes each.
    fn at<T>(&self, offset: usize, size: usize) -> *mut T {
        (self.address + (offset * size) as u64) as *mut T
    }
}

/// `$body` with `$slice` bound to the storage's typed slice.
macro_rules! with_slice {
    ($storage:expr, $method:ident, $slice:ident => $body:expr) => {
        match $storage.dtype() {
            DType::F32 => {
                let $slice = $storage.$method::<f32>()?;
                $body
            }
            DType::BF16 => {
                let $slice = $storage.$method::<bf16>()?;
                $body
            }
            DType::F16 => {
                let $slice = $storage.$method::<f16>()?;
                $body
            }
            DType::U32 => {
                let $slice = $storage.$method::<u32>()?;
                $body
            }
            dtype => bail!("candle-gdn: no CUDA kernel takes dtype {dtype:?}"),
        }
    };
}

fn read<'a>(storage: &'a CudaStorage, stream: &'a CudaStream) -> Result<Pointer<'a>> {
    with_slice!(storage, as_cuda_slice, slice => {
        let (address, order) = slice.device_ptr(stream);
        Ok(Pointer { address, _order: order })
    })
}

fn write<'a>(storage: &'a mut CudaStorage, stream: &'a CudaStream) -> Result<Pointer<'a>> {
    with_slice!(storage, as_cuda_slice_mut, slice => {
        let (address, order) = slice.device_ptr_mut(stream);
        Ok(Pointer { address, _order: order })
    })
}

/// The same for a tensor that there may be, with where it lies.
fn write_if_any<'a>(to: Option<Written<'a>>, stream: &'a CudaStream) -> Result<Option<(Pointer<'a>, &'a Layout)>> {
    to.map(|(storage, layout)| Ok((write(storage, stream)?, layout))).transpose()
}

/// An output of which every element will be written. At least one element, since CUDA allocates no empty block.
fn alloc(like: &CudaStorage, shape: &[usize]) -> Result<CudaStorage> {
    let (device, n) = (like.device(), shape.iter().product::<usize>().max(1));
    // SAFETY: the kernels write every element of the shape.
    Ok(unsafe {
        match like.dtype() {
            DType::F32 => CudaStorage::wrap_cuda_slice(device.alloc::<f32>(n)?, device.clone()),
            DType::BF16 => CudaStorage::wrap_cuda_slice(device.alloc::<bf16>(n)?, device.clone()),
            DType::F16 => CudaStorage::wrap_cuda_slice(device.alloc::<f16>(n)?, device.clone()),
            dtype => bail!("candle-gdn: no CUDA kernel writes dtype {dtype:?}"),
        }
    })
}

fn dtype_code(dtype: DType) -> i32 {
    match dtype {
        DType::BF16 => 1,
        DType::F16 => 2,
        _ => 0,
    }
}

fn heads(pointer: &Pointer<'_>, layout: HeadsLayout, dtype: DType) -> ffi::Heads {
    ffi::Heads {
        ptr: pointer.at(layout.offset, dtype.size_in_bytes()),
        seq_stride: layout.seq_stride as i64,
        token_stride: layout.token_stride as i64,
        head_stride: layout.head_stride as i64,
    }
}

/// A contiguous output `[tokens, heads, dim]`; `tokens` per sequence is zero where they are packed.
fn dense(pointer: &Pointer<'_>, tokens: usize, heads: usize, dim: usize) -> ffi::Heads {
    let row = (heads * dim) as i64;
    ffi::Heads { ptr: pointer.at(0, 0), seq_stride: tokens as i64 * row, token_stride: row, head_stride: dim as i64 }
}

/// The sequences of a launch, and the slots that it reads and those that it writes: of one state, whose layout is
/// `state`.
fn addressing(
    op: &str,
    seqs: &SequencePlan,
    cu_seqlens: *const u32,
    (read, write): (*const u32, *const u32),
    state: &Layout,
) -> Result<(ffi::Sequences, ffi::Slots, ffi::Slots)> {
    let sequences = ffi::Sequences {
        cu_seqlens,
        num_seqs: int(op, "sequences", seqs.count)?,
        tokens_per_seq: int(op, "tokens", seqs.tokens)?,
        max_tokens_per_seq: int(op, "tokens", seqs.max_tokens)?,
        total_tokens: int(op, "tokens of all sequences", seqs.total_tokens)?,
    };
    let (num_slots, slot_stride) = (seqs.num_slots as i64, state.stride()[0] as i64);
    let of = |slots| ffi::Slots { slots, num_slots, slot_stride };
    Ok((sequences, of(read), of(write)))
}

fn int(op: &str, arg: &str, value: usize) -> Result<i32> {
    i32::try_from(value).or_else(|_| bail!("{op}: {arg}: expected at most {} on CUDA, got {value}", i32::MAX))
}

fn check(op: &str, status: c_int) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the function returns a static string for every status.
    let why = unsafe { CStr::from_ptr(ffi::gdn_status_string(status)) };
    bail!("{op}: CUDA kernel refused with status {status}: {}", why.to_string_lossy())
}

/// The stream of a storage, with its context current on this thread for the launcher's runtime calls.
fn stream_of(storage: &CudaStorage) -> Result<Arc<CudaStream>> {
    let stream = storage.device().cuda_stream();
    stream.context().bind_to_thread().map_err(candle_core::Error::wrap)?;
    Ok(stream)
}

/// `$name`: a pointer to a tensor that the op holds. Its guards live to the end of the enclosing block.
macro_rules! held {
    ($name:ident, $tensor:expr, $stream:expr) => {
        let (guard, _) = $tensor.storage_and_layout();
        let Storage::Cuda(storage) = &*guard else { bail!("{}: expected a CUDA tensor", stringify!($name)) };
        let $name = read(storage, $stream)?;
    };
}

/// `$name`: a pointer to an optional tensor.
macro_rules! held_or_none {
    ($name:ident, $tensor:expr, $stream:expr) => {
        let guard = $tensor.map(|t| t.storage_and_layout().0);
        let $name = match guard.as_deref() {
            Some(Storage::Cuda(storage)) => Some(read(storage, $stream)?),
            Some(_) => bail!("{}: expected a CUDA tensor", stringify!($name)),
            None => None,
        };
    };
}

/// `$name`: a pointer to an optional u32 tensor, null where there is none.
macro_rules! held_u32 {
    ($name:ident, $tensor:expr, $stream:expr) => {
        let offset = $tensor.map_or(0, |t| t.layout().start_offset());
        held_or_none!($name, $tensor, $stream);
        let $name = $name.as_ref().map_or(std::ptr::null(), |p| p.at::<u32>(offset, 4).cast_const());
    };
}

/// `$name`: pointers to the slots read and written, which are u32; null where there are none.
macro_rules! held_slots {
    ($name:ident, $slots:expr, $stream:expr) => {
        let slots: Option<&Slots> = $slots;
        // One tensor that is both is locked once.
        let separate = slots.filter(|slots| !slots.in_place());
        held_u32!(slots_read, slots.map(Slots::read), $stream);
        held_u32!(slots_write, separate.map(Slots::write), $stream);
        let $name = (slots_read, if separate.is_some() { slots_write } else { slots_read });
    };
}

use {held, held_or_none, held_slots, held_u32};

/// What the rule needs besides its plan.
pub(crate) struct RuleArgs<'a> {
    pub name: &'static str,
    pub plan: &'a RulePlan,
    pub q: &'a CudaStorage,
    pub k: &'a CudaStorage,
    pub v: &'a CudaStorage,
    pub gates: &'a Gates,
    pub slots: Option<&'a Slots>,
    pub cu_seqlens: Option<&'a Tensor>,
    pub token_states: Option<&'a Tensor>,
    pub checkpoints: Option<&'a Tensor>,
    /// Tokens from one checkpoint to the next.
    pub checkpoint_tokens: usize,
}

/// A tensor under its write lock.
type Written<'a> = (&'a mut CudaStorage, &'a Layout);

/// Where copies of the state go.
struct Copies<'a> {
    token_states: Option<(&'a Pointer<'a>, &'a Layout)>,
    checkpoints: Option<(&'a Pointer<'a>, &'a Layout)>,
}

/// Runs the rule with `state` updated in place and returns o.
pub(crate) fn rule(args: &RuleArgs<'_>, state: &Tensor) -> Result<CudaStorage> {
    let name = args.name;
    in_place(name, state, |state, layout| {
        in_place_if_any(name, args.token_states, |token_states| {
            in_place_if_any(name, args.checkpoints, |to| launch_rule(args, (state, layout), token_states, to))
        })
    })
}

fn launch_rule(
    args: &RuleArgs<'_>,
    (state, layout): Written<'_>,
    token_states: Option<Written<'_>>,
    checkpoints: Option<Written<'_>>,
) -> Result<CudaStorage> {
    let stream = &*stream_of(args.q)?;
    let mut out = alloc(args.q, &args.plan.out_shape)?;
    let o = write(&mut out, stream)?;
    let state_dtype = state.dtype();
    let state = write(state, stream)?;
    let token_states = write_if_any(token_states, stream)?;
    let checkpoints = write_if_any(checkpoints, stream)?;
    let copies = Copies {
        token_states: token_states.as_ref().map(|(p, layout)| (p, *layout)),
        checkpoints: checkpoints.as_ref().map(|(p, layout)| (p, *layout)),
    };
    with_rule_params(args, stream, &o, (&state, layout, state_dtype), copies, |params| {
        // SAFETY: the launcher reads the parameters and writes the one number.
        check(args.name, unsafe { ffi::gdn_rule_workspace(params, &mut params.workspace_bytes) })?;
        let mut workspace = match usize::try_from(params.workspace_bytes) {
            // SAFETY: the kernels read nothing there that they have not written.
            Ok(bytes) if bytes > 0 => Some(unsafe { args.q.device().alloc::<u8>(bytes)? }),
            _ => None,
        };
        let pointer = workspace.as_mut().map(|slice| slice.device_ptr_mut(stream));
        params.workspace = pointer.as_ref().map_or(std::ptr::null_mut(), |(address, _)| *address as *mut c_void);
        // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch. The workspace is freed
        // on this stream, behind the launch.
        check(args.name, unsafe { ffi::gdn_rule(params, stream.cu_stream().cast::<c_void>()) })
    })?;
    drop((o, state, token_states, checkpoints));
    Ok(out)
}

/// The kernel that [`rule`] would run.
pub(crate) fn rule_choice(args: &RuleArgs<'_>, state: &Tensor) -> Result<Algo> {
    let stream = &*stream_of(args.q)?;
    held!(pointer, state, stream);
    let (mut algo, nowhere) = (0, read(args.q, stream)?); // no kernel is chosen by where o lies
    let state = (&pointer, state.layout(), state.dtype());
    held_or_none!(token_states, args.token_states, stream);
    held_or_none!(checkpoints, args.checkpoints, stream);
    let copies = Copies {
        token_states: token_states.as_ref().zip(args.token_states).map(|(p, t)| (p, t.layout())),
        checkpoints: checkpoints.as_ref().zip(args.checkpoints).map(|(p, t)| (p, t.layout())),
    };
    with_rule_params(args, stream, &nowhere, state, copies, |params| {
        // SAFETY: the launcher reads the parameters and writes the one number.
        check(args.name, unsafe { ffi::gdn_rule_choice(params, &mut algo) })
    })?;
    match ALGOS.iter().find(|(_, code)| *code == algo) {
        Some((algo, _)) => Ok(*algo),
        None => bail!("{}: the kernels chose an unknown algorithm, {algo}", args.name),
    }
}

/// `gdn_algo`
const ALGOS: [(Algo, i32); 7] = [
    (Algo::Auto, 0),
    (Algo::Recurrent, 1),
    (Algo::Recurrent128, 2),
    (Algo::Chunked, 3),
    (Algo::Decode128, 4),
    (Algo::ChunkedSm80, 5),
    (Algo::ChunkedSm90, 6),
];

fn algo_code(algo: Algo) -> i32 {
    ALGOS.iter().find(|(a, _)| *a == algo).map_or(-1, |(_, code)| *code) // -1 is refused by the launcher
}

/// `f` with the parameter struct, whose pointers live as long as `f` runs.
fn with_rule_params<R>(
    args: &RuleArgs<'_>,
    stream: &CudaStream,
    o: &Pointer<'_>,
    (state, layout, state_dtype): (&Pointer<'_>, &Layout, DType),
    copies: Copies<'_>,
    f: impl FnOnce(&mut ffi::RuleParams) -> Result<R>,
) -> Result<R> {
    let RuleArgs { name, plan, q, k, v, gates, slots, cu_seqlens, .. } = *args;
    let (dims, dtype, gate_dtype) = (plan.dims, q.dtype(), gates.a.dtype());
    let (q, k, v) = (read(q, stream)?, read(k, stream)?, read(v, stream)?);
    held!(a, gates.a, stream);
    held!(b, gates.b, stream);
    held!(a_log, gates.a_log, stream);
    held!(dt_bias, gates.dt_bias, stream);
    held_slots!(slots, slots, stream);
    held_u32!(cu_seqlens, cu_seqlens, stream);
    let state_size = state_dtype.size_in_bytes();
    let state_ptr: *mut c_void = state.at(layout.start_offset(), state_size);
    let copy = |to: Option<(&Pointer<'_>, &Layout)>| -> *mut c_void {
        to.map_or(std::ptr::null_mut(), |(p, layout)| p.at(layout.start_offset(), state_size))
    };
    let (seqs, in_slots, out_slots) = addressing(name, &plan.seqs, cu_seqlens, slots, layout)?;
    f(&mut ffi::RuleParams {
        q: heads(&q, plan.q, dtype),
        k: heads(&k, plan.k, dtype),
        v: heads(&v, plan.v, dtype),
        a: heads(&a, plan.a, gate_dtype),
        b: heads(&b, plan.b, gate_dtype),
        a_log: a_log.at(gates.a_log.layout().start_offset(), 4),
        dt_bias: dt_bias.at(gates.dt_bias.layout().start_offset(), 4),
        o: dense(o, plan.seqs.tokens, dims.value_heads, dims.value_dim),
        state_in: state_ptr,
        state_out: state_ptr,
        token_states: copy(copies.token_states),
        checkpoints: copy(copies.checkpoints),
        workspace: std::ptr::null_mut(),
        workspace_bytes: 0,
        in_slots,
        out_slots,
        seqs,
        num_k_heads: int(name, "key heads", dims.key_heads)?,
        num_v_heads: int(name, "value heads", dims.value_heads)?,
        head_k: dims.key_dim as i32,
        head_v: dims.value_dim as i32,
        io_dtype: dtype_code(dtype),
        gate_dtype: dtype_code(gate_dtype),
        state_dtype: dtype_code(state_dtype),
        l2norm: plan.options.l2norm.into(),
        algo: algo_code(plan.options.algo),
        checkpoint_tokens: int(name, "every", args.checkpoint_tokens)?,
        segments: int(name, "segments", plan.options.segments)?,
        l2_eps: plan.options.l2_eps as f32,
        scale: plan.scale as f32,
        beta_scale: plan.options.beta_scale as f32,
    })
}

/// Runs the causal convolution with `state` updated in place and returns y.
pub(crate) fn conv(
    plan: &ConvPlan,
    x: &CudaStorage,
    weight: &CudaStorage,
    state: &Tensor,
    slots: Option<&Slots>,
    cu_seqlens: Option<&Tensor>,
    silu: bool,
) -> Result<CudaStorage> {
    let name = "causal_conv1d";
    in_place(name, state, |state, layout| {
        let (dtype, weight_dtype) = (x.dtype(), weight.dtype());
        let stream = &*stream_of(x)?;
        let mut out = alloc(x, &plan.out_shape)?;

        let (x, weight) = (read(x, stream)?, read(weight, stream)?);
        held_slots!(slots, slots, stream);
        held_u32!(cu_seqlens, cu_seqlens, stream);
        let y = write(&mut out, stream)?;
        let state = write(state, stream)?;
        let state_ptr: *mut c_void = state.at(layout.start_offset(), dtype.size_in_bytes());
        let (seqs, in_slots, out_slots) = addressing(name, &plan.seqs, cu_seqlens, slots, layout)?;
        let params = ffi::ConvParams {
            x: heads(&x, plan.x, dtype),
            y: dense(&y, plan.seqs.tokens, 1, plan.channels),
            weight: weight.at(plan.weight_offset, weight_dtype.size_in_bytes()),
            state_in: state_ptr,
            state_out: state_ptr,
            in_slots,
            out_slots,
            seqs,
            channels: int(name, "channels", plan.channels)?,
            width: plan.width as i32,
            io_dtype: dtype_code(dtype),
            weight_dtype: dtype_code(weight_dtype),
            silu: silu.into(),
        };
        // SAFETY: as in `launch_rule`.
        check(name, unsafe { ffi::gdn_conv(&params, stream.cu_stream().cast::<c_void>()) })?;
        drop((y, state));
        Ok(out)
    })
}

/// Runs the gated norm.
pub(crate) fn norm(
    plan: &NormPlan,
    x: &CudaStorage,
    z: &CudaStorage,
    weight: &CudaStorage,
    eps: f64,
    sigmoid: bool,
) -> Result<CudaStorage> {
    let (name, dtype, weight_dtype) = ("gated_rms_norm", x.dtype(), weight.dtype());
    let stream = &*stream_of(x)?;
    let mut out = alloc(x, &plan.out_shape)?;
    let (x, z, weight) = (read(x, stream)?, read(z, stream)?, read(weight, stream)?);
    let to = write(&mut out, stream)?;
    let params = ffi::NormParams {
        x: heads(&x, plan.x, dtype),
        z: heads(&z, plan.z, dtype),
        out: dense(&to, 0, plan.heads, plan.dim),
        weight: weight.at(plan.weight_offset, weight_dtype.size_in_bytes()),
        tokens: plan.tokens as i64,
        heads: int(name, "heads", plan.heads)?,
        head_v: plan.dim as i32,
        io_dtype: dtype_code(dtype),
        weight_dtype: dtype_code(weight_dtype),
        sigmoid: sigmoid.into(),
        eps: eps as f32,
    };
    // SAFETY: as in `launch_rule`.
    check(name, unsafe { ffi::gdn_norm(&params, stream.cu_stream().cast::<c_void>()) })?;
    drop(to);
    Ok(out)
}

/// Copies slot `from` of a state over slot `to`, another one of the same storage.
pub(crate) fn copy_slot(storage: &mut CudaStorage, layout: &Layout, from: usize, to: usize) -> Result<()> {
    let (stride, size) = (layout.stride()[0], storage.dtype().size_in_bytes());
    let bytes = layout.dims()[1..].iter().product::<usize>() * size;
    let stream = &*stream_of(storage)?;
    let pointer = write(storage, stream)?;
    let at = |slot: usize| pointer.at::<c_void>(layout.start_offset() + slot * stride, size) as u64;
    // SAFETY: both slots lie in the storage and do not overlap.
    unsafe { driver::result::memcpy_dtod_async(at(to), at(from), bytes, stream.cu_stream()) }
        .map_err(candle_core::Error::wrap)
}

/// `run` on a tensor that it writes, through candle's own machinery: with the tensor's lock held for writing.
fn in_place<R>(
    name: &'static str,
    tensor: &Tensor,
    run: impl FnOnce(&mut CudaStorage, &Layout) -> Result<R>,
) -> Result<R> {
    let op = InPlace { name, run: RefCell::new(Some(run)), out: RefCell::new(None) };
    tensor.inplace_op1(&op)?;
    match op.out.into_inner() {
        Some(out) => Ok(out),
        None => bail!("{name}: no output"),
    }
}

/// The same for a tensor that there may be.
fn in_place_if_any<R>(
    name: &'static str,
    tensor: Option<&Tensor>,
    run: impl FnOnce(Option<Written<'_>>) -> Result<R>,
) -> Result<R> {
    match tensor {
        Some(tensor) => in_place(name, tensor, |storage, layout| run(Some((storage, layout)))),
        None => run(None),
    }
}

struct InPlace<F, R> {
    name: &'static str,
    run: RefCell<Option<F>>,
    out: RefCell<Option<R>>,
}

impl<R, F: FnOnce(&mut CudaStorage, &Layout) -> Result<R>> InplaceOp1 for InPlace<F, R> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &mut candle_core::CpuStorage, _: &Layout) -> Result<()> {
        bail!("{}: state: expected a CUDA tensor", self.name)
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let Some(run) = self.run.take() else { bail!("{}: applied twice", self.name) };
        *self.out.borrow_mut() = Some(run(storage, layout)?);
        Ok(())
    }
}
