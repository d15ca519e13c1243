//! Where the entries of each slot's ring lie: its head and its length.

use candle_core::{bail, DType, Device, Result, Tensor};
use candle_gdn_core::abi::{GDN_RING_CAPACITY, GDN_RING_ENTRIES};
use candle_gdn_core::check::{check_device, zeros};
use candle_gdn_core::CuSeqlens;
use std::sync::{Arc, Mutex, PoisonError};

/// Entries at most before they are flushed into the state.
pub const RING_ENTRIES: usize = GDN_RING_ENTRIES;

/// Rows that entries use in turn: a call never appends where another block of it still reads.
pub const RING_ROWS: usize = GDN_RING_CAPACITY;

/// Most tokens of a sequence that a call may append.
pub const RING_TOKENS: usize = RING_ROWS - RING_ENTRIES;

/// Head and length of the ring of each slot. A pool with a ring has its own; an engine shares one among the pools of a model's
/// layers ([`PoolOptions::shared_ring`](crate::PoolOptions::shared_ring)) and moves it once a pass, after the last layer.
#[derive(Debug, Clone)]
pub struct RingSpans(
    /// `[slots]` in u32: `head << 16 | length`.
    Arc<Mutex<Tensor>>,
);

/// A ring's head, the row of its first entry, and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub head: usize,
    pub length: usize,
}

impl Span {
    pub fn from_bits(bits: u32) -> Self {
        Self { head: (bits >> 16) as usize, length: (bits & 0xffff) as usize }
    }

    pub fn to_bits(self) -> u32 {
        (self.head as u32) << 16 | self.length as u32
    }

    /// The row of entry `j`.
    pub fn row(self, j: usize) -> usize {
        (self.head + j) % RING_ROWS
    }

    /// The row `back` before that of the next entry, also further back than the head.
    pub fn row_before(self, back: usize) -> usize {
        (self.head + self.length + RING_ROWS - back) % RING_ROWS
    }

    /// Whether a call with so many tokens flushes the ring; `moved` where the state goes to another slot.
    pub fn flushes(self, tokens: usize, moved: bool) -> bool {
        moved || (self.length > 0 && self.length + tokens > RING_ENTRIES)
    }

    /// The span after a call with so many tokens, of which `kept` stay.
    pub fn after(self, tokens: usize, kept: usize, flush: bool, moved: bool) -> Self {
        match flush || moved || self.length + tokens > RING_ENTRIES {
            true => Self { head: self.row(self.length), length: kept },
            false => Self { length: self.length + kept, ..self },
        }
    }
}

impl RingSpans {
    /// Rows of a slot's ring.
    pub const ROWS: usize = RING_ROWS;

    /// Most tokens of a sequence that one call may append, and so most that are verified in place.
    pub const MAX_TOKENS: usize = RING_TOKENS;

    /// Empty rings.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub fn new(slots: usize, device: &Device) -> Result<Self> {
        Ok(Self(Arc::new(Mutex::new(zeros("RingSpans", "slots", &[slots], DType::U32, device)?))))
    }

    /// Those that a pool of so many slots on `device` may share.
    pub(crate) fn checked(self, slots: usize, device: &Device) -> Result<Self> {
        let tensor = self.tensor();
        check_device("RingSpans", "spans", &tensor, device)?;
        if tensor.elem_count() < slots {
            bail!("RingSpans: spans: expected at least {slots} slots (the pool's), got {}", tensor.elem_count());
        }
        Ok(self)
    }

    /// The numbers, on the device.
    pub(crate) fn tensor(&self) -> Tensor {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes room for `slots` slots, if there is less.
    pub(crate) fn grow(&self, slots: usize) -> Result<()> {
        let mut tensor = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let old = tensor.elem_count();
        if slots > old {
            let grown = zeros("RingSpans", "slots", &[slots], DType::U32, tensor.device())?;
            grown.slice_set(&tensor, 0, 0)?;
            *tensor = grown;
        }
        Ok(())
    }

    /// Empties the ring of `slot`; its window is in the rows before the head.
    pub(crate) fn clear(&self, slot: usize) -> Result<()> {
        self.tensor().narrow(0, slot, 1)?.zero_set()
    }

    /// Gives slot `dst` the span of slot `src`.
    pub(crate) fn copy(&self, src: usize, dst: usize) -> Result<()> {
        let tensor = self.tensor();
        let span = tensor.narrow(0, src, 1)?.force_contiguous()?;
        tensor.slice_set(&span, 0, dst)
    }
}

/// What a call did to the rings of its sequences.
#[derive(Clone, Copy)]
pub(crate) struct RingMove<'a> {
    /// Boundaries of packed tokens; without, every sequence has `tokens`.
    pub cu_seqlens: Option<&'a CuSeqlens>,
    /// Tokens of each sequence.
    pub tokens: usize,
    /// How many of its tokens stay, `[sequences]` in u32; without, all.
    pub accepted: Option<&'a Tensor>,
    /// All rings were flushed.
    pub flush: bool,
}

impl<'a> RingMove<'a> {
    /// Tokens were appended.
    pub fn append(cu_seqlens: Option<&'a CuSeqlens>, tokens: usize) -> Self {
        Self { cu_seqlens, tokens, accepted: None, flush: false }
    }

    /// All rings were flushed, and are empty.
    pub fn flush() -> Self {
        Self { cu_seqlens: None, tokens: 0, accepted: None, flush: true }
    }

    pub fn tokens(&self, n: usize) -> usize {
        self.cu_seqlens.map_or(self.tokens, |cu| (cu.as_slice()[n + 1] - cu.as_slice()[n]) as usize)
    }
}
