//! The order of what several host threads do to one state.

use candle_core::{Device, Result};
use std::thread::{current, ThreadId};

/// The host thread that last gave a device work on a state.
///
/// A CUDA device made by `Device::new_cuda` has a stream for each host thread, and what two threads launch is not
/// ordered: a thread that takes a state over first waits for the device. Other devices need nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LastThread(ThreadId);

impl LastThread {
    pub fn new() -> Self {
        Self(current().id())
    }

    /// Before this thread reads the state. Waits for the device where another thread used it last.
    pub fn wait(self, device: &Device) -> Result<()> {
        if self.0 != current().id() {
            wait_for_all_streams(device)?;
        }
        Ok(())
    }

    /// Before this thread writes the state, which then is its own.
    pub fn take(&mut self, device: &Device) -> Result<()> {
        self.wait(device)?;
        *self = Self::new();
        Ok(())
    }
}

#[cfg(feature = "cuda")]
fn wait_for_all_streams(device: &Device) -> Result<()> {
    /// `CU_STREAM_PER_THREAD`
    const PER_THREAD: usize = 2;
    if let Device::Cuda(device) = device {
        let stream = device.cuda_stream();
        if stream.cu_stream().addr() == PER_THREAD {
            stream.context().synchronize().map_err(candle_core::Error::wrap)?;
        }
    }
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn wait_for_all_streams(_: &Device) -> Result<()> {
    Ok(())
}
