//! The half after the append: attention of new tokens over the cache.

use super::cache::{rows_on, AttentionCache, AttentionPlan};
#[cfg(doc)]
use candle_core::CustomOp2;
use candle_core::{bail, Result, Tensor};
use candle_gdn::CuSeqlens;
use candle_gdn_core::*;

const DECODE: &str = "attention_decode";

/// Softmax attention of new tokens over a cache to which [`super::AttentionPrepare`] has appended them, as a [`CustomOp2`]
/// over (q, gate): each token over itself and all before it, times an output gate.
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
/// `cache.positions` are those of the `AttentionPrepare`: tokens before these. Query head `h` reads key head `h / (H / HKV)`.
/// Any number of tokens a sequence. One kernel serves few tokens, as in decode and the verification of drafts, and everything that is in
/// f32 or unaligned; another serves prompts, in bf16 and f16 on sm_90a from 128 rows on: tokens, times the query heads of a key head.
/// The keys of a sequence are divided among blocks, whose number follows from sizes that the host knows; the lengths are read on
/// the device. Scores, softmax and sums are f32; in bf16 and f16 the weights are rounded before they multiply the values on the
/// tensor cores. A padding row's result is zero. Runs on CUDA.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct AttentionDecode {
    pub(super) cache: AttentionCache,
    pub(super) scale: f64,
    pub(super) cu_seqlens: Option<CuSeqlens>,
    /// The longest sequence, its new tokens included; 0 is the cache's capacity. It decides how the work is divided, and the result is
    /// right for any value.
    pub(super) max_len: usize,
    /// Whether the second argument is a gate; if not, it is q again.
    pub(super) gated: bool,
    /// With overlap, the kernel reads the slots, the positions and the old keys and values while the one before it on the stream
    /// still runs, which must not write them. [`super::AttentionPrepare`] does not.
    pub(super) launch: Launch,
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

    /// Applies the op: o, contiguous, in the shape and dtype of q.
    ///
    /// # Errors
    /// When a rank, shape, dtype or device does not fit; the message names the argument, what was expected and what came.
    pub fn forward(&self, q: &Tensor, gate: Option<&Tensor>) -> Result<Tensor> {
        let _working = Working::new(self.cache.device());
        // The kernels read queries 16 bytes and gates two elements at a time; other rows are copied.
        let rows = |x: &Tensor, elements| match dense_rows(x)? {
            x if rows_on(&x, elements) => Ok(x),
            x => x.force_contiguous(),
        };
        let q = rows(q, 16 / q.dtype().size_in_bytes().max(1))?;
        let second = gate.map_or(Ok(q.clone()), |gate| rows(gate, 2))?;
        for (arg, tensor) in [("q", &q), ("gate", &second)] {
            check_device(DECODE, arg, tensor, self.cache.device())?;
        }
        let op = Self { gated: gate.is_some(), ..self.clone() };
        apply2(&op, self.launch.arena.as_ref(), [("q", &q), ("gate", &second)])
    }

    fn plan(&self, args: [Arg<'_>; 2]) -> Result<AttentionPlan> {
        for arg in args {
            check_dtype(DECODE, arg.name, arg.dtype, self.cache.k.dtype())?;
        }
        let [q, gate] = args.map(|arg| arg.layout);
        let (lead, seqs, heads) = self.cache.sequences((DECODE, "q"), q, self.cu_seqlens.as_ref())?;
        let (dim, lead_dims) = (self.cache.dim(), &q.dims()[..lead.rank()]);
        let q_layout = heads_layout(DECODE, "q", q, lead, lead_dims, (heads, dim))?;
        let gate = heads_layout(DECODE, "gate", gate, lead, lead_dims, (heads, dim))?;
        let (kv_heads, out_shape) = (self.cache.kv_heads(), q.dims().to_vec());
        Ok(AttentionPlan { inputs: [q_layout, gate, gate], seqs, heads, kv_heads, dim, out_shape })
    }

    fn on_cpu(&self, [q, gate]: [CpuArg<'_>; 2]) -> CpuOutput {
        self.plan([Arg::cpu("q", q), Arg::cpu("gate", gate)])?;
        bail!("{DECODE}: q: expected a tensor on CUDA, got one on the CPU")
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(&self, [q, gate]: [CudaArg<'_>; 2]) -> CudaOutput {
        let plan = self.plan([Arg::cuda("q", q), Arg::cuda("gate", gate)])?;
        Ok((self.decode_cuda(DECODE, &plan, q.0, self.gated.then_some(gate.0))?, plan.out_shape.into()))
    }
}

custom_op!(CustomOp2 for AttentionDecode, DECODE, q q_layout, gate gate_layout);
