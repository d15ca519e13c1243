//! Keys and values of one attention layer on the CPU, a cache a slot.

use super::cpu::{Cache, Shape};
use candle_core::{DType, Device, Result, Tensor};
use half::{bf16, f16};
use std::ops::Range;

/// Sizes of one sequence's keys and values, and their device.
#[derive(Debug, Clone)]
pub(crate) struct CacheShape {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) max_len: usize,
    /// That of the layer.
    pub(crate) window: Option<usize>,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
}

impl CacheShape {
    /// Tokens of a sequence that the cache has room for.
    pub(crate) fn capacity(&self) -> usize {
        capacity(self.window, self.max_len)
    }
}

/// Tokens that a cache keeps of sequences of up to `max_len` tokens: with a window those that a token sees, and room for new
/// ones, which are in the cache before the first of them is read. The cache is then a ring: a token lies at its position modulo
/// the capacity.
pub(crate) fn capacity(window: Option<usize>, max_len: usize) -> usize {
    window.map_or(max_len, |window| window.saturating_add(new_tokens(window)).min(max_len))
}

/// New tokens that a ring has room for beside those of the window: of one append, or of a draft that may be rejected.
pub(crate) fn new_tokens(window: usize) -> usize {
    window.clamp(64, 512)
}

/// In the layout of the CPU's kernel.
#[derive(Debug)]
pub(crate) enum CpuCaches {
    F32(Vec<Cache<f32>>),
    BF16(Vec<Cache<bf16>>),
    F16(Vec<Cache<f16>>),
}

/// `$run` on the caches of whichever type.
macro_rules! typed {
    ($caches:expr, $typed:ident => $run:expr) => {
        match $caches {
            CpuCaches::F32($typed) => $run,
            CpuCaches::BF16($typed) => $run,
            CpuCaches::F16($typed) => $run,
        }
    };
}
pub(crate) use typed;

impl CpuCaches {
    pub(crate) fn new(sizes: &CacheShape, slots: usize) -> Self {
        let CacheShape { heads, kv_heads, head_dim: dim, window, .. } = *sizes;
        let shape = Shape { heads, kv_heads, dim, window };
        match sizes.dtype {
            DType::BF16 => Self::BF16((0..slots).map(|_| Cache::new(shape)).collect()),
            DType::F16 => Self::F16((0..slots).map(|_| Cache::new(shape)).collect()),
            _ => Self::F32((0..slots).map(|_| Cache::new(shape)).collect()),
        }
    }

    /// Bytes held.
    pub(crate) fn size_in_bytes(&self) -> usize {
        typed!(self, caches => caches.iter().map(Cache::size_in_bytes).sum())
    }

    /// Bytes of one cache with room for `tokens` tokens.
    pub(crate) fn bytes_of(&self, tokens: usize) -> usize {
        typed!(self, caches => caches.first().map_or(0, |cache| cache.bytes_of(tokens)))
    }

    /// The window of the layer.
    pub(crate) fn window(&self) -> Option<usize> {
        typed!(self, caches => caches.first().and_then(|cache| cache.shape.window))
    }

    /// Copies of keys and values of a range of tokens, `[1, kv_heads, tokens, head_dim]`.
    pub(crate) fn read_rows(&self, slot: usize, tokens: Range<usize>) -> Result<[Tensor; 2]> {
        typed!(self, caches => {
            let Shape { kv_heads, dim, .. } = caches[slot].shape;
            let shape = (1, kv_heads, tokens.len(), dim);
            let [k, v] = caches[slot].read_rows(tokens);
            Ok([Tensor::from_vec(k, shape, &Device::Cpu)?, Tensor::from_vec(v, shape, &Device::Cpu)?])
        })
    }

    /// Replaces the tokens from `start` on by rows in the layout of [`CpuCaches::read_rows`].
    pub(crate) fn write_rows(&mut self, slot: usize, start: usize, rows: [&Tensor; 2], max_len: usize) -> Result<()> {
        typed!(self, caches => {
            let [k, v] = rows.map(|rows| rows.flatten_all()?.to_vec1());
            caches[slot].seek(start);
            caches[slot].append_rows([&k?, &v?], rows[0].dim(2)?, max_len);
            Ok(())
        })
    }
}
