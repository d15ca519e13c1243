//! One model over several devices: tensor parallelism.
//!
//! Every rank holds a shard of each layer and runs all tokens through it: a range of key heads with their value heads of
//! Gated DeltaNet, a range of query heads with their key-value heads of softmax attention (ranks share a key-value head if
//! there are more ranks than those), a range of the inner width of every MLP and every expert, and a range of the vocabulary.
//! The outputs of mixers and feed-forwards are summed over the ranks, twice a layer; norms, routers and small gates are on
//! every rank.
//!
//! Weights may be quantised, in a GGUF file or as they load: rows are divided without change, columns at the borders of their
//! blocks if the borders of the shards are such ([`Loader::group`](crate::Loader::group) explains the other case).

mod config;
mod local;
#[cfg(feature = "nccl")]
mod nccl;
#[cfg(any(feature = "nccl", test))]
mod pending;
mod shards;
mod vocabulary;
mod weights;

pub use local::LocalRank;
#[cfg(feature = "nccl")]
pub use nccl::{NcclId, NcclRank};
pub(crate) use shards::{DimRanges, RowsOrColumns, WeightShards};
pub(crate) use vocabulary::Vocabulary;
pub use weights::shard_of;
pub(crate) use weights::shard_of_safetensors;

use candle_core::{bail, Result, Tensor};

/// The communication of a model's ranks. All of them make the same calls in the same order; the results are the same on
/// all, bit for bit.
pub trait Collective: std::fmt::Debug + Send + Sync {
    /// The number of this rank, below [`size`](Self::size).
    fn rank(&self) -> usize;

    /// The number of ranks.
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

    /// Returns when all calls of this rank have finished. Models call it at the end of each pass: on a GPU the calls
    /// above return before the ranks have exchanged anything.
    ///
    /// # Errors
    /// When a rank is gone.
    fn settle(&self) -> Result<()> {
        Ok(())
    }

    /// Whether a rank is gone for good: every later call is an error.
    fn is_lost(&self) -> bool {
        false
    }

    /// This rank makes no further call, as after an error of its own: the calls of the others become errors, those that wait already too.
    fn leave(&self) {}
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

    /// Its range of `0..total`, which the number of shards divides.
    pub fn range(self, total: usize) -> std::ops::Range<usize> {
        let each = total / self.size;
        self.rank * each..(self.rank + 1) * each
    }
}
