//! Softmax attention over caches of keys and values, for the layers that stand between those of the rule: its two
//! halves, before and behind the append to the cache.

use super::args::*;
use super::copies::written;
use super::rule::{heads, storage_dtype};
use super::sequences::{CuSeqlens, SequencePlan};
use super::slots::{cpu_slots, Slots};
use crate::cpu;
use crate::cpu::cached_attention::{CacheRows, Cached, Decode, Prepare};
use candle_core::{bail, CpuStorage, CustomOp2, CustomOp3, DType, Device, Layout, Result, Shape, Storage, Tensor};
use half::{bf16, f16};

const PREPARE: &str = "attention_prepare";
const DECODE: &str = "attention_decode";
const ADVANCE: &str = "attention_advance";

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
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Option<Slots>,
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

    /// Sequence `n` uses slot `slots[n]`; see [`crate::GdnDecode::with_slots`]. What is read is written: `slots` has one
    /// map, since keys and values stay where they are.
    pub fn with_slots(mut self, slots: impl Into<Slots>) -> Self {
        self.slots = Some(slots.into());
        self
    }

    /// Positions a slot has room for.
    pub fn capacity(&self) -> usize {
        self.k.dims()[2]
    }

    /// After the last layer of a forward pass: its `tokens` new tokens of every sequence are in the cache. In place, for
    /// all that hold this `positions`; padding stays where it is.
    ///
    /// # Errors
    /// When the slots do not fit.
    pub fn advance(&self, tokens: usize) -> Result<()> {
        self.advance_by(tokens, None)
    }

    /// The same for packed tokens.
    ///
    /// # Errors
    /// When the sequences or slots do not fit.
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
        if sequences == 0 {
            return Ok(());
        }
        if let Some(slots) = &self.slots {
            check_not_written(
                ADVANCE,
                ("slots", storage_key(slots.read())),
                ("positions", storage_key(&self.positions)),
            )?;
        }
        #[cfg(feature = "cuda")]
        if self.device().is_cuda() {
            let slots = self.slots.as_ref().map(Slots::in_u32).transpose()?;
            let cu_seqlens = cu_seqlens.map(CuSeqlens::tensor);
            return crate::cuda::attention::advance(ADVANCE, self, &seqs, slots.as_ref(), cu_seqlens);
        }
        let slots = cpu_slots(ADVANCE, self.slots.as_ref(), seqs.num_slots)?;
        let (slots, ranges) = (slots.of_stride(1), seqs.cpu(cu_seqlens));
        written(ADVANCE, &self.positions, |(storage, layout)| {
            let CpuStorage::U32(data) = storage else {
                bail!("{ADVANCE}: positions: expected a u32 tensor on the CPU")
            };
            for (n, position) in data[layout.start_offset()..][..sequences].iter_mut().enumerate() {
                if slots.offsets(n).is_some() {
                    *position = position.saturating_add(ranges.range(n).1 as u32);
                }
            }
            Ok(())
        })
    }

    fn kv_heads(&self) -> usize {
        self.k.dims()[1]
    }

    fn dim(&self) -> usize {
        self.k.dims()[3]
    }

    fn device(&self) -> &Device {
        self.k.device()
    }

    /// Sequences of the call whose argument `arg` this is, `[lead.., heads, D]`, and its number of heads.
    fn sequences(
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
    fn check_not_written(&self, op: &str, arg: &str, key: usize) -> Result<()> {
        for (cache, tensor) in [("k of the cache", &self.k), ("v of the cache", &self.v)] {
            check_not_written(op, (arg, key), (cache, storage_key(tensor)))?;
        }
        Ok(())
    }

    /// As the CPU kernels take it; there the host sees the positions, and whether they find room.
    fn cpu<'a>(
        &self,
        op: &str,
        positions: &'a [u32],
        (seqs, heads): (&SequencePlan, usize),
        cu_seqlens: Option<&'a CuSeqlens>,
        slots: cpu::Slots<'a>,
    ) -> Result<Cached<'a>> {
        let sequences = seqs.cpu(cu_seqlens);
        for (n, &position) in positions.iter().enumerate() {
            let (tokens, capacity) = (sequences.range(n).1, self.capacity());
            if slots.offsets(n).is_some() && position as usize + tokens > capacity {
                bail!("{op}: positions: expected room for {tokens} tokens in {capacity}, got {position} at {n}");
            }
        }
        let stride = self.k.stride();
        let rows = CacheRows { head_stride: stride[1], token_stride: stride[2], capacity: self.capacity() };
        Ok(Cached { seqs: sequences, slots, positions, rows, heads, kv_heads: self.kv_heads(), dim: self.dim() })
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn parts(&self) -> (&Tensor, &Tensor, &Tensor) {
        (&self.k, &self.v, &self.positions)
    }
}

