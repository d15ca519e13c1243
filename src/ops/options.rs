//! What a caller may choose about the rule and the step around it.

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
    /// Made for decode: up to 16 tokens a sequence, K = V = 128. On CUDA the rows of q and k must begin at multiples of
    /// eight elements, those of v at four, and the state at 16 bytes. On the CPU the same as `Recurrent`.
    Decode128,
    /// Chunk by chunk (64 tokens) on tensor cores, f32 sums: q, k and v in bf16 or f16, K up to 128, both head sizes
    /// multiples of 8. On CUDA the rows of q, k and v must begin at 16 bytes, which `Auto` checks and this refuses;
    /// `Auto` takes it where it wins. o and the state are within 5e-3 (relative RMS) of exact arithmetic; where a few keys
    /// repeat over hundreds of tokens without decay at beta near 2 they are not, as 16-bit operands do not suffice there,
    /// and [`Algo::Recurrent`] should be asked for. On the CPU the same as `Recurrent`.
    ChunkedSm80,
    /// `ChunkedSm80` with the instructions of compute capability 9.0, which no other device has: refused there. On the
    /// CPU the same as `Recurrent`.
    ChunkedSm90,
}

impl Algo {
    /// All variants, for sweeps.
    pub const ALL: [Algo; 6] =
        [Algo::Auto, Algo::Recurrent, Algo::Recurrent128, Algo::Decode128, Algo::ChunkedSm80, Algo::ChunkedSm90];

    /// Whether it rounds what it multiplies to q's dtype, since tensor cores do: these take bf16 and f16 only.
    pub(crate) fn on_tensor_cores(self) -> bool {
        matches!(self, Algo::ChunkedSm80 | Algo::ChunkedSm90)
    }
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
    /// Context parallelism of [`Algo::ChunkedSm80`] and [`Algo::ChunkedSm90`] on CUDA: how many parts a sequence is cut
    /// into that run side by side, which pays for few long sequences. 0 (default) chooses, 1 is none. Ignored elsewhere.
    pub segments: usize,
}

impl Default for RuleOptions {
    fn default() -> Self {
        Self { l2norm: true, l2_eps: 1e-6, scale: None, beta_scale: 1.0, algo: Algo::Auto, segments: 0 }
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

/// How a [`crate::GdnStep`] runs. Every variant computes the same function; `Auto` is what callers want, the others are
/// for tests and benchmarks. On the CPU all are `Composed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StepAlgo {
    /// Picked from the shape, the amount of work and the device.
    #[default]
    Auto,
    /// One CUDA kernel, a block for each key head of a sequence. K = V = 128 and a convolution of width 4; rows of qkv,
    /// z and the convolution's state at multiples of four elements, the state and the convolution's weight at multiples
    /// of 16 bytes, which `Auto` checks and this refuses.
    Whole,
    /// One CUDA kernel, several blocks for each value head: one token a sequence, at most four value heads a key head,
    /// compute capability 9.0, the rest as for `Whole`.
    Split,
    /// One CUDA kernel, a block for each value head: two to eight value heads a key head, compute capability 9.0, the
    /// rest as for `Whole`.
    Heads,
    /// The three ops one after the other, with what passes between them rounded to the dtype of qkv.
    Composed,
}

impl StepAlgo {
    /// All variants, for sweeps.
    pub const ALL: [StepAlgo; 5] =
        [StepAlgo::Auto, StepAlgo::Whole, StepAlgo::Split, StepAlgo::Heads, StepAlgo::Composed];
}

/// Constants of a [`crate::GdnStep`]: those of the rule and of the gated norm. The default is Qwen3-Next's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepOptions {
    /// Those of the rule. Its `algo` and `segments` are read only where the step runs as [`StepAlgo::Composed`].
    pub rule: RuleOptions,
    /// Added to the mean square in the gated norm. Default 1e-6.
    pub norm_eps: f64,
    /// Activation of the output gate z. Default SiLU.
    pub gate: GateActivation,
    /// How it runs.
    pub algo: StepAlgo,
}

impl Default for StepOptions {
    fn default() -> Self {
        Self { rule: RuleOptions::default(), norm_eps: 1e-6, gate: GateActivation::Silu, algo: StepAlgo::Auto }
    }
}
