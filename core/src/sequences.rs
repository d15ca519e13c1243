//! Sequence boundaries of packed tokens.

use crate::check::Lead;
use crate::cpu;
use crate::device::Working;
use crate::Slots;
use candle_core::{bail, Device, Result, Tensor};
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
        match cu_seqlens.first() {
            Some(0) => {}
            Some(first) => bail!("cu_seqlens: expected the first value to be 0, got {first}"),
            None => bail!("cu_seqlens: expected the first value to be 0, got no values"),
        }
        let mut max_len = 0;
        for (n, pair) in cu_seqlens.windows(2).enumerate() {
            let Some(len) = pair[1].checked_sub(pair[0]) else {
                bail!("cu_seqlens: expected non-decreasing values, got {} after {} at {}", pair[1], pair[0], n + 1);
            };
            max_len = max_len.max(len as usize);
        }
        let _working = Working::new(device);
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

    /// Tokens of each sequence.
    pub fn lengths(&self) -> impl Iterator<Item = usize> + '_ {
        self.host.windows(2).map(|pair| (pair[1] - pair[0]) as usize)
    }

    /// Whether every sequence has this one length; `None` where they differ or there are none.
    pub fn uniform_len(&self) -> Option<usize> {
        let count = self.num_sequences();
        (count > 0 && self.max_len.checked_mul(count) == Some(self.total_tokens())).then_some(self.max_len)
    }

    /// Whether the other is a clone of this one.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.host, &other.host)
    }

    /// The running totals.
    pub fn as_slice(&self) -> &[u32] {
        &self.host
    }

    /// Where the kernels read them.
    pub fn device(&self) -> &Device {
        self.device.device()
    }

    /// The running totals on the device, u32: to be read. Kernels trust the values, which were checked on the host.
    pub fn tensor(&self) -> &Tensor {
        &self.device
    }
}

/// How many sequences a call has and how long they are, from sizes that the host knows.
#[derive(Debug, Clone, Copy)]
pub struct SequencePlan {
    /// Sequences.
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
        slots: Option<&Slots>,
        state: &Tensor,
    ) -> Result<Self> {
        let seqs = Self::of_tokens((op, arg), (lead, lead_dims), cu_seqlens)?;
        let count = seqs.count;
        let num_slots = state.dims()[0];
        match slots {
            Some(slots) => slots.check(op, count, num_slots, state.device())?,
            None if num_slots != count => {
                let packed = if cu_seqlens.is_none() { "; packed tokens need cu_seqlens" } else { "" };
                bail!("{op}: state: expected {count} slots (one for each sequence), got {num_slots}{packed}")
            }
            None => {}
        }
        Ok(Self { num_slots, ..seqs })
    }

    /// The same without a state: sequence `n` has slot `n` of as many.
    pub fn of_tokens(
        (op, arg): (&str, &str),
        (lead, lead_dims): (Lead, &[usize]),
        cu_seqlens: Option<&CuSeqlens>,
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
        let total_tokens = cu_seqlens.map_or(count * tokens, CuSeqlens::total_tokens);
        Ok(Self { count, tokens, max_tokens, total_tokens, num_slots: count })
    }

    /// The same for the CPU kernels.
    pub fn cpu<'a>(&self, cu_seqlens: Option<&'a CuSeqlens>) -> cpu::Sequences<'a> {
        let cu_seqlens = cu_seqlens.map(CuSeqlens::as_slice);
        cpu::Sequences { cu_seqlens, count: self.count, tokens: self.tokens }
    }
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
}
