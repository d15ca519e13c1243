//! A step over states with rings on the CPU, in plain f32 loops.

use super::call::StepPlan;
use super::op::OP;
use crate::reference::Dims;
use crate::rule::{log_decay_and_beta, Rule, RulePlan};
use crate::state::{ring_get, ring_set, Ring, Window, RING_ROWS};
use candle_core::{CpuStorage, Result, Tensor};
use candle_gdn_core::check::storage_dtype;
use candle_gdn_core::{cpu_slots, host, CuSeqlens, Slots};

/// Before the convolution of a step: its windows go to the plain state of the slots written, and its inputs `x`, one head
/// of all channels, into the rings, after the window where the state moves.
pub fn append_inputs(
    ring: &Ring,
    conv_state: &Tensor,
    slots: &Slots,
    (x, plan): (&CpuStorage, &StepPlan),
    cu_seqlens: Option<&CuSeqlens>,
) -> Result<()> {
    ring.copy_window_on_cpu(conv_state, slots, Window::ToState)?;
    ring.copy_window_on_cpu(conv_state, slots, Window::ToRing)?;
    let seqs = &plan.rule.seqs;
    let (channels, maps) = (ring.inputs.dims()[2], cpu_slots(OP, Some(slots), seqs.num_slots)?);
    let seqs = seqs.cpu(cu_seqlens);
    let x = host::rows(x, plan.x, seqs, (1, channels))?;
    for (n, (read, write)) in (0..seqs.count).filter_map(|n| Some((n, maps.of_stride(1).numbers(n)?))) {
        let (span, mut inputs) = (ring.span(read)?, ring_get(&ring.inputs, write)?);
        for t in 0..seqs.range(n).1 {
            let x = &x[(seqs.out_token(n) + t) * channels..][..channels];
            inputs[span.row(span.length + t) * channels..][..channels].copy_from_slice(x);
        }
        ring_set(&ring.inputs, write, inputs)?;
    }
    Ok(())
}

/// Convolved q, k and v, `qkv`, through the rule of a checked step: o, with the tokens appended to the rings; rings that are
/// full are flushed first.
pub fn run(ring: &Ring, rule: &Rule, plan: &RulePlan, qkv: &CpuStorage) -> Result<CpuStorage> {
    let Dims { key_heads, value_heads, key_dim, value_dim } = plan.sizes;
    let (seqs, gates) = (plan.seqs.cpu(rule.cu_seqlens.as_ref()), log_decay_and_beta(rule, plan)?);
    let q = host::rows(qkv, plan.q, seqs, (key_heads, key_dim))?;
    let k = host::rows(qkv, plan.k, seqs, (key_heads, key_dim))?;
    let v = host::rows(qkv, plan.v, seqs, (value_heads, value_dim))?;
    let factor = |x: &[f32]| match rule.options.l2norm {
        true => (x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() + rule.options.l2_eps).sqrt().recip() as f32,
        false => 1.0,
    };
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f32>();
    let (mut out, maps) = (vec![0.0; v.len()], cpu_slots(OP, rule.slots.as_ref(), plan.seqs.num_slots)?);
    for (n, (read, write)) in (0..seqs.count).filter_map(|n| Some((n, maps.of_stride(1).numbers(n)?))) {
        let (span, (first, tokens)) = (ring.span(read)?, (seqs.out_token(n), seqs.range(n).1));
        let mut state = ring.flushed(&rule.state, read)?;
        if span.flushes(tokens, read != write) {
            ring_set(&rule.state, write, state.clone())?;
        }
        let mut entries = ring.entries(write)?;
        for t in 0..tokens {
            let row = span.row(span.length + t);
            for (h, state) in state.chunks_exact_mut(value_dim * key_dim).enumerate() {
                let (key, value) =
                    ((first + t) * key_heads + h / (value_heads / key_heads), (first + t) * value_heads + h);
                let (q, k) = (&q[key * key_dim..][..key_dim], &k[key * key_dim..][..key_dim]);
                let ((log_decay, beta), k_factor) = (gates[value], factor(k));
                let decay = log_decay.exp();
                for (i, s) in state.chunks_exact(key_dim).enumerate() {
                    let read = k_factor * decay * dot(s, k);
                    entries.updates[(h * RING_ROWS + row) * value_dim + i] =
                        k_factor * beta * (v[value * value_dim + i] - read);
                }
                entries.decays[h * RING_ROWS + row] = log_decay;
                let kept = h / (value_heads / key_heads) * RING_ROWS + row;
                entries.keys[kept * key_dim..][..key_dim].copy_from_slice(k);
                entries.add(state, h, row, plan.sizes);
                let q_factor = factor(q) * plan.scale as f32;
                for (i, s) in state.chunks_exact(key_dim).enumerate() {
                    out[value * value_dim + i] = q_factor * dot(s, q);
                }
            }
        }
        ring_set(&ring.keys, write, entries.keys)?;
        ring_set(&ring.updates, write, entries.updates)?;
        ring_set(&ring.decays, write, entries.decays)?;
    }
    host::storage(out, storage_dtype(qkv))
}
