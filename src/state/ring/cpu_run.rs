//! Rings on the CPU.

use super::check::{heads, storage_dtype};
use super::in_place::{in_place_cpu, in_place_cpu_if_any};
use super::plan::{RulePlan, StepPlan};
use super::ring::{Ring, Window, OP, RING_ROWS, RING_WINDOW};
use super::rule::Rule;
use super::rule_cpu::elements;
use super::slots::{cpu_slots, CpuSlots, Slots};
use crate::cpu;
use crate::cpu::replay::{Cursor, Replay, States};
use crate::cpu::{Element, Stored};
use candle_core::{bail, CpuStorage, DType, Layout, Result, Shape, Tensor};
use half::{bf16, f16};

/// `$body` with `$T` the type of the inputs, whose dtype is `$dtype`.
macro_rules! with_io {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $T = f32;
                $body
            }
            DType::BF16 => {
                type $T = bf16;
                $body
            }
            DType::F16 => {
                type $T = f16;
                $body
            }
            dtype => bail!("{OP}: expected dtype f32, bf16 or f16, got {dtype:?}"),
        }
    };
}

/// `run` with the entries as slices.
fn with_entries<T: Element, R>(ring: &Ring, run: impl FnOnce(cpu::replay::Ring<'_, T>) -> Result<R>) -> Result<R> {
    let cursors = ring.cursors.tensor().to_vec1::<u32>()?;
    in_place_cpu(OP, &ring.keys, |keys| {
        in_place_cpu(OP, &ring.updates, |updates| {
            in_place_cpu(OP, &ring.decays, |decays| {
                run(cpu::replay::Ring {
                    keys: elements((OP, "keys"), keys)?,
                    updates: elements((OP, "updates"), updates)?,
                    decays: elements((OP, "decays"), decays)?,
                    cursors: &cursors,
                    rows: RING_ROWS,
                    window: RING_WINDOW,
                })
            })
        })
    })
}

/// See [`Ring::fold`].
pub fn fold(ring: &Ring, state: &Tensor, slots: &Slots, to: Option<&Tensor>) -> Result<()> {
    with_io!(ring.keys.dtype(), T => match state.dtype() {
        DType::BF16 => fold_as::<T, bf16>(ring, state, slots, to),
        _ => fold_as::<T, f32>(ring, state, slots, to),
    })
}

fn fold_as<T: Element, S: Stored>(ring: &Ring, state: &Tensor, slots: &Slots, to: Option<&Tensor>) -> Result<()> {
    let (dims, capacity) = (ring.dims()?, state.dims()[0].max(to.map_or(0, |to| to.dims()[0])));
    let host = cpu_slots(OP, Some(slots), capacity)?;
    let nothing = cpu::Heads { data: &[], seq_stride: 0, token_stride: 0, head_stride: 0 };
    let replay = Replay::<T> {
        dims,
        q: nothing,
        k: nothing,
        v: nothing,
        gates: &[],
        seqs: cpu::Sequences { cu_seqlens: None, count: slots.len(), tokens: 0 },
        slots: host.of_stride(dims.value_heads * dims.value_dim * dims.key_dim),
        l2norm: false,
        l2_eps: 0.0,
        scale: 1.0,
    };
    with_entries::<T, _>(ring, |entries| {
        in_place_cpu(OP, state, |state| {
            in_place_cpu_if_any(OP, to, |to| {
                let state = elements::<S>((OP, "state"), state)?;
                let states = match to {
                    Some(to) => States::Apart(state, elements((OP, "state"), to)?),
                    None => States::InPlace(state),
                };
                replay.fold(states, entries);
                Ok(())
            })
        })
    })
}

/// See [`Ring::window`].
pub fn window(ring: &Ring, conv_state: &Tensor, slots: &Slots, to: Window) -> Result<()> {
    with_io!(ring.inputs.dtype(), T => window_as::<T>(ring, conv_state, slots, to))
}

fn window_as<T: Element>(ring: &Ring, conv_state: &Tensor, slots: &Slots, to: Window) -> Result<()> {
    let (capacity, history, channels) = conv_state.dims3()?;
    let host = cpu_slots(OP, Some(slots), capacity.max(ring.inputs.dims()[0]))?;
    let cursors = ring.cursors.tensor().to_vec1::<u32>()?;
    in_place_cpu(OP, &ring.inputs, |inputs| {
        in_place_cpu(OP, conv_state, |state| {
            let (inputs, state) = (elements::<T>((OP, "inputs"), inputs)?, elements::<T>((OP, "conv_state"), state)?);
            let maps = host.of_stride(1);
            for (read, write) in (0..slots.len()).filter_map(|n| maps.numbers(n)) {
                for i in 0..history {
                    let row = Cursor::from_bits(cursors[read]).row_before(history - i, RING_ROWS);
                    let own = (write * history + i) * channels;
                    match to {
                        Window::ToState => {
                            let from = (read * RING_ROWS + row) * channels;
                            state[own..own + channels].copy_from_slice(&inputs[from..from + channels]);
                        }
                        Window::ToRing => {
                            let at = (write * RING_ROWS + row) * channels;
                            inputs[at..at + channels].copy_from_slice(&state[own..own + channels]);
                        }
                    }
                }
            }
            Ok(())
        })
    })
}

/// Appends the inputs of the convolution, `x` with one head of all channels, and those before them where a state moves.
pub fn append_inputs(ring: &Ring, x: &CpuStorage, plan: &StepPlan, rule: &Rule) -> Result<()> {
    with_io!(ring.inputs.dtype(), T => {
        let Some(x) = T::slice(x) else { bail!("{OP}: qkv: expected dtype {:?}", ring.inputs.dtype()) };
        append_inputs_as::<T>(ring, heads(x, plan.x), plan, rule)
    })
}

fn append_inputs_as<T: Element>(ring: &Ring, x: cpu::Heads<'_, T>, plan: &StepPlan, rule: &Rule) -> Result<()> {
    let (seqs, history) = (&plan.rule.seqs, plan.conv_width - 1);
    let channels = ring.inputs.dims()[2];
    let host = cpu_slots(OP, rule.slots.as_ref(), seqs.num_slots)?;
    let cursors = ring.cursors.tensor().to_vec1::<u32>()?;
    in_place_cpu(OP, &ring.inputs, |inputs| {
        let inputs = elements::<T>((OP, "inputs"), inputs)?;
        let (seqs, maps) = (seqs.cpu(rule.cu_seqlens.as_ref()), host.of_stride(1));
        for (n, (read, write)) in (0..seqs.count).filter_map(|n| Some((n, maps.numbers(n)?))) {
            let (cursor, (first, tokens)) = (Cursor::from_bits(cursors[read]), seqs.range(n));
            if read != write {
                for row in (1..=history).map(|back| cursor.row_before(back, RING_ROWS)) {
                    let from = (read * RING_ROWS + row) * channels;
                    inputs.copy_within(from..from + channels, (write * RING_ROWS + row) * channels);
                }
            }
            for t in 0..tokens {
                let row = cursor.row(cursor.length + t, RING_ROWS);
                inputs[(write * RING_ROWS + row) * channels..][..channels].copy_from_slice(x.row(
                    n,
                    first + t,
                    0,
                    channels,
                ));
            }
        }
        Ok(())
    })
}

impl Rule {
    /// [`Rule::cpu_fwd`] over the state and a ring.
    pub fn cpu_replay(&self, ring: &Ring, args: [(&CpuStorage, &Layout); 3]) -> Result<(CpuStorage, Shape)> {
        let [(q, ql), (k, kl), (v, vl)] = args;
        let plan = self.plan(storage_dtype(q), [ql, kl, vl])?;
        let gates = self.cpu_gates(&plan)?;
        let slots = cpu_slots(self.name, self.slots.as_ref(), plan.seqs.num_slots)?;
        let run = CpuReplay { rule: self, ring, plan: &plan, gates, slots };
        let out = match (q, k, v) {
            (CpuStorage::F32(q), CpuStorage::F32(k), CpuStorage::F32(v)) => CpuStorage::F32(run.on([q, k, v])?),
            (CpuStorage::BF16(q), CpuStorage::BF16(k), CpuStorage::BF16(v)) => CpuStorage::BF16(run.on([q, k, v])?),
            (CpuStorage::F16(q), CpuStorage::F16(k), CpuStorage::F16(v)) => CpuStorage::F16(run.on([q, k, v])?),
            _ => bail!("{}: q: expected dtype f32, bf16 or f16, got {:?}", self.name, storage_dtype(q)),
        };
        Ok((out, Shape::from(plan.out_shape)))
    }
}

struct CpuReplay<'a> {
    rule: &'a Rule,
    ring: &'a Ring,
    plan: &'a RulePlan,
    gates: Vec<(f32, f32)>,
    slots: CpuSlots,
}