/// A checked call, as the CUDA side reads it.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct AttentionPlan {
    /// q, k, v; of a decode q and the gate.
    pub inputs: [HeadsLayout; 3],
    pub seqs: SequencePlan,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub out_shape: Vec<usize>,
}

/// Norm and rotary position of new queries and keys, as a [`CustomOp3`] over (q, k, v); see [`attention_prepare`]. The op
/// holds the cache and appends to it when it is applied.
#[derive(Debug, Clone)]
pub struct AttentionPrepare {
    cache: AttentionCache,
    q_weight: Tensor,
    k_weight: Tensor,
    inv_freq: Tensor,
    options: PrepareOptions,
    cu_seqlens: Option<CuSeqlens>,
    overlap: bool,
}

/// Constants of [`AttentionPrepare`]. The default is Qwen3-Next's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrepareOptions {
    /// Added to the mean square. Default 1e-6.
    pub eps: f64,
    /// Multiply by `1 + weight` instead of by the weight. Default true: as checkpoints store it.
    pub zero_centred: bool,
}

impl Default for PrepareOptions {
    fn default() -> Self {
        Self { eps: 1e-6, zero_centred: true }
    }
}

/// The frequencies of [`AttentionPrepare`] as it takes them: `[2, pairs]`, each rounded to f32 and what that lost.
///
/// # Errors
/// When the device is out of memory.
pub fn rotary_frequencies(inv_freq: &[f64], device: &Device) -> Result<Tensor> {
    let high = inv_freq.iter().map(|&f| f as f32);
    let low = inv_freq.iter().map(|&f| (f - f64::from(f as f32)) as f32);
    Tensor::from_vec(high.chain(low).collect::<Vec<_>>(), (2, inv_freq.len()), device)
}

impl AttentionPrepare {
    /// # Errors
    /// When a dtype, shape or device does not fit; the message names the argument.
    pub fn new(
        cache: &AttentionCache,
        q_weight: &Tensor,
        k_weight: &Tensor,
        inv_freq: &Tensor,
        options: PrepareOptions,
    ) -> Result<Self> {
        let dim = cache.dim();
        for (arg, tensor) in [("q_weight", q_weight), ("k_weight", k_weight), ("inv_freq", inv_freq)] {
            check_dtype(PREPARE, arg, tensor.dtype(), DType::F32)?;
            check_device(PREPARE, arg, tensor, cache.device())?;
            check_contiguous(PREPARE, arg, tensor)?;
            cache.check_not_written(PREPARE, arg, storage_key(tensor))?;
        }
        check_shape(PREPARE, "q_weight", q_weight, &[dim])?;
        check_shape(PREPARE, "k_weight", k_weight, &[dim])?;
        match inv_freq.dims() {
            [pairs] | [2, pairs] if 2 * pairs <= dim && *pairs > 0 => {}
            dims => bail!(
                "{PREPARE}: inv_freq: expected shape [pairs] or [2, pairs] with 1 to {} pairs, got {dims:?}",
                dim / 2
            ),
        }
        if !options.eps.is_finite() || options.eps < 0.0 {
            bail!("{PREPARE}: eps: expected a finite value of at least 0, got {}", options.eps);
        }
        Ok(Self {
            cache: cache.clone(),
            q_weight: q_weight.clone(),
            k_weight: k_weight.clone(),
            inv_freq: inv_freq.clone(),
            options,
            cu_seqlens: None,
            overlap: false,
        })
    }

