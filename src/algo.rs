//! The kernels, by name.

use candle_core::{Error, Result};
use std::ffi::OsString;
use std::fmt;
use std::str::FromStr;

/// Which kernel runs the rule or a step. Every variant computes the same function; `Auto` is what callers want, the others
/// are for tests and benchmarks. On the CPU all are the same, but for what they refuse. Programs and [`Algo::VARIABLE`] use
/// the names of `cuda/gdn.h` in lower case: `recurrent_128`.
///
/// A [`GdnStep`](crate::ops::GdnStep) with a kernel of the rule runs convolution, rule and norm one after the other; the
/// rule refuses a kernel of the step, and a layer uses it for its steps alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Algo {
    /// Picked from the amount of work and the device.
    #[default]
    Auto,
    /// Token by token, any head size. On the CPU, from eight tokens on, one pass over the state handles four tokens.
    Recurrent,
    /// Token by token, specialised for K = V = 128. On CUDA the rows of q and k must begin at multiples of four elements
    /// and the state at four of its own, which `Auto` checks and this refuses.
    Recurrent128,
    /// Made for decode: one token a sequence, K 64, 96, 128, 192 or 256 and V a multiple of 32; or up to 16 tokens, K = V = 128
    /// or K 96 and V 192; boundaries count as several tokens. On CUDA the rows of q and k must begin at multiples of eight elements,
    /// those of v at four, and the state at 16 bytes; for one token a and b are in f32 or in q's dtype.
    Decode,
    /// Chunk by chunk (64 tokens) on tensor cores, f32 sums: q, k and v in bf16 or f16, K up to 128, both head sizes
    /// multiples of 8. On CUDA the rows of q, k and v must begin at 16 bytes and the state at four elements, which `Auto` checks and this refuses;
    /// `Auto` uses it where it is the fastest. o and the state are within 5e-3 (relative RMS) of exact arithmetic; where a few keys
    /// repeat over hundreds of tokens without decay at beta near 2 they are not, as 16-bit operands do not suffice there,
    /// and [`Algo::Recurrent`] is the one to choose. In f16 what is made of the state, of v and of keys ends at 65,504.
    ChunkedSm80,
    /// `ChunkedSm80` with the instructions of compute capability 9.0, which no other device has: refused there, and where q, k or v
    /// is broadcast (a stride of zero).
    ChunkedSm90,
    /// A step as one CUDA kernel, a block for each key head of a sequence. K = V = 128, or K 96 and V 192, and a convolution of
    /// width 4; rows of qkv, z and the convolution's state at multiples of four elements, the state and the convolution's weight at
    /// multiples of 16 bytes, and shared memory for all tokens of a key head's value heads, which `Auto` checks and this refuses.
    StepWhole,
    /// A step as one CUDA kernel, several blocks for each value head: one token a sequence, at most four value heads a key
    /// head (two of V 192), gates in f32 or in qkv's dtype, offsets of 32 bits, compute capability 9.0, the rest as for `StepWhole`.
    StepSplit,
    /// A step as one CUDA kernel, a block for each value head: two to eight value heads a key head, compute capability 9.0,
    /// the rest as for `StepWhole`.
    StepHeads,
    /// A step as the three ops one after the other, with what passes between them rounded to the dtype of qkv; the rule's
    /// kernel is picked.
    Unfused,
}

impl Algo {
    /// The kernels of the rule, for sweeps.
    pub const RULE: [Algo; 6] =
        [Algo::Auto, Algo::Recurrent, Algo::Recurrent128, Algo::Decode, Algo::ChunkedSm80, Algo::ChunkedSm90];

    /// The ways of a step, for sweeps.
    pub const STEP: [Algo; 5] = [Algo::Auto, Algo::StepWhole, Algo::StepSplit, Algo::StepHeads, Algo::Unfused];

    /// The environment variable by which a program's user forces a kernel; the library does not read it by itself.
    pub const VARIABLE: &str = "CANDLE_GDN_ALGO";

    /// The kernel that [`Algo::VARIABLE`] names: `Auto` where it is not set or empty. For programs.
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

    /// As [`FromStr`] parses it.
    pub fn name(self) -> &'static str {
        match self {
            Algo::Auto => "auto",
            Algo::Recurrent => "recurrent",
            Algo::Recurrent128 => "recurrent_128",
            Algo::Decode => "decode",
            Algo::ChunkedSm80 => "chunked_sm80",
            Algo::ChunkedSm90 => "chunked_sm90",
            Algo::StepWhole => "step_whole",
            Algo::StepSplit => "step_split",
            Algo::StepHeads => "step_heads",
            Algo::Unfused => "unfused",
        }
    }

    /// Whether it is a kernel of the step.
    pub(crate) fn is_step(self) -> bool {
        matches!(self, Algo::StepWhole | Algo::StepSplit | Algo::StepHeads)
    }

    /// Whether a step may run as one kernel.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn may_fuse(self) -> bool {
        self == Algo::Auto || self.is_step()
    }

    /// What the rule runs where a layer or a step was given this.
    pub(crate) fn of_rule(self) -> Self {
        match self {
            Algo::Unfused => Algo::Auto,
            algo if algo.is_step() => Algo::Auto,
            algo => algo,
        }
    }

    fn all() -> impl Iterator<Item = Self> {
        Self::RULE.into_iter().chain(Self::STEP.into_iter().skip(1))
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
        match Self::all().find(|algo| algo.name() == name) {
            Some(algo) => Ok(algo),
            None => {
                let names: Vec<_> = Self::all().map(Self::name).collect();
                Err(format!("expected {}, got {name:?}", names.join(", ")))
            }
        }
    }
}

#[cfg(test)]
mod tests;
