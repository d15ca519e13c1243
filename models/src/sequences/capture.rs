//! Launches as a CUDA graph.

use candle_core::cuda_backend::cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaGraph, CudaStream, DriverError};
use candle_core::{bail, Device, Error, Result};
use candle_gdn_core::device::cuda::{capture as take_turn, is_per_thread};
use std::collections::BTreeMap;
use std::sync::Arc;

/// How often the work of a capture runs before it.
pub(crate) const RUNS: usize = 2;

/// The launches of `work`, which runs four times: twice as it is, then captured twice. All that it allocates it must free.
///
/// Whatever any thread gives the stream meanwhile would be captured too, and not run. Calls of this crate wait
/// ([`candle_gdn_core::Working`]). Other work shows in the second capture, whose contents then differ from the first.
///
/// How candle 0.11 and cudarc 0.19 behave meanwhile:
/// * An allocation becomes a node of the graph, and so does its release, so that temporaries have fixed addresses in
///   memory of the graph's own. A release of anything else fails: nothing older may be dropped inside.
/// * Some kernels of candle read shapes and strides from device memory. Under the guard of its cache they are uploaded
///   once, in the first run, and kept; inside a capture a missing one is an error, and so is any copy to the host.
/// * With event tracking cudarc lets the stream wait for events recorded outside, which a capture does not permit.
/// * The first run loads modules and lets cuBLAS choose its kernels.
pub(crate) fn capture(op: &str, device: &Device, mut work: impl FnMut() -> Result<()>) -> Result<CudaGraph> {
    let Device::Cuda(device) = device else { bail!("{op}: expected a CUDA device, got {:?}", device.location()) };
    let stream = device.cuda_stream();
    // Driver 580 hangs or crashes when a host thread ends whose own stream was captured.
    if is_per_thread(&stream) {
        bail!("{op}: device: expected one of `single_stream_device`, got one with a stream for each host thread")
    }
    if !stream.context().has_async_alloc() {
        bail!("{op}: expected a device that allocates in stream order, got one that does not")
    }
    let _turn = take_turn(op, &Device::Cuda(device.clone()))?;
    stream.context().synchronize().map_err(Error::wrap)?;
    let _tracking = TrackingOff::new(stream.context());
    let _cached = device.enable_cuda_graph_htod_cache();
    for _ in 0..RUNS {
        work()?;
    }
    stream.synchronize().map_err(Error::wrap)?;
    let first = contents(&record(op, &stream, &mut work)?)?;
    let graph = record(op, &stream, &mut work)?;
    if contents(&graph)? != first {
        bail!("{op}: another thread gave the device work during the capture, which recorded it: its results are lost")
    }
    // Errors of releases, which cudarc keeps for later.
    stream.context().check_err().map_err(Error::wrap)?;
    graph.upload().map_err(Error::wrap)?;
    Ok(graph)
}

fn record(op: &str, stream: &Arc<CudaStream>, work: impl FnOnce() -> Result<()>) -> Result<CudaGraph> {
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(Error::wrap)?;
    let recording = Recording(stream);
    let done = work();
    let graph = recording.end();
    done.map_err(|error| error.context(format!("{op}: a launch cannot be captured")))?;
    match graph.map_err(Error::wrap)? {
        Some(graph) => Ok(graph),
        None => bail!("{op}: expected launches to capture, got none"),
    }
}

/// A stream that captures. It can do nothing else: the capture ends in any case, in a panic too.
struct Recording<'a>(&'a Arc<CudaStream>);

impl Recording<'_> {
    fn end(self) -> std::result::Result<Option<CudaGraph>, DriverError> {
        std::mem::ManuallyDrop::new(self).stop()
    }

    fn stop(&self) -> std::result::Result<Option<CudaGraph>, DriverError> {
        self.0.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        // There is an error already.
        let _ = self.stop();
    }
}

/// How often each kernel, and each other kind of node, is in a graph.
fn contents(graph: &CudaGraph) -> Result<BTreeMap<(u32, usize), usize>> {
    let graph = graph.cu_graph();
    let mut count = 0;
    // SAFETY: the graph lives; without an array only the number of nodes is written.
    unsafe { sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count) }.result().map_err(Error::wrap)?;
    let mut nodes = vec![std::ptr::null_mut(); count];
    // SAFETY: the array has room for as many.
    unsafe { sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count) }.result().map_err(Error::wrap)?;
    let mut contents = BTreeMap::new();
    for node in nodes {
        let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
        // SAFETY: a node of the graph.
        unsafe { sys::cuGraphNodeGetType(node, &mut kind) }.result().map_err(Error::wrap)?;
        let mut kernel = 0;
        if kind == sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL {
            let mut params = std::mem::MaybeUninit::<sys::CUDA_KERNEL_NODE_PARAMS>::zeroed();
            // SAFETY: a kernel's node; all zeros are parameters too.
            let params = unsafe {
                sys::cuGraphKernelNodeGetParams_v2(node, params.as_mut_ptr()).result().map_err(Error::wrap)?;
                params.assume_init()
            };
            kernel = params.func.addr() ^ params.kern.addr();
        }
        *contents.entry((kind as u32, kernel)).or_insert(0) += 1;
    }
    Ok(contents)
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
