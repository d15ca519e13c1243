//! The half before the append: norm and rotary position of new queries and keys, and the append itself.

use super::cache::{AttentionCache, AttentionPlan};
#[cfg(doc)]
use candle_core::CustomOp3;
use candle_core::{bail, DType, Device, Layout, Result, Tensor};
use candle_gdn::CuSeqlens;
use candle_gdn_core::*;

const PREPARE: &str = "attention_prepare";

/// The steps of Qwen3-Next's softmax attention between its projections and the scores, as a [`CustomOp3`] over (q, k, v): RMS
/// norm of every head of q and k, rotary positions, and the append of k and v to the cache, in place. Returns the queries.
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
/// zero, and it appends nothing; nor does a token past the capacity, since the host does not see the positions. Arithmetic is
/// f32, of the angles f64. Runs on CUDA.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct AttentionPrepare {
    pub(super) cache: AttentionCache,
    /// Of queries and of keys; none where these come normed.
    pub(super) weights: Option<[Tensor; 2]>,
    pub(super) inv_freq: Tensor,
    pub(super) options: PrepareOptions,
    pub(super) cu_seqlens: Option<CuSeqlens>,
    /// With overlap, the kernel waits for the one before it on the stream before it reads anything.
    pub(super) launch: Launch,
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

/// Frequencies in radians a position in the layout of [`AttentionPrepare`], `[2, pairs]`: each rounded to f32, and the rounding
/// errors.
///
/// # Errors
/// When the device is out of memory.
pub fn rotary_frequencies(inv_freq: &[f64], device: &Device) -> Result<Tensor> {
    let _working = Working::new(device);
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
        for (arg, weight) in [("q_weight", q_weight), ("k_weight", k_weight)] {
            check_constant(arg, weight, cache)?;
            check_shape(PREPARE, arg, weight, &[dim])?;
        }
        if !options.eps.is_finite() || options.eps < 0.0 {
            bail!("{PREPARE}: eps: expected a finite value of at least 0, got {}", options.eps);
        }
        let weights = Some([q_weight.clone(), k_weight.clone()]);
        Ok(Self { weights, options, ..Self::of_normed(cache, inv_freq)? })
    }

    /// Without the norms: of queries and keys that had theirs.
    pub(crate) fn of_normed(cache: &AttentionCache, inv_freq: &Tensor) -> Result<Self> {
        check_constant("inv_freq", inv_freq, cache)?;
        let dim = cache.dim();
        match inv_freq.dims() {
            [pairs] | [2, pairs] if 2 * pairs <= dim && *pairs > 0 => {}
            dims => bail!(
                "{PREPARE}: inv_freq: expected shape [pairs] or [2, pairs] with 1 to {} pairs, got {dims:?}",
                dim / 2
            ),
        }
        Ok(Self {
            cache: cache.clone(),
            weights: None,
            inv_freq: inv_freq.clone(),
            options: PrepareOptions::default(),
            cu_seqlens: None,
            launch: Launch::default(),
        })
    }

    /// The tokens of all sequences are packed, `[tokens, ..]`.
    pub fn with_cu_seqlens(mut self, cu_seqlens: &CuSeqlens) -> Self {
        self.cu_seqlens = Some(cu_seqlens.clone());
        self
    }

    /// Applies the op: the queries, contiguous, in the shape and dtype of q.
    ///
    /// # Errors
    /// When a rank, shape, dtype or device does not fit, or an input shares its storage with the cache; the message names
    /// the argument, what was expected and what came.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let _working = Working::new(self.cache.device());
        let (q, k, v) = (dense_rows(q)?, dense_rows(k)?, dense_rows(v)?);
        for (arg, tensor) in [("q", &q), ("k", &k), ("v", &v)] {
            self.check_input(arg, tensor.dtype(), storage_key(tensor))?;
            check_device(PREPARE, arg, tensor, self.cache.device())?;
        }
        apply3(self, self.launch.arena.as_ref(), [("q", &q), ("k", &k), ("v", &v)])
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

    fn on_cpu(&self, args: [CpuArg<'_>; 3]) -> CpuOutput {
        self.plan(args.map(|(_, layout)| layout))?;
        bail!("{PREPARE}: q: expected a tensor on CUDA, got one on the CPU")
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(&self, args: [CudaArg<'_>; 3]) -> CudaOutput {
        use candle_core::backend::BackendStorage;
        let plan = self.plan(args.map(|(_, layout)| layout))?;
        for (arg, (storage, _)) in ["q", "k", "v"].into_iter().zip(args) {
            self.check_input(arg, storage.dtype(), std::ptr::from_ref(storage).addr())?;
        }
        Ok((self.prepare_cuda(PREPARE, &plan, args.map(|(storage, _)| storage))?, plan.out_shape.into()))
    }
}

/// An f32 tensor that the launch reads and nothing writes.
fn check_constant(arg: &str, tensor: &Tensor, cache: &AttentionCache) -> Result<()> {
    check_dtype(PREPARE, arg, tensor.dtype(), DType::F32)?;
    check_device(PREPARE, arg, tensor, cache.device())?;
    check_contiguous(PREPARE, arg, tensor)?;
    check_untracked(PREPARE, arg, tensor)?;
    cache.check_not_written(PREPARE, arg, storage_key(tensor))
}

custom_op!(CustomOp3 for AttentionPrepare, PREPARE, q q_layout, k k_layout, v v_layout);
