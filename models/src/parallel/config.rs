//! What one rank computes of a model.

use crate::config::{FfnKind, ModelConfig};
use candle_core::{bail, Result};

impl ModelConfig {
    /// The configuration of the shard that each of `ranks` has: fewer heads, narrower feed-forwards, fewer rows of the
    /// vocabulary; the width of the model is the whole one.
    ///
    /// # Errors
    /// Where the shards would not be equal: the message names what `ranks` does not divide.
    pub fn split(&self, ranks: usize) -> Result<Self> {
        let n = ranks;
        if n == 0 {
            bail!("tensor parallelism: expected at least 1 rank, got 0")
        }
        let whole = |what: &str, total: usize| match total.is_multiple_of(n) {
            true => Ok(total / n),
            false => bail!("tensor parallelism: expected a number of ranks that divides the {what} ({total}), got {n}"),
        };
        let mut c = self.clone();
        if n > self.gdn.num_key_heads {
            bail!(
                "tensor parallelism: expected at most as many ranks as key heads ({}), got {n}",
                self.gdn.num_key_heads
            )
        }
        c.gdn.num_key_heads = whole("key heads of Gated DeltaNet", self.gdn.num_key_heads)?;
        c.gdn.num_value_heads = whole("value heads of Gated DeltaNet", self.gdn.num_value_heads)?;
        c.attention.num_heads = whole("attention heads", self.attention.num_heads)?;
        // With more ranks than key-value heads, ranks side by side have the same one.
        let kv = self.attention.num_kv_heads;
        c.attention.num_kv_heads = match n.is_multiple_of(kv) {
            true => 1,
            false => whole("key-value heads", kv)?,
        };
        c.vocab_size = whole("vocabulary", self.vocab_size)?;
        if let Some(moe) = &mut c.moe {
            moe.intermediate_size = whole("inner width of the experts", moe.intermediate_size)?;
            moe.shared_intermediate_size = whole("inner width of the shared expert", moe.shared_intermediate_size)?;
        }
        for layer in &mut c.layers {
            if let FfnKind::Dense { intermediate_size } = &mut layer.ffn {
                *intermediate_size = whole("inner width of the MLPs", *intermediate_size)?;
            }
        }
        Ok(c)
    }
}
