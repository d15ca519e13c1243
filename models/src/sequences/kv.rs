//! Keys and values of one softmax layer, by slot.

use crate::blocks::attention::{GatedAttention, Projections};
use crate::blocks::kv_cache::{CacheShape, KvCache};
use crate::blocks::rotary::Angles;
use crate::cpu::attention::Cache;
use crate::ops::{AttentionCache, AttentionDecode, AttentionPrepare, PrepareOptions};
use candle_core::{bail, DType, Module, Result, Tensor, D};
use candle_gdn::plumbing::cpu::Element;
use candle_gdn::plumbing::host;
use candle_gdn::plumbing::Launch;
use candle_gdn::{CuSeqlens, Slots};
use half::{bf16, f16};
use std::ops::Range;

/// A slot's tokens end where the sequence's length says: what lies behind, of a draft that was not accepted, is
/// overwritten by the next pass.
#[derive(Debug)]
pub(crate) enum KvSlots {
    /// On the CPU: a cache a slot, in the layout of the kernel there, that grows with its sequence.
    Panels(Vec<KvCache>, CacheShape),
    /// Elsewhere: `[slots, kv_heads, max_len, head_dim]`.
    Tensors([Tensor; 2]),
}

/// Which sequences a pass has, as attention needs it.
#[derive(Debug)]
pub(crate) enum KvRows {
    /// Slot and tokens before the pass; the angles of all new tokens.
    Host { rows: Vec<(usize, usize)>, angles: Angles },
    /// The same on the device, and the longest length after the pass.
    Device { slots: Slots, positions: Tensor, max_len: usize },
}

impl KvSlots {
    /// `shape` is of one sequence.
    pub fn new(shape: &CacheShape, slots: usize) -> Result<Self> {
        if shape.device.is_cpu() {
            return Ok(Self::Panels((0..slots).map(|_| KvCache::new(shape)).collect(), shape.clone()));
        }
        let dims = (slots, shape.kv_heads, shape.max_len, shape.head_dim);
        let zeros = || Tensor::zeros(dims, shape.dtype, &shape.device);
        let (k, v) = (zeros()?, zeros()?);
        // Head sizes that the kernels do not take are refused here, not at the first token.
        AttentionCache::new(&k, &v, &Tensor::zeros(1, DType::U32, &shape.device)?)?;
        Ok(Self::Tensors([k, v]))
    }

    /// Makes room for `max_len` tokens of each slot, no fewer than there is. On a device keys and values move.
    pub fn grow(&mut self, max_len: usize) -> Result<()> {
        match self {
            Self::Panels(_, shape) => shape.max_len = max_len,
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
            Self::Panels(caches, _) => caches.iter().map(KvCache::size_in_bytes).sum(),
            Self::Tensors(kv) => kv.iter().map(bytes).sum(),
        }
    }

    /// Bytes of a sequence of the greatest length.
    pub fn bytes_per_sequence(&self) -> usize {
        match self {
            Self::Panels(_, shape) => KvCache::bytes_of(shape, shape.max_len),
            Self::Tensors(kv) => kv.iter().map(|x| bytes(x) / x.dims()[0]).sum(),
        }
    }

    /// Copies of keys and values of some tokens of a slot: `[1, kv_heads, tokens, head_dim]`.
    pub fn read(&self, slot: usize, tokens: Range<usize>) -> Result<[Tensor; 2]> {
        match self {
            Self::Panels(caches, shape) => caches[slot].read_rows(shape, tokens),
            Self::Tensors([k, v]) => {
                let copy = |x: &Tensor| x.narrow(0, slot, 1)?.narrow(2, tokens.start, tokens.len())?.force_contiguous();
                Ok([copy(k)?, copy(v)?])
            }
        }
    }

    /// Puts such copies into a slot behind its first `at` tokens.
    pub fn write(&mut self, slot: usize, at: usize, [k, v]: [&Tensor; 2]) -> Result<()> {
        match self {
            Self::Panels(caches, shape) => {
                caches[slot].truncate(at);
                caches[slot].append_rows([k, v], shape.max_len)
            }
            Self::Tensors(to) => {
                for (to, from) in to.iter().zip([k, v]) {
                    to.narrow(0, slot, 1)?.slice_set(from, 2, at)?;
                }
                Ok(())
            }
        }
    }

