//! Keys and values of one softmax layer, by slot.

use crate::blocks::attention::{capacity, new_tokens, Angles, AttentionCache, CacheShape};
use crate::blocks::attention::{CpuCaches, CpuTokens, DeviceTokens, GatedAttention};
use crate::causal_lm::CausalLm;
use candle_core::{bail, DType, Device, Result, Tensor};
use candle_gdn::{CuSeqlens, Slots};
use candle_gdn_core::Launch;
use std::ops::Range;

/// Entries past a sequence's length, of a draft that was not accepted, are ignored and overwritten by the next pass.
#[derive(Debug)]
pub(crate) enum KvSlots {
    /// On the CPU: a cache a slot, which grows with its sequence, and the most tokens of a sequence.
    Panels(CpuCaches, usize),
    /// On a device: `[slots, kv_heads, capacity, head_dim]`, and the layer's window.
    Tensors([Tensor; 2], Option<usize>),
}

/// The sequences of a pass, as attention reads them.
#[derive(Debug)]
pub(crate) enum KvRows {
    /// Slot and tokens before the pass of each; the angles of all new tokens.
    Host { rows: Vec<(usize, usize)>, angles: Angles },
    /// The same on the device, and the longest length after the pass; and the tokens once more in the pieces that windows have room
    /// for, none where that is all of them.
    Device { slots: Slots, positions: Tensor, max_len: usize, pieces: Vec<KvPiece> },
}

/// Some of the tokens of a pass.
#[derive(Debug)]
pub(crate) struct KvPiece {
    /// Those of the packed ones.
    tokens: Range<usize>,
    cu_seqlens: CuSeqlens,
    slots: Slots,
    positions: Tensor,
}

impl KvPiece {
    /// The tokens of a pass, as in [`KvRows::new`], no more than `room` of a sequence in a piece.
    pub fn cut(rows: &[(usize, usize)], lengths: &[usize], room: usize, device: &Device) -> Result<Vec<Self>> {
        if lengths.iter().all(|&tokens| tokens <= room) {
            return Ok(Vec::new());
        }
        let mut end = 0;
        let piece = |parts: Vec<Part>| {
            let lengths: Vec<_> = parts.iter().map(|part| part.tokens).collect();
            let start = end;
            end += lengths.iter().sum::<usize>();
            let (slots, positions): (Vec<_>, Vec<_>) =
                parts.iter().map(|part| (part.slot as u32, part.position as u32)).unzip();
            Ok(Self {
                tokens: start..end,
                cu_seqlens: CuSeqlens::from_lengths(&lengths, device)?,
                slots: Slots::new(&slots, device)?,
                positions: Tensor::new(positions, device)?,
            })
        };
        parts(rows, lengths, room).into_iter().map(piece).collect()
    }
}

/// Tokens of a sequence, and those in the slot before them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    slot: usize,
    position: usize,
    tokens: usize,
}

/// Packed tokens in pieces: sequences stay together, but for the further parts of a long one.
fn parts(rows: &[(usize, usize)], lengths: &[usize], room: usize) -> Vec<Vec<Part>> {
    let mut pieces: Vec<Vec<Part>> = Vec::new();
    for (&(slot, position), &tokens) in rows.iter().zip(lengths) {
        for start in (0..tokens).step_by(room) {
            let part = Part { slot, position: position + start, tokens: room.min(tokens - start) };
            match pieces.last_mut().filter(|_| start == 0) {
                Some(piece) => piece.push(part),
                None => pieces.push(vec![part]),
            }
        }
    }
    pieces
}

impl KvRows {
    /// For a pass over `kv`; `rows` are the slots, and the tokens in each before the `lengths` new ones.
    pub fn new(model: &CausalLm, kv: &KvSlots, rows: Vec<(usize, usize)>, lengths: &[usize]) -> Result<Self> {
        if let KvSlots::Panels(..) = kv {
            return Ok(Self::on_host(model, rows, lengths));
        }
        let max_len = rows.iter().zip(lengths).map(|((_, len), new)| len + new).max().unwrap_or(0);
        let pieces = match kv.room() {
            Some(room) => KvPiece::cut(&rows, lengths, room, &model.device)?,
            None => Vec::new(),
        };
        let (slots, positions): (Vec<u32>, Vec<u32>) =
            rows.into_iter().map(|(slot, len)| (slot as u32, len as u32)).unzip();
        let slots = Slots::new(&slots, &model.device)?;
        Ok(Self::Device { slots, positions: Tensor::new(positions, &model.device)?, max_len, pieces })
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
        let dims = (slots, shape.kv_heads, shape.capacity(), shape.head_dim);
        let zeros = || Tensor::zeros(dims, shape.dtype, &shape.device);
        let (k, v) = (zeros()?, zeros()?);
        // Head sizes that the kernels do not support are refused here, not at the first token.
        AttentionCache::new(&k, &v, &Tensor::zeros(1, DType::U32, &shape.device)?)?;
        Ok(Self::Tensors([k, v], shape.window))
    }

    /// New tokens that there is room for at once, in one append or a draft; `None`: any number.
    pub fn room(&self) -> Option<usize> {
        self.window().map(new_tokens)
    }

    /// That of the layer.
    pub fn window(&self) -> Option<usize> {
        match self {
            Self::Panels(caches, _) => caches.window(),
            Self::Tensors(_, window) => *window,
        }
    }

