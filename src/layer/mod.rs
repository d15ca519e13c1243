//! The Gated DeltaNet layer: projection, convolution, rule, gated norm, output projection.

mod checkpoints;
mod forward;
mod verify;

pub use checkpoints::{CheckpointPlan, Checkpoints};
pub use verify::{Accepted, Drafted};

use crate::linear::Linear;
use crate::ops::{check_state_dtype, GateActivation, StepOptions};
use crate::state::{GdnState, StatePool};
use crate::weights::{Matrix, Source};
use candle_core::{bail, DType, Result, Tensor};
use candle_nn::VarBuilder;

/// Sizes and constants of a [`GatedDeltaNet`] layer.
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
    pub(crate) fn key_size(&self) -> usize {
        self.num_key_heads * self.key_head_dim
    }

    /// HV * V
    pub(crate) fn value_size(&self) -> usize {
        self.num_value_heads * self.value_head_dim
    }

    /// Channels of the convolution: q, k and v.
    fn conv_channels(&self) -> usize {
        2 * self.key_size() + self.value_size()
    }

    fn check(&self) -> Result<()> {
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

/// A Gated DeltaNet layer, as Qwen3-Next and its successors have it under `linear_attn`:
///
/// ```text
/// [q k v | z | b | a] = in_proj(x)
/// q, k, v = silu(causal_conv1d([q k v]))
/// o = gated_delta_rule(q, k, v, a, b)          // crate::gdn_prefill_in_place
/// y = out_proj(rms_norm(o) * act(z))
/// ```
///
/// The weights' dtype (f32, bf16 or f16) is the dtype of x and y; gates and norms are f32, and so is the recurrent
/// state unless [`GatedDeltaNet::new_state_as`] was asked for bf16.
#[derive(Debug, Clone)]
pub struct GatedDeltaNet {
    config: GdnConfig,
    /// Rows q, k, v, z, b, a.
    in_proj: Linear,
    /// `[channels, width]`
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    out_proj: Linear,
    options: StepOptions,
}

impl GatedDeltaNet {
    /// Loads the layer from the weights under `vb`, which stands at `..linear_attn`.
    ///
    /// Either checkpoint layout is recognised by its names: Qwen3-Next's `in_proj_qkvz` and `in_proj_ba` (interleaved
    /// by key head) or the split `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a` of Qwen3.5 and later. Both
    /// become one projection.
    ///
    /// # Errors
    /// When the config does not fit together, or a weight is missing or misshapen (the message names it).
    pub fn load(config: &GdnConfig, vb: VarBuilder) -> Result<Self> {
        Self::load_from(config, &Source::new(vb))
    }

    /// `source` is at `..linear_attn`.
    pub(crate) fn load_from(config: &GdnConfig, source: &Source) -> Result<Self> {
        config.check()?;
        let c = config;
        let in_proj = if source.contains("in_proj_qkvz.weight") {
            interleaved_projection(c, source)?
        } else if source.contains("in_proj_qkv.weight") || source.is_gguf() {
            split_projection(c, source)?
        } else {
            bail!(
                "no Gated DeltaNet under `{0}`: expected the weight `{0}.in_proj_qkvz.weight` (Qwen3-Next) or \
                 `{0}.in_proj_qkv.weight` (Qwen3.5 and later), found neither",
                source.prefix()
            );
        };
        let conv = source.get((c.conv_channels(), 1, c.conv_kernel), "conv1d.weight")?;
        let f32_vector = |n: usize, name: &str| source.get(n, name)?.to_dtype(DType::F32)?.contiguous();
        let layer = Self {
            in_proj: Linear::stack(in_proj, source.device())?,
            conv_weight: conv.squeeze(1)?.contiguous()?,
            a_log: f32_vector(c.num_value_heads, "A_log")?,
            dt_bias: f32_vector(c.num_value_heads, "dt_bias")?,
            norm_weight: f32_vector(c.value_head_dim, "norm.weight")?,
            out_proj: source.pp("out_proj").linear(c.value_size(), c.hidden_size)?,
            options: StepOptions {
                beta_scale: f64::from(c.beta_scale),
                norm_eps: c.rms_norm_eps,
                gate: c.output_gate,
                ..StepOptions::default()
            },
            config: config.clone(),
        };
        // What wrote the weights is done before any launch reads them early.
        layer.conv_weight.device().synchronize()?;
        Ok(layer)
    }

    /// The config it was loaded with.
    pub fn config(&self) -> &GdnConfig {
        &self.config
    }

    /// A zero state for `batch` sequences, on the weights' device, its recurrent part in f32.
    ///
    /// # Errors
    /// When the device is out of memory.
    pub fn new_state(&self, batch: usize) -> Result<GdnState> {
        self.new_state_as(batch, DType::F32)
    }

    /// The same with the recurrent part in `recurrent`, f32 or bf16.
    ///
    /// bf16 halves its bytes, of which a decode step reads and writes all. Arithmetic stays f32, but every `forward`
    /// rounds the new state once (to nearest even, 8 bits), and that error fades only as fast as the state does: it
    /// adds up like a random walk. Relative RMS error of the state after 1, 16, 64 and 256 decode steps on normal
    /// inputs (f32 otherwise, K = V = 128): 0.2, 0.5, 0.9 and 1.7 % where nothing decays, and 0.2, 0.4, 0.4 and 0.4 %
    /// with a decay of 0.9 a token; of the outputs a little less. A prompt fed whole costs one rounding.
    ///
    /// # Errors
    /// When the device is out of memory, or on another dtype.
    pub fn new_state_as(&self, batch: usize, recurrent: DType) -> Result<GdnState> {
        check_state_dtype("GatedDeltaNet", "state", recurrent)?;
        let c = &self.config;
        GdnState::zeros(
            (batch, c.conv_kernel - 1, c.conv_channels()),
            (batch, c.num_value_heads, c.value_head_dim, c.key_head_dim),
            (self.conv_weight.dtype(), recurrent),
            self.conv_weight.device(),
        )
    }

    /// States for `capacity` sequences that come and go, on the weights' device, their recurrent part in f32. All slots
    /// are zero.
    ///
    /// # Errors
    /// When `capacity` is zero, or the device is out of memory.
    pub fn new_pool(&self, capacity: usize) -> Result<StatePool> {
        self.new_pool_as(capacity, DType::F32)
    }

    /// The same with the recurrent part in `recurrent`, f32 or bf16; see [`GatedDeltaNet::new_state_as`].
    ///
    /// # Errors
    /// When `capacity` is zero, the device is out of memory, or on another dtype.
    pub fn new_pool_as(&self, capacity: usize, recurrent: DType) -> Result<StatePool> {
        if capacity == 0 {
            bail!("GatedDeltaNet: capacity: expected at least 1 slot, got 0");
        }
        Ok(StatePool::new(self.new_state_as(capacity, recurrent)?))
    }
}

/// Qwen3-Next: the rows of `in_proj_qkvz` come by key head, each `[q K | k K | v rV | z rV]`, and those of `in_proj_ba`
/// as `[b r | a r]`, where r is the number of value heads a key head serves.
fn interleaved_projection(c: &GdnConfig, source: &Source) -> Result<Vec<Matrix>> {
    let (heads, r, hidden) = (c.num_key_heads, c.num_value_heads / c.num_key_heads, c.hidden_size);
    let (key, value) = (c.key_head_dim, r * c.value_head_dim);
    let rows = |from: &Tensor, start: usize, n: usize| from.narrow(1, start, n)?.reshape((heads * n, hidden));
    let qkvz = || {
        let qkvz = source.staged((2 * (c.key_size() + c.value_size()), hidden), "in_proj_qkvz.weight")?;
        let qkvz = qkvz.reshape((heads, 2 * (key + value), hidden))?;
        let (q, k) = (rows(&qkvz, 0, key)?, rows(&qkvz, key, key)?);
        let (v, z) = (rows(&qkvz, 2 * key, value)?, rows(&qkvz, 2 * key + value, value)?);
        Tensor::cat(&[q, k, v, z], 0)
    };
    let ba = || {
        let ba = source.staged((2 * c.num_value_heads, hidden), "in_proj_ba.weight")?;
        let ba = ba.reshape((heads, 2 * r, hidden))?;
        Tensor::cat(&[rows(&ba, 0, r)?, rows(&ba, r, r)?], 0)
    };
    Ok(vec![
        source.matrix_of(&source.path("in_proj_qkvz.weight"), qkvz)?,
        source.matrix_of(&source.path("in_proj_ba.weight"), ba)?,
    ])
}

/// Qwen3.5 and later: already split, rows by head.
fn split_projection(c: &GdnConfig, source: &Source) -> Result<Vec<Matrix>> {
    let get = |rows: usize, name: &str| source.matrix(rows, c.hidden_size, name);
    Ok(vec![
        get(c.conv_channels(), "in_proj_qkv.weight")?,
        get(c.value_size(), "in_proj_z.weight")?,
        get(c.num_value_heads, "in_proj_b.weight")?,
        get(c.num_value_heads, "in_proj_a.weight")?,
    ])
}