    /// As [`AttentionCache`] takes it; nothing where the CPU's own kernel runs.
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

/// The new tokens of a pass on the CPU.
struct New<'a> {
    rows: &'a [(usize, usize)],
    lengths: &'a [usize],
    angles: [&'a [f32]; 2],
    max_tokens: usize,
    /// Whether there are queries, too.
    attends: bool,
}

/// Which of the CPU's caches holds this type.
trait Typed: Element {
    fn cache_in(cache: &mut KvCache) -> Option<&mut Cache<Self>>;
}

macro_rules! typed {
    ($($ty:ty => $variant:ident),*) => {$(
        impl Typed for $ty {
            fn cache_in(cache: &mut KvCache) -> Option<&mut Cache<Self>> {
                match cache {
                    KvCache::$variant(cache) => Some(cache),
                    _ => None,
                }
            }
        }
    )*};
}
typed!(f32 => F32, bf16 => BF16, f16 => F16);

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

    /// Nothing comes out where it only appends.
    fn on_slots(
        &self,
        (x, cu_seqlens): (&Tensor, Option<&CuSeqlens>),
        rows: &KvRows,
        kv: &mut KvSlots,
        launch: &Launch,
        attends: bool,
    ) -> Result<Option<Tensor>> {
        match (kv, rows) {
            (KvSlots::Panels(caches, shape), KvRows::Host { rows, angles }) => {
                let lengths = cu_seqlens.map_or_else(|| vec![1; rows.len()], |cu| cu.lengths().collect());
                let (angles, max_tokens) = ([&angles.cos[..], &angles.sin], shape.max_len);
                let new = New { rows, lengths: &lengths, angles, max_tokens, attends };
                match shape.dtype {
                    DType::BF16 => self.slots_cpu::<bf16>(x, new, caches),
                    DType::F16 => self.slots_cpu::<f16>(x, new, caches),
                    _ => self.slots_cpu::<f32>(x, new, caches),
                }
            }
            (kv, KvRows::Device { max_len, .. }) => match kv.attention_cache(rows)? {
                Some(cache) if attends => self.slots_device(x, cu_seqlens, &cache, *max_len, launch).map(Some),
                Some(cache) => self.append_device(x, cu_seqlens, &cache, launch).map(|()| None),
                None => bail!("attention: expected rows for a cache on the CPU"),
            },
            _ => bail!("attention: expected rows for a cache on a device"),
        }
    }

    /// One product for all, then each sequence on its cache, the work of all shared out together.
    fn slots_cpu<T: Typed>(&self, x: &Tensor, new: New<'_>, caches: &mut [KvCache]) -> Result<Option<Tensor>> {
        let width = if new.attends { self.cfg.num_heads * self.cfg.head_dim } else { 0 };
        let widths = [2 * width, self.cfg.num_kv_heads * self.cfg.head_dim];
        let [q_gate, k, v] = match new.attends {
            true => self.project_cpu(x)?,
            false => self.project_kv_cpu(x).map(|[k, v]| [Vec::new(), k, v])?,
        };
        let mut o = vec![0f32; x.dim(0)? * width];
        let mut caches: Vec<Option<&mut KvCache>> = caches.iter_mut().map(Some).collect();
        let (mut rest, mut first) = (&mut o[..], 0);
        let pairs = new.angles[0].len() / x.dim(0)?;
        let mut sequences = Vec::with_capacity(new.rows.len());
        for (&(slot, position), &tokens) in new.rows.iter().zip(new.lengths) {
            let Some(cache) = caches.get_mut(slot).and_then(Option::take).and_then(T::cache_in) else {
                bail!("attention: expected a slot of the model's dtype once, got {slot}")
            };
            cache.truncate(position);
            if cache.len() != position {
                bail!("attention: expected {position} tokens in slot {slot}, got {}", cache.len())
            }
            let part = |width: usize| first * width..(first + tokens) * width;
            let projections = Projections {
                q_gate: &q_gate[part(widths[0])],
                k: &k[part(widths[1])],
                v: &v[part(widths[1])],
                angles: new.angles.map(|angles| &angles[part(pairs)]),
                tokens,
            };
            let (out, behind) = rest.split_at_mut(tokens * width);
            sequences.push((projections, cache, out));
            (rest, first) = (behind, first + tokens);
        }
        if !new.attends {
            let sequences = sequences.into_iter().map(|(projections, cache, _)| (projections, cache));
            return self.append_cpu(sequences.collect(), new.max_tokens).map(|()| None);
        }
        self.attend_cpu(sequences, new.max_tokens)?;
        self.o_proj.forward(&host::tensor(o, (x.dim(0)?, width), x.dtype())?).map(Some)
    }

