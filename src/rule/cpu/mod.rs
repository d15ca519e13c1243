//! The rule on the CPU.

pub(super) mod kernel;
mod recurrent;
mod transposed;

use super::call::{Rule, RuleGates, RulePlan};
use super::gates::cpu as gates;
use candle_core::{bail, CpuStorage, DType, Result, Storage};
use candle_gdn_core::check::{heads, storage_dtype};
use candle_gdn_core::cpu::{Element, Stored};
use candle_gdn_core::device::{elements, in_place_cpu, CpuWritten};
use candle_gdn_core::{by_dtype, cpu_slots, host, CpuSlots};
use half::bf16;

/// Runs a checked call: o, with the state updated in place.
pub fn run(rule: &Rule, plan: &RulePlan, qkv: [&CpuStorage; 3]) -> Result<CpuStorage> {
    let (gates, slots) =
        (log_decay_and_beta(rule, plan)?, cpu_slots(rule.name, rule.slots.as_ref(), plan.seqs.num_slots)?);
    let run = CpuRun { rule, plan, gates, slots };
    in_place_cpu(rule.name, &rule.state, |state| match storage_dtype(state.0) {
        DType::BF16 => run.stored::<bf16>(qkv, state),
        _ => run.stored::<f32>(qkv, state),
    })
}

/// `[tokens, HV]` pairs of log decay and beta, in the packed order of the output.
pub fn log_decay_and_beta(rule: &Rule, plan: &RulePlan) -> Result<Vec<(f32, f32)>> {
    let RuleGates { a, b, raw } = &rule.gates;
    let ((a, _), (b, _)) = (a.storage_and_layout(), b.storage_and_layout());
    let (Storage::Cpu(a), Storage::Cpu(b)) = (&*a, &*b) else {
        bail!("{}: a, b: expected tensors on the CPU", rule.name)
    };
    let (seqs, heads) = (plan.seqs.cpu(rule.cu_seqlens.as_ref()), (plan.sizes.value_heads, 1));
    let (a, b) = (host::rows(a, plan.a, seqs, heads)?, host::rows(b, plan.b, seqs, heads)?);
    Ok(match raw {
        Some([a_log, dt_bias]) => {
            let (a_log, dt_bias) = (a_log.to_vec1::<f32>()?, dt_bias.to_vec1::<f32>()?);
            gates::log_decay_and_beta(&a, &b, &a_log, &dt_bias, rule.options.beta_scale as f32)
        }
        None => a.into_iter().zip(b).collect(),
    })
}

struct CpuRun<'a> {
    rule: &'a Rule,
    plan: &'a RulePlan,
    gates: Vec<(f32, f32)>,
    slots: CpuSlots,
}

impl CpuRun<'_> {
    fn stored<S: Stored>(&self, qkv: [&CpuStorage; 3], (state, layout): CpuWritten<'_>) -> Result<CpuStorage> {
        let (op, stride) = (self.rule.name, layout.stride()[0]);
        let state = elements::<S>((op, "state"), (state, layout))?;
        let [q, k, v] = qkv;
        Ok(by_dtype!(
            q, k, v => self.kernel([q, k, v], state, stride),
            else bail!("{op}: q: expected dtype f32, bf16 or f16, got {:?}", storage_dtype(q))
        ))
    }

    fn kernel<T: Element, S: Stored>(&self, [q, k, v]: [&Vec<T>; 3], state: &mut [S], stride: usize) -> CpuStorage {
        let (plan, options) = (self.plan, self.rule.options);
        let mut out = vec![T::ZERO; plan.out_shape.elem_count()];
        let rule = kernel::Rule {
            sizes: plan.sizes,
            q: heads(q, plan.q),
            k: heads(k, plan.k),
            v: heads(v, plan.v),
            gates: &self.gates,
            seqs: plan.seqs.cpu(self.rule.cu_seqlens.as_ref()),
            slots: self.slots.of_stride(stride),
            from_zeros: self.rule.from_zeros,
            l2norm: options.l2norm,
            l2_eps: options.l2_eps,
            scale: plan.scale,
        };
        rule.run(&mut out, state);
        T::storage(out)
    }
}