    /// Makes room for `max_len` tokens of each slot, no fewer than there is. On a device keys and values move.
    pub fn grow(&mut self, max_len: usize) -> Result<()> {
        match self {
            Self::Panels(_, most) => *most = max_len,
            Self::Tensors(kv, window) => {
                // A ring that wraps has its greatest capacity.
                let capacity = capacity(*window, max_len);
                for x in kv.iter_mut().filter(|x| x.dims()[2] < capacity) {
                    let (slots, heads, _, dim) = x.dims4()?;
                    let grown = Tensor::zeros((slots, heads, capacity, dim), x.dtype(), x.device())?;
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
            Self::Tensors(kv, _) => kv.iter().map(bytes).sum(),
        }
    }

    /// Bytes of a sequence of the greatest length.
    pub fn bytes_per_sequence(&self) -> usize {
        match self {
            Self::Panels(caches, max_len) => caches.bytes_of(*max_len),
            Self::Tensors(kv, _) => kv.iter().map(|x| bytes(x) / x.dims()[0]).sum(),
        }
    }

    /// Copies of keys and values of some tokens of a slot, `[1, kv_heads, tokens, head_dim]`: with a window of its last ones.
    pub fn read(&self, slot: usize, tokens: Range<usize>) -> Result<[Tensor; 2]> {
        let kept = self.window().map_or(0, |window| tokens.end.saturating_sub(window));
        let tokens = kept.max(tokens.start)..tokens.end;
        match self {
            Self::Panels(caches, _) => caches.read_rows(slot, tokens),
            Self::Tensors([k, v], _) => {
                let copy = |x: &Tensor| {
                    let slot = x.narrow(0, slot, 1)?;
                    let rows = ring_rows(tokens.clone(), x.dims()[2]);
                    let rows = rows.map(|rows| slot.narrow(2, rows.start, rows.len()));
                    match rows.collect::<Result<Vec<_>>>()?.as_slice() {
                        [rows] => rows.force_contiguous(),
                        rows => Tensor::cat(rows, 2),
                    }
                };
                Ok([copy(k)?, copy(v)?])
            }
        }
    }

    /// Writes such copies into a slot, as its tokens up to `end`.
    pub fn write(&mut self, slot: usize, end: usize, copies: [&Tensor; 2]) -> Result<()> {
        let start = end - copies[0].dim(2)?;
        match self {
            Self::Panels(caches, max_len) => caches.write_rows(slot, start, copies, *max_len),
            Self::Tensors(kv, _) => {
                for (x, copy) in kv.iter().zip(copies) {
                    let mut first = 0;
                    for rows in ring_rows(start..end, x.dims()[2]) {
                        x.narrow(0, slot, 1)?.slice_set(
                            &copy.narrow(2, first, rows.len())?.contiguous()?,
                            2,
                            rows.start,
                        )?;
                        first += rows.len();
                    }
                }
                Ok(())
            }
        }
    }

    /// The argument of the ops on a device; `None` on the CPU.
    pub fn attention_cache(&self, rows: &KvRows) -> Result<Option<AttentionCache>> {
        match (self, rows) {
            (Self::Tensors(..), KvRows::Device { slots, positions, .. }) => {
                self.device_cache(slots, positions).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn device_cache(&self, slots: &Slots, positions: &Tensor) -> Result<AttentionCache> {
        let Self::Tensors([k, v], window) = self else { bail!("attention: expected rows for a cache on the CPU") };
        let cache = AttentionCache::new(k, v, positions)?.with_slots(slots);
        match window {
            Some(window) => cache.with_window(*window),
            None => Ok(cache),
        }
    }

    /// The calls of a pass on a device; `all` are the boundaries of its `tokens` tokens.
    fn device_calls(&self, rows: &KvRows, tokens: usize, all: Option<&CuSeqlens>) -> Result<Vec<DeviceTokens>> {
        let KvRows::Device { slots, positions, max_len, pieces } = rows else {
            bail!("attention: expected rows for a cache on a device")
        };
        if self.room().is_none() || pieces.is_empty() {
            let (cache, cu_seqlens) = (self.device_cache(slots, positions)?, all.cloned());
            return Ok(vec![DeviceTokens { tokens: 0..tokens, cu_seqlens, cache, max_len: *max_len }]);
        }
        let call = |piece: &KvPiece| {
            let (cache, cu_seqlens) =
                (self.device_cache(&piece.slots, &piece.positions)?, Some(piece.cu_seqlens.clone()));
            Ok(DeviceTokens { tokens: piece.tokens.clone(), cu_seqlens, cache, max_len: *max_len })
        };
        pieces.iter().map(call).collect()
    }
}

/// The rows of a ring that hold the tokens, in their order.
fn ring_rows(tokens: Range<usize>, capacity: usize) -> impl Iterator<Item = Range<usize>> {
    let start = tokens.start % capacity;
    let end = start + tokens.len();
    [start..end.min(capacity), 0..end.saturating_sub(capacity)].into_iter().filter(|rows| !rows.is_empty())
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
            (kv, rows) => {
                let calls = kv.device_calls(rows, x.dim(0)?, cu_seqlens)?;
                match attend {
                    true => self.forward_cuda(x, &calls, launch).map(Some),
                    false => self.append_cuda(x, &calls, launch).map(|()| None),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
