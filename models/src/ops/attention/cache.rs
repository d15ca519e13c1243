//! The cache of one layer, and its checks.

use crate::cpu::cached_attention::{CacheRows, Cached};
use crate::ops::plan::AttentionPlan;
use candle_core::{bail, DType, Device, Layout, Result, Tensor};
use candle_gdn::plumbing::*;
use candle_gdn::{CuSeqlens, Slots};

/// Keys and values of one softmax layer, and how many tokens of each sequence they hold.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `k`, `v` | `[slots, HKV, capacity, D]`, of one layout, not one storage; may be views of larger pools | f32, bf16 or f16 |
/// | `positions` | `[sequences]`, contiguous: tokens in the cache before a call's new ones | u32 |
///
/// D is a multiple of 8 up to 256. All are read on the device and keep their addresses: a captured CUDA graph replays
/// for growing sequences. The ops do not change `positions`: all layers of a model share one tensor, and after the last
/// one [`AttentionCache::advance`] adds the new tokens.
#[derive(Debug, Clone)]
pub struct AttentionCache {
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    pub(super) positions: Tensor,
    pub(super) slots: Option<Slots>,
}

impl AttentionCache {
    /// # Errors
    /// When a dtype, shape, stride or device does not fit; the message names the argument.
    pub fn new(k: &Tensor, v: &Tensor, positions: &Tensor) -> Result<Self> {
        let op = "attention_cache";
        check_float(op, "k", k.dtype())?;
        check_dtype(op, "v", v.dtype(), k.dtype())?;
        check_dtype(op, "positions", positions.dtype(), DType::U32)?;
        let [_, kv_heads, _, dim] = *k.dims() else {
            bail!("{op}: k: expected shape [slots, kv_heads, capacity, head_dim], got {:?}", k.dims());
        };
        if kv_heads == 0 || dim == 0 || dim % 8 != 0 || dim > 256 {
            bail!("{op}: k: expected heads of a size that is a multiple of 8 up to 256, got shape {:?}", k.dims());
        }
        check_shape(op, "v", v, k.dims())?;
        if v.stride() != k.stride() {
            bail!("{op}: v: expected the strides of k ({:?}), got {:?}", k.stride(), v.stride());
        }
        let spread = k.dims().iter().zip(k.stride()).all(|(&n, &stride)| n <= 1 || stride > 0);
        if k.stride()[3] != 1 || !spread {
            bail!("{op}: k: expected a contiguous last dimension and no repeated rows, got strides {:?}", k.stride());
        }
        if positions.rank() != 1 || !positions.is_contiguous() {
            bail!("{op}: positions: expected a contiguous tensor [sequences], got shape {:?}", positions.dims());
        }
        check_device(op, "v", v, k.device())?;
        check_device(op, "positions", positions, k.device())?;
        if storage_key(k) == storage_key(v) {
            bail!("{op}: v: shares its storage with k; both are written in place: pass tensors of their own");
        }
        Ok(Self { k: k.clone(), v: v.clone(), positions: positions.clone(), slots: None })
    }

    /// Sequence `n` uses slot `slots[n]`; see [`candle_gdn::ops::GdnDecode::with_slots`]. What is read is written: `slots` has one
    /// map, since keys and values stay where they are.
    pub fn with_slots(mut self, slots: impl Into<Slots>) -> Self {
        self.slots = Some(slots.into());
        self
    }

    /// Positions a slot has room for.
    pub fn capacity(&self) -> usize {
        self.k.dims()[2]
    }

    pub(super) fn kv_heads(&self) -> usize {
        self.k.dims()[1]
    }

    pub(super) fn dim(&self) -> usize {
        self.k.dims()[3]
    }

    pub(super) fn device(&self) -> &Device {
        self.k.device()
    }

    /// Sequences of the call whose argument `arg` this is, `[lead.., heads, D]`, and its number of heads.
    pub(super) fn sequences(
        &self,
        (op, arg): (&str, &str),
        layout: &Layout,
        cu_seqlens: Option<&CuSeqlens>,
    ) -> Result<(Lead, SequencePlan, usize)> {
        let dims = layout.dims();
        let lead = match (dims.len(), cu_seqlens) {
            (3, Some(_)) => Lead::Packed,
            (3, None) => Lead::Decode,
            (4, None) => Lead::Batched,
            (_, Some(_)) => bail!("{op}: {arg}: expected shape [tokens, heads, {}], got {dims:?}", self.dim()),
            _ => bail!("{op}: {arg}: expected shape [batch, tokens, heads, {}], got {dims:?}", self.dim()),
        };
        let (heads, kv_heads) = (dims[lead.rank()], self.kv_heads());
        if heads == 0 || heads % kv_heads != 0 {
            bail!("{op}: {arg}: expected a multiple of {kv_heads} heads (the cache's), got {heads}");
        }
        if let Some(slots) = self.slots.as_ref().filter(|slots| !slots.in_place()) {
            bail!("{op}: slots: expected one map of {} slots that are read and written, got two", slots.len());
        }
        let lead_dims = &dims[..lead.rank()];
        let seqs = SequencePlan::new((op, arg), (lead, lead_dims), cu_seqlens, self.slots.as_ref(), &self.k)?;
        if self.positions.dims() != [seqs.count] {
            bail!("{op}: positions: expected {} values (one a sequence), got {:?}", seqs.count, self.positions.dims());
        }
        Ok((lead, seqs, heads))
    }

    /// Nothing is written where `key` lies.
    pub(super) fn check_not_written(&self, op: &str, arg: &str, key: usize) -> Result<()> {
        for (cache, tensor) in [("k of the cache", &self.k), ("v of the cache", &self.v)] {
            check_not_written(op, (arg, key), (cache, storage_key(tensor)))?;
        }
        Ok(())
    }

    /// Calls `run` with the cache as the CPU kernels take it; there the host sees the positions, and whether they find
    /// room.
    pub(super) fn cpu<R>(
        &self,
        op: &str,
        plan: &AttentionPlan,
        cu_seqlens: Option<&CuSeqlens>,
        run: impl FnOnce(Cached) -> Result<R>,
    ) -> Result<R> {
        let slots = cpu_slots(op, self.slots.as_ref(), plan.seqs.num_slots)?;
        let positions = self.positions.to_vec1::<u32>()?;
        let stride = self.k.stride();
        let (slots, seqs) = (slots.of_stride(stride[0]), plan.seqs.cpu(cu_seqlens));
        for (n, &position) in positions.iter().enumerate() {
            let (tokens, capacity) = (seqs.range(n).1, self.capacity());
            if slots.offsets(n).is_some() && position as usize + tokens > capacity {
                bail!("{op}: positions: expected room for {tokens} tokens in {capacity}, got {position} at {n}");
            }
        }
        let rows = CacheRows { head_stride: stride[1], token_stride: stride[2], capacity: self.capacity() };
        let AttentionPlan { heads, kv_heads, dim, .. } = *plan;
        run(Cached { seqs, slots, positions: &positions, rows, heads, kv_heads, dim })
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn parts(&self) -> (&Tensor, &Tensor, &Tensor) {
        (&self.k, &self.v, &self.positions)
    }
}
