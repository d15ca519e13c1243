//! The gated delta rule: the two ops, what they share, and its CPU and CUDA sides.

mod backward;
mod call;
mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod decode;
mod dispatch;
mod gates;
mod options;
mod prefill;

pub use backward::gdn_rule_diff;
pub(crate) use call::{Rule, RulePlan};
pub(crate) use cpu::log_decay_and_beta;
pub use decode::{gdn_decode_in_place, GdnDecode};
pub use gates::gdn_gates;
pub use options::{Gates, RuleOptions};
pub use prefill::{gdn_prefill_in_place, GdnPrefill};
