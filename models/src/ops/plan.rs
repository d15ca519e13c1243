//! Checked calls in the form that launches read: sizes and places.

use candle_gdn_core::Launch;

/// Rows of one length at one distance.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct RowsLayout {
    pub offset: usize,
    pub stride: usize,
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
