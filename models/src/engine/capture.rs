//! Launches as a CUDA graph.

use candle_core::cuda_backend::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode, CUstream_st};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaGraph};
use candle_core::{bail, Device, Error, Result};
use std::sync::Arc;

/// `CU_STREAM_PER_THREAD`, a macro in C.
const PER_THREAD: *mut CUstream_st = 2 as _;

/// The launches of `work`, which runs three times: twice as it is, then captured. All that it allocates it must free.
///
/// How candle 0.11 and cudarc 0.19 behave meanwhile:
/// * An allocation becomes a node of the graph, and so does its release, so that temporaries have fixed addresses in
///   memory of the graph's own. A release of anything else fails: nothing older may be dropped inside.
/// * Some kernels of candle read shapes and strides from device memory. Under the guard of its cache they are uploaded
///   once, in the first run, and kept; inside a capture a missing one is an error, and so is any copy to the host.
/// * With event tracking cudarc lets the stream wait for events recorded outside, which a capture does not permit.
/// * The first run loads modules and lets cuBLAS choose its kernels.
pub(super) fn capture(op: &str, device: &Device, mut work: impl FnMut() -> Result<()>) -> Result<CudaGraph> {
    let Device::Cuda(device) = device else { bail!("{op}: expected a CUDA device, got {:?}", device.location()) };
    let stream = device.cuda_stream();
    // Driver 580 hangs or crashes when a host thread ends whose own stream was captured.
    if stream.cu_stream() == PER_THREAD {
        bail!("{op}: device: expected one of `single_stream_device`, got one with a stream for each host thread")
    }
    if !stream.context().has_async_alloc() {
        bail!("{op}: expected a device that allocates in stream order, got one that does not")
    }
    stream.context().synchronize().map_err(Error::wrap)?;
    let _tracking = TrackingOff::new(stream.context());
    let _cached = device.enable_cuda_graph_htod_cache();
    for _ in 0..2 {
        work()?;
    }
    stream.synchronize().map_err(Error::wrap)?;
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(Error::wrap)?;
    let done = work();
    // Ended in any case: a stream that captures can do nothing else.
    let graph = stream.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
    done.map_err(|error| error.context(format!("{op}: a launch cannot be captured")))?;
    let Some(graph) = graph.map_err(Error::wrap)? else { bail!("{op}: expected launches to capture, got none") };
    // Errors of releases, which cudarc keeps for later.
    stream.context().check_err().map_err(Error::wrap)?;
    graph.upload().map_err(Error::wrap)?;
    Ok(graph)
}

/// cudarc's event tracking, off until this goes.
struct TrackingOff(Option<Arc<CudaContext>>);

impl TrackingOff {
    fn new(context: &Arc<CudaContext>) -> Self {
        if !context.is_event_tracking() {
            return Self(None);
        }
        // SAFETY: the device was waited for; what is made from here on lives on one stream.
        unsafe { context.disable_event_tracking() };
        Self(Some(context.clone()))
    }
}

impl Drop for TrackingOff {
    fn drop(&mut self) {
        if let Some(context) = &self.0 {
            // SAFETY: what was made meanwhile without events is used on the stream it was made on.
            unsafe { context.enable_event_tracking() };
        }
    }
}
