//! The Gated DeltaNet layer: projection, convolution, rule, gated norm, output projection.

mod checkpoints;
mod config;
mod forward;
mod projection;
mod verify;

pub use checkpoints::{CheckpointPlan, Checkpoints};
pub use config::GdnConfig;
pub use projection::{deinterleaved, InProjection, Launched, Projection};
pub use verify::{no_tokens, Accepted, Drafted};

use crate::linear::Linear;
use crate::ops::ring::{Cursors, Ring};
use crate::ops::{
    check_device, check_float, check_shape, check_state_dtype, fused_sizes, Algo, RuleOptions, StepAlgo, StepOptions,
};
use crate::reference::Dims;
use crate::state::{GdnState, PoolRing, StatePool};
use candle_core::{bail, DType, Result, Tensor};
use candle_nn::VarBuilder;

const OP: &str = "GatedDeltaNet";

/// What a [`GatedDeltaNet`] is made of, all on one device. The dtype of `conv_weight` (f32, bf16 or f16) is the layer's.
#[derive(Debug, Clone)]
pub struct GdnParts {
    /// hidden_size to q, k, v, z, b and a.
    pub in_proj: InProjection,
    /// `[channels, width]`, or with the 1 in between that checkpoints have; channels are q, k, v.
    pub conv_weight: Tensor,
    /// `[HV]`, any float dtype; kept in f32.
    pub a_log: Tensor,
    /// `[HV]`, the same.
    pub dt_bias: Tensor,
    /// `[V]`, the same; plain, not zero-centred.
    pub norm_weight: Tensor,
    /// `HV * V` to hidden_size.
    pub out_proj: Projection,
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
    in_proj: InProjection,
    /// `[channels, width]`
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    out_proj: Projection,
    options: StepOptions,
}

impl GatedDeltaNet {
    /// Loads the layer from the weights under `vb`, which stands at `..linear_attn`.
    ///
    /// Both layouts of published checkpoints are recognised by their names: Qwen3-Next's `in_proj_qkvz` and `in_proj_ba`
    /// (interleaved by key head) or the split `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a` of Qwen3.5 and
    /// later. Both become one projection.
    ///
    /// # Errors
    /// When the config does not fit together, or a weight is missing or misshapen (the message names it).
    pub fn load(config: &GdnConfig, vb: VarBuilder) -> Result<Self> {
        config.check()?;
        let (c, hidden, heads) = (config, config.hidden_size, config.num_value_heads);
        let get = |rows: usize, name: &str| vb.get((rows, hidden), name);
        let in_proj = if vb.contains_tensor("in_proj_qkvz.weight") {
            let qkvz = get(c.conv_channels() + c.value_size(), "in_proj_qkvz.weight")?;
            let ba = get(2 * heads, "in_proj_ba.weight")?;
            Tensor::cat(&[deinterleaved(c, &qkvz, c.qkvz_sizes())?, deinterleaved(c, &ba, c.ba_sizes())?], 0)?
        } else if vb.contains_tensor("in_proj_qkv.weight") {
            let (qkv, z) = (get(c.conv_channels(), "in_proj_qkv.weight")?, get(c.value_size(), "in_proj_z.weight")?);
            Tensor::cat(&[qkv, z, get(heads, "in_proj_b.weight")?, get(heads, "in_proj_a.weight")?], 0)?
        } else {
            bail!(
                "no Gated DeltaNet under `{0}`: expected the weight `{0}.in_proj_qkvz.weight` (Qwen3-Next) or \
                 `{0}.in_proj_qkv.weight` (Qwen3.5 and later), found neither",
                vb.prefix()
            );
        };
        let parts = GdnParts {
            in_proj: InProjection::Fused(Linear::new(in_proj)?.into()),
            conv_weight: vb.get((c.conv_channels(), 1, c.conv_kernel), "conv1d.weight")?,
            a_log: vb.get(heads, "A_log")?,
            dt_bias: vb.get(heads, "dt_bias")?,
            norm_weight: vb.get(c.value_head_dim, "norm.weight")?,
            out_proj: Linear::new(vb.get((hidden, c.value_size()), "out_proj.weight")?)?.into(),
        };
        Self::new(config, parts)
    }

