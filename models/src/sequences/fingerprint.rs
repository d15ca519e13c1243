//! Hashes that say which tokens and which model a state belongs to. They are the same in every process.

use crate::config::ModelConfig;
use candle_core::DType;

/// Hash of `tokens` after tokens with the hash `before`, 0 before the first: FNV-1a over whole tokens.
pub(crate) fn hash_tokens(before: u64, tokens: &[u32]) -> u64 {
    let append =
        |hash: u64, token: &u32| (hash ^ 0xcbf2_9ce4_8422_2325 ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3);
    tokens.iter().fold(before, append)
}

/// Hash of the configuration and dtype of a model.
pub(crate) fn hash_model(config: &ModelConfig, dtype: DType) -> u64 {
    let text: Vec<u32> = format!("{config:?} {dtype:?}").chars().map(u32::from).collect();
    hash_tokens(0, &text)
}