impl CpuReplay<'_> {
    fn on<T: Element>(&self, qkv: [&[T]; 3]) -> Result<Vec<T>> {
        match self.rule.state.dtype() {
            DType::BF16 => self.stored::<T, bf16>(qkv),
            _ => self.stored::<T, f32>(qkv),
        }
    }

    fn stored<T: Element, S: Stored>(&self, [q, k, v]: [&[T]; 3]) -> Result<Vec<T>> {
        let plan = self.plan;
        let mut out = vec![T::ZERO; plan.out_shape.iter().product()];
        in_place_cpu(OP, &self.rule.state, |(storage, layout)| {
            let replay = Replay {
                dims: plan.dims,
                q: heads(q, plan.q),
                k: heads(k, plan.k),
                v: heads(v, plan.v),
                gates: &self.gates,
                seqs: plan.seqs.cpu(self.rule.cu_seqlens.as_ref()),
                slots: self.slots.of_stride(layout.stride()[0]),
                l2norm: plan.options.l2norm,
                l2_eps: plan.options.l2_eps,
                scale: plan.scale,
            };
            let state = elements::<S>((OP, "state"), (storage, layout))?;
            with_entries(self.ring, |entries| {
                replay.run(&mut out, state, entries);
                Ok(())
            })
        })?;
        Ok(out)
    }
}
