//! Rings on the CPU: plain f32 loops, for tests of everything around rings. Engines take them on CUDA alone, since a core's
//! caches hold a state between reading and writing it.

use super::spans::Span;
use super::{Ring, Window, OP, RING_ROWS};
use crate::rule::{log_decay_and_beta, Rule, RulePlan};
use crate::sizes::HeadSizes;
use candle_core::{CpuStorage, DType, Device, Result, Tensor};
use candle_gdn_core::check::{storage_dtype, HeadsLayout};
use candle_gdn_core::{cpu_slots, host, CuSeqlens, SequencePlan, Slots};

/// The numbers of slot `slot` of a tensor.
fn get(tensor: &Tensor, slot: usize) -> Result<Vec<f32>> {
    tensor.get(slot)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

fn set(tensor: &Tensor, slot: usize, data: Vec<f32>) -> Result<()> {
    let shape = [&[1], &tensor.dims()[1..]].concat();
    tensor.slice_set(&Tensor::from_vec(data, shape, &Device::Cpu)?.to_dtype(tensor.dtype())?, 0, slot)
}

/// The entries of one slot.
struct Entries {
    keys: Vec<f32>,
    updates: Vec<f32>,
    decays: Vec<f32>,
}

impl Entries {
    /// Adds the entry in `row` to value head `h` of a state, `[V, K]`.
    fn add(&self, state: &mut [f32], h: usize, row: usize, sizes: HeadSizes) {
        let HeadSizes { key_heads, value_heads, key_dim, value_dim } = sizes;
        let decay = self.decays[h * RING_ROWS + row].exp();
        let key = &self.keys[(h / (value_heads / key_heads) * RING_ROWS + row) * key_dim..][..key_dim];
        let update = &self.updates[(h * RING_ROWS + row) * value_dim..][..value_dim];
        for (s, e) in state.chunks_exact_mut(key_dim).zip(update) {
            s.iter_mut().zip(key).for_each(|(s, k)| *s = *s * decay + e * k);
        }
    }
}

impl Ring {
    fn span(&self, slot: usize) -> Result<Span> {
        Ok(Span::from_bits(self.spans.tensor().to_vec1::<u32>()?[slot]))
    }

    fn entries(&self, slot: usize) -> Result<Entries> {
        Ok(Entries {
            keys: get(&self.keys, slot)?,
            updates: get(&self.updates, slot)?,
            decays: get(&self.decays, slot)?,
        })
    }

    /// The state of a slot with all its entries, `[HV, V, K]`.
    fn flushed(&self, state: &Tensor, slot: usize) -> Result<Vec<f32>> {
        let (sizes, span, entries) = (self.sizes()?, self.span(slot)?, self.entries(slot)?);
        let mut state = get(state, slot)?;
        for (h, state) in state.chunks_exact_mut(sizes.value_dim * sizes.key_dim).enumerate() {
            (0..span.length).for_each(|j| entries.add(state, h, span.row(j), sizes));
        }
        Ok(state)
    }

    /// See [`Ring::flush`].
    pub(super) fn flush_on_cpu(&self, state: &Tensor, slots: &Slots, to: Option<&Tensor>) -> Result<()> {
        let to = to.unwrap_or(state);
        let maps = cpu_slots(OP, Some(slots), state.dims()[0].max(to.dims()[0]))?;
        for (read, write) in (0..slots.len()).filter_map(|n| maps.of_stride(1).numbers(n)) {
            set(to, write, self.flushed(state, read)?)?;
        }
        Ok(())
    }

    /// See [`Ring::copy_window`].
    pub(super) fn copy_window_on_cpu(&self, conv_state: &Tensor, slots: &Slots, to: Window) -> Result<()> {
        let (capacity, history, channels) = conv_state.dims3()?;
        let maps = cpu_slots(OP, Some(slots), capacity.max(self.inputs.dims()[0]))?;
        for (read, write) in (0..slots.len()).filter_map(|n| maps.of_stride(1).numbers(n)) {
            let span = self.span(read)?;
            let row = |i: usize| span.row_before(history - i) * channels;
            let mut window = get(conv_state, write)?;
            let mut inputs = get(&self.inputs, if to == Window::ToRing { write } else { read })?;
            for (i, own) in window.chunks_exact_mut(channels).enumerate() {
                let input = &mut inputs[row(i)..][..channels];
                match to {
                    Window::ToState => own.copy_from_slice(input),
                    Window::ToRing => input.copy_from_slice(own),
                }
            }
            match to {
                Window::ToState => set(conv_state, write, window)?,
                Window::ToRing => set(&self.inputs, write, inputs)?,
            }
        }
        Ok(())
    }

    /// Before the convolution of a step: its windows go to the plain state of the slots written, and its inputs `x`, one head
    /// of all channels, into the rings, after the window where the state moves.
    pub fn append_inputs(
        &self,
        conv_state: &Tensor,
        slots: &Slots,
        (x, layout): (&CpuStorage, HeadsLayout),
        seqs: &SequencePlan,
        cu_seqlens: Option<&CuSeqlens>,
    ) -> Result<()> {
        self.copy_window_on_cpu(conv_state, slots, Window::ToState)?;
        self.copy_window_on_cpu(conv_state, slots, Window::ToRing)?;
        let (channels, maps) = (self.inputs.dims()[2], cpu_slots(OP, Some(slots), seqs.num_slots)?);
        let seqs = seqs.cpu(cu_seqlens);
        let x = host::rows(x, layout, seqs, (1, channels))?;
        for (n, (read, write)) in (0..seqs.count).filter_map(|n| Some((n, maps.of_stride(1).numbers(n)?))) {
            let (span, mut inputs) = (self.span(read)?, get(&self.inputs, write)?);
            for t in 0..seqs.range(n).1 {
                let x = &x[(seqs.out_token(n) + t) * channels..][..channels];
                inputs[span.row(span.length + t) * channels..][..channels].copy_from_slice(x);
            }
            set(&self.inputs, write, inputs)?;
        }
        Ok(())
    }

    /// Convolved q, k and v, `qkv`, through the rule of a checked step: o, with the tokens appended to the rings; rings that are
    /// full are flushed first.
    pub fn step(&self, rule: &Rule, plan: &RulePlan, qkv: &CpuStorage) -> Result<CpuStorage> {
        let HeadSizes { key_heads, value_heads, key_dim, value_dim } = plan.sizes;
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
            let (span, (first, tokens)) = (self.span(read)?, (seqs.out_token(n), seqs.range(n).1));
            let mut state = self.flushed(&rule.state, read)?;
            if span.flushes(tokens, read != write) {
                set(&rule.state, write, state.clone())?;
            }
            let mut entries = self.entries(write)?;
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
            set(&self.keys, write, entries.keys)?;
            set(&self.updates, write, entries.updates)?;
            set(&self.decays, write, entries.decays)?;
        }
        host::storage(out, storage_dtype(qkv))
    }
}
