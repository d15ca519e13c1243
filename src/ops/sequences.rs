//! Sequence boundaries of packed tokens, and slots of a state pool.

use super::args::{check_device, check_dtype, Lead};
use crate::cpu;
use candle_core::{bail, CpuStorage, DType, Device, Result, Storage, Tensor};
use std::sync::Arc;

/// Where each sequence begins among packed tokens: sequence `n` owns the tokens `cu_seqlens[n]..cu_seqlens[n + 1]`.
/// Sequences may be empty.
///
/// The values live on the host, so that launches are planned without asking the device, and on the device, where the
/// kernels read them. Build it once and use it for every layer of a forward pass.
#[derive(Debug, Clone)]
pub struct CuSeqlens {
    host: Arc<[u32]>,
    device: Tensor,
    max_len: usize,
}

impl CuSeqlens {
    /// From running totals: the first 0, non-decreasing, one more than there are sequences.
    ///
    /// # Errors
    /// When they are not.
    pub fn new(cu_seqlens: &[u32], device: &Device) -> Result<Self> {
        if cu_seqlens.first() != Some(&0) {
            bail!("cu_seqlens: expected the first value to be 0, got {:?}", cu_seqlens.first());
        }
        let mut max_len = 0;
        for (n, pair) in cu_seqlens.windows(2).enumerate() {
            let Some(len) = pair[1].checked_sub(pair[0]) else {
                bail!("cu_seqlens: expected non-decreasing values, got {} after {} at {}", pair[1], pair[0], n + 1);
            };
            max_len = max_len.max(len as usize);
        }
        let device = Tensor::new(cu_seqlens, device)?;
        Ok(Self { host: cu_seqlens.into(), device, max_len })
    }

    /// From the length of each sequence.
    ///
    /// # Errors
    /// When the total does not fit in 32 bits.
    pub fn from_lengths(lengths: &[usize], device: &Device) -> Result<Self> {
        let mut cu = vec![0u32];
        let mut total = 0usize;
        for len in lengths {
            total = total.saturating_add(*len);
            let Ok(end) = u32::try_from(total) else {
                bail!("cu_seqlens: expected at most {} tokens in all, got {total}", u32::MAX);
            };
            cu.push(end);
        }
        Self::new(&cu, device)
    }

    /// Number of sequences.
    pub fn num_sequences(&self) -> usize {
        self.host.len() - 1
    }

    /// Number of tokens of all sequences together.
    pub fn total_tokens(&self) -> usize {
        self.host[self.host.len() - 1] as usize
    }

    /// Length of the longest sequence.
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// The running totals.
    pub fn as_slice(&self) -> &[u32] {
        &self.host
    }

    /// The running totals on the device, u32.
    pub fn tensor(&self) -> &Tensor {
        &self.device
    }
}

/// How many sequences a call has and how long they are, from sizes that the host knows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SequencePlan {
    pub count: usize,
    /// Tokens of each sequence where they are not packed, else zero.
    pub tokens: usize,
    /// Length of the longest.
    pub max_tokens: usize,
    /// Tokens of all sequences together.
    pub total_tokens: usize,
    /// Slots of the state.
    pub num_slots: usize,
}

impl SequencePlan {
    /// From the leading dimensions of the argument `arg`, checked against the boundaries, the slots and the state.
    pub fn new(
        (op, arg): (&str, &str),
        (lead, lead_dims): (Lead, &[usize]),
        cu_seqlens: Option<&CuSeqlens>,
        slots: Option<&Tensor>,
        state: &Tensor,
    ) -> Result<Self> {
        let (count, tokens, max_tokens) = match (cu_seqlens, lead) {
            (Some(cu), _) if cu.total_tokens() != lead_dims[0] => bail!(
                "{op}: cu_seqlens: expected {} tokens in all ({arg} has them), got {}",
                lead_dims[0],
                cu.total_tokens()
            ),
            (Some(cu), _) => (cu.num_sequences(), 0, cu.max_len()),
            (None, Lead::Decode) => (lead_dims[0], 1, 1),
            (None, _) => (lead_dims[0], lead_dims[1], lead_dims[1]),
        };
        let num_slots = state.dims()[0];
        match slots {
            Some(slots) => check_slots(op, slots, count, state.device())?,
            None if num_slots != count => {
                bail!("{op}: state: expected {count} slots (one for each sequence), got {num_slots}")
            }
            None => {}
        }
        let total_tokens = cu_seqlens.map_or(count * tokens, CuSeqlens::total_tokens);
        Ok(Self { count, tokens, max_tokens, total_tokens, num_slots })
    }

