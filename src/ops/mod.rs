//! The operations: one file each, with the `CustomOp` struct, its checks and its dispatch to the CPU or CUDA kernel.

pub mod apply;
#[allow(missing_docs)] // for `plumbing` only
pub mod check;
mod conv;
mod copy_slot;
mod decode;
#[allow(missing_docs)] // for `plumbing` only
pub mod in_place;
pub mod launch;
pub mod norm;
mod options;
mod plan;
mod prefill;
pub mod ring;
mod ring_cpu;
mod rule;
mod rule_cpu;
pub mod sequences;
pub mod slots;
mod step;
mod step_run;

pub use conv::{causal_conv1d, CausalConv1d};
pub use decode::{gdn_decode, gdn_decode_in_place, GdnDecode};
pub use norm::{gated_rms_norm, GatedRmsNorm};
pub use options::{Algo, GateActivation, Gates, RuleOptions, StepAlgo, StepOptions};
pub use prefill::{gdn_prefill, gdn_prefill_in_place, GdnPrefill};
pub use sequences::CuSeqlens;
pub use slots::{Slots, NO_SLOT};
pub use step::{gdn_step_in_place, GdnStep};

pub(crate) use check::{check_device, check_float, check_shape, check_state_dtype};
pub(crate) use copy_slot::copy_slot;
pub use launch::Launch;
pub(crate) use step::{fused_sizes, STEP_TOKENS};
#[cfg(feature = "cuda")]
pub(crate) use {
    apply::apply2,
    check::HeadsLayout,
    in_place::{in_place_cuda, in_place_cuda_if_any, CudaWritten},
    plan::{ConvPlan, NormPlan, RulePlan, StepPlan},
    sequences::SequencePlan,
};
