//! What a caller may choose about the rule and the step around it.

use candle_core::{Error, Result, Tensor};
use std::ffi::OsString;
use std::fmt;
use std::str::FromStr;

/// Which kernel runs. Every variant computes the same function; `Auto` is what callers want, the others are for tests
/// and benchmarks. Programs and [`Algo::VARIABLE`] name them as `cuda/gdn.h` does, in lower case: `recurrent_128`.
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

    /// The environment variable that forces a variant on every [`crate::GatedDeltaNet`] of a program, and on the
    /// programs of this repository where they are given no `--algo`.
    pub const VARIABLE: &str = "CANDLE_GDN_ALGO";

    /// What [`Algo::VARIABLE`] asks for: `Auto` where it is not set or empty.
    ///
    /// # Errors
    /// When it is no name of a variant; the message has the names.
    pub fn from_env() -> Result<Self> {
        Self::from_value(std::env::var_os(Self::VARIABLE))
    }

    fn from_value(value: Option<OsString>) -> Result<Self> {
        match value.unwrap_or_default().to_string_lossy() {
            name if name.is_empty() => Ok(Algo::Auto),
            name => name.parse().map_err(|e| Error::msg(format!("{}: {e}", Self::VARIABLE))),
        }
    }

    /// As [`FromStr`] takes it.
    pub fn name(self) -> &'static str {
        match self {
            Algo::Auto => "auto",
            Algo::Recurrent => "recurrent",
            Algo::Recurrent128 => "recurrent_128",
            Algo::Decode128 => "decode_128",
            Algo::ChunkedSm80 => "chunked_sm80",
            Algo::ChunkedSm90 => "chunked_sm90",
        }
    }

    /// Whether it rounds what it multiplies to q's dtype, since tensor cores do: these take bf16 and f16 only.
    pub(crate) fn on_tensor_cores(self) -> bool {
        matches!(self, Algo::ChunkedSm80 | Algo::ChunkedSm90)
    }
}

impl fmt::Display for Algo {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}

/// By [`Algo::name`].
impl FromStr for Algo {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        match Self::ALL.into_iter().find(|algo| algo.name() == name) {
            Some(algo) => Ok(algo),
            None => Err(format!("expected {}, got {name:?}", Self::ALL.map(Self::name).join(", "))),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_algo_has_one_name() {
        for algo in Algo::ALL {
            assert_eq!(algo.name().parse::<Algo>().unwrap(), algo);
            let camel: String = format!("{algo:?}").to_lowercase();
            assert_eq!(algo.name().replace('_', ""), camel);
        }
        for name in ["", "fast", "Recurrent", "recurrent128", " auto", "all"] {
            let error = name.parse::<Algo>().unwrap_err();
            let names = "auto, recurrent, recurrent_128, decode_128, chunked_sm80, chunked_sm90";
            assert_eq!(error, format!("expected {names}, got {name:?}"));
        }
    }

    #[test]
    fn they_are_those_of_the_header() {
        let header = include_str!("../../cuda/gdn.h").split("typedef enum gdn_algo {").nth(1).unwrap();
        let lines = header.split("} gdn_algo;").next().unwrap().lines();
        let names = lines.filter_map(|line| line.trim().strip_prefix("GDN_")?.split(' ').next());
        assert!(names.map(str::to_lowercase).eq(Algo::ALL.map(Algo::name)));
    }

    #[test]
    fn the_variable_is_a_name_or_nothing() {
        let of = |value: Option<&str>| Algo::from_value(value.map(OsString::from));
        assert_eq!(of(None).unwrap(), Algo::Auto);
        assert_eq!(of(Some("")).unwrap(), Algo::Auto);
        assert_eq!(of(Some("chunked_sm80")).unwrap(), Algo::ChunkedSm80);
        let error = of(Some("fast")).unwrap_err().to_string();
        assert!(error.starts_with("CANDLE_GDN_ALGO: expected auto, recurrent, "), "{error}");
        assert!(error.contains("got \"fast\""), "{error}");
    }
}
