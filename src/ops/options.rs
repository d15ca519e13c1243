//! What a caller may choose about the rule.

use candle_core::Tensor;

/// Which kernel runs. Every variant computes the same function; `Auto` is what callers want, the others are for tests
/// and benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Algo {
    /// Picked from the amount of work and the device.
    #[default]
    Auto,
    /// Token by token, any head size. On the CPU four tokens a pass over the state once there are eight.
    Recurrent,
    /// Token by token, specialised for K = V = 128. On CUDA the rows of q and k must begin at multiples of four elements
    /// and the state at 16 bytes, which `Auto` checks and this refuses. On the CPU the same as `Recurrent`.
    Recurrent128,
    /// Chunk by chunk (64 tokens on the CPU, 16 or 32 on CUDA), any head size, f32 arithmetic.
    Chunked,
}

impl Algo {
    /// All variants, for sweeps.
    pub const ALL: [Algo; 4] = [Algo::Auto, Algo::Recurrent, Algo::Recurrent128, Algo::Chunked];
}

/// Activation of an output gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GateActivation {
    /// `z * sigmoid(z)`
    #[default]
    Silu,
    /// `sigmoid(z)`
    Sigmoid,
}

/// Constants of the gated delta rule. The default is Qwen3-Next's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RuleOptions {
    /// Divide q and k by their L2 norm inside the kernel. Default true.
    pub l2norm: bool,
    /// Added to the sum of squares, inside the root. Default 1e-6.
    pub l2_eps: f64,
    /// Multiplies q after the norm. Default `None`: `K^-0.5`.
    pub scale: Option<f64>,
    /// Multiplies `sigmoid(b)`: 1 (default), or 2 for models whose state transition may have negative eigenvalues.
    pub beta_scale: f64,
    /// Which kernel runs.
    pub algo: Algo,
}

impl Default for RuleOptions {
    fn default() -> Self {
        Self { l2norm: true, l2_eps: 1e-6, scale: None, beta_scale: 1.0, algo: Algo::Auto }
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
