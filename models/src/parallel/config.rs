//! The configuration of a rank's shard.

use crate::config::{FfnKind, ModelConfig};
use candle_core::{bail, Result};

impl ModelConfig {
    /// The configuration of each rank's shard: fewer heads, narrower feed-forwards, fewer rows of the vocabulary, the same
    /// width of the model.
    ///
    /// # Errors
    /// When the shards would not be equal: the message names the number that `ranks` does not divide.
    pub fn split(&self, ranks: usize) -> Result<Self> {
        let (n, key_heads) = (ranks, self.gdn.num_key_heads);
        if n == 0 {
            bail!("tensor parallelism: expected at least 1 rank, got 0")
        }
        let shard = |what: &str, total: usize| match total.is_multiple_of(n) {
            true => Ok(total / n),
            false => bail!("tensor parallelism: expected a number of ranks that divides the {what} ({total}), got {n}"),
        };
        let mut c = self.clone();
        if n > key_heads {
            bail!("tensor parallelism: expected at most as many ranks as key heads ({key_heads}), got {n}")
        }
        c.gdn.num_key_heads = shard("key heads of Gated DeltaNet", key_heads)?;
        c.gdn.num_value_heads = shard("value heads of Gated DeltaNet", self.gdn.num_value_heads)?;
        c.attention.num_heads = shard("attention heads", self.attention.num_heads)?;
        // With more ranks than key-value heads, neighbouring ranks share one.
        let kv = self.attention.num_kv_heads;
        c.attention.num_kv_heads = match n.is_multiple_of(kv) {
            true => 1,
            false => shard("key-value heads", kv)?,
        };
        c.vocab_size = shard("vocabulary", self.vocab_size)?;
        if let Some(moe) = &mut c.moe {
            moe.intermediate_size = shard("inner width of the experts", moe.intermediate_size)?;
            moe.shared_intermediate_size = shard("inner width of the shared expert", moe.shared_intermediate_size)?;
        }
        for layer in &mut c.layers {
            if let FfnKind::Dense { intermediate_size } = &mut layer.ffn {
                *intermediate_size = shard("inner width of the MLPs", *intermediate_size)?;
            }
        }
        Ok(c)
    }
}