    /// The tokens of all sequences are packed, `[tokens, ..]`.
    pub fn with_cu_seqlens(mut self, cu_seqlens: &CuSeqlens) -> Self {
        self.cu_seqlens = Some(cu_seqlens.clone());
        self
    }

    /// The kernel may begin while the one before it on the stream still runs; it waits for it before it reads anything.
    #[allow(dead_code)]
    pub(crate) fn overlapping(mut self) -> Self {
        self.overlap = true;
        self
    }

    /// Applies the op: the queries, contiguous, in the shape and dtype of q.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit, an input shares its storage with the cache or, on the CPU, the
    /// tokens find no room.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (q, k, v) = (dense_rows(q)?, dense_rows(k)?, dense_rows(v)?);
        for (arg, tensor) in [("q", &q), ("k", &k), ("v", &v)] {
            self.check_input(arg, tensor.dtype(), storage_key(tensor))?;
            check_device(PREPARE, arg, tensor, self.cache.device())?;
        }
        apply3(self, &q, &k, &v)
    }

    fn check_input(&self, arg: &str, dtype: DType, key: usize) -> Result<()> {
        check_dtype(PREPARE, arg, dtype, self.cache.k.dtype())?;
        self.cache.check_not_written(PREPARE, arg, key)
    }

    fn plan(&self, [q, k, v]: [&Layout; 3]) -> Result<AttentionPlan> {
        let (lead, seqs, heads) = self.cache.sequences((PREPARE, "q"), q, self.cu_seqlens.as_ref())?;
        let (kv_heads, dim, lead_dims) = (self.cache.kv_heads(), self.cache.dim(), &q.dims()[..lead.rank()]);
        let inputs = [
            heads_layout(PREPARE, "q", q, lead, lead_dims, (heads, dim))?,
            heads_layout(PREPARE, "k", k, lead, lead_dims, (kv_heads, dim))?,
            heads_layout(PREPARE, "v", v, lead, lead_dims, (kv_heads, dim))?,
        ];
        Ok(AttentionPlan { inputs, seqs, heads, kv_heads, dim, out_shape: q.dims().to_vec() })
    }

    /// `1 + weight` or the weight.
    fn scale(&self, weight: &Tensor) -> Result<Vec<f32>> {
        let centre = if self.options.zero_centred { 1.0 } else { 0.0 };
        Ok(weight.to_vec1::<f32>()?.into_iter().map(|w| w + centre).collect())
    }

    fn cpu_run<T: cpu::Element>(&self, plan: &AttentionPlan, [q, k, v]: [&[T]; 3]) -> Result<Vec<T>> {
        let pairs = self.inv_freq.elem_count() / self.inv_freq.rank();
        let mut inv_freq = vec![0f64; pairs];
        for (i, x) in self.inv_freq.flatten_all()?.to_vec1::<f32>()?.into_iter().enumerate() {
            inv_freq[i % pairs] += f64::from(x);
        }
        let (q_scale, k_scale) = (self.scale(&self.q_weight)?, self.scale(&self.k_weight)?);
        let slots = cpu_slots(PREPARE, self.cache.slots.as_ref(), plan.seqs.num_slots)?;
        let positions = self.cache.positions.to_vec1::<u32>()?;
        let slots = slots.of_stride(self.cache.k.stride()[0]);
        let cu_seqlens = self.cu_seqlens.as_ref();
        let cached = self.cache.cpu(PREPARE, &positions, (&plan.seqs, plan.heads), cu_seqlens, slots)?;
        let kernel = Prepare {
            cached,
            q: heads(q, plan.inputs[0]),
            k: heads(k, plan.inputs[1]),
            v: heads(v, plan.inputs[2]),
            q_scale: &q_scale,
            k_scale: &k_scale,
            eps: self.options.eps as f32,
            inv_freq: &inv_freq,
        };
        let mut out = vec![T::ZERO; plan.out_shape.iter().product()];
        if out.is_empty() {
            return Ok(out);
        }
        written(PREPARE, &self.cache.k, |(keys, k_layout)| {
            written(PREPARE, &self.cache.v, |(values, v_layout)| {
                let (Some(keys), Some(values)) = (T::slice_mut(keys), T::slice_mut(values)) else {
                    bail!("{PREPARE}: k of the cache: expected q's dtype")
                };
                kernel.run(&mut keys[k_layout.start_offset()..], &mut values[v_layout.start_offset()..], &mut out);
                Ok(())
            })
        })?;
        Ok(out)
    }
}

