//! Tokens on their way from the device to the host.

use super::sampling::{tokens, Token};
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, PinnedHostSlice};
use candle_core::{bail, Device, Error, Result, Storage, Tensor};
use candle_gdn::plumbing::Working;

/// Pinned memory that a step's tokens are copied to, behind the step, while the host goes on.
pub(super) struct Landing {
    host: PinnedHostSlice<u32>,
    /// The copy is done. The event of the memory itself would let the thread sleep.
    done: CudaEvent,
    count: usize,
}

impl Landing {
    /// For up to `most` tokens.
    pub fn new(device: &Device, most: usize) -> Result<Self> {
        let Device::Cuda(device) = device else { bail!("landing: expected a CUDA device") };
        let (context, zeros) = (device.cuda_stream().context().clone(), vec![0; most]);
        // SAFETY: written right below, before anything reads it.
        let mut host = unsafe { context.alloc_pinned_with_flags(most, 0) }.map_err(Error::wrap)?;
        host.as_mut_slice().map_err(Error::wrap)?.copy_from_slice(&zeros);
        Ok(Self { host, done: context.new_event(None).map_err(Error::wrap)?, count: 0 })
    }

    /// Sends `drawn`, of as many, as it is once all work given so far is done; the first `count` are somebody's.
    pub fn send(&mut self, drawn: &Tensor, count: usize) -> Result<()> {
        let _working = Working::new(drawn.device());
        let (storage, layout) = drawn.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { bail!("landing: expected a tensor on CUDA") };
        let from = layout.start_offset();
        let stream = storage.device.cuda_stream();
        let drawn = storage.as_cuda_slice::<u32>()?.slice(from..from + layout.shape().elem_count());
        stream.memcpy_dtoh(&drawn, &mut self.host).map_err(Error::wrap)?;
        self.done.record(&stream).map_err(Error::wrap)?;
        self.count = count;
        Ok(())
    }

    /// Waits for what was sent last.
    pub fn read(&self) -> Result<Vec<Token>> {
        Ok(tokens(&self.words()?))
    }

    /// The same as it was sent.
    pub fn words(&self) -> Result<Vec<u32>> {
        self.done.synchronize().map_err(Error::wrap)?;
        Ok(self.host.as_slice().map_err(Error::wrap)?[..self.count].to_vec())
    }
}

impl std::fmt::Debug for Landing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Landing").field("count", &self.count).finish_non_exhaustive()
    }
}
