//! The ring of a state pool: what stands beside states that decode only reads. The layout is `gdn_ring`'s of `cuda/gdn.h`.

use super::check::check_device;
use super::in_place::in_place_cpu;
use super::sequences::CuSeqlens;
use super::slots::{cpu_slots, Slots};
use crate::cpu::replay::Cursor;
use crate::reference::Dims;
use candle_core::{bail, CpuStorage, DType, Device, Result, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

pub(super) const OP: &str = "ring";

/// Entries at most before they are folded into the state.
pub const RING_WINDOW: usize = 16;

/// Rows that entries take turns in: what a call appends is never where another block of it still reads.
pub const RING_ROWS: usize = 32;

/// Most tokens of a sequence that a call may append.
pub const RING_TOKENS: usize = RING_ROWS - RING_WINDOW;

/// Where the ring of each slot begins and how long it is, `[slots]` in u32: `first << 16 | length`. The layers of a model may
/// share one, which then moves once they are all done.
#[derive(Debug, Clone)]
pub struct Cursors(Arc<Mutex<Tensor>>);

impl Cursors {
    /// Empty rings.
    pub fn new(slots: usize, device: &Device) -> Result<Self> {
        Ok(Self(Arc::new(Mutex::new(Tensor::zeros(slots, DType::U32, device)?))))
    }

    /// The numbers, on the device.
    pub fn tensor(&self) -> Tensor {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Room for `slots` slots, if there is less.
    pub fn grow(&self, slots: usize) -> Result<()> {
        let mut tensor = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let old = tensor.elem_count();
        if slots > old {
            let grown = Tensor::zeros(slots, DType::U32, tensor.device())?;
            grown.slice_set(&tensor, 0, 0)?;
            *tensor = grown;
        }
        Ok(())
    }

    /// The ring of `slot` is empty, and its window in the rows before the first.
    pub fn clear(&self, slot: usize) -> Result<()> {
        self.tensor().narrow(0, slot, 1)?.zero_set()
    }

    /// That of slot `to` is as long as that of slot `from`, and lies where that does.
    pub fn copy(&self, from: usize, to: usize) -> Result<()> {
        let tensor = self.tensor();
        let cursor = tensor.narrow(0, from, 1)?.force_contiguous()?;
        tensor.slice_set(&cursor, 0, to)
    }

    /// Moves the cursors behind a call, from the slots that it read to those that it wrote.
    pub fn advance(&self, slots: &Slots, moved: Move<'_>) -> Result<()> {
        let tensor = self.tensor();
        slots.check(OP, slots.len(), tensor.elem_count(), tensor.device())?;
        if slots.is_empty() {
            return Ok(());
        }
        if let Some(accepted) = moved.accepted {
            check_device(OP, "accepted", accepted, tensor.device())?;
        }
        #[cfg(feature = "cuda")]
        if tensor.device().is_cuda() {
            return crate::cuda::ring::advance(&tensor, &slots.in_u32()?, moved);
        }
        let host = cpu_slots(OP, Some(slots), tensor.elem_count())?;
        let accepted = moved.accepted.map(Tensor::to_vec1::<u32>).transpose()?;
        in_place_cpu(OP, &tensor, |(storage, layout)| {
            let CpuStorage::U32(cursors) = storage else { bail!("{OP}: expected cursors in u32") };
            let cursors = &mut cursors[layout.start_offset()..];
            let maps = host.of_stride(1);
            for (n, (read, write)) in (0..slots.len()).filter_map(|n| Some((n, maps.numbers(n)?))) {
                let tokens = moved.tokens(n);
                let kept = accepted.as_ref().map_or(tokens, |accepted| tokens.min(accepted[n] as usize));
                let cursor = Cursor::from_bits(cursors[read]);
                cursors[write] =
                    cursor.after(tokens, kept, (RING_ROWS, RING_WINDOW), moved.fold, read != write).to_bits();
            }
            Ok(())
        })
    }
}

/// What a call did to the rings of its sequences.
#[derive(Clone, Copy)]
pub struct Move<'a> {
    /// Boundaries of packed tokens; without, every sequence has as many as `each`.
    pub cu_seqlens: Option<&'a CuSeqlens>,
    /// Tokens of each sequence.
    pub each: usize,
    /// How many of its tokens stay, `[sequences]` in u32; without, all.
    pub accepted: Option<&'a Tensor>,
    /// All rings were folded.
    pub fold: bool,
}

impl<'a> Move<'a> {
    /// Tokens were appended.
    pub fn append(cu_seqlens: Option<&'a CuSeqlens>, each: usize) -> Self {
        Self { cu_seqlens, each, accepted: None, fold: false }
    }

    /// All rings were folded, and are empty.
    pub fn fold() -> Self {
        Self { cu_seqlens: None, each: 0, accepted: None, fold: true }
    }

    /// Tokens wait behind the entries, of which none counts yet: `none` is as many zeros as sequences.
    pub fn draft(cu_seqlens: &'a CuSeqlens, none: &'a Tensor) -> Self {
        Self::accept(cu_seqlens, none)
    }

    /// So many of the tokens that waited count.
    pub fn accept(cu_seqlens: &'a CuSeqlens, accepted: &'a Tensor) -> Self {
        Self { accepted: Some(accepted), ..Self::append(Some(cu_seqlens), 0) }
    }

    fn tokens(&self, n: usize) -> usize {
        self.cu_seqlens.map_or(self.each, |cu| (cu.as_slice()[n + 1] - cu.as_slice()[n]) as usize)
    }
}

/// The tensors of a ring; all are written in place. Slots lie one after the other.
#[derive(Debug, Clone)]
pub struct Ring {
    /// `[slots, HK, RING_ROWS, K]`, the dtype of the inputs: keys as they came.
    pub keys: Tensor,
    /// `[slots, HV, RING_ROWS, V]`, f32.
    pub updates: Tensor,
    /// `[slots, HV, RING_ROWS]`, f32: log decays.
    pub decays: Tensor,
    /// `[slots, RING_ROWS, channels]`, the dtype of the inputs: those of the convolution, in the rows of their entries.
    pub inputs: Tensor,
    pub cursors: Cursors,
}

impl Ring {
    pub fn new(slots: usize, dims: Dims, channels: usize, dtype: DType, cursors: Cursors) -> Result<Self> {
        let device = &cursors.tensor().device().clone();
        let Dims { key_heads, value_heads, key_dim, value_dim } = dims;
        Ok(Self {
            keys: Tensor::zeros((slots, key_heads, RING_ROWS, key_dim), dtype, device)?,
            updates: Tensor::zeros((slots, value_heads, RING_ROWS, value_dim), DType::F32, device)?,
            decays: Tensor::zeros((slots, value_heads, RING_ROWS), DType::F32, device)?,
            inputs: Tensor::zeros((slots, RING_ROWS, channels), dtype, device)?,
            cursors,
        })
    }

    /// All but the cursors.
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
        self.cursors.grow(slots)
    }

    pub fn dims(&self) -> Result<Dims> {
        let (_, key_heads, _, key_dim) = self.keys.dims4()?;
        let (_, value_heads, _, value_dim) = self.updates.dims4()?;
        Ok(Dims { key_heads, value_heads, key_dim, value_dim })
    }

    /// Folds the rings of the slots read into their states, which go to the slots written: of `state`, or of the tensor `to`.
    /// The cursors stay for the caller to move.
    pub fn fold(&self, state: &Tensor, slots: &Slots, to: Option<&Tensor>) -> Result<()> {
        if slots.is_empty() {
            return Ok(());
        }
        #[cfg(feature = "cuda")]
        if state.device().is_cuda() {
            return crate::cuda::ring::fold(self, state, &slots.in_u32()?, to);
        }
        super::ring_cpu::fold(self, state, slots, to)
    }

    /// Copies the last inputs of the convolution before the next entry between the ring and a plain state of the convolution,
    /// `[slots, width - 1, channels]`: out of the ring of the slots read, or into that of the slots written, where in either case
    /// the cursors of the slots read tell the rows. The plain state's are of the slots written.
    pub fn window(&self, conv_state: &Tensor, slots: &Slots, to: Window) -> Result<()> {
        if slots.is_empty() {
            return Ok(());
        }
        #[cfg(feature = "cuda")]
        if conv_state.device().is_cuda() {
            return crate::cuda::ring::window(self, conv_state, &slots.in_u32()?, to);
        }
        super::ring_cpu::window(self, conv_state, slots, to)
    }
}

/// Where a window goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    ToState,
    ToRing,
}