    /// The same for the CPU kernels.
    pub fn cpu<'a>(&self, cu_seqlens: Option<&'a CuSeqlens>) -> cpu::Sequences<'a> {
        let cu_seqlens = cu_seqlens.map(CuSeqlens::as_slice);
        cpu::Sequences { cu_seqlens, count: self.count, tokens: self.tokens }
    }
}

/// Shape, dtype and device of a slot map; its values are checked by [`check_slot_values`] where the host can see them.
fn check_slots(op: &str, slots: &Tensor, sequences: usize, device: &Device) -> Result<()> {
    check_dtype(op, "slots", slots.dtype(), DType::U32)?;
    check_device(op, "slots", slots, device)?;
    if slots.dims() != [sequences] || !slots.is_contiguous() {
        bail!("{op}: slots: expected a contiguous tensor of shape [{sequences}], got shape {:?}", slots.dims());
    }
    Ok(())
}

/// Every slot in range or padding (`u32::MAX`), and none twice.
fn check_slot_values(op: &str, slots: &[u32], num_slots: usize) -> Result<()> {
    let mut used = vec![false; num_slots];
    for (n, &slot) in slots.iter().enumerate() {
        if slot == u32::MAX {
            continue;
        }
        match used.get_mut(slot as usize) {
            None => bail!("{op}: slots: expected values below {num_slots} (the state's slots), got {slot} at {n}"),
            Some(true) => bail!("{op}: slots: expected distinct values, got {slot} a second time at {n}"),
            Some(seen) => *seen = true,
        }
    }
    Ok(())
}

/// The slot map of a CPU tensor, its values checked.
pub(super) fn cpu_slots(op: &str, slots: Option<&Tensor>, num_slots: usize) -> Result<Option<Vec<u32>>> {
    let Some(slots) = slots else { return Ok(None) };
    let (storage, layout) = slots.storage_and_layout();
    let Storage::Cpu(CpuStorage::U32(data)) = &*storage else {
        bail!("{op}: slots: expected a u32 tensor on the CPU");
    };
    let start = layout.start_offset();
    let map = data[start..start + layout.shape().elem_count()].to_vec();
    check_slot_values(op, &map, num_slots)?;
    Ok(Some(map))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cu_seqlens_are_checked() {
        let new = |cu: &[u32]| CuSeqlens::new(cu, &Device::Cpu);
        let err = |cu: &[u32]| new(cu).unwrap_err().to_string();
        assert!(err(&[]).contains("first value to be 0"));
        assert!(err(&[1, 2]).contains("first value to be 0"));
        assert!(err(&[0, 3, 2]).contains("got 2 after 3 at 2"));
        let cu = new(&[0, 0, 3, 10]).unwrap();
        assert_eq!((cu.num_sequences(), cu.total_tokens(), cu.max_len()), (3, 10, 7));
        assert_eq!(new(&[0]).unwrap().num_sequences(), 0);
        let lengths = CuSeqlens::from_lengths(&[0, 3, 7], &Device::Cpu).unwrap();
        assert_eq!(lengths.as_slice(), cu.as_slice());
        let too_many = CuSeqlens::from_lengths(&[usize::MAX, 1], &Device::Cpu).unwrap_err();
        assert!(too_many.to_string().contains("cu_seqlens"));
    }

    #[test]
    fn slots_are_checked() {
        assert!(check_slot_values("op", &[2, u32::MAX, 0, u32::MAX], 3).is_ok());
        assert!(check_slot_values("op", &[3], 3).unwrap_err().to_string().contains("got 3 at 0"));
        assert!(check_slot_values("op", &[1, 1], 3).unwrap_err().to_string().contains("second time at 1"));
    }
}
