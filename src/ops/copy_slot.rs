//! One slot of a state over another of the same tensor, which candle's own copies refuse.

use candle_core::{bail, CpuStorage, InplaceOp1, Layout, Result, Tensor};

/// Copies slot `from` of `state` `[slots, ..]`, whose slots are contiguous, over slot `to`, another one.
pub(crate) fn copy_slot(op: &'static str, state: &Tensor, from: usize, to: usize) -> Result<()> {
    state.inplace_op1(&CopySlot { op, from, to })
}

struct CopySlot {
    op: &'static str,
    from: usize,
    to: usize,
}

impl InplaceOp1 for CopySlot {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let stride = layout.stride()[0];
        let len = layout.dims()[1..].iter().product::<usize>();
        let at = |slot: usize| layout.start_offset() + slot * stride;
        let (from, to) = (at(self.from)..at(self.from) + len, at(self.to));
        match storage {
            CpuStorage::F32(data) => data.copy_within(from, to),
            CpuStorage::BF16(data) => data.copy_within(from, to),
            CpuStorage::F16(data) => data.copy_within(from, to),
            _ => bail!("{}: expected a state in f32, bf16 or f16", self.op),
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, layout: &Layout) -> Result<()> {
        crate::cuda::copy_slot(storage, layout, self.from, self.to)
    }
}