impl CustomOp3 for AttentionPrepare {
    fn name(&self) -> &'static str {
        PREPARE
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        ql: &Layout,
        k: &CpuStorage,
        kl: &Layout,
        v: &CpuStorage,
        vl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        use CpuStorage::{BF16, F16, F32};
        let plan = self.plan([ql, kl, vl])?;
        for (arg, storage) in [("q", q), ("k", k), ("v", v)] {
            self.check_input(arg, storage_dtype(storage), std::ptr::from_ref(storage).addr())?;
        }
        let out = match (q, k, v) {
            (F32(q), F32(k), F32(v)) => F32(self.cpu_run(&plan, [q, k, v])?),
            (BF16(q), BF16(k), BF16(v)) => BF16(self.cpu_run::<bf16>(&plan, [q, k, v])?),
            (F16(q), F16(k), F16(v)) => F16(self.cpu_run::<f16>(&plan, [q, k, v])?),
            _ => bail!("{PREPARE}: q: expected dtype f32, bf16 or f16, got {:?}", storage_dtype(q)),
        };
        Ok((out, Shape::from(plan.out_shape)))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &candle_core::CudaStorage,
        ql: &Layout,
        k: &candle_core::CudaStorage,
        kl: &Layout,
        v: &candle_core::CudaStorage,
        vl: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let plan = self.plan([ql, kl, vl])?;
        for (arg, storage) in [("q", q), ("k", k), ("v", v)] {
            self.check_input(arg, storage.dtype(), std::ptr::from_ref(storage).addr())?;
        }
        let slots = self.cache.slots.as_ref().map(Slots::in_u32).transpose()?;
        let args = crate::cuda::attention::PrepareArgs {
            call: crate::cuda::attention::Call {
                name: PREPARE,
                plan: &plan,
                cache: &self.cache,
                slots: slots.as_ref(),
                cu_seqlens: self.cu_seqlens.as_ref().map(CuSeqlens::tensor),
                overlap: self.overlap,
            },
            q_weight: &self.q_weight,
            k_weight: &self.k_weight,
            inv_freq: &self.inv_freq,
            eps: self.options.eps,
            zero_centred: self.options.zero_centred,
        };
        let out = crate::cuda::attention::prepare(&args, [q, k, v])?;
        Ok((out, Shape::from(plan.out_shape)))
    }
}

/// Attention of new tokens over a cache that has them already, as a [`CustomOp2`] over (q, gate); see
/// [`attention_decode`].
#[derive(Debug, Clone)]
pub struct AttentionDecode {
    cache: AttentionCache,
    scale: f64,
    cu_seqlens: Option<CuSeqlens>,
    max_len: usize,
    /// Whether the second argument is a gate, and not q again.
    gated: bool,
    overlap: bool,
}

impl AttentionDecode {
    /// `scale` multiplies the scores; `None` is `D^-0.5`.
    ///
    /// # Errors
    /// When the scale is not finite.
    pub fn new(cache: &AttentionCache, scale: Option<f64>) -> Result<Self> {
        let scale = scale.unwrap_or((cache.dim() as f64).powf(-0.5));
        if !scale.is_finite() {
            bail!("{DECODE}: scale: expected a finite value, got {scale}");
        }
        Ok(Self { cache: cache.clone(), scale, cu_seqlens: None, max_len: 0, gated: true, overlap: false })
    }

    /// The tokens of all sequences are packed, `[tokens, ..]`.
    pub fn with_cu_seqlens(mut self, cu_seqlens: &CuSeqlens) -> Self {
        self.cu_seqlens = Some(cu_seqlens.clone());
        self
    }

    /// No sequence is longer than this, its new tokens included. CUDA divides the work by it, the result is right for
    /// any; without it the cache's capacity counts.
    pub fn with_max_len(mut self, max_len: usize) -> Self {
        self.max_len = max_len;
        self
    }

