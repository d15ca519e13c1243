//! Choices between ops, from sizes that the host knows. Which kernel of an op runs, the op's CUDA library chooses
//! (`cuda/`), which knows the device.

use crate::algo::Algo;
use candle_core::DType;

/// Most tokens of a sequence that a step supports.
pub const STEP_TOKENS: usize = 16;

/// Tokens a sequence up to which a call of a layer uses the fused step on CUDA. With more, convolution, rule and norm one by
/// one are faster (the suite `layer`, docs/2026-11-chain.md).
pub const FUSED_TOKENS: usize = 8;

/// Sequences up to which the launches of one token overlap. With more the step's blocks only keep the projections' from
/// running (docs/2026-11-chain.md).
const OVERLAP_SEQUENCES: usize = 16;

/// Most tokens of a sequence that [`Algo::Decode`] supports.
const DECODE_TOKENS: usize = 16;

/// Head sizes of [`Algo::Decode`] for one token: K, and what divides V. For several tokens they are those of the fused step.
const DECODE_KEY_DIMS: [usize; 5] = [64, 96, 128, 192, 256];
const DECODE_VALUE_ROWS: usize = 32;

/// The sizes that the fused steps are made for: K and V of a head, and the convolution's width.
const FUSED_DIMS: [(usize, usize); 2] = [(128, 128), (96, 192)];
const FUSED_WIDTH: usize = 4;

/// Whether a layer's call of at most `longest` tokens a sequence uses the step.
pub fn uses_step(longest: usize, cuda: bool) -> bool {
    longest <= if cuda { FUSED_TOKENS } else { STEP_TOKENS }
}

/// Whether the launches of a layer's call may overlap.
pub fn overlaps(longest: usize, sequences: usize) -> bool {
    longest == 1 && sequences <= OVERLAP_SEQUENCES
}

/// Whether there are fused steps, over states and over rings, for these sizes.
pub fn has_fused_step(key_dim: usize, value_dim: usize, width: usize) -> bool {
    FUSED_DIMS.contains(&(key_dim, value_dim)) && width == FUSED_WIDTH
}

/// Why the rule's kernel that was chosen does not support a call; `None` where it may. `packed` where boundaries were given.
pub fn refuses_rule(
    algo: Algo,
    dtype: DType,
    (key_dim, value_dim): (usize, usize),
    longest: usize,
    packed: bool,
) -> Option<String> {
    match algo {
        Algo::Recurrent128 if (key_dim, value_dim) != (128, 128) => {
            Some(format!("supports heads of size 128, got {key_dim} (K) and {value_dim} (V)"))
        }
        Algo::Decode if longest > DECODE_TOKENS => {
            Some(format!("supports up to {DECODE_TOKENS} tokens a sequence, got {longest}"))
        }
        Algo::Decode if (longest > 1 || packed) && !FUSED_DIMS.contains(&(key_dim, value_dim)) => Some(format!(
            "supports several or packed tokens for heads of 128, or 96 (K) and 192 (V), got {key_dim} (K) and {value_dim} (V)"
        )),
        Algo::Decode if !DECODE_KEY_DIMS.contains(&key_dim) || value_dim % DECODE_VALUE_ROWS != 0 => Some(format!(
            "supports K of 64, 96, 128, 192 or 256 and V of a multiple of {DECODE_VALUE_ROWS}, got {key_dim} (K) and {value_dim} (V)"
        )),
        Algo::ChunkedSm80 | Algo::ChunkedSm90 if !matches!(dtype, DType::BF16 | DType::F16) => {
            Some(format!("supports q, k and v in bf16 or f16, got {dtype:?}"))
        }
        Algo::ChunkedSm80 | Algo::ChunkedSm90 if key_dim > 128 || key_dim % 8 != 0 || value_dim % 8 != 0 => {
            Some(format!(
                "supports head sizes that are multiples of 8 and K up to 128, got {key_dim} (K) and {value_dim} (V)"
            ))
        }
        Algo::StepWhole | Algo::StepSplit | Algo::StepHeads => Some("is a kernel of gdn_step".to_owned()),
        _ => None,
    }
}

/// The same for a step over states.
pub fn refuses_step(
    algo: Algo,
    (key_dim, value_dim, width): (usize, usize, usize),
    longest: usize,
    packed: bool,
) -> Option<String> {
    if !algo.is_step() {
        return None;
    }
    if !has_fused_step(key_dim, value_dim, width) {
        return Some(format!(
            "supports heads of 128, or 96 (K) and 192 (V), and a convolution of width {FUSED_WIDTH}, got {key_dim} (K), \
             {value_dim} (V) and {width}"
        ));
    }
    if algo == Algo::StepSplit && (longest > 1 || packed) {
        let packed = if packed { " packed" } else { "" };
        return Some(format!("supports one token a sequence, got {longest}{packed}"));
    }
    None
}

#[cfg(test)]
mod tests;
