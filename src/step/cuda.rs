//! `gdn_step`: convolution, rule and gated norm of a few tokens in one launch.

use super::arena::{alloc, undo};
use super::pointers::Pointer;
use super::pointers::{addressing, check, dense, dtype_code, heads, int, read, stream_of, write};
use crate::abi as gdn;
use crate::ops::{in_place_cuda, CudaWritten, GateActivation, Gates, Slots, StepAlgo, StepPlan};
use crate::{held, held_slots, held_u32};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{bail, CudaStorage, DType, Layout, Result, Tensor};
use std::ffi::c_void;

/// What the step needs besides its states.
pub(crate) struct StepArgs<'a> {
    pub name: &'static str,
    pub plan: &'a StepPlan,
    pub x: &'a CudaStorage,
    pub z: &'a CudaStorage,
    pub conv_weight: &'a CudaStorage,
    pub norm_weight: &'a Tensor,
    pub gates: &'a Gates,
    pub slots: Option<&'a Slots>,
    pub cu_seqlens: Option<&'a Tensor>,
}

/// Runs the step with both states updated in place; `None` where no fused kernel takes it.
pub(crate) fn run(args: &StepArgs<'_>, conv_state: &Tensor, state: &Tensor) -> Result<Option<CudaStorage>> {
    let name = args.name;
    in_place_cuda(name, conv_state, |conv| in_place_cuda(name, state, |state| launch(args, conv, state)))
}

fn launch(
    args: &StepArgs<'_>,
    (conv, conv_layout): CudaWritten<'_>,
    (state, layout): CudaWritten<'_>,
) -> Result<Option<CudaStorage>> {
    let (stream, arena) = (&*stream_of(args.x)?, args.plan.launch.arena.as_ref());
    let (dims, seqs) = (args.plan.rule.dims, args.plan.rule.seqs);
    let mut out = alloc(arena, args.x, &[seqs.total_tokens, dims.value_heads, dims.value_dim])?;
    let to = write(&mut out, stream)?;
    let state_dtype = state.dtype();
    let (conv, state) = (write(conv, stream)?, write(state, stream)?);
    let states = States { conv: (&conv, conv_layout), state: (&state, layout, state_dtype) };
    let status = with_params(args, stream, &to, states, |params| {
        // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
        unsafe { gdn::gdn_step(params, stream.cu_stream().cast::<c_void>()) }
    })?;
    drop((to, conv, state));
    // Asking beforehand would choose twice.
    if status == gdn::GDN_BAD_ALGO {
        undo(arena, out)?;
        return Ok(None);
    }
    check(args.name, status)?;
    Ok(Some(out))
}

/// The variant that [`run`] would launch.
pub(crate) fn choice(args: &StepArgs<'_>, conv_state: &Tensor, state: &Tensor) -> Result<Option<StepAlgo>> {
    let stream = &*stream_of(args.x)?;
    held!(conv, conv_state, stream);
    held!(pointer, state, stream);
    let states = States { conv: (&conv, conv_state.layout()), state: (&pointer, state.layout(), state.dtype()) };
    // The output is an allocation of its own, aligned as any is.
    let (mut algo, nowhere) = (0, read(args.x, stream)?);
    let status = with_params(args, stream, &nowhere, states, |params| {
        // SAFETY: the launcher reads the parameters and writes the one number.
        unsafe { gdn::gdn_step_choice(params, &mut algo) }
    })?;
    check(args.name, status)?;
    match algo {
        gdn::GDN_STEP_AUTO => Ok(None),
        gdn::GDN_STEP_WHOLE => Ok(Some(StepAlgo::Whole)),
        gdn::GDN_STEP_SPLIT => Ok(Some(StepAlgo::Split)),
        gdn::GDN_STEP_HEADS => Ok(Some(StepAlgo::Heads)),
        _ => bail!("{}: the kernels chose an unknown algorithm, {algo}", args.name),
    }
}

