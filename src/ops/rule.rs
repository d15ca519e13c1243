//! What decode and prefill share: the checks of their arguments and the run over a state that is updated in place.

use super::args::*;
use super::options::{Algo, Gates, RuleOptions};
use super::sequences::{cpu_slots, CuSeqlens, SequencePlan};
use crate::cpu;
use crate::reference::Dims;
use candle_core::{bail, CpuStorage, DType, InplaceOp1, Layout, Result, Shape, Storage, Tensor};
use half::{bf16, f16};
use std::cell::RefCell;

/// Most tokens of a sequence that [`Algo::Decode128`] takes.
const DECODE_128_TOKENS: usize = 16;

/// The gated delta rule with everything but q, k and v.
#[derive(Debug, Clone)]
pub(super) struct Rule {
    pub name: &'static str,
    pub lead: Lead,
    pub gates: Gates,
    pub state: Tensor,
    pub slots: Option<Tensor>,
    pub cu_seqlens: Option<CuSeqlens>,
    pub token_states: Option<Tensor>,
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
    /// Checks that need only what the op holds.
    pub fn check(self) -> Result<Self> {
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
        apply3(op, &q, &k, &v)
    }

    /// Checks the three layouts against the state.
    pub fn plan(&self, q: &Layout, k: &Layout, v: &Layout) -> Result<RulePlan> {
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
        let algo = self.options.algo;
        if matches!(algo, Algo::Recurrent128 | Algo::Decode128) && (key_dim, value_dim) != (128, 128) {
            bail!("{op}: algo: {algo:?} takes heads of size 128, got {key_dim} (K) and {value_dim} (V)");
        }
        if algo == Algo::Decode128 && seqs.max_tokens > DECODE_128_TOKENS {
            bail!("{op}: algo: Decode128 takes up to {DECODE_128_TOKENS} tokens a sequence, got {}", seqs.max_tokens);
        }
        self.check_token_states(lead_dims)?;
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

    /// The token states against the call that writes them.
    fn check_token_states(&self, lead_dims: &[usize]) -> Result<()> {
        let (op, arg) = (self.name, "token_states");
        let Some(tensor) = &self.token_states else { return Ok(()) };
        if self.options.algo == Algo::Chunked {
            bail!("{op}: {arg}: expected an algo that goes token by token, got Chunked");
        }
        check_dtype(op, arg, tensor.dtype(), self.state.dtype())?;
        check_device(op, arg, tensor, self.state.device())?;
        check_shape(op, arg, tensor, &[lead_dims, &self.state.dims()[1..]].concat())?;
        check_contiguous(op, arg, tensor)?;
        let (Gates { a, b, a_log, dt_bias }, key) = (&self.gates, storage_key(tensor));
        for (held, tensor) in [("state", &self.state), ("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)] {
            check_not_token_states(op, held, storage_key(tensor), key)?;
        }
        Ok(())
    }

    /// The token states where there are any: candle refuses to write an empty tensor in place for its zero strides.
    pub fn token_states_to_write(&self) -> Option<&Tensor> {
        self.token_states.as_ref().filter(|tensor| tensor.elem_count() > 0)
    }

    /// No input may lie in what the op writes while it reads.
    pub fn check_not_written(&self, arg: &str, key: usize) -> Result<()> {
        check_not_state(self.name, arg, key, &self.state)?;
        match &self.token_states {
            Some(tensor) => check_not_token_states(self.name, arg, key, storage_key(tensor)),
            None => Ok(()),
        }
    }

    pub fn cpu_fwd(&self, args: [(&CpuStorage, &Layout); 3]) -> Result<(CpuStorage, Shape)> {
        let [(q, ql), (k, kl), (v, vl)] = args;
        let plan = self.plan(ql, kl, vl)?;
        for (arg, storage) in [("q", q), ("k", k), ("v", v)] {
            self.check_not_written(arg, std::ptr::from_ref(storage).addr())?;
            check_dtype(self.name, arg, storage_dtype(storage), storage_dtype(q))?;
        }
        let gates = self.cpu_gates(&plan)?;
        let slots = cpu_slots(self.name, self.slots.as_ref(), plan.seqs.num_slots)?;
        let run = CpuRun { rule: self, plan: &plan, q, k, v, gates, slots, out: RefCell::new(None) };
        self.state.inplace_op1(&run)?;
        let Some(out) = run.out.into_inner() else { bail!("{}: no output", self.name) };
        Ok((out, Shape::from(plan.out_shape)))
    }

    #[cfg(feature = "cuda")]
    pub fn cuda_fwd(
        &self,
        args: [(&candle_core::CudaStorage, &Layout); 3],
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let [(q, ql), (k, kl), (v, vl)] = args;
        let plan = self.plan(ql, kl, vl)?;
        for (arg, storage) in [("q", q), ("k", k), ("v", v)] {
            self.check_not_written(arg, std::ptr::from_ref(storage).addr())?;
            check_dtype(self.name, arg, storage.dtype(), q.dtype())?;
        }
        let out = crate::cuda::rule(&self.cuda_args(&plan, [q, k, v]), &self.state)?;
        Ok((out, Shape::from(plan.out_shape)))
    }

    #[cfg(feature = "cuda")]
    fn cuda_args<'a>(
        &'a self,
        plan: &'a RulePlan,
        [q, k, v]: [&'a candle_core::CudaStorage; 3],
    ) -> crate::cuda::RuleArgs<'a> {
        let (gates, slots, token_states) = (&self.gates, self.slots.as_ref(), self.token_states_to_write());
        let cu_seqlens = self.cu_seqlens.as_ref().map(CuSeqlens::tensor);
        crate::cuda::RuleArgs { name: self.name, plan, q, k, v, gates, slots, cu_seqlens, token_states }
    }

    /// The variant that [`Self::forward`] runs for these tensors.
    pub fn algo(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Algo> {
        let (q, k, v) = (dense_rows(q)?, dense_rows(k)?, dense_rows(v)?);
        let plan = self.plan(q.layout(), k.layout(), v.layout())?;
        #[cfg(feature = "cuda")]
        {
            let guards = [q.storage_and_layout().0, k.storage_and_layout().0, v.storage_and_layout().0];
            if let [Storage::Cuda(q), Storage::Cuda(k), Storage::Cuda(v)] = [&*guards[0], &*guards[1], &*guards[2]] {
                return crate::cuda::rule_choice(&self.cuda_args(&plan, [q, k, v]), &self.state);
            }
        }
        // On the CPU the variants are these two.
        Ok(if plan.options.algo == Algo::Chunked { Algo::Chunked } else { Algo::Recurrent })
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

pub(super) fn heads<T>(data: &[T], layout: HeadsLayout) -> cpu::Heads<'_, T> {
    cpu::Heads {
        data: &data[layout.offset.min(data.len())..],
        seq_stride: layout.seq_stride,
        token_stride: layout.token_stride,
        head_stride: layout.head_stride,
    }
}

pub(super) fn storage_dtype(storage: &CpuStorage) -> DType {
    candle_core::backend::BackendStorage::dtype(storage)
}

/// The run itself, with the state's lock held for writing.
struct CpuRun<'a> {
    rule: &'a Rule,
    plan: &'a RulePlan,
    q: &'a CpuStorage,
    k: &'a CpuStorage,
    v: &'a CpuStorage,
    gates: Vec<(f32, f32)>,
    slots: Option<Vec<u32>>,
    out: RefCell<Option<CpuStorage>>,
}

/// A tensor under its write lock.
type Written<'a> = (&'a mut CpuStorage, &'a Layout);

impl CpuRun<'_> {
    fn run(&self, state: Written<'_>, token_states: Option<Written<'_>>) -> Result<()> {
        let out = match storage_dtype(state.0) {
            DType::BF16 => self.stored::<bf16>(state, token_states),
            _ => self.stored::<f32>(state, token_states),
        }?;
        *self.out.borrow_mut() = Some(out);
        Ok(())
    }

    fn stored<S: cpu::Stored>(&self, state: Written<'_>, token_states: Option<Written<'_>>) -> Result<CpuStorage> {
        let (op, stride) = (self.rule.name, state.1.stride()[0]);
        let state = elements::<S>((op, "state"), state)?;
        let token_states = token_states.map(|t| elements::<S>((op, "token_states"), t)).transpose()?;
        Ok(match (self.q, self.k, self.v) {
            (CpuStorage::F32(q), CpuStorage::F32(k), CpuStorage::F32(v)) => {
                CpuStorage::F32(self.kernel::<f32, S>([q, k, v], (state, stride), token_states))
            }
            (CpuStorage::BF16(q), CpuStorage::BF16(k), CpuStorage::BF16(v)) => {
                CpuStorage::BF16(self.kernel::<bf16, S>([q, k, v], (state, stride), token_states))
            }
            (CpuStorage::F16(q), CpuStorage::F16(k), CpuStorage::F16(v)) => {
                CpuStorage::F16(self.kernel::<f16, S>([q, k, v], (state, stride), token_states))
            }
            _ => bail!("{op}: q: expected dtype f32, bf16 or f16, got {:?}", storage_dtype(self.q)),
        })
    }

    fn kernel<T: cpu::Element, S: cpu::Stored>(
        &self,
        [q, k, v]: [&[T]; 3],
        (state, stride): (&mut [S], usize),
        token_states: Option<&mut [S]>,
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
            slots: cpu::Slots { map: self.slots.as_deref(), stride },
            l2norm: plan.options.l2norm,
            l2_eps: plan.options.l2_eps,
            scale: plan.scale,
            // Measured slower than the recurrence at every length, by 1.2 times or more (benches/cpu.rs; other head sizes
            // alike): in f32 the chunk form has more arithmetic, and the CPU needs no large matrices to be busy.
            chunked: plan.options.algo == Algo::Chunked,
        };
        rule.run(&mut out, state, token_states);
        out
    }
}

