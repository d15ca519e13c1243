//! The advance of a cache's positions.

use super::cache::AttentionCache;
use candle_core::{bail, CpuStorage, Result};
use candle_gdn::plumbing::*;
use candle_gdn::CuSeqlens;
#[cfg(feature = "cuda")]
use candle_gdn::Slots;

const ADVANCE: &str = "attention_advance";

impl AttentionCache {
    /// After the last layer of a forward pass: its `tokens` new tokens of every sequence are in the cache. In place, for
    /// all that hold this `positions`; padding stays where it is.
    ///
    /// # Errors
    /// When the slots do not fit.
    pub fn advance(&self, tokens: usize) -> Result<()> {
        self.advance_by(tokens, None)
    }

    /// The same for packed tokens.
    ///
    /// # Errors
    /// When the sequences or slots do not fit.
    pub fn advance_packed(&self, cu_seqlens: &CuSeqlens) -> Result<()> {
        self.advance_by(cu_seqlens.total_tokens(), Some(cu_seqlens))
    }

    fn advance_by(&self, tokens: usize, cu_seqlens: Option<&CuSeqlens>) -> Result<()> {
        let sequences = self.positions.elem_count();
        let packed = cu_seqlens.is_some();
        let (lead, dims) = if packed { (Lead::Packed, vec![tokens]) } else { (Lead::Batched, vec![sequences, tokens]) };
        let seqs = SequencePlan::new((ADVANCE, "tokens"), (lead, &dims), cu_seqlens, self.slots.as_ref(), &self.k)?;
        if seqs.count != sequences {
            bail!("{ADVANCE}: cu_seqlens: expected {sequences} sequences (as positions), got {}", seqs.count);
        }
        if sequences == 0 {
            return Ok(());
        }
        if let Some(slots) = &self.slots {
            check_not_written(
                ADVANCE,
                ("slots", storage_key(slots.read())),
                ("positions", storage_key(&self.positions)),
            )?;
        }
        #[cfg(feature = "cuda")]
        if self.device().is_cuda() {
            let slots = self.slots.as_ref().map(Slots::in_u32).transpose()?;
            let cu_seqlens = cu_seqlens.map(cu_seqlens_on_device);
            return crate::cuda::attention::advance(ADVANCE, self, &seqs, slots.as_ref(), cu_seqlens);
        }
        let slots = cpu_slots(ADVANCE, self.slots.as_ref(), seqs.num_slots)?;
        let (slots, ranges) = (slots.of_stride(1), seqs.cpu(cu_seqlens));
        in_place_cpu(ADVANCE, &self.positions, |(storage, layout)| {
            let CpuStorage::U32(data) = storage else {
                bail!("{ADVANCE}: positions: expected a u32 tensor on the CPU")
            };
            for (n, position) in data[layout.start_offset()..][..sequences].iter_mut().enumerate() {
                if slots.offsets(n).is_some() {
                    *position = position.saturating_add(ranges.range(n).1 as u32);
                }
            }
            Ok(())
        })
    }
}
