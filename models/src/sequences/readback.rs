//! Tokens on their way from the device to the host.

use candle_core::cuda_backend::cudarc::driver::{CudaEvent, PinnedHostSlice};
use candle_core::{bail, Device, Error, Result, Storage, Tensor};
use candle_gdn::plumbing::Working;

/// Pinned memory that what a step drew is copied to, behind the step, while the host goes on.
pub(super) struct Landing {
    /// Of each tensor that comes.
    host: Vec<PinnedHostSlice<u32>>,
    /// The copies are done. The event of the memory itself would let the thread sleep.
    done: CudaEvent,
}

impl Landing {
    /// For tensors of as many words as these.
    pub fn new(parts: &[Tensor]) -> Result<Self> {
        let Some(Device::Cuda(device)) = parts.first().map(Tensor::device) else {
            bail!("landing: expected tensors on a CUDA device")
        };
        let context = device.cuda_stream().context().clone();
        let pinned = |part: &Tensor| {
            let words = part.elem_count();
            // SAFETY: written right below, before anything reads it.
            let mut host = unsafe { context.alloc_pinned_with_flags(words, 0) }.map_err(Error::wrap)?;
            host.as_mut_slice().map_err(Error::wrap)?.copy_from_slice(&vec![0; words]);
            Ok(host)
        };
        let host = parts.iter().map(pinned).collect::<Result<_>>()?;
        Ok(Self { host, done: context.new_event(None).map_err(Error::wrap)? })
    }

    /// Sends the tensors as they are once all work given so far is done.
    pub fn send(&mut self, parts: &[Tensor]) -> Result<()> {
        for (part, host) in parts.iter().zip(&mut self.host) {
            let _working = Working::new(part.device());
            let (storage, layout) = part.storage_and_layout();
            let Storage::Cuda(storage) = &*storage else { bail!("landing: expected a tensor on CUDA") };
            let from = layout.start_offset();
            let stream = storage.device.cuda_stream();
            let words = storage.as_cuda_slice::<u32>()?.slice(from..from + layout.shape().elem_count());
            stream.memcpy_dtoh(&words, host).map_err(Error::wrap)?;
            self.done.record(&stream).map_err(Error::wrap)?;
        }
        Ok(())
    }

    /// Waits for what was sent last: the words of each tensor.
    pub fn words(&self) -> Result<Vec<Vec<u32>>> {
        self.done.synchronize().map_err(Error::wrap)?;
        self.host.iter().map(|host| Ok(host.as_slice().map_err(Error::wrap)?.to_vec())).collect()
    }
}

impl std::fmt::Debug for Landing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Landing").field("parts", &self.host.len()).finish_non_exhaustive()
    }
}
