//! The cache of one layer on a device, its checks, and the advance of its positions.

use candle_core::{bail, DType, Device, Layout, Result, Tensor};
use candle_gdn::{CuSeqlens, Slots};
use candle_gdn_core::*;

const ADVANCE: &str = "attention_advance";

/// A checked call of one of the two ops.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(super) struct AttentionPlan {
    /// q, k and v of [`super::AttentionPrepare`]; q, the gate and the gate again of [`super::AttentionDecode`].
    pub inputs: [HeadsLayout; 3],
    pub seqs: SequencePlan,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub out_shape: Vec<usize>,
}

/// Keys and values of one softmax layer, and how many tokens of each sequence they hold.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `k`, `v` | `[slots, HKV, capacity, D]`, of one layout, not one storage; may be views of larger pools | f32, bf16 or f16 |
/// | `positions` | `[sequences]`, contiguous: tokens in the cache before a call's new ones | u32 |
///
/// D is a multiple of 8 up to 256; rows of `k` and `v` begin at multiples of 16 bytes. All are read on the device and keep their
/// addresses: a captured CUDA graph replays for growing sequences. The ops do not change `positions`: all layers of a model share
/// one tensor, and after the last one [`AttentionCache::advance`] adds the new tokens. The ops on it run on CUDA; models on the CPU
/// have caches and a kernel of their own.
#[derive(Debug, Clone)]
pub struct AttentionCache {
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    pub(super) positions: Tensor,
    pub(super) slots: Option<Slots>,
    pub(super) window: Option<usize>,
}

/// Whether all rows begin at multiples of `elements`.
pub(super) fn rows_on(x: &Tensor, elements: usize) -> bool {
    let Some((_, lead)) = x.stride().split_last() else { return true };
    lead.iter().chain([&x.layout().start_offset()]).all(|n| n.is_multiple_of(elements))
}

impl AttentionCache {
    /// # Errors
    /// When a dtype, shape, stride, alignment or device does not fit; the message names the argument.
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
        for (arg, x) in [("k", k), ("v", v)] {
            if !rows_on(x, 16 / x.dtype().size_in_bytes()) {
                let (offset, stride) = (x.layout().start_offset(), x.stride());
                bail!(
                    "{op}: {arg}: expected rows at multiples of 16 bytes, got offset {offset} and strides {stride:?}"
                );
            }
        }
        if positions.rank() != 1 {
            bail!("{op}: positions: expected shape [sequences], got {:?}", positions.dims());
        }
        check_contiguous(op, "positions", positions)?;
        check_untracked(op, "k", k)?;
        check_untracked(op, "v", v)?;
        check_device(op, "v", v, k.device())?;
        check_device(op, "positions", positions, k.device())?;
        if storage_key(k) == storage_key(v) {
            bail!("{op}: v: shares its storage with k; both are written in place: pass tensors of their own");
        }
        Ok(Self { k: k.clone(), v: v.clone(), positions: positions.clone(), slots: None, window: None })
    }

    /// Sequence `n` uses slot `slots[n]`; see [`candle_gdn::ops::GdnDecode::with_slots`]. `slots` has one map, for reads and
    /// writes: keys and values stay where they are.
    pub fn with_slots(mut self, slots: impl Into<Slots>) -> Self {
        self.slots = Some(slots.into());
        self
    }

    /// Tokens see `window` tokens, themselves included: position `t` the positions `t - window + 1` to `t`, as with `sliding_window` in
    /// transformers. The cache is then a ring: position `p` lies at `p` modulo the capacity, and stays until position
    /// `p + capacity` overwrites it.
    ///
    /// A call's tokens are in the cache before the first of them is read: sequences longer than the capacity need one of at least
    /// `window` and a call's tokens less one; with fewer its first tokens see fewer. The values in `v` must be finite from the start, also
    /// where no token is.
    ///
    /// # Errors
    /// When the window is 0.
    pub fn with_window(mut self, window: usize) -> Result<Self> {
        if window == 0 {
            bail!("attention_cache: window: expected at least 1 token, got 0");
        }
        // No sequence has more.
        self.window = Some(window.min(1 << 30));
        Ok(self)
    }

    /// Tokens that a slot has room for.
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
        if self.window.is_some() && seqs.max_tokens > self.capacity() {
            let (capacity, tokens) = (self.capacity(), seqs.max_tokens);
            bail!("{op}: {arg}: expected at most {capacity} tokens of a sequence (the cache's capacity), got {tokens}");
        }
        if self.positions.dims() != [seqs.count] {
            bail!("{op}: positions: expected {} values (one a sequence), got {:?}", seqs.count, self.positions.dims());
        }
        Ok((lead, seqs, heads))
    }

    /// Refuses an input that lies in the storage `key` of the cache.
    pub(super) fn check_not_written(&self, op: &str, arg: &str, key: usize) -> Result<()> {
        for (cache, tensor) in [("k of the cache", &self.k), ("v of the cache", &self.v)] {
            check_not_written(op, (arg, key), (cache, storage_key(tensor)))?;
        }
        Ok(())
    }

    /// After the last layer of a forward pass: its `tokens` new tokens of every sequence are in the cache. In place, for
    /// all holders of this `positions`; padding does not change.
    ///
    /// # Errors
    /// When the slots do not fit, or the cache is not on CUDA.
    pub fn advance(&self, tokens: usize) -> Result<()> {
        self.advance_by(tokens, None)
    }

    /// The same for packed tokens.
    ///
    /// # Errors
    /// When the sequences or slots do not fit, or the cache is not on CUDA.
    pub fn advance_packed(&self, cu_seqlens: &CuSeqlens) -> Result<()> {
        self.advance_by(cu_seqlens.total_tokens(), Some(cu_seqlens))
    }

    fn advance_by(&self, tokens: usize, cu_seqlens: Option<&CuSeqlens>) -> Result<()> {
        let sequences = self.positions.elem_count();
        let packed = cu_seqlens.is_some();
        let (lead, dims) = if packed { (Lead::Packed, vec![tokens]) } else { (Lead::Batched, vec![sequences, tokens]) };
        let seqs = SequencePlan::new((ADVANCE, "tokens"), (lead, &dims), cu_seqlens, self.slots.as_ref(), &self.k)?;
        if seqs.count != sequences {
            bail!("{ADVANCE}: cu_seqlens: expected {sequences} sequences (as positions), got {}", seqs.count);
        }
        if let Some(slots) = &self.slots {
            let positions = ("positions", storage_key(&self.positions));
            check_not_written(ADVANCE, ("slots", storage_key(slots.read())), positions)?;
        }
        #[cfg(feature = "cuda")]
        if self.device().is_cuda() {
            return if sequences == 0 { Ok(()) } else { self.advance_cuda(ADVANCE, &seqs, cu_seqlens) };
        }
        bail!("{ADVANCE}: positions: expected a tensor on CUDA, got one on {:?}", self.device().location())
    }
}
