//! The Gated DeltaNet layer: projection, convolution, rule, gated norm, output projection.

mod checkpoint;
mod columns;
mod config;
mod conv_weight;
mod forward;
mod freeze;
mod layout;
mod load;
mod projection;
mod train;
mod train_load;
mod verify;

pub use config::GdnConfig;
pub use conv_weight::ConvWeight;
pub use load::{select_rows, Matrices};
pub use projection::{InProjection, Project, Projection};
pub use train::{TrainableGatedDeltaNet, TrainingState};
pub use verify::{Accepted, Drafted};

use crate::algo::Algo;
use crate::rule::RuleOptions;
use crate::state::{GdnState, PoolOptions, PoolRing, Ring, RingSpans, StatePool};
use crate::step::StepOptions;
use candle_core::{bail, DType, Result, Tensor};
use candle_gdn_core::check::{check_device, check_dtype, check_shape, check_state_dtype};
use candle_gdn_core::device::{check_gpu, Working};
use std::sync::atomic::AtomicBool;
use std::sync::Arc;

const OP: &str = "GatedDeltaNet";

/// What a [`GatedDeltaNet`] or a [`TrainableGatedDeltaNet`] is made of, all on one device. The first copies all tensors, and has
/// the dtype of `conv_weight` (f32, bf16 or f16); the second uses them as they are.
#[derive(Debug, Clone)]
pub struct GdnParts {
    /// hidden_size to q, k, v, z, b and a.
    pub in_proj: InProjection,
    /// `[channels, width]`; channels are q, k, v.
    pub conv_weight: ConvWeight,
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
/// o = gated_delta_rule(q, k, v, a, b)          // crate::ops::gdn_prefill_in_place
/// y = out_proj(rms_norm(o) * act(z))
/// ```
///
/// The weights' dtype (f32, bf16 or f16) is the dtype of x and y; gates and norms are f32, and so is the recurrent
/// state unless [`GatedDeltaNet::new_state_as`] made it in bf16.
///
/// # Training
/// [`TrainableGatedDeltaNet`] is the layer in training. This one has no backward pass, and no gradient vanishes in silence: an x that
/// is a variable, or was computed from one, is refused, and so is what such a module as input projection returns. Without
/// training, give them detached (`x.detach()`; in the module, `y.detach()`). A module as output projection is the last to run, so
/// that gradients of its own parameters are right.
///
/// Weights are read once, when the layer is made: they are copies, which neither an optimiser nor `VarMap::load` changes and
/// which have no gradients. Load first, then make the layer; after a change make it again. A module is called each
/// time and shows changes of its own weights.
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
    /// A launch of the layer has waited for those that wrote the weights: `project` overlaps none before.
    launched: Arc<AtomicBool>,
}

impl GatedDeltaNet {
    /// The layer of these parts: for projections that are not dense, or weights from elsewhere.
    ///
    /// [`GatedDeltaNet::with_algo`] forces a kernel.
    ///
    /// # Errors
    /// When the config does not fit together, a part does not fit the config (the message names it), or the kernels do not run on the GPU.
    pub fn new(config: &GdnConfig, parts: GdnParts) -> Result<Self> {
        let _working = Working::new(parts.conv_weight.first().device());
        config.check()?;
        let GdnParts { in_proj, conv_weight, a_log, dt_bias, norm_weight, out_proj } = parts;
        check_gpu(conv_weight.first().device())?;
        conv_weight.check(OP, config)?;
        in_proj.check(OP, config, conv_weight.first().device())?;
        out_proj.check((OP, "out_proj"), [config.hidden_size, config.value_size()], conv_weight.first().device())?;
        let conv_weight = conv_weight.joined()?.detach().force_contiguous()?;
        // Before a call, as the last product of one would fail with the state already written.
        if let Some((dtype, _)) = out_proj.dtype_and_device() {
            check_dtype(OP, "out_proj", dtype, conv_weight.dtype())?;
        }
        let vector = |arg: &str, tensor: &Tensor, n: usize| {
            check_shape(OP, arg, tensor, &[n])?;
            check_device(OP, arg, tensor, conv_weight.device())?;
            tensor.detach().to_dtype(DType::F32)?.force_contiguous()
        };
        Ok(Self {
            a_log: vector("a_log", &a_log, config.num_value_heads)?,
            dt_bias: vector("dt_bias", &dt_bias, config.num_value_heads)?,
            norm_weight: vector("norm_weight", &norm_weight, config.value_head_dim)?,
            in_proj,
            out_proj,
            options: StepOptions::with(|options| {
                options.rule = RuleOptions::with(|rule| rule.beta_scale = config.beta_scale);
                options.norm_eps = config.rms_norm_eps;
                options.gate = config.output_gate;
            }),
            config: config.clone(),
            conv_weight,
            launched: Arc::default(),
        })
    }

