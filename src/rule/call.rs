//! What decode and prefill share: the checks of their arguments, and the launch on CUDA.

use super::apply::apply3;
use super::check::*;
use super::options::{Algo, Gates, RuleOptions};
use super::plan::RulePlan;
use super::sequences::{CuSeqlens, SequencePlan};
use super::slots::Slots;
use crate::reference::Dims;
use candle_core::{bail, DType, Layout, Result, Tensor};
#[cfg(feature = "cuda")]
use candle_core::{Shape, Storage};

/// Most tokens of a sequence that [`Algo::Decode128`] takes.
const DECODE_128_TOKENS: usize = 16;

/// The gated delta rule with everything but q, k and v.
#[derive(Debug, Clone)]
pub(super) struct Rule {
    pub name: &'static str,
    pub lead: Lead,
    pub gates: Gates,
    pub state: Tensor,
    pub slots: Option<Slots>,
    pub cu_seqlens: Option<CuSeqlens>,
    pub options: RuleOptions,
}

impl Rule {
    /// A call on `state` with sequence `n` in slot `n`, its gates, state and options checked.
    pub fn new(
        name: &'static str,
        lead: Lead,
        gates: Gates,
        state: &Tensor,
        cu_seqlens: Option<&CuSeqlens>,
        options: RuleOptions,
    ) -> Result<Self> {
        let (state, cu_seqlens) = (state.clone(), cu_seqlens.cloned());
        Self { name, lead, gates, state, slots: None, cu_seqlens, options }.check()
    }

