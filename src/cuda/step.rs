//! `gdn_step`: convolution, rule and gated norm of a few tokens in one launch.

use super::arena::{alloc, undo};
use super::pointers::{check, dense, dtype_code, heads, read, stream_of, write, Pointer};
use super::rule::{with_common, State};
use crate::abi as gdn;
use crate::held;
use crate::ops::{in_place_cuda, CudaWritten, GateActivation, Gates, Slots, StepAlgo, StepPlan};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{bail, CudaStorage, Layout, Result, Tensor};
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

/// Runs the step with both states updated in place; `None` where no fused kernel supports it.
pub(crate) fn run(args: &StepArgs<'_>, conv_state: &Tensor, state: &Tensor) -> Result<Option<CudaStorage>> {
    in_place_cuda(args.name, conv_state, |conv| in_place_cuda(args.name, state, |state| launch(args, conv, state)))
}

fn launch(
    args: &StepArgs<'_>,
    (conv, conv_layout): CudaWritten<'_>,
    (state, layout): CudaWritten<'_>,
) -> Result<Option<CudaStorage>> {
    let (stream, arena) = (&*stream_of(args.x)?, args.plan.launch.arena.as_ref());
    let mut out = alloc(arena, args.x, &args.out_shape())?;
    let to = write(&mut out, stream)?;
    let state_dtype = state.dtype();
    let (conv, state) = (write(conv, stream)?, write(state, stream)?);
    let status = with_params(args, stream, &to, (&conv, conv_layout), (&state, layout, state_dtype), |params| {
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
    let state = (&pointer, state.layout(), state.dtype());
    // The output is an allocation of its own, aligned as any is.
    let (mut algo, nowhere) = (0, read(args.x, stream)?);
    let status = with_params(args, stream, &nowhere, (&conv, conv_state.layout()), state, |params| {
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

impl StepArgs<'_> {
    pub(super) fn out_shape(&self) -> [usize; 3] {
        let (dims, seqs) = (self.plan.rule.dims, &self.plan.rule.seqs);
        [seqs.total_tokens, dims.value_heads, dims.value_dim]
    }

    /// `f` with what both fused steps have in common. Its pointers live as long as `f` runs.
    pub(super) fn with_layer<R>(
        &self,
        stream: &CudaStream,
        out: &Pointer<'_>,
        state: State<'_>,
        f: impl FnOnce(gdn::Common, gdn::Layer) -> Result<R>,
    ) -> Result<R> {
        let (plan, options) = (self.plan, &self.plan.options);
        let (dims, rule) = (plan.rule.dims, &plan.rule);
        let (dtype, conv_dtype, norm_dtype) = (self.x.dtype(), self.conv_weight.dtype(), self.norm_weight.dtype());
        let (x, z, weight) = (read(self.x, stream)?, read(self.z, stream)?, read(self.conv_weight, stream)?);
        held!(norm, self.norm_weight, stream);
        let layer = gdn::Layer {
            x: heads(&x, plan.x, dtype),
            z: heads(&z, plan.z, dtype),
            out: dense(out, rule.seqs.tokens, dims.value_heads, dims.value_dim),
            conv_weight: weight.at(plan.conv_weight_offset, conv_dtype.size_in_bytes()),
            norm_weight: norm.at(self.norm_weight.layout().start_offset(), norm_dtype.size_in_bytes()),
            conv_width: plan.conv_width as i32,
            conv_dtype: dtype_code(conv_dtype),
            norm_dtype: dtype_code(norm_dtype),
            sigmoid: (options.gate == GateActivation::Sigmoid).into(),
            norm_eps: options.norm_eps as f32,
            overlap: plan.launch.overlap.into(),
        };
        let held = (self.gates, self.slots, self.cu_seqlens);
        with_common(self.name, rule, dtype, held, state, stream, |common| f(common, layer))
    }
}

/// `f` with the parameter struct, whose pointers live as long as `f` runs.
fn with_params<R>(
    args: &StepArgs<'_>,
    stream: &CudaStream,
    out: &Pointer<'_>,
    (conv, conv_layout): (&Pointer<'_>, &Layout),
    state: State<'_>,
    f: impl FnOnce(&gdn::StepParams) -> R,
) -> Result<R> {
    let conv: *mut c_void = conv.at(conv_layout.start_offset(), args.x.dtype().size_in_bytes());
    let conv_stride = conv_layout.stride()[0] as i64;
    args.with_layer(stream, out, state, |common, layer| {
        Ok(f(&gdn::StepParams {
            common,
            layer,
            conv_in: conv,
            conv_out: conv,
            conv_in_stride: conv_stride,
            conv_out_stride: conv_stride,
            algo: match args.plan.options.algo {
                StepAlgo::Whole => gdn::GDN_STEP_WHOLE,
                StepAlgo::Split => gdn::GDN_STEP_SPLIT,
                StepAlgo::Heads => gdn::GDN_STEP_HEADS,
                StepAlgo::Auto | StepAlgo::Composed => gdn::GDN_STEP_AUTO,
            },
        }))
    })
}
