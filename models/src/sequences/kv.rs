//! Keys and values of one softmax layer, by slot.

use crate::blocks::attention::{Angles, AttentionCache, CacheShape, CpuCaches, CpuTokens, GatedAttention};
use crate::causal_lm::CausalLm;
use candle_core::{bail, DType, Result, Tensor};
use candle_gdn::{CuSeqlens, Slots};
use candle_gdn_core::Launch;
use std::ops::Range;

/// Entries past a sequence's length, of a draft that was not accepted, are ignored and overwritten by the next pass.
#[derive(Debug)]
pub(crate) enum KvSlots {
    /// On the CPU: a cache a slot, which grows with its sequence, and the most tokens of a sequence.
    Panels(CpuCaches, usize),
    /// On a device: `[slots, kv_heads, max_len, head_dim]`.
    Tensors([Tensor; 2]),
}

/// The sequences of a pass, as attention reads them.
#[derive(Debug)]
pub(crate) enum KvRows {
    /// Slot and tokens before the pass of each; the angles of all new tokens.
    Host { rows: Vec<(usize, usize)>, angles: Angles },
    /// The same on the device, and the longest length after the pass.
    Device { slots: Slots, positions: Tensor, max_len: usize },
}

impl KvRows {
    /// For a pass over `kv`; `rows` are the slots, and the tokens in each before the `lengths` new ones.
    pub fn new(model: &CausalLm, kv: &KvSlots, rows: Vec<(usize, usize)>, lengths: &[usize]) -> Result<Self> {
        if let KvSlots::Panels(..) = kv {
            return Ok(Self::on_host(model, rows, lengths));
        }
        let max_len = rows.iter().zip(lengths).map(|((_, len), new)| len + new).max().unwrap_or(0);
        let (slots, positions): (Vec<u32>, Vec<u32>) =
            rows.into_iter().map(|(slot, len)| (slot as u32, len as u32)).unzip();
        let slots = Slots::new(&slots, &model.device)?;
        Ok(Self::Device { slots, positions: Tensor::new(positions, &model.device)?, max_len })
    }

    pub fn on_host(model: &CausalLm, rows: Vec<(usize, usize)>, lengths: &[usize]) -> Self {
        let mut angles = Angles::default();
        for ((_, position), tokens) in rows.iter().zip(lengths) {
            model.rotary.append(*position, *tokens, &mut angles);
        }
        Self::Host { rows, angles }
    }
}

impl KvSlots {
    /// `shape` is that of one sequence.
    pub fn new(shape: &CacheShape, slots: usize) -> Result<Self> {
        if shape.device.is_cpu() {
            return Ok(Self::Panels(CpuCaches::new(shape, slots), shape.max_len));
        }
        let dims = (slots, shape.kv_heads, shape.max_len, shape.head_dim);
        let zeros = || Tensor::zeros(dims, shape.dtype, &shape.device);
        let (k, v) = (zeros()?, zeros()?);
        // Head sizes that the kernels do not support are refused here, not at the first token.
        AttentionCache::new(&k, &v, &Tensor::zeros(1, DType::U32, &shape.device)?)?;
        Ok(Self::Tensors([k, v]))
    }

    /// Makes room for `max_len` tokens of each slot, no fewer than there is. On a device keys and values move.
    pub fn grow(&mut self, max_len: usize) -> Result<()> {
        match self {
            Self::Panels(_, most) => *most = max_len,
            Self::Tensors(kv) => {
                for x in kv {
                    let (slots, heads, _, dim) = x.dims4()?;
                    let grown = Tensor::zeros((slots, heads, max_len, dim), x.dtype(), x.device())?;
                    // candle counts the elements of a copy in 32 bits.
                    for slot in 0..slots {
                        grown.narrow(0, slot, 1)?.slice_set(&x.narrow(0, slot, 1)?, 2, 0)?;
                    }
                    *x = grown;
                }
            }
        }
        Ok(())
    }

    /// Bytes held now.
    pub fn size_in_bytes(&self) -> usize {
        match self {
            Self::Panels(caches, _) => caches.size_in_bytes(),
            Self::Tensors(kv) => kv.iter().map(bytes).sum(),
        }
    }

