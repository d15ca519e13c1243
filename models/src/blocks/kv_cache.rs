//! Keys and values of one attention layer and one sequence, on the CPU.

use crate::cpu::attention::{Cache, Shape};
use candle_core::{DType, Device, Result, Tensor, WithDType};
use candle_gdn::plumbing::cpu::Element;
use half::{bf16, f16};
use std::ops::Range;

/// In the layout of the CPU's kernel.
#[derive(Debug)]
pub(crate) enum KvCache {
    F32(Cache<f32>),
    BF16(Cache<bf16>),
    F16(Cache<f16>),
}

impl KvCache {
    pub(crate) fn new(s: &CacheShape) -> Self {
        let shape = s.shape();
        match s.dtype {
            DType::BF16 => Self::BF16(Cache::new(shape)),
            DType::F16 => Self::F16(Cache::new(shape)),
            _ => Self::F32(Cache::new(shape)),
        }
    }

    /// Forgets all but the first `tokens`.
    pub(crate) fn truncate(&mut self, tokens: usize) {
        match self {
            Self::F32(cache) => cache.truncate(tokens),
            Self::BF16(cache) => cache.truncate(tokens),
            Self::F16(cache) => cache.truncate(tokens),
        }
    }

    /// Bytes held.
    pub(crate) fn size_in_bytes(&self) -> usize {
        match self {
            Self::F32(cache) => cache.size_in_bytes(),
            Self::BF16(cache) => cache.size_in_bytes(),
            Self::F16(cache) => cache.size_in_bytes(),
        }
    }

    /// Bytes for `tokens` tokens.
    pub(crate) fn bytes_of(s: &CacheShape, tokens: usize) -> usize {
        match s.dtype {
            DType::BF16 => Cache::<bf16>::bytes_of(s.shape(), tokens),
            DType::F16 => Cache::<f16>::bytes_of(s.shape(), tokens),
            _ => Cache::<f32>::bytes_of(s.shape(), tokens),
        }
    }

    /// Copies of keys and values of a range of tokens, `[1, kv_heads, tokens, head_dim]`.
    pub(crate) fn read_rows(&self, s: &CacheShape, tokens: Range<usize>) -> Result<[Tensor; 2]> {
        match self {
            Self::F32(cache) => rows_of(cache, s, tokens),
            Self::BF16(cache) => rows_of(cache, s, tokens),
            Self::F16(cache) => rows_of(cache, s, tokens),
        }
    }

    /// Appends what [`KvCache::read_rows`] gave.
    pub(crate) fn append_rows(&mut self, rows: [&Tensor; 2], max_len: usize) -> Result<()> {
        match self {
            Self::F32(cache) => append(cache, rows, max_len),
            Self::BF16(cache) => append(cache, rows, max_len),
            Self::F16(cache) => append(cache, rows, max_len),
        }
    }
}

fn rows_of<T: Element + WithDType>(cache: &Cache<T>, s: &CacheShape, tokens: Range<usize>) -> Result<[Tensor; 2]> {
    let shape = (1, s.kv_heads, tokens.len(), s.head_dim);
    let [k, v] = cache.read_rows(tokens);
    Ok([Tensor::from_vec(k, shape, &Device::Cpu)?, Tensor::from_vec(v, shape, &Device::Cpu)?])
}

fn append<T: Element + WithDType>(cache: &mut Cache<T>, [k, v]: [&Tensor; 2], max_len: usize) -> Result<()> {
    let tokens = k.dim(2)?;
    let (k, v) = (k.flatten_all()?.to_vec1::<T>()?, v.flatten_all()?.to_vec1::<T>()?);
    cache.append_rows([&k, &v], tokens, max_len);
    Ok(())
}

/// Of one sequence, and the device that it is to lie on.
#[derive(Debug, Clone)]
pub(crate) struct CacheShape {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) max_len: usize,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
}

impl CacheShape {
    fn shape(&self) -> Shape {
        Shape { batch: 1, heads: self.heads, kv_heads: self.kv_heads, dim: self.head_dim }
    }
}
