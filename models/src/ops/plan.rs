//! Checked calls, as the kernels' launches read them: sizes and places, nothing left to refuse.

use candle_gdn::plumbing::{HeadsLayout, Launch, SequencePlan};

/// Rows of one length at one distance.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct RowsLayout {
    pub offset: usize,
    pub stride: usize,
}

/// A checked call of residual and norm.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct ResidualPlan {
    pub x: RowsLayout,
    pub h: Option<RowsLayout>,
    pub weight_offset: usize,
    pub rows: usize,
    pub dim: usize,
    /// x's; with h two of it, the sum and the norm.
    pub out_shape: Vec<usize>,
    pub launch: Launch,
    pub eps: f64,
}

/// A checked call of SwiGLU.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct SwigluPlan {
    pub gate_up: RowsLayout,
    pub rows: usize,
    /// Of a half.
    pub columns: usize,
    pub out_shape: Vec<usize>,
    pub launch: Launch,
}

/// A checked call of one half of attention.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct AttentionPlan {
    /// q, k, v; of a decode q and the gate.
    pub inputs: [HeadsLayout; 3],
    pub seqs: SequencePlan,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub out_shape: Vec<usize>,
}
