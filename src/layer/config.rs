//! Sizes of the layer.

use crate::ops::GateActivation;
use candle_core::{bail, Result};

/// Sizes and constants of a [`GatedDeltaNet`](crate::GatedDeltaNet) layer.
#[derive(Debug, Clone, PartialEq)]
pub struct GdnConfig {
    /// Width of the model.
    pub hidden_size: usize,
    /// Key (and query) heads, HK.
    pub num_key_heads: usize,
    /// Value heads, HV: a multiple of HK.
    pub num_value_heads: usize,
    /// Size of a key head, K: 1 to 256.
    pub key_head_dim: usize,
    /// Size of a value head, V: 1 to 256.
    pub value_head_dim: usize,
    /// Width of the causal convolution: 2 to 8 (4 in all known models).
    pub conv_kernel: usize,
    /// Added to the mean square in the gated norm.
    pub rms_norm_eps: f64,
    /// Activation of the output gate z.
    pub output_gate: GateActivation,
    /// Multiplies `sigmoid(b)`: 1, or 2 for models whose state transition may have negative eigenvalues.
    pub beta_scale: f32,
}

impl GdnConfig {
    /// HK * K
    pub fn key_size(&self) -> usize {
        self.num_key_heads * self.key_head_dim
    }

    /// HV * V
    pub fn value_size(&self) -> usize {
        self.num_value_heads * self.value_head_dim
    }

    /// Channels of the convolution: q, k and v.
    pub fn conv_channels(&self) -> usize {
        2 * self.key_size() + self.value_size()
    }

    /// Rows of q, k, v and z that a key head has in an interleaved checkpoint.
    #[doc(hidden)]
    pub fn qkvz_sizes(&self) -> [usize; 4] {
        let value = self.num_value_heads / self.num_key_heads * self.value_head_dim;
        [self.key_head_dim, self.key_head_dim, value, value]
    }

    /// Rows of b and a, the same.
    #[doc(hidden)]
    pub fn ba_sizes(&self) -> [usize; 2] {
        [self.num_value_heads / self.num_key_heads; 2]
    }

    pub(super) fn check(&self) -> Result<()> {
        let Self { hidden_size, num_key_heads, num_value_heads, key_head_dim, value_head_dim, conv_kernel, .. } = *self;
        if hidden_size == 0 {
            bail!("GdnConfig: hidden_size: expected at least 1, got 0");
        }
        if num_key_heads == 0 || num_value_heads == 0 || num_value_heads % num_key_heads != 0 {
            bail!(
                "GdnConfig: num_value_heads: expected a multiple of num_key_heads ({num_key_heads}), got {num_value_heads}"
            );
        }
        for (name, dim) in [("key_head_dim", key_head_dim), ("value_head_dim", value_head_dim)] {
            if !(1..=256).contains(&dim) {
                bail!("GdnConfig: {name}: expected 1 to 256, got {dim}");
            }
        }
        if !(2..=8).contains(&conv_kernel) {
            bail!("GdnConfig: conv_kernel: expected 2 to 8, got {conv_kernel}");
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0) {
            bail!("GdnConfig: rms_norm_eps: expected a finite value of at least 0, got {}", self.rms_norm_eps);
        }
        if !(self.beta_scale > 0.0 && self.beta_scale <= 2.0) {
            bail!("GdnConfig: beta_scale: expected a value above 0 and up to 2, got {}", self.beta_scale);
        }
        Ok(())
    }
}