/// Where the states lie.
struct States<'a> {
    conv: (&'a Pointer<'a>, &'a Layout),
    state: (&'a Pointer<'a>, &'a Layout, DType),
}

/// `f` with the parameter struct, whose pointers live as long as `f` runs.
fn with_params<R>(
    args: &StepArgs<'_>,
    stream: &CudaStream,
    out: &Pointer<'_>,
    states: States<'_>,
    f: impl FnOnce(&gdn::StepParams) -> R,
) -> Result<R> {
    let StepArgs { name, plan, x, z, conv_weight, norm_weight, gates, slots, cu_seqlens } = *args;
    let (dims, rule, options) = (plan.rule.dims, &plan.rule, &plan.options);
    let (dtype, conv_dtype, norm_dtype) = (x.dtype(), conv_weight.dtype(), norm_weight.dtype());
    let gate_dtype = gates.a.dtype();
    let (x, z, weight) = (read(x, stream)?, read(z, stream)?, read(conv_weight, stream)?);
    held!(norm, norm_weight, stream);
    held!(a, gates.a, stream);
    held!(b, gates.b, stream);
    held!(a_log, gates.a_log, stream);
    held!(dt_bias, gates.dt_bias, stream);
    held_slots!(slots, slots, stream);
    held_u32!(cu_seqlens, cu_seqlens, stream);
    let ((conv, conv_layout), (state, layout, state_dtype)) = (states.conv, states.state);
    let state_size = state_dtype.size_in_bytes();
    let conv_ptr: *mut c_void = conv.at(conv_layout.start_offset(), dtype.size_in_bytes());
    let state_ptr: *mut c_void = state.at(layout.start_offset(), state_size);
    let (seqs, in_slots, out_slots) = addressing(name, &rule.seqs, cu_seqlens, slots, layout)?;
    let conv_stride = conv_layout.stride()[0] as i64;
    Ok(f(&gdn::StepParams {
        x: heads(&x, plan.x, dtype),
        z: heads(&z, plan.z, dtype),
        a: heads(&a, rule.a, gate_dtype),
        b: heads(&b, rule.b, gate_dtype),
        out: dense(out, rule.seqs.tokens, dims.value_heads, dims.value_dim),
        conv_weight: weight.at(plan.conv_weight_offset, conv_dtype.size_in_bytes()),
        norm_weight: norm.at(norm_weight.layout().start_offset(), norm_dtype.size_in_bytes()),
        a_log: a_log.at(gates.a_log.layout().start_offset(), 4),
        dt_bias: dt_bias.at(gates.dt_bias.layout().start_offset(), 4),
        conv_in: conv_ptr,
        conv_out: conv_ptr,
        state_in: state_ptr,
        state_out: state_ptr,
        token_states: std::ptr::null_mut(),
        in_slots,
        out_slots,
        conv_in_stride: conv_stride,
        conv_out_stride: conv_stride,
        seqs,
        num_k_heads: int(name, "key heads", dims.key_heads)?,
        num_v_heads: int(name, "value heads", dims.value_heads)?,
        head_k: dims.key_dim as i32,
        head_v: dims.value_dim as i32,
        conv_width: plan.conv_width as i32,
        io_dtype: dtype_code(dtype),
        gate_dtype: dtype_code(gate_dtype),
        state_dtype: dtype_code(state_dtype),
        conv_dtype: dtype_code(conv_dtype),
        norm_dtype: dtype_code(norm_dtype),
        l2norm: options.rule.l2norm.into(),
        sigmoid: (options.gate == GateActivation::Sigmoid).into(),
        algo: match options.algo {
            StepAlgo::Whole => gdn::GDN_STEP_WHOLE,
            StepAlgo::Split => gdn::GDN_STEP_SPLIT,
            StepAlgo::Heads => gdn::GDN_STEP_HEADS,
            StepAlgo::Auto | StepAlgo::Composed => gdn::GDN_STEP_AUTO,
        },
        overlap: plan.launch.overlap.into(),
        l2_eps: options.rule.l2_eps as f32,
        scale: rule.scale as f32,
        beta_scale: options.rule.beta_scale as f32,
        norm_eps: options.norm_eps as f32,
    }))
}
