//! Keys and values of one attention layer.

use crate::cpu::attention::{Cache, Shape};
use candle_core::{DType, Device, Result, Tensor};
use half::{bf16, f16};

/// On the CPU in the layout of its kernel, elsewhere as tensors.
#[derive(Debug)]
pub(crate) enum KvCache {
    F32(Cache<f32>),
    BF16(Cache<bf16>),
    F16(Cache<f16>),
    Device(DeviceCache),
}

impl KvCache {
    pub(crate) fn new(s: &CacheShape) -> Self {
        let shape = Shape { batch: s.batch, heads: s.heads, kv_heads: s.kv_heads, dim: s.head_dim };
        match (s.device.is_cpu(), s.dtype) {
            (true, DType::BF16) => Self::BF16(Cache::new(shape)),
            (true, DType::F16) => Self::F16(Cache::new(shape)),
            (true, _) => Self::F32(Cache::new(shape)),
            (false, _) => Self::Device(DeviceCache::new(s.clone())),
        }
    }

    /// Forgets the tokens and keeps the memory.
    pub(crate) fn reset(&mut self) {
        match self {
            Self::F32(cache) => cache.reset(),
            Self::BF16(cache) => cache.reset(),
            Self::F16(cache) => cache.reset(),
            Self::Device(cache) => cache.len = 0,
        }
    }
}

/// Two buffers `[batch, kv_heads, capacity, head_dim]` that grow by doubling, so that a token is
/// written in place and copied a constant number of times on average.
#[derive(Debug)]
pub(crate) struct DeviceCache {
    buffers: Option<(Tensor, Tensor)>,
    shape: CacheShape,
    len: usize,
}

#[derive(Debug, Clone)]
pub(crate) struct CacheShape {
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) max_len: usize,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
}

const FIRST_CAPACITY: usize = 256;

impl DeviceCache {
    pub(super) fn new(shape: CacheShape) -> Self {
        Self { buffers: None, shape, len: 0 }
    }

    /// Appends `k` and `v` `[batch, kv_heads, tokens, head_dim]`, contiguous, and returns all keys
    /// and values so far as views of the buffers.
    pub(crate) fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let end = self.len + k.dim(2)?;
        let (keys, values) = self.reserve(end)?;
        keys.slice_set(k, 2, self.len)?;
        values.slice_set(v, 2, self.len)?;
        self.len = end;
        Ok((keys.narrow(2, 0, end)?, values.narrow(2, 0, end)?))
    }

    fn reserve(&mut self, end: usize) -> Result<(Tensor, Tensor)> {
        match &self.buffers {
            Some((k, v)) if k.dim(2)? >= end => return Ok((k.clone(), v.clone())),
            _ => (),
        }
        let s = &self.shape;
        let capacity = end.next_power_of_two().max(FIRST_CAPACITY).min(s.max_len.max(end));
        let grown = |old: Option<&Tensor>| -> Result<Tensor> {
            let dims = (s.batch, s.kv_heads, capacity, s.head_dim);
            let new = Tensor::zeros(dims, s.dtype, &s.device)?;
            if let Some(old) = old.filter(|_| self.len > 0) {
                new.slice_set(&old.narrow(2, 0, self.len)?.contiguous()?, 2, 0)?;
            }
            Ok(new)
        };
        let old = self.buffers.as_ref();
        let new = (grown(old.map(|b| &b.0))?, grown(old.map(|b| &b.1))?);
        self.buffers = Some(new.clone());
        Ok(new)
    }
}
