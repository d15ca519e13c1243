//! What a caller may choose about the rule.

use crate::algo::Algo;
use candle_core::{bail, Result, Tensor};

/// Constants of the gated delta rule. The default is Qwen3-Next's.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct RuleOptions {
    /// Divide q and k by their L2 norm inside the kernel. Default true. Without it keys must be short: the rule itself diverges where
    /// `beta |k|^2` exceeds 2, and the chunk forms hold products of keys up to 65,504.
    pub l2norm: bool,
    /// Added to the sum of squares, inside the root. Default 1e-6. With 0 a key of zeros makes a state NaN where tokens are computed one by
    /// one, and keys shorter than 1e-5 exceed what f16 holds in the chunk forms, which use at least 2^-100.
    pub l2_eps: f64,
    /// Multiplies q after the norm. Default `None`: `K^-0.5`.
    pub scale: Option<f64>,
    /// Multiplies `sigmoid(b)`: 1 (default), or 2 for models whose state transition may have negative eigenvalues.
    pub beta_scale: f64,
    /// Which kernel runs.
    pub algo: Algo,
    /// Context parallelism of [`Algo::ChunkedSm80`] and [`Algo::ChunkedSm90`] on CUDA, in both passes: how many segments a sequence is cut
    /// into that run side by side, which pays for few long sequences. 0 (default) chooses by the device and by all lengths, 1 is
    /// none. Results of different numbers of segments differ by rounding, and on CUDA a NaN
    /// or an infinity of one segment may not reach the segments after it. At most 64 in training, by any kernel, else 2^31 - 1. Of no effect elsewhere.
    pub segments: usize,
    /// In the backward pass of [`gdn_rule_diff`](crate::ops::gdn_rule_diff) on CUDA: states of fewer chunks at a time, which costs time and less
    /// memory. Default false. Ignored elsewhere.
    pub recompute: bool,
}

impl Default for RuleOptions {
    fn default() -> Self {
        Self {
            l2norm: true,
            l2_eps: 1e-6,
            scale: None,
            beta_scale: 1.0,
            algo: Algo::Auto,
            segments: 0,
            recompute: false,
        }
    }
}

impl RuleOptions {
    /// The default with some fields changed.
    pub fn with(change: impl FnOnce(&mut Self)) -> Self {
        let mut options = Self::default();
        change(&mut options);
        options
    }

    /// Refuses values that no kernel supports.
    pub(super) fn check(&self, op: &str) -> Result<()> {
        let Self { l2_eps, scale, beta_scale, .. } = *self;
        // The kernels take subnormal numbers for zero.
        let normal = (l2_eps as f32).is_normal() && l2_eps > 0.0;
        if !normal && l2_eps != 0.0 {
            bail!("{op}: l2_eps: expected a finite value of at least 0, none that is subnormal in f32, got {l2_eps}");
        }
        // The kernels multiply in f32.
        if let Some(scale) = scale.filter(|scale| !(*scale as f32).is_finite()) {
            bail!("{op}: scale: expected a value that is finite in f32, got {scale}");
        }
        if !(beta_scale > 0.0 && beta_scale <= 2.0) {
            bail!("{op}: beta_scale: expected a value above 0 and up to 2, got {beta_scale}");
        }
        Ok(())
    }
}

/// The gates of the rule, raw as the projections and the checkpoint give them:
/// `g = -exp(a_log) * softplus(a + dt_bias)` is the log decay, `beta = beta_scale * sigmoid(b)`.
/// They are computed in f32 inside the kernel.
#[derive(Debug, Clone)]
pub struct Gates {
    /// Decay input, `[.., HV]` with the same leading dimensions as v, f32, bf16 or f16; may be a strided view.
    pub a: Tensor,
    /// Beta input, same shape and dtype as `a`.
    pub b: Tensor,
    /// `[HV]`, f32.
    pub a_log: Tensor,
    /// `[HV]`, f32.
    pub dt_bias: Tensor,
}
