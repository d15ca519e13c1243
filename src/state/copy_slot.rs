//! A slot of a state over another one of the same tensor.

use super::in_place::{in_place, StorageMut};
use candle_core::{bail, CpuStorage, Result, Tensor};

/// Copies slot `from` of `state` `[slots, ..]`, whose slots are contiguous, over slot `to`, another one of the same
/// tensor, which candle's own copies refuse.
pub fn copy_slot(op: &'static str, state: &Tensor, from: usize, to: usize) -> Result<()> {
    in_place(op, state, |storage, layout| match storage {
        StorageMut::Cpu(storage) => {
            let len = layout.dims()[1..].iter().product::<usize>();
            let at = |slot: usize| layout.start_offset() + slot * layout.stride()[0];
            let (from, to) = (at(from)..at(from) + len, at(to));
            match storage {
                CpuStorage::F32(data) => data.copy_within(from, to),
                CpuStorage::BF16(data) => data.copy_within(from, to),
                CpuStorage::F16(data) => data.copy_within(from, to),
                _ => bail!("{op}: expected a state in f32, bf16 or f16"),
            }
            Ok(())
        }
        #[cfg(feature = "cuda")]
        StorageMut::Cuda(storage) => crate::cuda::copy_slot(storage, layout, from, to),
    })
}