    /// The layer with another choice of kernel: [`Algo::Auto`]; one of the rule, which then runs every call, those of few
    /// tokens with convolution and norm one by one; or one of the step, for calls of few tokens. A call that the kernel does
    /// not support is an error. Programs have [`Algo::from_env`].
    pub fn with_algo(mut self, algo: Algo) -> Self {
        self.options.rule.algo = algo;
        self
    }

    /// The config it was loaded with.
    pub fn config(&self) -> &GdnConfig {
        &self.config
    }

    /// A zero state for `batch` sequences, on the weights' device, its recurrent part in f32.
    ///
    /// # Errors
    /// When there is not enough memory.
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
    /// When there is not enough memory, or on another dtype.
    pub fn new_state_as(&self, batch: usize, recurrent: DType) -> Result<GdnState> {
        check_state_dtype("GatedDeltaNet", "state", recurrent)?;
        let c = &self.config;
        GdnState::zeros(
            [batch, c.conv_kernel - 1, c.conv_channels()],
            [batch, c.num_value_heads, c.value_head_dim, c.key_head_dim],
            (self.conv_weight.dtype(), recurrent),
            self.conv_weight.device(),
        )
    }

    /// States for `capacity` sequences that come and go, on the weights' device, with [`PoolOptions::default`]. All slots are
    /// zero.
    ///
    /// # Errors
    /// When `capacity` is zero, or there is not enough memory.
    pub fn new_pool(&self, capacity: usize) -> Result<StatePool> {
        self.new_pool_with(capacity, &PoolOptions::default())
    }

    /// The same with options.
    ///
    /// # Errors
    /// As [`Self::new_pool`], on another dtype than f32 and bf16, with shared spans of fewer slots; and with a ring where [`Self::with_algo`] chose a kernel, or
    /// on CUDA for other sizes than K = V = 128, or K 96 and V 192, with a convolution of width 4.
    pub fn new_pool_with(&self, capacity: usize, options: &PoolOptions) -> Result<StatePool> {
        if capacity == 0 {
            bail!("GatedDeltaNet: capacity: expected at least 1 slot, got 0");
        }
        if options.ring {
            self.check_ring()?;
        }
        let states = self.new_state_as(capacity, options.dtype.unwrap_or(DType::F32))?;
        let ring = match options.ring {
            true => {
                let own = options.spans.is_none();
                let spans = match &options.spans {
                    Some(spans) => spans.clone().checked(capacity, self.conv_weight.device())?,
                    None => RingSpans::new(capacity, self.conv_weight.device())?,
                };
                let (c, dtype) = (&self.config, self.conv_weight.dtype());
                Some(PoolRing { ring: Ring::new(capacity, c.head_sizes(), c.conv_channels(), dtype, spans)?, own })
            }
            false => None,
        };
        Ok(StatePool::new(states, ring))
    }

    /// Whether [`Self::new_pool_with`] supports a ring for this layer.
    pub fn supports_ring(&self) -> bool {
        self.check_ring().is_ok()
    }

    fn check_ring(&self) -> Result<()> {
        let (c, algo) = (&self.config, self.options.rule.algo);
        if self.conv_weight.device().is_cuda() && !c.has_fused_step() {
            bail!(
                "GatedDeltaNet: ring: expected heads of 128, or 96 (K) and 192 (V), and a convolution of width 4 on CUDA, got {} (K), {} (V) and {}",
                c.key_head_dim,
                c.value_head_dim,
                c.conv_kernel
            );
        }
        if algo != Algo::Auto {
            bail!("GatedDeltaNet: ring: expected no choice of kernel, since a ring has its own, got {algo}");
        }
        Ok(())
    }
}
