//! The tensors of a ring.

use super::spans::{RingSpans, RING_ROWS};
use crate::reference::Dims;
use candle_core::{DType, Result, Tensor};
use candle_gdn_core::check::zeros;

pub(super) const OP: &str = "ring";

/// The tensors of a ring; all are written in place. Slots lie one after the other.
#[derive(Debug, Clone)]
pub(crate) struct Ring {
    /// `[slots, HK, RING_ROWS, K]`, the dtype of the inputs: keys as they came.
    pub keys: Tensor,
    /// `[slots, HV, RING_ROWS, V]`, f32.
    pub updates: Tensor,
    /// `[slots, HV, RING_ROWS]`, f32: log decays.
    pub decays: Tensor,
    /// `[slots, RING_ROWS, channels]`, the dtype of the inputs: those of the convolution, in the rows of their entries.
    pub inputs: Tensor,
    pub spans: RingSpans,
}

impl Ring {
    pub fn new(slots: usize, sizes: Dims, channels: usize, dtype: DType, spans: RingSpans) -> Result<Self> {
        let device = &spans.tensor().device().clone();
        let Dims { key_heads, value_heads, key_dim, value_dim } = sizes;
        Ok(Self {
            keys: zeros(OP, "keys", &[slots, key_heads, RING_ROWS, key_dim], dtype, device)?,
            updates: zeros(OP, "updates", &[slots, value_heads, RING_ROWS, value_dim], DType::F32, device)?,
            decays: zeros(OP, "decays", &[slots, value_heads, RING_ROWS], DType::F32, device)?,
            inputs: zeros(OP, "inputs", &[slots, RING_ROWS, channels], dtype, device)?,
            spans,
        })
    }

    /// All but the spans.
    pub fn tensors(&self) -> [&Tensor; 4] {
        [&self.keys, &self.updates, &self.decays, &self.inputs]
    }

    /// Room for `slots` slots; what is there stays.
    pub fn grow(&mut self, slots: usize) -> Result<()> {
        let grown = |tensor: &Tensor| {
            let shape = [&[slots], &tensor.dims()[1..]].concat();
            let grown = zeros(OP, "slots", &shape, tensor.dtype(), tensor.device())?;
            for slot in 0..tensor.dims()[0] {
                grown.slice_set(&tensor.narrow(0, slot, 1)?, 0, slot)?;
            }
            Ok::<_, candle_core::Error>(grown)
        };
        let [keys, updates, decays, inputs] = self.tensors().map(grown);
        let grown = (keys?, updates?, decays?, inputs?);
        self.spans.grow(slots)?;
        (self.keys, self.updates, self.decays, self.inputs) = grown;
        Ok(())
    }

    pub fn sizes(&self) -> Result<Dims> {
        let (_, key_heads, _, key_dim) = self.keys.dims4()?;
        let (_, value_heads, _, value_dim) = self.updates.dims4()?;
        Ok(Dims { key_heads, value_heads, key_dim, value_dim })
    }
}

/// Where a window goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Window {
    ToState,
    ToRing,
}