    /// The kernel may begin while the one before it on the stream still runs, and read the slots, the positions and the
    /// old keys and values, which that one must not write. [`AttentionPrepare`] does not.
    #[allow(dead_code)]
    pub(crate) fn overlapping(mut self) -> Self {
        self.overlap = true;
        self
    }

    /// Applies the op: o, contiguous, in the shape and dtype of q.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit or, on the CPU, the tokens are past the cache's capacity.
    pub fn forward(&self, q: &Tensor, gate: Option<&Tensor>) -> Result<Tensor> {
        let q = dense_rows(q)?;
        let second = gate.map_or(Ok(q.clone()), dense_rows)?;
        for (arg, tensor) in [("q", &q), ("gate", &second)] {
            check_dtype(DECODE, arg, tensor.dtype(), self.cache.k.dtype())?;
            check_device(DECODE, arg, tensor, self.cache.device())?;
        }
        q.apply_op2_no_bwd(&second, &Self { gated: gate.is_some(), ..self.clone() })
    }

    fn plan(&self, q: &Layout, gate: &Layout) -> Result<AttentionPlan> {
        let (lead, seqs, heads) = self.cache.sequences((DECODE, "q"), q, self.cu_seqlens.as_ref())?;
        let (dim, lead_dims) = (self.cache.dim(), &q.dims()[..lead.rank()]);
        let q_layout = heads_layout(DECODE, "q", q, lead, lead_dims, (heads, dim))?;
        let gate = heads_layout(DECODE, "gate", gate, lead, lead_dims, (heads, dim))?;
        let (kv_heads, out_shape) = (self.cache.kv_heads(), q.dims().to_vec());
        Ok(AttentionPlan { inputs: [q_layout, gate, gate], seqs, heads, kv_heads, dim, out_shape })
    }

    fn cpu_run<T: cpu::Element>(&self, plan: &AttentionPlan, q: &[T], gate: &[T], cache: [&[T]; 2]) -> Result<Vec<T>> {
        let slots = cpu_slots(DECODE, self.cache.slots.as_ref(), plan.seqs.num_slots)?;
        let positions = self.cache.positions.to_vec1::<u32>()?;
        let slots = slots.of_stride(self.cache.k.stride()[0]);
        let cu_seqlens = self.cu_seqlens.as_ref();
        let kernel = Decode {
            cached: self.cache.cpu(DECODE, &positions, (&plan.seqs, plan.heads), cu_seqlens, slots)?,
            q: heads(q, plan.inputs[0]),
            gate: self.gated.then(|| heads(gate, plan.inputs[1])),
            keys: &cache[0][self.cache.k.layout().start_offset()..],
            values: &cache[1][self.cache.v.layout().start_offset()..],
            scale: self.scale as f32,
        };
        let mut out = vec![T::ZERO; plan.out_shape.iter().product()];
        kernel.run(&mut out);
        Ok(out)
    }
}

impl CustomOp2 for AttentionDecode {
    fn name(&self) -> &'static str {
        DECODE
    }

    fn cpu_fwd(&self, q: &CpuStorage, ql: &Layout, gate: &CpuStorage, gl: &Layout) -> Result<(CpuStorage, Shape)> {
        use CpuStorage::{BF16, F16, F32};
        let plan = self.plan(ql, gl)?;
        let (k, v) = (self.cache.k.storage_and_layout().0, self.cache.v.storage_and_layout().0);
        let (Storage::Cpu(k), Storage::Cpu(v)) = (&*k, &*v) else {
            bail!("{DECODE}: k of the cache: expected a tensor on the CPU")
        };
        let out = match (q, gate, k, v) {
            (F32(q), F32(gate), F32(k), F32(v)) => F32(self.cpu_run(&plan, q, gate, [k, v])?),
            (BF16(q), BF16(gate), BF16(k), BF16(v)) => BF16(self.cpu_run::<bf16>(&plan, q, gate, [k, v])?),
            (F16(q), F16(gate), F16(k), F16(v)) => F16(self.cpu_run::<f16>(&plan, q, gate, [k, v])?),
            _ => bail!("{DECODE}: q: expected the dtype of gate and cache, got {:?}", storage_dtype(q)),
        };
        Ok((out, Shape::from(plan.out_shape)))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &candle_core::CudaStorage,
        ql: &Layout,
        gate: &candle_core::CudaStorage,
        gl: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let plan = self.plan(ql, gl)?;
        let slots = self.cache.slots.as_ref().map(Slots::in_u32).transpose()?;
        let args = crate::cuda::attention::DecodeArgs {
            call: crate::cuda::attention::Call {
                name: DECODE,
                plan: &plan,
                cache: &self.cache,
                slots: slots.as_ref(),
                cu_seqlens: self.cu_seqlens.as_ref().map(CuSeqlens::tensor),
                overlap: self.overlap,
            },
            scale: self.scale,
            max_len: self.max_len,
        };
        let out = crate::cuda::attention::decode(&args, q, self.gated.then_some(gate))?;
        Ok((out, Shape::from(plan.out_shape)))
    }
}