    /// Bytes of a sequence of the greatest length.
    pub fn bytes_per_sequence(&self) -> usize {
        match self {
            Self::Panels(caches, max_len) => caches.bytes_of(*max_len),
            Self::Tensors(kv) => kv.iter().map(|x| bytes(x) / x.dims()[0]).sum(),
        }
    }

    /// Copies of keys and values of some tokens of a slot: `[1, kv_heads, tokens, head_dim]`.
    pub fn read(&self, slot: usize, tokens: Range<usize>) -> Result<[Tensor; 2]> {
        match self {
            Self::Panels(caches, _) => caches.read_rows(slot, tokens),
            Self::Tensors([k, v]) => {
                let copy = |x: &Tensor| x.narrow(0, slot, 1)?.narrow(2, tokens.start, tokens.len())?.force_contiguous();
                Ok([copy(k)?, copy(v)?])
            }
        }
    }

    /// Writes such copies into a slot after its first `start` tokens.
    pub fn write(&mut self, slot: usize, start: usize, copies: [&Tensor; 2]) -> Result<()> {
        match self {
            Self::Panels(caches, max_len) => caches.write_rows(slot, start, copies, *max_len),
            Self::Tensors(kv) => {
                for (x, copy) in kv.iter().zip(copies) {
                    x.narrow(0, slot, 1)?.slice_set(copy, 2, start)?;
                }
                Ok(())
            }
        }
    }

    /// The argument of the ops on a device; `None` on the CPU.
    pub fn attention_cache(&self, rows: &KvRows) -> Result<Option<AttentionCache>> {
        match (self, rows) {
            (Self::Tensors([k, v]), KvRows::Device { slots, positions, .. }) => {
                Ok(Some(AttentionCache::new(k, v, positions)?.with_slots(slots)))
            }
            _ => Ok(None),
        }
    }
}

fn bytes(x: &Tensor) -> usize {
    x.elem_count() * x.dtype().size_in_bytes()
}

impl GatedAttention {
    /// `x [tokens, hidden]`, packed, to the same. Without `cu_seqlens` every sequence has one token.
    pub(crate) fn forward_slots(
        &self,
        x: &Tensor,
        cu_seqlens: Option<&CuSeqlens>,
        rows: &KvRows,
        kv: &mut KvSlots,
        launch: &Launch,
    ) -> Result<Tensor> {
        match self.on_slots((x, cu_seqlens), rows, kv, launch, true)? {
            Some(y) => Ok(y),
            None => bail!("attention: expected outputs"),
        }
    }

    /// Appends keys and values alone.
    pub(crate) fn append_slots(
        &self,
        x: &Tensor,
        cu_seqlens: Option<&CuSeqlens>,
        rows: &KvRows,
        kv: &mut KvSlots,
        launch: &Launch,
    ) -> Result<()> {
        self.on_slots((x, cu_seqlens), rows, kv, launch, false).map(drop)
    }

    /// `None` where it only appends.
    fn on_slots(
        &self,
        (x, cu_seqlens): (&Tensor, Option<&CuSeqlens>),
        rows: &KvRows,
        kv: &mut KvSlots,
        launch: &Launch,
        attend: bool,
    ) -> Result<Option<Tensor>> {
        match (kv, rows) {
            (KvSlots::Panels(caches, max_tokens), KvRows::Host { rows, angles }) => {
                let lengths: Vec<_> = cu_seqlens.map_or_else(|| vec![1; rows.len()], |cu| cu.lengths().collect());
                let new = CpuTokens { rows, lengths: &lengths, angles, max_tokens: *max_tokens, attend };
                self.forward_cpu(x, new, caches)
            }
            (kv, KvRows::Device { max_len, .. }) => match kv.attention_cache(rows)? {
                Some(cache) if attend => self.forward_cuda(x, cu_seqlens, &cache, *max_len, launch).map(Some),
                Some(cache) => self.append_cuda(x, cu_seqlens, &cache, launch).map(|()| None),
                None => bail!("attention: expected rows for a cache on the CPU"),
            },
            _ => bail!("attention: expected rows for a cache on a device"),
        }
    }
}
