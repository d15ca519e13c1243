//! Keys and values of one attention layer.

use crate::cpu::attention::{Cache, Shape};
use candle_gdn::plumbing::cpu::Element;
use candle_core::{bail, DType, Device, Result, Tensor, WithDType};
use half::{bf16, f16};
use std::ops::Range;

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
        let shape = s.shape();
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

    /// Forgets all but the first `tokens`.
    pub(crate) fn truncate(&mut self, tokens: usize) {
        match self {
            Self::F32(cache) => cache.truncate(tokens),
            Self::BF16(cache) => cache.truncate(tokens),
            Self::F16(cache) => cache.truncate(tokens),
            Self::Device(cache) => cache.len = cache.len.min(tokens),
        }
    }

    /// Bytes held on the CPU.
    pub(crate) fn size_in_bytes(&self) -> usize {
        match self {
            Self::F32(cache) => cache.size_in_bytes(),
            Self::BF16(cache) => cache.size_in_bytes(),
            Self::F16(cache) => cache.size_in_bytes(),
            Self::Device(_) => 0,
        }
    }

    /// Bytes on the CPU for `tokens` tokens.
    pub(crate) fn bytes_of(s: &CacheShape, tokens: usize) -> usize {
        match s.dtype {
            DType::BF16 => Cache::<bf16>::bytes_of(s.shape(), tokens),
            DType::F16 => Cache::<f16>::bytes_of(s.shape(), tokens),
            _ => Cache::<f32>::bytes_of(s.shape(), tokens),
        }
    }

    /// Copies of keys and values of a range of tokens, `[batch, kv_heads, tokens, head_dim]`; of the CPU's caches only.
    pub(crate) fn read_rows(&self, s: &CacheShape, tokens: Range<usize>) -> Result<[Tensor; 2]> {
        match self {
            Self::F32(cache) => rows_of(cache, s, tokens),
            Self::BF16(cache) => rows_of(cache, s, tokens),
            Self::F16(cache) => rows_of(cache, s, tokens),
            Self::Device(_) => bail!("attention: expected a cache on the CPU"),
        }
    }

    /// Appends what [`KvCache::read_rows`] gave.
    pub(crate) fn append_rows(&mut self, rows: [&Tensor; 2], max_len: usize) -> Result<()> {
        match self {
            Self::F32(cache) => append(cache, rows, max_len),
            Self::BF16(cache) => append(cache, rows, max_len),
            Self::F16(cache) => append(cache, rows, max_len),
            Self::Device(_) => bail!("attention: expected a cache on the CPU"),
        }
    }
}

fn rows_of<T: Element + WithDType>(cache: &Cache<T>, s: &CacheShape, tokens: Range<usize>) -> Result<[Tensor; 2]> {
    let shape = (s.batch, s.kv_heads, tokens.len(), s.head_dim);
    let [k, v] = cache.read_rows(tokens);
    Ok([Tensor::from_vec(k, shape, &Device::Cpu)?, Tensor::from_vec(v, shape, &Device::Cpu)?])
}

fn append<T: Element + WithDType>(cache: &mut Cache<T>, [k, v]: [&Tensor; 2], max_len: usize) -> Result<()> {
    let tokens = k.dim(2)?;
    let (k, v) = (k.flatten_all()?.to_vec1::<T>()?, v.flatten_all()?.to_vec1::<T>()?);
    cache.append_rows([&k, &v], tokens, max_len);
    Ok(())
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

impl CacheShape {
    fn shape(&self) -> Shape {
        Shape { batch: self.batch, heads: self.heads, kv_heads: self.kv_heads, dim: self.head_dim }
    }
}

const FIRST_CAPACITY: usize = 256;

impl DeviceCache {
    pub(crate) fn new(shape: CacheShape) -> Self {
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
