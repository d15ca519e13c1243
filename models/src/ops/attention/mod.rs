//! Softmax attention over caches of keys and values, for the layers that stand between those of the rule: its two
//! halves, before and behind the append to the cache.

mod advance;
mod cache;
mod decode;
mod prepare;

pub use cache::AttentionCache;
pub use decode::{attention_decode, AttentionDecode};
pub use prepare::{attention_prepare, rotary_frequencies, AttentionPrepare, PrepareOptions};
