//! The half before the append: norm and rotary position of new queries and keys, and the append itself.

use super::cache::AttentionCache;
use crate::cpu::cached_attention::Prepare;
use crate::ops::plan::AttentionPlan;
use candle_core::{bail, CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor};
use candle_gdn::plumbing::*;
use candle_gdn::CuSeqlens;
#[cfg(feature = "cuda")]
use candle_gdn::Slots;
use half::{bf16, f16};

const PREPARE: &str = "attention_prepare";

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
    launch: Launch,
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
            launch: Launch::default(),
        })
    }

    /// The tokens of all sequences are packed, `[tokens, ..]`.
    pub fn with_cu_seqlens(mut self, cu_seqlens: &CuSeqlens) -> Self {
        self.cu_seqlens = Some(cu_seqlens.clone());
        self
    }

    /// The kernel may begin while the one before it on the stream still runs; it waits for it before it reads anything.
    pub(crate) fn launched(mut self, launch: &Launch) -> Self {
        self.launch = launch.clone();
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
        apply3(self, self.launch.arena.as_ref(), &q, &k, &v)
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
        self.cache.cpu(PREPARE, plan, self.cu_seqlens.as_ref(), |cached| {
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
            in_place_cpu(PREPARE, &self.cache.k, |(keys, k_layout)| {
                in_place_cpu(PREPARE, &self.cache.v, |(values, v_layout)| {
                    let (Some(keys), Some(values)) = (T::slice_mut(keys), T::slice_mut(values)) else {
                        bail!("{PREPARE}: k of the cache: expected q's dtype")
                    };
                    kernel.run(&mut keys[k_layout.start_offset()..], &mut values[v_layout.start_offset()..], &mut out);
                    Ok(())
                })
            })?;
            Ok(out)
        })
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
            common: crate::cuda::attention::CacheArgs {
                name: PREPARE,
                plan: &plan,
                cache: &self.cache,
                slots: slots.as_ref(),
                cu_seqlens: self.cu_seqlens.as_ref().map(cu_seqlens_on_device),
                launch: &self.launch,
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
