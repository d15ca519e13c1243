//! Sizes of the layer.

use crate::norm::GateActivation;
use crate::plan;
use crate::reference::Dims;
use candle_core::{bail, Result};
use serde::de::{Deserialize, Deserializer, Error};

/// Sizes and constants of a [`GatedDeltaNet`](crate::GatedDeltaNet) layer.
///
/// It is deserialized from a checkpoint's `config.json`, of Qwen3-Next, Lara-4-Mini, OLMo-Hybrid (with its own epsilon and beta
/// scale), or of Qwen3.5 and later, whose text model is nested in `text_config`:
///
/// ```
/// # fn main() -> anyhow::Result<()> {
/// let json = r#"{ "text_config": { "hidden_size": 2048, "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4,
///     "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128 } }"#;
/// let config: candle_gdn::GdnConfig = serde_json::from_str(json)?;
/// assert_eq!(config, candle_gdn::GdnConfig::new(2048, (16, 128), (32, 128)));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
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
    pub beta_scale: f64,
}

impl GdnConfig {
    /// A layer of Qwen3-Next's kind: count and size of the key heads, and of the value heads. A convolution of width 4, an
    /// epsilon of 1e-6, a SiLU gate and a beta scale of 1; other values go into the fields.
    pub fn new(
        hidden_size: usize,
        (key_heads, key_dim): (usize, usize),
        (value_heads, value_dim): (usize, usize),
    ) -> Self {
        Self {
            hidden_size,
            num_key_heads: key_heads,
            num_value_heads: value_heads,
            key_head_dim: key_dim,
            value_head_dim: value_dim,
            conv_kernel: 4,
            rms_norm_eps: 1e-6,
            output_gate: GateActivation::Silu,
            beta_scale: 1.0,
        }
    }

    /// The same with some fields changed.
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// HK * K
    pub fn key_size(&self) -> usize {
        self.num_key_heads.saturating_mul(self.key_head_dim)
    }

    /// HV * V
    pub fn value_size(&self) -> usize {
        self.num_value_heads.saturating_mul(self.value_head_dim)
    }

    /// Channels of the convolution: q, k and v.
    pub fn conv_channels(&self) -> usize {
        self.key_size().saturating_mul(2).saturating_add(self.value_size())
    }

    /// Rows of OLMo-Hybrid's three convolutions as transformers saves them: thirds of the whole, whatever q, k and v have.
    pub fn conv_thirds(&self) -> [usize; 3] {
        let third = self.conv_channels().div_ceil(3);
        [third, third, self.conv_channels().saturating_sub(2 * third)]
    }

    /// Rows of q, k, v and z that a key head has in an interleaved checkpoint (Qwen3-Next's `in_proj_qkvz`).
    pub fn qkvz_sizes(&self) -> [usize; 4] {
        let value = self.ba_sizes()[0].saturating_mul(self.value_head_dim);
        [self.key_head_dim, self.key_head_dim, value, value]
    }

    /// Rows of b and a that a key head has in an interleaved checkpoint (Qwen3-Next's `in_proj_ba`).
    pub fn ba_sizes(&self) -> [usize; 2] {
        [self.num_value_heads.checked_div(self.num_key_heads).unwrap_or(0); 2]
    }

    /// Whether CUDA has fused steps for these sizes, over states and over rings: K = V = 128, or K 96 and V 192, and a convolution of
    /// width 4.
    pub fn has_fused_step(&self) -> bool {
        plan::has_fused_step(self.key_head_dim, self.value_head_dim, self.conv_kernel)
    }

    pub(crate) fn head_sizes(&self) -> Dims {
        Dims {
            key_heads: self.num_key_heads,
            value_heads: self.num_value_heads,
            key_dim: self.key_head_dim,
            value_dim: self.value_head_dim,
        }
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
        let rows = self.conv_channels().checked_add(self.value_size());
        let rows = rows.and_then(|rows| rows.checked_add(num_value_heads.checked_mul(2)?));
        if rows.and_then(|rows| rows.checked_mul(hidden_size)).is_none() {
            bail!(
                "GdnConfig: hidden_size, num_key_heads, num_value_heads: expected sizes of weights that memory can hold, got \
                 {hidden_size}, {num_key_heads} and {num_value_heads}"
            );
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

/// The keys of a `config.json` that a layer needs.
#[derive(serde::Deserialize)]
struct Keys {
    text_config: Option<Box<Keys>>,
    model_type: Option<String>,
    hidden_size: Option<usize>,
    num_attention_heads: Option<usize>,
    linear_num_key_heads: Option<usize>,
    linear_num_value_heads: Option<usize>,
    linear_key_head_dim: Option<usize>,
    linear_value_head_dim: Option<usize>,
    linear_conv_kernel_dim: Option<usize>,
    rms_norm_eps: Option<f64>,
    output_gate_type: Option<String>,
    linear_allow_neg_eigval: Option<bool>,
}

impl Keys {
    /// What OLMo-Hybrid's files need not say, as its configuration class in transformers completes it.
    fn complete_olmo_hybrid(&mut self) {
        let heads = self.num_attention_heads;
        self.linear_num_key_heads = self.linear_num_key_heads.or(heads);
        self.linear_num_value_heads = self.linear_num_value_heads.or(heads);
        let three_quarters =
            self.hidden_size.zip(self.linear_num_key_heads).and_then(|(h, n)| (h.saturating_mul(3) / 4).checked_div(n));
        self.linear_key_head_dim = self.linear_key_head_dim.or(three_quarters);
        self.linear_value_head_dim =
            self.linear_value_head_dim.or(self.linear_key_head_dim.map(|dim| dim.saturating_mul(2)));
        self.linear_conv_kernel_dim = self.linear_conv_kernel_dim.or(Some(4));
        // That of the gated norm is not the model's.
        self.rms_norm_eps = Some(1e-5);
        self.linear_allow_neg_eigval = self.linear_allow_neg_eigval.or(Some(true));
    }
}

/// From `config.json`; an error names the key.
impl<'de> Deserialize<'de> for GdnConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let root = Keys::deserialize(deserializer)?;
        let mut keys = match root.text_config {
            Some(text) => *text,
            None => root,
        };
        if keys.model_type.as_deref() == Some("olmo_hybrid") {
            keys.complete_olmo_hybrid();
        }
        let need = |key: &'static str, value: Option<usize>| value.ok_or_else(|| D::Error::missing_field(key));
        let heads = |count: &'static str, n, dim: &'static str, d| Ok::<_, D::Error>((need(count, n)?, need(dim, d)?));
        let key =
            heads("linear_num_key_heads", keys.linear_num_key_heads, "linear_key_head_dim", keys.linear_key_head_dim)?;
        let value = heads(
            "linear_num_value_heads",
            keys.linear_num_value_heads,
            "linear_value_head_dim",
            keys.linear_value_head_dim,
        )?;
        let mut config = Self::new(need("hidden_size", keys.hidden_size)?, key, value);
        config.conv_kernel = need("linear_conv_kernel_dim", keys.linear_conv_kernel_dim)?;
        config.rms_norm_eps = keys.rms_norm_eps.unwrap_or(config.rms_norm_eps);
        config.output_gate = match keys.output_gate_type.as_deref() {
            None | Some("silu" | "swish") => GateActivation::Silu,
            Some("sigmoid") => GateActivation::Sigmoid,
            Some(other) => {
                return Err(D::Error::custom(format!("output_gate_type: expected silu or sigmoid, got {other:?}")))
            }
        };
        if keys.linear_allow_neg_eigval == Some(true) {
            config.beta_scale = 2.0;
        }
        config.check().map_err(D::Error::custom)?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests;
