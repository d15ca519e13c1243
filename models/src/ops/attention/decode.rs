//! The half behind the append: attention of new tokens over the cache.

use super::cache::AttentionCache;
use crate::cpu::cached_attention::Decode;
use crate::ops::plan::AttentionPlan;
use candle_core::{bail, CpuStorage, CustomOp2, Layout, Result, Shape, Storage, Tensor};
use candle_gdn::plumbing::*;
use candle_gdn::CuSeqlens;
#[cfg(feature = "cuda")]
use candle_gdn::Slots;
use half::{bf16, f16};

const DECODE: &str = "attention_decode";

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
    launch: Launch,
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
        Ok(Self { cache: cache.clone(), scale, cu_seqlens: None, max_len: 0, gated: true, launch: Launch::default() })
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
    /// old keys and values, which that one must not write. [`crate::ops::AttentionPrepare`] does not.
    pub(crate) fn launched(mut self, launch: &Launch) -> Self {
        self.launch = launch.clone();
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
        apply2(&Self { gated: gate.is_some(), ..self.clone() }, self.launch.arena.as_ref(), &q, &second)
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
        self.cache.cpu(DECODE, plan, self.cu_seqlens.as_ref(), |cached| {
            let kernel = Decode {
                cached,
                q: heads(q, plan.inputs[0]),
                gate: self.gated.then(|| heads(gate, plan.inputs[1])),
                keys: &cache[0][self.cache.k.layout().start_offset()..],
                values: &cache[1][self.cache.v.layout().start_offset()..],
                scale: self.scale as f32,
            };
            let mut out = vec![T::ZERO; plan.out_shape.iter().product()];
            kernel.run(&mut out);
            Ok(out)
        })
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
            common: crate::cuda::attention::CacheArgs {
                name: DECODE,
                plan: &plan,
                cache: &self.cache,
                slots: slots.as_ref(),
                cu_seqlens: self.cu_seqlens.as_ref().map(cu_seqlens_on_device),
                launch: &self.launch,
            },
            scale: self.scale,
            max_len: self.max_len,
        };
        let out = crate::cuda::attention::decode(&args, q, self.gated.then_some(gate))?;
        Ok((out, Shape::from(plan.out_shape)))
    }
}

/// Softmax attention of new tokens over a cache that [`crate::attention_prepare`] has appended them to, each over
/// itself and all before it, times an output gate:
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
