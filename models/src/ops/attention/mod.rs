//! Softmax attention over caches of keys and values, for the layers that stand between those of the rule: its two
//! halves, before and behind the append to the cache.

mod cache;
mod decode;
mod prepare;

pub use cache::AttentionCache;
pub use decode::{attention_decode, AttentionDecode};
pub use prepare::{attention_prepare, rotary_frequencies, AttentionPrepare, PrepareOptions};

use candle_gdn::plumbing::{HeadsLayout, SequencePlan};

/// A checked call, as the CUDA side reads it.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct AttentionPlan {
    /// q, k, v; of a decode q and the gate.
    pub inputs: [HeadsLayout; 3],
    pub seqs: SequencePlan,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub out_shape: Vec<usize>,
}
