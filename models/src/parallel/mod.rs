//! One model over several devices: tensor parallelism.
//!
//! Every rank holds a shard of each layer and runs all tokens through it: of Gated DeltaNet a range of key heads with
//! their value heads, of softmax attention a range of query heads with the key-value heads they read (which ranks share
//! where there are more ranks than those), of every MLP and every expert a range of the inner width, and a range of the
//! vocabulary. What a mixer or a feed-forward gives is summed over the ranks, twice a layer; norms, routers and small
//! gates are on every rank.
//!
//! Weights may be quantised, in a GGUF file or as they load: rows are divided as they are, columns at the borders of their
//! blocks where these fall so ([`Loader::group`](crate::Loader::group) says what else).

mod config;
mod local;
mod shards;
mod vocabulary;
mod weights;

pub use local::LocalRank;
pub(crate) use shards::{DimRanges, RowsOrColumns, WeightShards};
pub(crate) use vocabulary::Vocabulary;
pub use weights::{shard_of, shard_of_safetensors};

use candle_core::{bail, Result, Tensor};

/// What the ranks of a model do together. All of them make the same calls in the same order; what comes back is the
/// same on all, bit for bit.
pub trait Collective: std::fmt::Debug + Send + Sync {
    /// Which of the ranks this is, below [`size`](Self::size).
    fn rank(&self) -> usize;

    /// How many there are.
    fn size(&self) -> usize;

    /// The sum of the ranks' `x`, which have one shape and dtype.
    ///
    /// # Errors
    /// When a rank is gone.
    fn all_reduce(&self, x: &Tensor) -> Result<Tensor>;

    /// The ranks' `x [..]`, of one shape and dtype, first to last: `[size, ..]`.
    ///
    /// # Errors
    /// When a rank is gone.
    fn all_gather(&self, x: &Tensor) -> Result<Tensor>;

    /// Returns when all that this rank asked for is done. Models call it at the end of each pass: on a GPU the calls
    /// above return before the ranks have met.
    ///
    /// # Errors
    /// When a rank is gone.
    fn settle(&self) -> Result<()> {
        Ok(())
    }
}

/// One of several equal shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shard {
    pub rank: usize,
    pub size: usize,
}

impl Shard {
    pub fn of_rank(group: &dyn Collective) -> Result<Self> {
        let shard = Self { rank: group.rank(), size: group.size() };
        if shard.rank >= shard.size {
            bail!("rank: expected one below {}, got {}", shard.size, shard.rank)
        }
        Ok(shard)
    }

    /// Its shard of `0..total`, which the number of shards divides.
    pub fn range(self, total: usize) -> std::ops::Range<usize> {
        let each = total / self.size;
        self.rank * each..(self.rank + 1) * each
    }
}
