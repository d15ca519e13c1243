//! The operations: one file each, with the `CustomOp` struct, its checks and its dispatch to the CPU or CUDA kernel.

mod args;
mod attention;
mod conv;
mod copies;
mod copy_slot;
mod decode;
mod norm;
mod options;
mod prefill;
mod residual;
mod rule;
mod sequences;
mod slots;
mod step;
mod swiglu;

pub use attention::{
    attention_decode, attention_prepare, rotary_frequencies, AttentionCache, AttentionDecode, AttentionPrepare,
    PrepareOptions,
};
pub use conv::{causal_conv1d, CausalConv1d};
pub use copies::{checkpoint_rows, CHECKPOINT_MULTIPLE};
pub use decode::{gdn_decode, gdn_decode_in_place, GdnDecode};
pub use norm::{gated_rms_norm, GatedRmsNorm};
pub use options::{Algo, GateActivation, Gates, RuleOptions, StepAlgo, StepOptions};
pub use prefill::{gdn_prefill, gdn_prefill_in_place, GdnPrefill};
pub use residual::{add_rms_norm, rms_norm, AddRmsNorm};
pub use sequences::CuSeqlens;
pub use slots::{Slots, NO_SLOT};
pub use step::{gdn_step_in_place, GdnStep};
pub use swiglu::{swiglu, Swiglu};

pub(crate) use args::check_state_dtype;
#[cfg(feature = "cuda")]
pub(crate) use attention::AttentionPlan;
pub(crate) use copy_slot::copy_slot;
pub(crate) use step::STEP_TOKENS;
#[cfg(feature = "cuda")]
pub(crate) use {
    args::{apply2, HeadsLayout},
    conv::ConvPlan,
    norm::NormPlan,
    residual::ResidualPlan,
    rule::RulePlan,
    sequences::SequencePlan,
    step::StepPlan,
    swiglu::SwigluPlan,
};
