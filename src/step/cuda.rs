//! `gdn_step`: convolution, rule and gated norm of a few tokens in one launch.

use super::call::StepPlan;
use super::op::GdnStep;
use crate::algo::Algo;
use crate::norm::GateActivation;
use crate::rule::cuda::with_common;
use crate::state::State;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{bail, CudaStorage, Layout, Result};
use candle_gdn_core::abi as gdn;
use candle_gdn_core::device::cuda::*;
use candle_gdn_core::device::{in_place_cuda, CudaWritten};
use candle_gdn_core::{held, Slots};
use std::ffi::c_void;

/// A checked call of a step on CUDA.
pub(super) struct StepCall<'a> {
    pub step: &'a GdnStep,
    pub plan: &'a StepPlan,
    /// In u32.
    slots: Option<Slots>,
    pub x: &'a CudaStorage,
    z: &'a CudaStorage,
    conv_weight: &'a CudaStorage,
}

impl<'a> StepCall<'a> {
    pub(super) fn new(
        step: &'a GdnStep,
        plan: &'a StepPlan,
        [x, z, conv_weight]: [&'a CudaStorage; 3],
    ) -> Result<Self> {
        let slots = step.rule.slots.as_ref().map(Slots::in_u32).transpose()?;
        Ok(Self { step, plan, slots, x, z, conv_weight })
    }

    /// An output for all tokens.
    pub fn alloc(&self) -> Result<CudaStorage> {
        let (sizes, seqs) = (self.plan.rule.sizes, &self.plan.rule.seqs);
        let shape = [seqs.total_tokens, sizes.value_heads, sizes.value_dim];
        alloc(self.step.launch.arena.as_ref(), self.x, &shape)
    }

    /// `f` with what both fused steps have in common. Its pointers live as long as `f` runs.
    pub fn with_layer<R>(
        &self,
        stream: &CudaStream,
        out: &Pointer<'_>,
        state: State<'_>,
        f: impl FnOnce(gdn::Common, gdn::Layer) -> Result<R>,
    ) -> Result<R> {
        let (plan, step, rule) = (self.plan, self.step, &self.plan.rule);
        let (dtype, conv_dtype, norm_dtype) = (self.x.dtype(), self.conv_weight.dtype(), step.norm_weight.dtype());
        let (x, z, weight) = (read(self.x, stream)?, read(self.z, stream)?, read(self.conv_weight, stream)?);
        held!(norm, step.norm_weight, stream);
        let layer = gdn::Layer {
            x: heads(&x, plan.x, dtype),
            z: heads(&z, plan.z, dtype),
            out: dense(out, rule.seqs.tokens, rule.sizes.value_heads, rule.sizes.value_dim),
            conv_weight: weight.at(plan.conv_weight_offset, conv_dtype.size_in_bytes()),
            norm_weight: norm.at(step.norm_weight.layout().start_offset(), norm_dtype.size_in_bytes()),
            conv_width: plan.conv_width as i32,
            conv_dtype: dtype_code(conv_dtype),
            norm_dtype: dtype_code(norm_dtype),
            sigmoid: (step.gate == GateActivation::Sigmoid).into(),
            norm_eps: step.norm_eps as f32,
            overlap: step.launch.overlap.into(),
        };
        with_common(&step.rule, rule, self.slots.as_ref(), dtype, state, stream, |common| f(common, layer))
    }

    /// Runs the step with both states updated in place; `None` where no fused kernel supports it.
    pub(super) fn run(&self) -> Result<Option<CudaStorage>> {
        let GdnStep { rule, conv_state, .. } = self.step;
        in_place_cuda(rule.name, conv_state, |conv| {
            in_place_cuda(rule.name, &rule.state, |state| self.launch(conv, state))
        })
    }

    fn launch(
        &self,
        (conv, conv_layout): CudaWritten<'_>,
        (state, layout): CudaWritten<'_>,
    ) -> Result<Option<CudaStorage>> {
        let stream = &*stream_of(self.x)?;
        let mut out = self.alloc()?;
        let dst = write(&mut out, stream)?;
        let state_dtype = state.dtype();
        let (conv, state) = (write(conv, stream)?, write(state, stream)?);
        let status = self.with_params(stream, &dst, (&conv, conv_layout), (&state, layout, state_dtype), |params| {
            // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
            unsafe { gdn::gdn_step(params, stream.cu_stream().cast::<c_void>()) }
        })?;
        drop((dst, conv, state));
        // To ask beforehand would be to choose twice.
        if status == gdn::GDN_BAD_ALGO {
            undo(self.step.launch.arena.as_ref(), out)?;
            return Ok(None);
        }
        check(self.step.rule.name, status)?;
        Ok(Some(out))
    }

    /// The variant that [`Self::run`] would launch.
    pub(super) fn choice(&self) -> Result<Option<Algo>> {
        let GdnStep { rule, conv_state, .. } = self.step;
        let stream = &*stream_of(self.x)?;
        held!(conv, conv_state, stream);
        held!(pointer, rule.state, stream);
        let state = (&pointer, rule.state.layout(), rule.state.dtype());
        // The output is an allocation of its own, aligned as any is.
        let (mut algo, output) = (0, read(self.x, stream)?);
        let status = self.with_params(stream, &output, (&conv, conv_state.layout()), state, |params| {
            // SAFETY: the launcher reads the parameters and writes the one number.
            unsafe { gdn::gdn_step_choice(params, &mut algo) }
        })?;
        check(rule.name, status)?;
        match ALGOS.iter().find(|(_, code)| *code == algo) {
            Some((Algo::Auto, _)) => Ok(None),
            Some((algo, _)) => Ok(Some(*algo)),
            None => bail!("{}: the kernels chose an unknown algorithm, {algo}", rule.name),
        }
    }

    /// `f` with the parameter struct, whose pointers live as long as `f` runs.
    fn with_params<R>(
        &self,
        stream: &CudaStream,
        out: &Pointer<'_>,
        (conv, conv_layout): (&Pointer<'_>, &Layout),
        state: State<'_>,
        f: impl FnOnce(&gdn::StepParams) -> R,
    ) -> Result<R> {
        let conv: *mut c_void = conv.at(conv_layout.start_offset(), self.x.dtype().size_in_bytes());
        let conv_stride = conv_layout.stride()[0] as i64;
        let algo = self.step.algo;
        self.with_layer(stream, out, state, |common, layer| {
            Ok(f(&gdn::StepParams {
                common,
                layer,
                conv_in: conv,
                conv_out: conv,
                conv_in_stride: conv_stride,
                conv_out_stride: conv_stride,
                algo: ALGOS.iter().find(|(a, _)| *a == algo).map_or(gdn::GDN_STEP_AUTO, |(_, code)| *code),
            }))
        })
    }
}

/// `gdn_step_algo`
const ALGOS: [(Algo, i32); 4] = [
    (Algo::Auto, gdn::GDN_STEP_AUTO),
    (Algo::StepWhole, gdn::GDN_STEP_WHOLE),
    (Algo::StepSplit, gdn::GDN_STEP_SPLIT),
    (Algo::StepHeads, gdn::GDN_STEP_HEADS),
];
