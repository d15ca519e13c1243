//! The run of a rule on the CPU.

use super::check::*;
use super::in_place::{in_place_cpu, CpuWritten};
use super::options::Gates;
use super::plan::RulePlan;
use super::rule::Rule;
use super::slots::{cpu_slots, CpuSlots};
use crate::cpu;
use candle_core::{bail, CpuStorage, DType, Layout, Result, Shape, Storage};
use half::{bf16, f16};

impl Rule {
    pub fn cpu_fwd(&self, args: [(&CpuStorage, &Layout); 3]) -> Result<(CpuStorage, Shape)> {
        let [(q, ql), (k, kl), (v, vl)] = args;
        let plan = self.plan(storage_dtype(q), [ql, kl, vl])?;
        for (arg, storage) in [("q", q), ("k", k), ("v", v)] {
            check_not_state(self.name, arg, std::ptr::from_ref(storage).addr(), &self.state)?;
            check_dtype(self.name, arg, storage_dtype(storage), storage_dtype(q))?;
        }
        let gates = self.cpu_gates(&plan)?;
        let slots = cpu_slots(self.name, self.slots.as_ref(), plan.seqs.num_slots)?;
        let run = CpuRun { rule: self, plan: &plan, q, k, v, gates, slots };
        let out = in_place_cpu(self.name, &self.state, |state| run.run(state))?;
        Ok((out, Shape::from(plan.out_shape)))
    }

    pub(super) fn cpu_gates(&self, plan: &RulePlan) -> Result<Vec<(f32, f32)>> {
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
    fn run(&self, state: CpuWritten<'_>) -> Result<CpuStorage> {
        match storage_dtype(state.0) {
            DType::BF16 => self.stored::<bf16>(state),
            _ => self.stored::<f32>(state),
        }
    }

    fn stored<S: cpu::Stored>(&self, state: CpuWritten<'_>) -> Result<CpuStorage> {
        let (op, stride) = (self.rule.name, state.1.stride()[0]);
        let state = (elements::<S>((op, "state"), state)?, stride);
        Ok(match (self.q, self.k, self.v) {
            (CpuStorage::F32(q), CpuStorage::F32(k), CpuStorage::F32(v)) => {
                CpuStorage::F32(self.kernel::<f32, S>([q, k, v], state))
            }
            (CpuStorage::BF16(q), CpuStorage::BF16(k), CpuStorage::BF16(v)) => {
                CpuStorage::BF16(self.kernel::<bf16, S>([q, k, v], state))
            }
            (CpuStorage::F16(q), CpuStorage::F16(k), CpuStorage::F16(v)) => {
                CpuStorage::F16(self.kernel::<f16, S>([q, k, v], state))
            }
            _ => bail!("{op}: q: expected dtype f32, bf16 or f16, got {:?}", storage_dtype(self.q)),
        })
    }

    fn kernel<T: cpu::Element, S: cpu::Stored>(
        &self,
        [q, k, v]: [&[T]; 3],
        (state, stride): (&mut [S], usize),
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
        rule.run(&mut out, state);
        out
    }
}

/// The elements of a tensor from its first on.
pub(super) fn elements<'a, S: cpu::Element>(
    (op, arg): (&str, &str),
    (storage, layout): CpuWritten<'a>,
) -> Result<&'a mut [S]> {
    let dtype = storage_dtype(storage);
    let Some(data) = S::slice_mut(storage) else { bail!("{op}: {arg}: expected another dtype than {dtype:?}") };
    let start = layout.start_offset().min(data.len());
    Ok(&mut data[start..])
}