/// What softmax attention of Qwen3-Next and its family does between its projections and the scores: RMS norm of every
/// head of q and k, rotary positions, and the append of k and v to the cache, in place. Returns the queries.
///
/// ```text
/// q, k <- rotate(x * rsqrt(mean(x^2) + eps) * (1 + weight), position);   cache[position] <- k, v
/// ```
///
/// Token `t` of sequence `n` has position `positions[n] + t`. Value `i` of a head is paired with value `i + pairs`; values
/// from `2 * pairs` on are not rotated.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q` | `[batch, tokens, H, D]`, or `[batch, H, D]` for one token | f32, bf16 or f16 |
/// | `k`, `v` | `[batch, tokens, HKV, D]`, the last two may be merged | as q |
/// | `q_weight`, `k_weight` | `[D]` | f32 |
/// | `inv_freq` | `[pairs]`: radians a position; or `[2, pairs]` of [`rotary_frequencies`], for long contexts | f32 |
/// | result | as q, contiguous | as q |
///
/// HKV divides H. q, k and v may be strided views of one projection, as of the `[q | gate]` heads of a checkpoint. With
/// packed tokens ([`AttentionPrepare::with_cu_seqlens`]) `[batch, tokens]` is `[tokens]`. A padding row's result is
/// zero, and it appends nothing. On CUDA, where the host does not see the positions, a token past the capacity appends
/// nothing; on the CPU it is an error. Arithmetic is f32, of the angles f64.
///
/// # Errors
/// When a rank, shape, dtype or device does not fit, or an input shares its storage with the cache; the message names
/// the argument, what was expected and what came.
#[allow(clippy::too_many_arguments)]
pub fn attention_prepare(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    cache: &AttentionCache,
    q_weight: &Tensor,
    k_weight: &Tensor,
    inv_freq: &Tensor,
    options: PrepareOptions,
) -> Result<Tensor> {
    AttentionPrepare::new(cache, q_weight, k_weight, inv_freq, options)?.forward(q, k, v)
}

/// Softmax attention of new tokens over a cache that [`attention_prepare`] has appended them to, each over itself and
/// all before it, times an output gate:
///
/// ```text
/// o = sigmoid(gate) * softmax(scale * q k^T) v
/// ```
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q` | `[batch, tokens, H, D]`, or `[batch, H, D]` for one token | f32, bf16 or f16 |
/// | `gate` | as q, the last two may be merged; may be a strided view | as q |
/// | result o | as q, contiguous | as q |
///
/// `cache.positions` are those that `attention_prepare` got: tokens before these. Query head `h` reads key head
/// `h / (H / HKV)`. Made for up to 16 tokens a sequence, as in decode and the verification of drafts; right for any
/// number. On CUDA the keys of a sequence are shared out to blocks, whose number follows from sizes that the host knows;
/// the lengths are read on the device. Scores, softmax and sums are f32; in bf16 and f16 the weights are rounded before
/// they multiply the values, as the tensor cores take them. A padding row's result is zero.
///
/// # Errors
/// When a rank, shape, dtype or device does not fit; the message names the argument, what was expected and what came.
pub fn attention_decode(
    q: &Tensor,
    gate: Option<&Tensor>,
    cache: &AttentionCache,
    scale: Option<f64>,
) -> Result<Tensor> {
    AttentionDecode::new(cache, scale)?.forward(q, gate)
}
