//! The ring of a state pool: the tokens since each state was last written, beside states that decode only reads. The layout is
//! `gdn_ring`'s of `cuda/gdn.h`.
//!
//! With entries 1 .. P (key k_j, update e_j, log decay g_j) after the state S0, a token (k, q, v, g, beta) does
//!
//! ```text
//! c_j = exp(g_(j + 1) + .. + g_P + g),  c_0 = exp(g_1 + .. + g_P + g)
//! S k = c_0 S0 k + sum_j c_j e_j (k_j . k),  S q alike
//! e   = |k|^-1 beta (v - |k|^-1 S k),  o = |q|^-1 scale (S q + e (k . q))
//! ```
//!
//! and appends (k, e, g). A flush is `S0 <- c_0 S0 + sum_j c_j e_j k_j^T`. Keys are kept as they came: their norm is in the
//! update.

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod spans;

pub use spans::RingSpans;
#[cfg(feature = "cuda")]
use spans::RING_ENTRIES;
pub(crate) use spans::{RingMove, RING_ROWS, RING_TOKENS};

use crate::sizes::HeadSizes;
use candle_core::{DType, Result, Tensor};
use candle_gdn_core::Slots;

const OP: &str = "ring";

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
    pub fn new(slots: usize, sizes: HeadSizes, channels: usize, dtype: DType, spans: RingSpans) -> Result<Self> {
        let device = &spans.tensor().device().clone();
        let HeadSizes { key_heads, value_heads, key_dim, value_dim } = sizes;
        Ok(Self {
            keys: Tensor::zeros((slots, key_heads, RING_ROWS, key_dim), dtype, device)?,
            updates: Tensor::zeros((slots, value_heads, RING_ROWS, value_dim), DType::F32, device)?,
            decays: Tensor::zeros((slots, value_heads, RING_ROWS), DType::F32, device)?,
            inputs: Tensor::zeros((slots, RING_ROWS, channels), dtype, device)?,
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
            let grown = Tensor::zeros(shape, tensor.dtype(), tensor.device())?;
            for slot in 0..tensor.dims()[0] {
                grown.slice_set(&tensor.narrow(0, slot, 1)?, 0, slot)?;
            }
            Ok::<_, candle_core::Error>(grown)
        };
        let [keys, updates, decays, inputs] = self.tensors().map(grown);
        (self.keys, self.updates, self.decays, self.inputs) = (keys?, updates?, decays?, inputs?);
        self.spans.grow(slots)
    }

    pub fn sizes(&self) -> Result<HeadSizes> {
        let (_, key_heads, _, key_dim) = self.keys.dims4()?;
        let (_, value_heads, _, value_dim) = self.updates.dims4()?;
        Ok(HeadSizes { key_heads, value_heads, key_dim, value_dim })
    }

    /// Flushes the rings of the slots read into their states, which go to the slots written: of `state`, or of the tensor
    /// `to`. The caller moves the spans.
    pub fn flush(&self, state: &Tensor, slots: &Slots, to: Option<&Tensor>) -> Result<()> {
        if slots.is_empty() {
            return Ok(());
        }
        #[cfg(feature = "cuda")]
        if state.device().is_cuda() {
            return cuda::flush(self, state, &slots.in_u32()?, to);
        }
        self.flush_on_cpu(state, slots, to)
    }

    /// Copies the last inputs of the convolution before the next entry between the ring and a plain state of the
    /// convolution, `[slots, width - 1, channels]`: out of the ring of the slots read, or into that of the slots written. In
    /// both directions the spans of the slots read give the rows, and the plain state has the slots written.
    pub fn copy_window(&self, conv_state: &Tensor, slots: &Slots, to: Window) -> Result<()> {
        if slots.is_empty() {
            return Ok(());
        }
        #[cfg(feature = "cuda")]
        if conv_state.device().is_cuda() {
            return cuda::copy_window(self, conv_state, &slots.in_u32()?, to);
        }
        self.copy_window_on_cpu(conv_state, slots, to)
    }
}

/// Where a window goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Window {
    ToState,
    ToRing,
}
