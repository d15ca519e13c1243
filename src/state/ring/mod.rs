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
mod cuda;
mod spans;
mod tensors;
#[cfg(test)]
mod tests;

pub(crate) use cpu::{get as ring_get, set as ring_set};
#[cfg(feature = "cuda")]
pub(crate) use cuda::with_ring;
pub use spans::RingSpans;
pub(crate) use spans::{RingMove, RING_ROWS, RING_TOKENS};
pub(crate) use tensors::{Ring, Window};

use candle_core::{bail, CpuStorage, DType, Result, Tensor};
use candle_gdn_core::check::{check_dense, check_device, check_dtype, zeros};
use candle_gdn_core::device::in_place_cpu;
use candle_gdn_core::{cpu_slots, CuSeqlens, Slots};
use spans::Span;
use tensors::OP;

impl Ring {
    /// Flushes the rings of the slots read into their states, which go to the slots written: of `state`, or of the tensor
    /// `dst`. The caller moves the spans.
    pub fn flush(&self, state: &Tensor, slots: &Slots, dst: Option<&Tensor>) -> Result<()> {
        if slots.is_empty() {
            return Ok(());
        }
        #[cfg(feature = "cuda")]
        if state.device().is_cuda() {
            return cuda::flush(self, state, &slots.in_u32()?, dst);
        }
        self.flush_on_cpu(state, slots, dst)
    }

    /// Copies the last inputs of the convolution before the next entry between the ring and a plain state of the
    /// convolution, `[slots, width - 1, channels]`: out of the ring of the slots read, or into that of the slots written. In
    /// both directions the spans of the slots read give the rows, and the plain state has the slots written.
    pub fn copy_window(&self, conv_state: &Tensor, slots: &Slots, dst: Window) -> Result<()> {
        if slots.is_empty() {
            return Ok(());
        }
        #[cfg(feature = "cuda")]
        if conv_state.device().is_cuda() {
            return cuda::copy_window(self, conv_state, &slots.in_u32()?, dst);
        }
        self.copy_window_on_cpu(conv_state, slots, dst)
    }
}

impl RingSpans {
    /// After a call that appended drafts, of which none counts yet, to the rings of `slots`: entries that no longer fit were
    /// flushed before them.
    ///
    /// # Errors
    /// When the slots do not fit, or the device refuses.
    pub fn draft(&self, slots: &Slots, cu_seqlens: &CuSeqlens) -> Result<()> {
        let none = Self::no_counts(slots)?;
        self.advance(slots, RingMove { accepted: Some(&none), ..RingMove::append(Some(cu_seqlens), 0) })
    }

    /// For each sequence, that none of its tokens counts.
    pub(crate) fn no_counts(slots: &Slots) -> Result<Tensor> {
        zeros(OP, "accepted", &[slots.len()], DType::U32, slots.read().device())
    }

    /// Of the drafts that wait in the rings of `slots` the first `accepted[n]` of sequence `n` count. `accepted` is
    /// `[sequences]` in u32 on the device.
    ///
    /// # Errors
    /// When the slots or the counts do not fit, or the device refuses.
    pub fn accept(&self, slots: &Slots, cu_seqlens: &CuSeqlens, accepted: &Tensor) -> Result<()> {
        self.advance(slots, RingMove { accepted: Some(accepted), ..RingMove::append(Some(cu_seqlens), 0) })
    }

    /// Moves the spans after a call, from the slots that it read to those that it wrote.
    pub(crate) fn advance(&self, slots: &Slots, moved: RingMove<'_>) -> Result<()> {
        let tensor = self.tensor();
        slots.check(OP, slots.len(), tensor.elem_count(), tensor.device())?;
        if slots.is_empty() {
            return Ok(());
        }
        if let Some(accepted) = moved.accepted {
            check_dtype(OP, "accepted", accepted.dtype(), DType::U32)?;
            check_dense(OP, "accepted", accepted.layout(), &[slots.len()])?;
            check_device(OP, "accepted", accepted, tensor.device())?;
        }
        if let Some(cu) = moved.cu_seqlens {
            check_device(OP, "cu_seqlens", cu.tensor(), tensor.device())?;
            if cu.num_sequences() != slots.len() {
                bail!("{OP}: cu_seqlens: expected {} sequences (the slots'), got {}", slots.len(), cu.num_sequences());
            }
        }
        let longest = moved.cu_seqlens.map_or(moved.tokens, CuSeqlens::max_len);
        if !moved.flush && longest > RING_TOKENS {
            bail!("{OP}: expected at most {RING_TOKENS} tokens a sequence, got {longest}");
        }
        #[cfg(feature = "cuda")]
        if tensor.device().is_cuda() {
            return cuda::advance(&tensor, &slots.in_u32()?, moved);
        }
        let host = cpu_slots(OP, Some(slots), tensor.elem_count())?;
        let accepted = moved.accepted.map(Tensor::to_vec1::<u32>).transpose()?;
        in_place_cpu(OP, &tensor, |(storage, layout)| {
            let CpuStorage::U32(spans) = storage else { bail!("{OP}: expected spans in u32") };
            let spans = &mut spans[layout.start_offset()..];
            let maps = host.of_stride(1);
            for (n, (read, write)) in (0..slots.len()).filter_map(|n| Some((n, maps.numbers(n)?))) {
                let tokens = moved.tokens(n);
                let kept = accepted.as_ref().map_or(tokens, |accepted| tokens.min(accepted[n] as usize));
                spans[write] = Span::from_bits(spans[read]).after(tokens, kept, moved.flush, read != write).to_bits();
            }
            Ok(())
        })
    }
}
