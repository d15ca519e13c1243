//! What decode and prefill share: the checks of their arguments and the run over a state that is updated in place.

use super::apply::apply3;
use super::check::*;
use super::copies::Checkpoints;
use super::in_place::{in_place_cpu, in_place_cpu_if_any, CpuWritten};
use super::options::{Algo, Gates, RuleOptions};
use super::sequences::{CuSeqlens, SequencePlan};
use super::slots::{cpu_slots, CpuSlots, Slots};
use crate::cpu;
use crate::reference::Dims;
use candle_core::{bail, CpuStorage, DType, Layout, Result, Shape, Storage, Tensor};
use half::{bf16, f16};

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
    pub token_states: Option<Tensor>,
    pub checkpoints: Option<Checkpoints>,
    pub options: RuleOptions,
}

/// A checked call: sizes and addresses, nothing left to refuse.
#[derive(Debug, Clone)]
pub(crate) struct RulePlan {
    pub dims: Dims,
    pub seqs: SequencePlan,
    pub q: HeadsLayout,
    pub k: HeadsLayout,
    pub v: HeadsLayout,
    pub a: HeadsLayout,
    pub b: HeadsLayout,
    pub out_shape: Vec<usize>,
    pub scale: f64,
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
        let rule =
            Self { name, lead, gates, state, slots: None, cu_seqlens, token_states: None, checkpoints: None, options };
        rule.check()
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
            self.check_not_written(arg, storage_key(tensor))?;
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
        self.check_token_states(lead_dims)?;
        self.check_checkpoints(seqs.total_tokens)?;
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
    fn check_algo(&self, dtype: DType, (key_dim, value_dim): (usize, usize), max_tokens: usize) -> Result<()> {
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

    pub fn cpu_fwd(&self, args: [(&CpuStorage, &Layout); 3]) -> Result<(CpuStorage, Shape)> {
        let [(q, ql), (k, kl), (v, vl)] = args;
        let plan = self.plan(storage_dtype(q), [ql, kl, vl])?;
        for (arg, storage) in [("q", q), ("k", k), ("v", v)] {
            self.check_not_written(arg, std::ptr::from_ref(storage).addr())?;
            check_dtype(self.name, arg, storage_dtype(storage), storage_dtype(q))?;
        }
        let gates = self.cpu_gates(&plan)?;
        let slots = cpu_slots(self.name, self.slots.as_ref(), plan.seqs.num_slots)?;
        let run = CpuRun { rule: self, plan: &plan, q, k, v, gates, slots };
        let checkpoints = self.checkpoints.as_ref().map(|to| &to.tensor);
        let out = in_place_cpu(self.name, &self.state, |state| {
            in_place_cpu_if_any(self.name, self.token_states.as_ref(), |token_states| {
                in_place_cpu_if_any(self.name, checkpoints, |to| run.run(state, token_states, to))
            })
        })?;
        Ok((out, Shape::from(plan.out_shape)))
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
            self.check_not_written(arg, std::ptr::from_ref(storage).addr())?;
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
            token_states: self.token_states.as_ref(),
            checkpoints: self.checkpoints.as_ref().map(|to| &to.tensor),
            checkpoint_tokens: self.checkpoints.as_ref().map_or(0, |to| to.every),
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

    fn cpu_gates(&self, plan: &RulePlan) -> Result<Vec<(f32, f32)>> {
        let Gates { a, b, a_log, dt_bias } = &self.gates;
        let (a_log, dt_bias) = (a_log.to_vec1::<f32>()?, dt_bias.to_vec1::<f32>()?);
        let (a, _) = a.storage_and_layout();
        let (b, _) = b.storage_and_layout();
        let (Storage::Cpu(a), Storage::Cpu(b)) = (&*a, &*b) else {
            bail!("{}: a, b: expected tensors on the CPU", self.name)
        };
        let seqs = plan.seqs.cpu(self.cu_seqlens.as_ref());
        let beta_scale = plan.options.beta_scale as f32;
        macro_rules! gates {
            ($a:expr, $b:expr) => {
                cpu::log_decay_and_beta(heads($a, plan.a), heads($b, plan.b), &a_log, &dt_bias, seqs, beta_scale)
            };
        }
        Ok(match (a, b) {
            (CpuStorage::F32(a), CpuStorage::F32(b)) => gates!(a, b),
            (CpuStorage::BF16(a), CpuStorage::BF16(b)) => gates!(a, b),
            (CpuStorage::F16(a), CpuStorage::F16(b)) => gates!(a, b),
            _ => bail!("{}: a, b: expected dtype f32, bf16 or f16", self.name),
        })
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

pub fn heads<T>(data: &[T], layout: HeadsLayout) -> cpu::Heads<'_, T> {
    cpu::Heads {
        data: &data[layout.offset.min(data.len())..],
        seq_stride: layout.seq_stride,
        token_stride: layout.token_stride,
        head_stride: layout.head_stride,
    }
}

pub fn storage_dtype(storage: &CpuStorage) -> DType {
    candle_core::backend::BackendStorage::dtype(storage)
}

/// The run itself, under the locks of what it writes.
struct CpuRun<'a> {
    rule: &'a Rule,
    plan: &'a RulePlan,
    q: &'a CpuStorage,
    k: &'a CpuStorage,
    v: &'a CpuStorage,
    gates: Vec<(f32, f32)>,
    slots: CpuSlots,
}

impl CpuRun<'_> {
    fn run(
        &self,
        state: CpuWritten<'_>,
        token_states: Option<CpuWritten<'_>>,
        checkpoints: Option<CpuWritten<'_>>,
    ) -> Result<CpuStorage> {
        match storage_dtype(state.0) {
            DType::BF16 => self.stored::<bf16>(state, token_states, checkpoints),
            _ => self.stored::<f32>(state, token_states, checkpoints),
        }
    }

    fn stored<S: cpu::Stored>(
        &self,
        state: CpuWritten<'_>,
        token_states: Option<CpuWritten<'_>>,
        checkpoints: Option<CpuWritten<'_>>,
    ) -> Result<CpuStorage> {
        let (op, stride) = (self.rule.name, state.1.stride()[0]);
        let state = (elements::<S>((op, "state"), state)?, stride);
        let copies = cpu::rule::Copies {
            every_token: token_states.map(|t| elements::<S>((op, "token_states"), t)).transpose()?,
            checkpoints: checkpoints.map(|t| elements::<S>((op, "checkpoints"), t)).transpose()?,
            every: self.rule.checkpoints.as_ref().map_or(0, |to| to.every),
        };
        Ok(match (self.q, self.k, self.v) {
            (CpuStorage::F32(q), CpuStorage::F32(k), CpuStorage::F32(v)) => {
                CpuStorage::F32(self.kernel::<f32, S>([q, k, v], state, copies))
            }
            (CpuStorage::BF16(q), CpuStorage::BF16(k), CpuStorage::BF16(v)) => {
                CpuStorage::BF16(self.kernel::<bf16, S>([q, k, v], state, copies))
            }
            (CpuStorage::F16(q), CpuStorage::F16(k), CpuStorage::F16(v)) => {
                CpuStorage::F16(self.kernel::<f16, S>([q, k, v], state, copies))
            }
            _ => bail!("{op}: q: expected dtype f32, bf16 or f16, got {:?}", storage_dtype(self.q)),
        })
    }

    fn kernel<T: cpu::Element, S: cpu::Stored>(
        &self,
        [q, k, v]: [&[T]; 3],
        (state, stride): (&mut [S], usize),
        copies: cpu::rule::Copies<'_, S>,
    ) -> Vec<T> {
        let plan = self.plan;
        let mut out = vec![T::ZERO; plan.out_shape.iter().product()];
        let rule = cpu::rule::Rule {
            dims: plan.dims,
            q: heads(q, plan.q),
            k: heads(k, plan.k),
            v: heads(v, plan.v),
            gates: &self.gates,
            seqs: plan.seqs.cpu(self.rule.cu_seqlens.as_ref()),
            slots: self.slots.of_stride(stride),
            l2norm: plan.options.l2norm,
            l2_eps: plan.options.l2_eps,
            scale: plan.scale,
        };
        rule.run(&mut out, state, copies);
        out
    }
}

/// The elements of a tensor from its first on.
fn elements<'a, S: cpu::Stored>((op, arg): (&str, &str), (storage, layout): CpuWritten<'a>) -> Result<&'a mut [S]> {
    let dtype = storage_dtype(storage);
    let Some(data) = S::slice_mut(storage) else { bail!("{op}: {arg}: expected another dtype than {dtype:?}") };
    let start = layout.start_offset().min(data.len());
    Ok(&mut data[start..])
}