    /// Checks that need only what the op holds.
    fn check(self) -> Result<Self> {
        let (op, device) = (self.name, self.state.device());
        let Gates { a, b, a_log, dt_bias } = &self.gates;
        check_state_dtype(op, "state", self.state.dtype())?;
        let (_, heads, ..) = match self.state.dims4() {
            Ok(dims) => dims,
            Err(_) => bail!(
                "{op}: state: expected shape [slots, value_heads, value_dim, key_dim], got {:?}",
                self.state.dims()
            ),
        };
        check_state_strides(op, "state", self.state.layout())?;
        check_float(op, "a", a.dtype())?;
        check_dtype(op, "b", b.dtype(), a.dtype())?;
        for (arg, tensor) in [("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)] {
            check_device(op, arg, tensor, device)?;
            check_not_state(op, arg, storage_key(tensor), &self.state)?;
        }
        for (arg, tensor) in [("a_log", a_log), ("dt_bias", dt_bias)] {
            check_dtype(op, arg, tensor.dtype(), DType::F32)?;
            check_shape(op, arg, tensor, &[heads])?;
            check_contiguous(op, arg, tensor)?;
        }
        let RuleOptions { l2_eps, scale, beta_scale, .. } = self.options;
        if !l2_eps.is_finite() || l2_eps < 0.0 {
            bail!("{op}: l2_eps: expected a finite value of at least 0, got {l2_eps}");
        }
        if !scale.unwrap_or(1.0).is_finite() {
            bail!("{op}: scale: expected a finite value, got {scale:?}");
        }
        if !(beta_scale > 0.0 && beta_scale <= 2.0) {
            bail!("{op}: beta_scale: expected a value above 0 and up to 2, got {beta_scale}");
        }
        if let Some(cu) = &self.cu_seqlens {
            check_device(op, "cu_seqlens", cu.tensor(), device)?;
        }
        Ok(self)
    }

    /// Runs the op on q, k and v, copying only those whose rows are not contiguous.
    pub fn forward<C: candle_core::CustomOp3>(&self, op: &C, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (q, k, v) = (dense_rows(q)?, dense_rows(k)?, dense_rows(v)?);
        for (arg, tensor) in [("q", &q), ("k", &k), ("v", &v)] {
            check_float(self.name, arg, tensor.dtype())?;
            check_dtype(self.name, arg, tensor.dtype(), q.dtype())?;
            check_device(self.name, arg, tensor, self.state.device())?;
            check_not_state(self.name, arg, storage_key(tensor), &self.state)?;
        }
        apply3(op, None, &q, &k, &v)
    }

    /// Checks the three layouts, of tensors of one dtype, against the state.
    pub fn plan(&self, dtype: DType, [q, k, v]: [&Layout; 3]) -> Result<RulePlan> {
        let (op, lead) = (self.name, self.lead);
        let (_, value_heads, value_dim, key_dim) = self.state.dims4()?;
        if !(1..=256).contains(&key_dim) || !(1..=256).contains(&value_dim) || value_heads == 0 {
            bail!(
                "{op}: state: expected at least one head and head sizes of 1 to 256, got shape {:?}",
                self.state.dims()
            );
        }
        let r = lead.rank();
        let key_heads = match q.dims().get(r..) {
            Some([heads, dim]) if *dim == key_dim => *heads,
            Some([merged]) if merged % key_dim == 0 => merged / key_dim,
            _ => bail!(
                "{op}: q: expected shape [{lead}, key_heads, {key_dim}] or [{lead}, key_heads * {key_dim}], got {:?}",
                q.dims(),
                lead = lead.names()
            ),
        };
        if key_heads == 0 || value_heads % key_heads != 0 {
            bail!(
                "{op}: q: expected a number of key heads that divides the {value_heads} value heads, got {key_heads}"
            );
        }
        let lead_dims = &q.dims()[..r];
        let heads = |arg, layout, sizes| heads_layout(op, arg, layout, lead, lead_dims, sizes);
        let gate = |arg, tensor: &Tensor| gate_layout(op, arg, tensor.layout(), lead, lead_dims, value_heads);

        let (cu_seqlens, slots) = (self.cu_seqlens.as_ref(), self.slots.as_ref());
        let seqs = SequencePlan::new((op, "q"), (lead, lead_dims), cu_seqlens, slots, &self.state)?;
        self.check_algo(dtype, (key_dim, value_dim), seqs.max_tokens)?;
        Ok(RulePlan {
            dims: Dims { key_heads, value_heads, key_dim, value_dim },
            seqs,
            q: heads("q", q, (key_heads, key_dim))?,
            k: heads("k", k, (key_heads, key_dim))?,
            v: heads("v", v, (value_heads, value_dim))?,
            a: gate("a", &self.gates.a)?,
            b: gate("b", &self.gates.b)?,
            out_shape: lead_dims.iter().copied().chain([value_heads, value_dim]).collect(),
            scale: self.options.scale.unwrap_or((key_dim as f64).powf(-0.5)),
            options: self.options,
        })
    }

    /// The kernel asked for against the sizes and the dtype of q.
    pub fn check_algo(&self, dtype: DType, (key_dim, value_dim): (usize, usize), max_tokens: usize) -> Result<()> {
        let (op, algo) = (self.name, self.options.algo);
        if matches!(algo, Algo::Recurrent128 | Algo::Decode128) && (key_dim, value_dim) != (128, 128) {
            bail!("{op}: algo: {algo:?} takes heads of size 128, got {key_dim} (K) and {value_dim} (V)");
        }
        if algo == Algo::Decode128 && max_tokens > DECODE_128_TOKENS {
            bail!("{op}: algo: Decode128 takes up to {DECODE_128_TOKENS} tokens a sequence, got {max_tokens}");
        }
        if algo.on_tensor_cores() {
            if !matches!(dtype, DType::BF16 | DType::F16) {
                bail!("{op}: algo: {algo:?} takes q, k and v in bf16 or f16, got {dtype:?}");
            }
            if key_dim > 128 || key_dim % 8 != 0 || value_dim % 8 != 0 {
                bail!(
                    "{op}: algo: {algo:?} takes head sizes that are multiples of 8 and K up to 128, got {key_dim} (K) \
                     and {value_dim} (V)"
                );
            }
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    pub fn cuda_fwd(
        &self,
        args: [(&candle_core::CudaStorage, &Layout); 3],
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let [(q, ql), (k, kl), (v, vl)] = args;
        let plan = self.plan(q.dtype(), [ql, kl, vl])?;
        for (arg, storage) in [("q", q), ("k", k), ("v", v)] {
            check_not_state(self.name, arg, std::ptr::from_ref(storage).addr(), &self.state)?;
            check_dtype(self.name, arg, storage.dtype(), q.dtype())?;
        }
        let slots = self.slots.as_ref().map(Slots::in_u32).transpose()?;
        let out = crate::cuda::rule(&self.cuda_args(&plan, slots.as_ref(), [q, k, v]), &self.state)?;
        Ok((out, Shape::from(plan.out_shape)))
    }

    #[cfg(feature = "cuda")]
    fn cuda_args<'a>(
        &'a self,
        plan: &'a RulePlan,
        slots: Option<&'a Slots>,
        [q, k, v]: [&'a candle_core::CudaStorage; 3],
    ) -> crate::cuda::RuleArgs<'a> {
        crate::cuda::RuleArgs {
            name: self.name,
            plan,
            q,
            k,
            v,
            gates: &self.gates,
            slots,
            cu_seqlens: self.cu_seqlens.as_ref().map(CuSeqlens::tensor),
        }
    }

    /// The variant that [`Self::forward`] runs for these tensors.
    pub fn algo(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Algo> {
        let (q, k, v) = (dense_rows(q)?, dense_rows(k)?, dense_rows(v)?);
        let plan = self.plan(q.dtype(), [q.layout(), k.layout(), v.layout()])?;
        #[cfg(feature = "cuda")]
        {
            let guards = [q.storage_and_layout().0, k.storage_and_layout().0, v.storage_and_layout().0];
            if let [Storage::Cuda(q), Storage::Cuda(k), Storage::Cuda(v)] = [&*guards[0], &*guards[1], &*guards[2]] {
                let slots = self.slots.as_ref().map(Slots::in_u32).transpose()?;
                return crate::cuda::rule_choice(&self.cuda_args(&plan, slots.as_ref(), [q, k, v]), &self.state);
            }
        }
        drop(plan);
        Ok(Algo::Recurrent) // all there is on the CPU
    }
}

/// `CustomOp3` over (q, k, v) for a struct around a [`Rule`].
macro_rules! custom_op3 {
    ($op:ty) => {
        impl candle_core::CustomOp3 for $op {
            fn name(&self) -> &'static str {
                self.0.name
            }

            fn cpu_fwd(
                &self,
                q: &candle_core::CpuStorage,
                ql: &candle_core::Layout,
                k: &candle_core::CpuStorage,
                kl: &candle_core::Layout,
                v: &candle_core::CpuStorage,
                vl: &candle_core::Layout,
            ) -> Result<(candle_core::CpuStorage, candle_core::Shape)> {
                self.0.cpu_fwd([(q, ql), (k, kl), (v, vl)])
            }

            #[cfg(feature = "cuda")]
            fn cuda_fwd(
                &self,
                q: &candle_core::CudaStorage,
                ql: &candle_core::Layout,
                k: &candle_core::CudaStorage,
                kl: &candle_core::Layout,
                v: &candle_core::CudaStorage,
                vl: &candle_core::Layout,
            ) -> Result<(candle_core::CudaStorage, candle_core::Shape)> {
                self.0.cuda_fwd([(q, ql), (k, kl), (v, vl)])
            }
        }
    };
}
pub(super) use custom_op3;
