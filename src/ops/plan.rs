//! Checked calls, as the kernels' launches read them: sizes and places, nothing left to refuse.

use super::check::HeadsLayout;
use super::launch::Launch;
use super::options::{RuleOptions, StepOptions};
use super::sequences::SequencePlan;
use crate::reference::Dims;

/// A checked call of the convolution.
#[derive(Debug, Clone)]
pub(crate) struct ConvPlan {
    pub x: HeadsLayout,
    pub channels: usize,
    pub width: usize,
    pub seqs: SequencePlan,
    pub weight_offset: usize,
    pub out_shape: Vec<usize>,
}

/// A checked call of the rule: sizes and addresses, nothing left to refuse.
#[derive(Debug, Clone)]
pub(crate) struct RulePlan {
    pub dims: Dims,
    pub seqs: SequencePlan,
    pub q: HeadsLayout,
    pub k: HeadsLayout,
    pub v: HeadsLayout,
    pub a: HeadsLayout,
    pub b: HeadsLayout,
    pub out_shape: Vec<usize>,
    pub scale: f64,
    pub options: RuleOptions,
}

/// A checked call of the gated norm.
#[derive(Debug, Clone)]
pub(crate) struct NormPlan {
    pub x: HeadsLayout,
    pub z: HeadsLayout,
    pub tokens: usize,
    pub heads: usize,
    pub dim: usize,
    pub weight_offset: usize,
    pub out_shape: Vec<usize>,
}

/// A checked call of a step, as the CUDA side reads it.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct StepPlan {
    /// q, k and v in it are columns of the convolution's output.
    pub rule: RulePlan,
    pub x: HeadsLayout,
    pub z: HeadsLayout,
    pub conv_weight_offset: usize,
    pub conv_width: usize,
    pub options: StepOptions,
    pub launch: Launch,
}