    /// The layer of these parts: for projections that are not dense, or weights from elsewhere.
    ///
    /// [`GatedDeltaNet::with_algo`] forces a kernel.
    ///
    /// # Errors
    /// When the config does not fit together, or a part does not fit the config (the message names it).
    pub fn new(config: &GdnConfig, parts: GdnParts) -> Result<Self> {
        config.check()?;
        let GdnParts { in_proj, conv_weight, a_log, dt_bias, norm_weight, out_proj } = parts;
        in_proj.check(config)?;
        out_proj.check("out_proj", config.hidden_size, config.value_size())?;
        let conv_weight = match conv_weight.dims() {
            [_, 1, _] => conv_weight.squeeze(1)?.contiguous()?,
            _ => conv_weight.contiguous()?,
        };
        check_float(OP, "conv_weight", conv_weight.dtype())?;
        check_shape(OP, "conv_weight", &conv_weight, &[config.conv_channels(), config.conv_kernel])?;
        let vector = |arg: &str, tensor: &Tensor, n: usize| {
            check_shape(OP, arg, tensor, &[n])?;
            check_device(OP, arg, tensor, conv_weight.device())?;
            tensor.to_dtype(DType::F32)?.contiguous()
        };
        let layer = Self {
            a_log: vector("a_log", &a_log, config.num_value_heads)?,
            dt_bias: vector("dt_bias", &dt_bias, config.num_value_heads)?,
            norm_weight: vector("norm_weight", &norm_weight, config.value_head_dim)?,
            in_proj,
            out_proj,
            options: StepOptions {
                rule: RuleOptions { beta_scale: f64::from(config.beta_scale), ..RuleOptions::default() },
                norm_eps: config.rms_norm_eps,
                gate: config.output_gate,
                ..StepOptions::default()
            },
            config: config.clone(),
            conv_weight,
        };
        // What wrote the weights is done before any launch reads them early.
        layer.conv_weight.device().synchronize()?;
        Ok(layer)
    }

    /// The layer with another choice of the rule's kernel: [`Algo::Auto`], or one that then runs every call, those of few
    /// tokens as [`StepAlgo::Composed`]. A call that the kernel does not take is an error.
    pub fn with_algo(mut self, algo: Algo) -> Self {
        self.options.rule.algo = algo;
        self.options.algo = if algo == Algo::Auto { StepAlgo::Auto } else { StepAlgo::Composed };
        self
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
        Ok(StatePool::new(self.new_state_as(capacity, recurrent)?, None))
    }

    /// As [`GatedDeltaNet::new_pool_as`], with a ring beside the states: decode reads a state with every token and writes it
    /// with every sixteenth. In between a ring of the slot keeps of each token its key, its correction of the state and its
    /// decay, from which outputs are made as well; in exact arithmetic it is the same function. What does that is
    /// [`GatedDeltaNet::forward_slots`] of up to 8 tokens a sequence and [`GatedDeltaNet::verify`] in place of up to 16. Everything
    /// else folds the rings of its sequences first. A ring takes about half the memory of an f32 state.
    ///
    /// On CUDA it is faster than a plain pool from about 8 sequences on, and for drafts. On the CPU, where a core's caches hold a
    /// state between reading and writing it, it is not.
    ///
    /// # Errors
    /// When `capacity` is zero, the device is out of memory, on another dtype, where [`GatedDeltaNet::with_algo`] chose a kernel, or
    /// on CUDA where heads are not of 128 or the convolution's width is not 4.
    pub fn new_ring_pool(&self, capacity: usize, recurrent: DType) -> Result<StatePool> {
        let cursors = Cursors::new(capacity, self.conv_weight.device())?;
        self.ring_pool(capacity, recurrent, cursors, true)
    }

    /// With cursors that pools of other layers have too, and that move when the caller moves them.
    #[doc(hidden)]
    pub fn new_ring_pool_sharing(&self, capacity: usize, recurrent: DType, cursors: &Cursors) -> Result<StatePool> {
        self.ring_pool(capacity, recurrent, cursors.clone(), false)
    }

    fn ring_pool(&self, capacity: usize, recurrent: DType, cursors: Cursors, own: bool) -> Result<StatePool> {
        if capacity == 0 {
            bail!("GatedDeltaNet: capacity: expected at least 1 slot, got 0");
        }
        self.check_ring()?;
        let states = self.new_state_as(capacity, recurrent)?;
        let c = &self.config;
        let dims = Dims {
            key_heads: c.num_key_heads,
            value_heads: c.num_value_heads,
            key_dim: c.key_head_dim,
            value_dim: c.value_head_dim,
        };
        let ring = Ring::new(capacity, dims, c.conv_channels(), self.conv_weight.dtype(), cursors)?;
        Ok(StatePool::new(states, Some(PoolRing { ring, own })))
    }

    /// Whether [`GatedDeltaNet::new_ring_pool`] has kernels for this layer.
    #[doc(hidden)]
    pub fn takes_ring(&self) -> bool {
        self.check_ring().is_ok()
    }

    fn check_ring(&self) -> Result<()> {
        let (c, algo) = (&self.config, self.options.rule.algo);
        if self.conv_weight.device().is_cuda() && !fused_sizes(c.key_head_dim, c.value_head_dim, c.conv_kernel) {
            bail!(
                "GatedDeltaNet: ring: expected heads of 128 and a convolution of width 4 on CUDA, got {} (K), {} (V) and {}",
                c.key_head_dim,
                c.value_head_dim,
                c.conv_kernel
            );
        }
        if algo != Algo::Auto {
            bail!("GatedDeltaNet: ring: expected no choice of the rule's kernel, since a ring has its own, got {algo}");
        }
        Ok(())
    }
}
