//! Whose turn it is on a stream that all host threads share: theirs who give it work, or the one's that captures a graph.
//! A stream that is being captured takes in what any thread launches, runs none of it, and replays it with the graph.

use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{bail, Device, Result};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

/// What threads have of a stream.
#[derive(Debug, Default)]
struct Stream {
    /// Threads that give it work.
    working: usize,
    /// A thread captures, or waits for the others to be done.
    capturing: bool,
}

static STREAMS: LazyLock<Mutex<HashMap<usize, Stream>>> = LazyLock::new(Mutex::default);
static CHANGED: Condvar = Condvar::new();

thread_local! {
    /// The streams that this thread has a turn on.
    static MINE: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// A turn, over when it is dropped, on the thread that took it.
#[derive(Debug)]
pub struct Turn {
    stream: usize,
    captures: bool,
}

/// Whether `Device::new_cuda` made it: a stream of each thread's own, which is never captured.
pub fn is_per_thread(stream: &CudaStream) -> bool {
    /// `CU_STREAM_PER_THREAD`, a macro in C.
    const PER_THREAD: usize = 2;
    stream.cu_stream().addr() == PER_THREAD
}

/// What a shared stream is known by.
fn key(device: &Device) -> Option<usize> {
    let Device::Cuda(device) = device else { return None };
    let stream = device.cuda_stream();
    (!is_per_thread(&stream)).then(|| Arc::as_ptr(&stream).addr())
}

fn mine(stream: usize) -> bool {
    MINE.with_borrow(|mine| mine.contains(&stream))
}

fn lock() -> MutexGuard<'static, HashMap<usize, Stream>> {
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Turn {
    /// Waits until `free`, then notes by `take` that the turn is this thread's.
    fn wait(stream: usize, captures: bool, free: impl Fn(&Stream) -> bool, take: impl Fn(&mut Stream)) -> Self {
        let mut streams = CHANGED
            .wait_while(lock(), |streams| !free(streams.entry(stream).or_default()))
            .unwrap_or_else(PoisonError::into_inner);
        take(streams.entry(stream).or_default());
        MINE.with_borrow_mut(|mine| mine.push(stream));
        Self { stream, captures }
    }
}

/// A turn to give `device` work: waits while another thread captures. `None` where it needs none or has one.
pub fn work(device: &Device) -> Option<Turn> {
    let stream = key(device).filter(|stream| !mine(*stream))?;
    Some(Turn::wait(stream, false, |stream| !stream.capturing, |stream| stream.working += 1))
}

/// A turn to capture: waits until no other thread gives the device work, and keeps those that would.
pub fn capture(op: &str, device: &Device) -> Result<Turn> {
    let Some(stream) = key(device) else { bail!("{op}: device: expected a CUDA device of one stream") };
    if mine(stream) {
        bail!("{op}: expected a thread that is not giving the device work")
    }
    let turn = Turn::wait(stream, true, |stream| !stream.capturing, |stream| stream.capturing = true);
    let done = CHANGED.wait_while(lock(), |streams| streams.entry(stream).or_default().working > 0);
    drop(done.unwrap_or_else(PoisonError::into_inner));
    Ok(turn)
}

impl Drop for Turn {
    fn drop(&mut self) {
        MINE.with_borrow_mut(|mine| mine.retain(|stream| *stream != self.stream));
        let mut streams = lock();
        if let Some(stream) = streams.get_mut(&self.stream) {
            match self.captures {
                true => stream.capturing = false,
                false => stream.working -= 1,
            }
            if stream.working == 0 && !stream.capturing {
                streams.remove(&self.stream);
            }
        }
        drop(streams);
        CHANGED.notify_all();
    }
}
