//! Rings on the CPU: plain f32 loops, for tests of everything around rings. Engines use them on CUDA alone, since a core's
//! caches hold a state between reading and writing it.

use super::spans::{Span, RING_ROWS};
use super::tensors::{Ring, Window, OP};
use crate::reference::Dims;
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_core::{cpu_slots, Slots};

/// The numbers of slot `slot` of a tensor.
pub fn get(tensor: &Tensor, slot: usize) -> Result<Vec<f32>> {
    tensor.get(slot)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

pub fn set(tensor: &Tensor, slot: usize, data: Vec<f32>) -> Result<()> {
    let shape = [&[1], &tensor.dims()[1..]].concat();
    tensor.slice_set(&Tensor::from_vec(data, shape, &Device::Cpu)?.to_dtype(tensor.dtype())?, 0, slot)
}

/// The entries of one slot.
pub(crate) struct Entries {
    pub keys: Vec<f32>,
    pub updates: Vec<f32>,
    pub decays: Vec<f32>,
}

impl Entries {
    /// Adds the entry in `row` to value head `h` of a state, `[V, K]`.
    pub fn add(&self, state: &mut [f32], h: usize, row: usize, sizes: Dims) {
        let Dims { key_heads, value_heads, key_dim, value_dim } = sizes;
        let decay = self.decays[h * RING_ROWS + row].exp();
        let key = &self.keys[(h / (value_heads / key_heads) * RING_ROWS + row) * key_dim..][..key_dim];
        let update = &self.updates[(h * RING_ROWS + row) * value_dim..][..value_dim];
        for (s, e) in state.chunks_exact_mut(key_dim).zip(update) {
            s.iter_mut().zip(key).for_each(|(s, k)| *s = *s * decay + e * k);
        }
    }
}

impl Ring {
    pub fn span(&self, slot: usize) -> Result<Span> {
        Ok(Span::from_bits(self.spans.tensor().to_vec1::<u32>()?[slot]))
    }

    pub fn entries(&self, slot: usize) -> Result<Entries> {
        Ok(Entries {
            keys: get(&self.keys, slot)?,
            updates: get(&self.updates, slot)?,
            decays: get(&self.decays, slot)?,
        })
    }

    /// The state of a slot with all its entries, `[HV, V, K]`.
    pub fn flushed(&self, state: &Tensor, slot: usize) -> Result<Vec<f32>> {
        let (sizes, span, entries) = (self.sizes()?, self.span(slot)?, self.entries(slot)?);
        let mut state = get(state, slot)?;
        for (h, state) in state.chunks_exact_mut(sizes.value_dim * sizes.key_dim).enumerate() {
            (0..span.length).for_each(|j| entries.add(state, h, span.row(j), sizes));
        }
        Ok(state)
    }

    /// See [`Ring::flush`].
    pub fn flush_on_cpu(&self, state: &Tensor, slots: &Slots, dst: Option<&Tensor>) -> Result<()> {
        let dst = dst.unwrap_or(state);
        let maps = cpu_slots(OP, Some(slots), state.dims()[0].max(dst.dims()[0]))?;
        for (read, write) in (0..slots.len()).filter_map(|n| maps.of_stride(1).numbers(n)) {
            set(dst, write, self.flushed(state, read)?)?;
        }
        Ok(())
    }

    /// See [`Ring::copy_window`].
    pub fn copy_window_on_cpu(&self, conv_state: &Tensor, slots: &Slots, dst: Window) -> Result<()> {
        let (capacity, history, channels) = conv_state.dims3()?;
        let maps = cpu_slots(OP, Some(slots), capacity.max(self.inputs.dims()[0]))?;
        for (read, write) in (0..slots.len()).filter_map(|n| maps.of_stride(1).numbers(n)) {
            let span = self.span(read)?;
            let row = |i: usize| span.row_before(history - i) * channels;
            let mut window = get(conv_state, write)?;
            let mut inputs = get(&self.inputs, if dst == Window::ToRing { write } else { read })?;
            for (i, own) in window.chunks_exact_mut(channels).enumerate() {
                let input = &mut inputs[row(i)..][..channels];
                match dst {
                    Window::ToState => own.copy_from_slice(input),
                    Window::ToRing => input.copy_from_slice(own),
                }
            }
            match dst {
                Window::ToState => set(conv_state, write, window)?,
                Window::ToRing => set(&self.inputs, write, inputs)?,
            }
        }
        Ok(())
    }
}
