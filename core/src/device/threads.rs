//! The order of what several host threads give one device.

use candle_core::{Device, Result};
use std::marker::PhantomData;
use std::thread::{current, ThreadId};

/// The host thread that last gave a device work on a state.
///
/// A CUDA device made by `Device::new_cuda` has a stream for each host thread, and what two threads launch is not
/// ordered: a thread that takes a state over first waits for the device, and so does one that drops it, because memory
/// is freed in the order of the stream of the thread that drops it. Other devices need nothing.
#[derive(Debug, Clone, Copy)]
pub struct LastThread(ThreadId);

impl Default for LastThread {
    fn default() -> Self {
        Self(current().id())
    }
}

impl LastThread {
    /// Calls `read`, which gives the device work that reads what another thread may have written, and may drop next.
    pub fn reading<R>(self, device: &Device, read: impl FnOnce() -> Result<R>) -> Result<R> {
        let _working = Working::new(device);
        self.wait(device)?;
        let out = read()?;
        self.wait(device)?;
        Ok(out)
    }

    /// Waits for the device where another thread used the state last.
    pub fn wait(self, device: &Device) -> Result<()> {
        if self.0 != current().id() {
            wait_for_all_streams(device)?;
        }
        Ok(())
    }

    /// Before this thread writes the state, which then is its own. No graph is captured until it is done.
    pub fn take(&mut self, device: &Device) -> Result<Working> {
        let working = Working::new(device);
        self.wait(device)?;
        *self = Self::default();
        Ok(working)
    }
}

/// While it lives, this thread may give the device work: no other thread captures a graph on its stream, which would
/// take that work in instead of running it. Costs nothing where this thread has one already, and on other devices than
/// those of [`single_stream_device`](super::single_stream_device).
#[derive(Debug)]
#[must_use = "another thread may capture a graph as soon as it is dropped"]
pub struct Working {
    #[cfg(feature = "cuda")]
    _guard: Option<super::stream_lock::StreamGuard>,
    /// Of this thread: not `Send`.
    thread: PhantomData<*mut ()>,
}

impl Working {
    /// Waits while another thread captures.
    pub fn new(device: &Device) -> Self {
        #[cfg(not(feature = "cuda"))]
        let _ = device;
        Self {
            #[cfg(feature = "cuda")]
            _guard: super::stream_lock::launch(device),
            thread: PhantomData,
        }
    }
}

#[cfg(feature = "cuda")]
fn wait_for_all_streams(device: &Device) -> Result<()> {
    if let Device::Cuda(device) = device {
        let stream = device.cuda_stream();
        if super::stream_lock::is_per_thread(&stream) {
            stream.context().synchronize().map_err(candle_core::Error::wrap)?;
        }
    }
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn wait_for_all_streams(_: &Device) -> Result<()> {
    Ok(())
}
