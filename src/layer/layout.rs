//! The layouts in which checkpoints have a layer, told apart by the names of their weights.

use super::GdnConfig;
use candle_core::{bail, Result};

/// How the input projections of a layer are stored, and what else is called differently then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// Qwen3-Next: `in_proj_qkvz` and `in_proj_ba`, interleaved by key head.
    Interleaved,
    /// Qwen3.5 and later: `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`.
    Split,
    /// Lara-4-Mini: one `in_proj`, with the rows of `Split` one below the other.
    OneMatrix,
    /// OLMo-Hybrid: a matrix each of q, k, v, the gate, b and a, and a convolution each of q, k and v.
    Separate,
}

/// The projections of [`Layout::Separate`], in the order of [`InProjection::Fused`](super::InProjection::Fused).
pub(super) const SEPARATE: [&str; 6] = ["q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"];

/// The weight by which each is recognised.
pub(super) const FIRST: [(&str, Layout); 4] = [
    ("in_proj_qkvz.weight", Layout::Interleaved),
    ("in_proj_qkv.weight", Layout::Split),
    ("in_proj.weight", Layout::OneMatrix),
    ("q_proj.weight", Layout::Separate),
];

impl Layout {
    /// The one of which a layer at `prefix` has the first weight.
    pub fn find(prefix: &str, contains: impl Fn(&str) -> bool) -> Result<Self> {
        if let Some((_, layout)) = FIRST.into_iter().find(|(name, _)| contains(name)) {
            return Ok(layout);
        }
        bail!(
            "no Gated DeltaNet under `{prefix}`: expected the weight `{prefix}.in_proj_qkvz.weight` (Qwen3-Next), \
             `{prefix}.in_proj_qkv.weight` (Qwen3.5 and later), `{prefix}.in_proj.weight` (Lara-4-Mini) or \
             `{prefix}.q_proj.weight` (OLMo-Hybrid), found none"
        )
    }

    /// The output projection.
    pub fn out_proj(self) -> &'static str {
        match self {
            Self::Separate => "o_proj",
            _ => "out_proj",
        }
    }

    /// The gated norm.
    pub fn norm(self) -> &'static str {
        match self {
            Self::OneMatrix => "out_norm.weight",
            Self::Separate => "o_norm.weight",
            _ => "norm.weight",
        }
    }
}

impl GdnConfig {
    /// Rows of the matrices of [`SEPARATE`], and of the sections of [`Layout::OneMatrix`].
    pub(super) fn section_rows(&self) -> [usize; 6] {
        let (key, value, heads) = (self.key_size(), self.value_size(), self.num_value_heads);
        [key, key, value, value, heads, heads]
    }
}
