//! `gdn_ring_step`: a step whose state is only read.

use super::cuda::StepCall;
use crate::state::{with_ring, Ring};
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result};
use candle_gdn_core::abi as gdn;
use candle_gdn_core::device::cuda::{check, stream_of, write};
use candle_gdn_core::device::{in_place_cuda, CudaWritten};
use candle_gdn_core::held;
use std::ffi::c_void;

/// Runs the step over the pair of the state and its ring.
pub(super) fn run(call: &StepCall<'_>, ring: &Ring) -> Result<CudaStorage> {
    let rule = &call.step.rule;
    in_place_cuda(rule.name, &rule.state, |state| launch(call, ring, state))
}

fn launch(call: &StepCall<'_>, ring: &Ring, (state, layout): CudaWritten<'_>) -> Result<CudaStorage> {
    let stream = &*stream_of(call.x)?;
    let mut out = call.alloc()?;
    let dst = write(&mut out, stream)?;
    let state_dtype = state.dtype();
    let state = write(state, stream)?;
    let spans = ring.spans.tensor();
    held!(spans, spans, stream);
    call.with_layer(stream, &dst, (&state, layout, state_dtype), |common, layer| {
        with_ring(ring, stream, spans.at(0, 4), |written| {
            let params = gdn::RingStepParams {
                common,
                layer,
                ring: written.ring,
                inputs: written.inputs,
                inputs_stride: written.inputs_stride,
                algo: gdn::GDN_RING_AUTO,
            };
            // SAFETY: every pointer reaches what the plan and the ring were checked for, and the guards outlive the launch.
            check(call.step.rule.name, unsafe { gdn::gdn_ring_step(&params, stream.cu_stream().cast::<c_void>()) })
        })
    })?;
    drop((dst, state));
    Ok(out)
}
