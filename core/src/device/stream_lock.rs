//! A lock for a stream that all host threads share: many threads may launch on it, or one thread may capture a graph. While
//! a stream is captured, whatever any thread launches on it becomes part of the graph instead of running.

use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{bail, Device, Result};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

/// Who uses a stream.
#[derive(Debug, Default)]
struct Stream {
    /// Threads that launch on it.
    launching: usize,
    /// A thread captures, or waits until the others are done.
    capturing: bool,
}

static STREAMS: LazyLock<Mutex<HashMap<usize, Stream>>> = LazyLock::new(Mutex::default);
static CHANGED: Condvar = Condvar::new();

thread_local! {
    /// The streams that this thread holds.
    static HELD: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The lock held by this thread, until it is dropped.
#[derive(Debug)]
pub struct StreamGuard {
    stream: usize,
    captures: bool,
}

/// Whether `Device::new_cuda` made it: a stream of each thread's own, which is never captured.
pub fn is_per_thread(stream: &CudaStream) -> bool {
    /// `CU_STREAM_PER_THREAD`, a macro in C.
    const PER_THREAD: usize = 2;
    stream.cu_stream().addr() == PER_THREAD
}

/// Identifies a shared stream.
fn key(device: &Device) -> Option<usize> {
    let Device::Cuda(device) = device else { return None };
    let stream = device.cuda_stream();
    (!is_per_thread(&stream)).then(|| Arc::as_ptr(&stream).addr())
}

fn is_held(stream: usize) -> bool {
    HELD.with_borrow(|held| held.contains(&stream))
}

fn lock() -> MutexGuard<'static, HashMap<usize, Stream>> {
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StreamGuard {
    /// Waits until `free`, then records by `take` that this thread holds the stream.
    fn wait(stream: usize, captures: bool, free: impl Fn(&Stream) -> bool, take: impl Fn(&mut Stream)) -> Self {
        let mut streams = CHANGED
            .wait_while(lock(), |streams| !free(streams.entry(stream).or_default()))
            .unwrap_or_else(PoisonError::into_inner);
        take(streams.entry(stream).or_default());
        HELD.with_borrow_mut(|held| held.push(stream));
        Self { stream, captures }
    }
}

/// The lock to launch on `device`: waits while another thread captures. `None` where none is needed or this thread has it.
pub fn launch(device: &Device) -> Option<StreamGuard> {
    let stream = key(device).filter(|stream| !is_held(*stream))?;
    Some(StreamGuard::wait(stream, false, |stream| !stream.capturing, |stream| stream.launching += 1))
}

/// The lock to capture: waits until no other thread launches, and keeps away those that would.
pub fn capture(op: &str, device: &Device) -> Result<StreamGuard> {
    let Some(stream) = key(device) else { bail!("{op}: device: expected a CUDA device of one stream") };
    if is_held(stream) {
        bail!("{op}: expected a thread that is not giving the device work")
    }
    let guard = StreamGuard::wait(stream, true, |stream| !stream.capturing, |stream| stream.capturing = true);
    let done = CHANGED.wait_while(lock(), |streams| streams.entry(stream).or_default().launching > 0);
    drop(done.unwrap_or_else(PoisonError::into_inner));
    Ok(guard)
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        HELD.with_borrow_mut(|held| held.retain(|stream| *stream != self.stream));
        let mut streams = lock();
        if let Some(stream) = streams.get_mut(&self.stream) {
            match self.captures {
                true => stream.capturing = false,
                false => stream.launching -= 1,
            }
            if stream.launching == 0 && !stream.capturing {
                streams.remove(&self.stream);
            }
        }
        drop(streams);
        CHANGED.notify_all();
    }
}