/// The elements of a tensor from its first on.
fn elements<'a, S: cpu::Stored>((op, arg): (&str, &str), (storage, layout): Written<'a>) -> Result<&'a mut [S]> {
    let dtype = storage_dtype(storage);
    let Some(data) = S::slice_mut(storage) else { bail!("{op}: {arg}: expected another dtype than {dtype:?}") };
    let start = layout.start_offset().min(data.len());
    Ok(&mut data[start..])
}

impl InplaceOp1 for CpuRun<'_> {
    fn name(&self) -> &'static str {
        self.rule.name
    }

    fn cpu_fwd(&self, state: &mut CpuStorage, layout: &Layout) -> Result<()> {
        match self.rule.token_states_to_write() {
            None => self.run((state, layout), None),
            Some(tensor) => tensor.inplace_op1(&WithTokenStates { run: self, state: RefCell::new((state, layout)) }),
        }
    }
}

/// The same with the lock of the token states held as well.
struct WithTokenStates<'a> {
    run: &'a CpuRun<'a>,
    state: RefCell<Written<'a>>,
}

impl InplaceOp1 for WithTokenStates<'_> {
    fn name(&self) -> &'static str {
        self.run.rule.name
    }

    fn cpu_fwd(&self, token_states: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (state, state_layout) = &mut *self.state.borrow_mut();
        self.run.run((&mut **state, *state_layout), Some((token_states, layout)))
    }
}