    /// The keys stand for the queries, which nobody asks for.
    fn append_device(
        &self,
        x: &Tensor,
        cu_seqlens: Option<&CuSeqlens>,
        cache: &AttentionCache,
        launch: &Launch,
    ) -> Result<()> {
        let heads = (x.dim(0)?, self.cfg.num_kv_heads, self.cfg.head_dim);
        let [k, v] = [&self.k_proj, &self.v_proj].map(|proj| proj.forward_launched(x, launch)?.reshape(heads));
        let (k, v) = (k?, v?);
        self.prepare(cache, cu_seqlens, launch)?.forward(&k, &k, &v).map(drop)
    }

    fn prepare(
        &self,
        cache: &AttentionCache,
        cu_seqlens: Option<&CuSeqlens>,
        launch: &Launch,
    ) -> Result<AttentionPrepare> {
        // The norms' scales are 1 + w already.
        let options = PrepareOptions { eps: f64::from(self.q_norm.eps()), zero_centred: false };
        let (q_scale, k_scale) = (self.q_norm.scale(), self.k_norm.scale());
        let prepare = AttentionPrepare::new(cache, q_scale, k_scale, &self.frequencies, options)?.launched(launch);
        Ok(match cu_seqlens {
            Some(cu_seqlens) => prepare.with_cu_seqlens(cu_seqlens),
            None => prepare,
        })
    }

    /// One projection, whose columns stay where they are: append, then attention, by the ops that read slots and
    /// positions on the device.
    fn slots_device(
        &self,
        x: &Tensor,
        cu_seqlens: Option<&CuSeqlens>,
        cache: &AttentionCache,
        max_len: usize,
        launch: &Launch,
    ) -> Result<Tensor> {
        let (tokens, _) = x.dims2()?;
        let (heads, kv_heads, d) = (self.cfg.num_heads, self.cfg.num_kv_heads, self.cfg.head_dim);
        let all = match &self.qkv_proj {
            // No kernel of a pass writes a weight, and none but `advance`, behind the last layer, a position.
            Some(proj) => proj.forward_launched(x, launch)?,
            None => {
                let parts = [&self.q_proj, &self.k_proj, &self.v_proj].map(|proj| proj.forward(x));
                let [q, k, v] = parts;
                Tensor::cat(&[q?, k?, v?], D::Minus1)?
            }
        };
        // Heads [q | gate], then k, then v.
        let pairs = all.reshape((tokens, heads + kv_heads, 2 * d))?.narrow(1, 0, heads)?;
        let (q, gate) = (pairs.narrow(2, 0, d)?, pairs.narrow(2, d, d)?);
        let rows = all.reshape((tokens, 2 * (heads + kv_heads), d))?;
        let (k, v) = (rows.narrow(1, 2 * heads, kv_heads)?, rows.narrow(1, 2 * heads + kv_heads, kv_heads)?);
        let mut decode = AttentionDecode::new(cache, None)?.with_max_len(max_len).launched(launch);
        if let Some(cu_seqlens) = cu_seqlens {
            decode = decode.with_cu_seqlens(cu_seqlens);
        }
        let q = self.prepare(cache, cu_seqlens, launch)?.forward(&q, &k, &v)?;
        let o = decode.forward(&q, Some(&gate))?;
        self.o_proj.forward_launched(&o.reshape((tokens, heads * d))?, launch)
    }
}
