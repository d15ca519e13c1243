//! Which kernel multiplies a weight on CUDA: pure functions of rows, sizes, storage and dtype. For dense weights candle-gdn
//! chooses between its kernel and cuBLAS (`src/linear/plan.rs` there).
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use crate::abi::moe::{GDN_MOE_EXPERTS, GDN_MOE_PACKED_INPUTS, GDN_MOE_PACKED_TOKENS, GDN_MOE_TOP_K};
use crate::abi::scaled::{GDN_SCALED_ROWS, GDN_SWIGLU_ROWS};
use crate::config::MoeConfig;
use candle_core::DType;

/// How the kernels of a product read its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// As it is stored, once for up to [`FEW`] rows of x where it is packed, or [`GDN_SCALED_ROWS`] in e4m3.
    Few,
    /// As it is stored, once for up to [`MANY`] rows of x, by tensor cores.
    Many,
    /// Dequantised to x's dtype, then by cuBLAS.
    Dequantised,
}

/// Rows for which the kernels read packed weights once (`cuda/quantized/README.md`).
pub(crate) const FEW: usize = 8;
/// The same where all matrices are in q4_K: with more rows unpacking once is faster.
const FEW_OF_Q4_K: usize = 6;
/// Rows up to which unpacking inside the product is faster than storing the numbers in 16 bits.
pub(crate) const MANY: usize = 128;

/// Of matrices in ggml's types that are packed for our kernels.
pub(crate) fn packed(rows: usize, dtype: DType, all_q4_k: bool) -> Kernel {
    let f32 = dtype == DType::F32;
    match rows {
        _ if rows <= if all_q4_k && !f32 { FEW_OF_Q4_K } else { FEW } => Kernel::Few,
        _ if rows <= MANY && !f32 => Kernel::Many,
        _ => Kernel::Dequantised,
    }
}

/// Of a matrix in e4m3: dequantising reads and writes five bytes a number, which more rows are worth. The kernel may still
/// refuse a width that does not fit into the device's shared memory.
pub(crate) fn e4m3(rows: usize) -> Kernel {
    match rows {
        _ if rows <= GDN_SCALED_ROWS => Kernel::Few,
        _ => Kernel::Dequantised,
    }
}

/// Whether a dense product and SwiGLU are faster in one kernel than in two, the first by cuBLAS (measured on an H200).
pub(crate) fn dense_swiglu_wins(rows: usize, inputs: usize) -> bool {
    rows <= if inputs < 4096 || inputs.is_multiple_of(2048) { 8 } else { 4 }
}

/// Whether the kernel for up to 8 rows can end in SwiGLU.
pub(crate) fn swiglu_fits(rows: usize, outputs: usize) -> bool {
    (1..=GDN_SWIGLU_ROWS).contains(&rows) && outputs.is_multiple_of(2)
}

/// Whether the kernels of a mixture of experts on CUDA support a layer, `dtype` being that of x.
pub(crate) fn experts_supported(cfg: &MoeConfig, hidden: usize, dtype: DType) -> bool {
    let widths = [cfg.intermediate_size, cfg.shared_intermediate_size];
    matches!(dtype, DType::BF16 | DType::F16)
        && hidden.is_multiple_of(64)
        && widths[0] > 0
        && widths.iter().all(|width| width.is_multiple_of(64) && width.saturating_mul(hidden) <= 1 << 29)
        && (1..=GDN_MOE_EXPERTS).contains(&cfg.num_experts)
        && (1..=GDN_MOE_TOP_K.min(cfg.num_experts)).contains(&cfg.experts_per_token)
}

/// Tokens of one call with 16-bit experts or experts in e4m3: the kernels keep a row of each token and expert.
pub(crate) const EXPERT_TOKENS: usize = 8192;

/// Tokens up to which packed experts are multiplied as they are. Of 256 experts, 8 a token, 16 tokens choose 102, so 256
/// tokens read all of them 6.4 times, in half a byte a number each; 16-bit numbers of them are written and read once.
const PACKED_EXPERT_TOKENS: usize = 256;

/// Of packed experts: the tokens of one call that reads them as they are, or `None` where they are dequantised first.
pub(crate) fn packed_experts(tokens: usize, hidden: usize) -> Option<usize> {
    (tokens <= PACKED_EXPERT_TOKENS).then(|| packed_expert_tokens(hidden))
}

/// Tokens of a call with packed experts, at most; 0 where x is too wide for one.
pub(crate) fn packed_expert_tokens(hidden: usize) -> usize {
    GDN_MOE_PACKED_TOKENS.min(GDN_MOE_PACKED_INPUTS / hidden.max(1))
}

/// Tokens whose dense experts are gathered on the device where our kernels do not support the layer. A gathered weight is read
/// twice and written once; the host's way costs one wait and several launches an expert.
pub(crate) const GATHERED_TOKENS: usize = 32;

/// Whether so many tokens of a layer on CUDA wait for the host to route them, which no captured graph may.
pub(crate) fn routed_on_host(cfg: &MoeConfig, hidden: usize, dtype: DType, tokens: usize) -> bool {
    tokens > GATHERED_TOKENS && !experts_supported(cfg, hidden, dtype)
}

#[cfg(test)]
mod tests;
