//! All-reduce and all-gather of GPUs by NCCL.
//!
//! The library is loaded when a group is made, not when the program is linked or started: builds do not need it, and its
//! absence is an error for several GPUs only.

use super::pending::Pending;
use super::Collective;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::sys::{cuStreamQuery, CUresult, CUstreamCaptureStatus};
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{bail, CudaStorage, DType, Device, Error, Layout, Result, Shape, Tensor};
use candle_gdn_core::device::cuda::{alloc, read, stream_of, write};
use libloading::Library;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{mpsc, Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

const OP: &str = "NCCL";
/// The environment variable that names another file.
const VARIABLE: &str = "CANDLE_GDN_NCCL";
const FILE: &str = "libnccl.so.2";
/// How long ranks wait for one another by default.
const LIMIT: Duration = Duration::from_secs(60);

/// Identifies a group: made by one of its ranks, passed to all.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct NcclId([c_char; 128]);

type Comm = *mut c_void;

/// The functions used, as `nccl.h` (2.9 and later) declares them.
struct Api {
    get_unique_id: unsafe extern "C" fn(*mut NcclId) -> c_int,
    comm_init_rank: unsafe extern "C" fn(*mut Comm, c_int, NcclId, c_int) -> c_int,
    comm_destroy: unsafe extern "C" fn(Comm) -> c_int,
    comm_abort: unsafe extern "C" fn(Comm) -> c_int,
    all_reduce: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> c_int,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, *mut c_void) -> c_int,
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    /// Keeps the functions loaded.
    _library: Library,
}

impl Api {
    fn get() -> Result<&'static Self> {
        static API: OnceLock<std::result::Result<Api, String>> = OnceLock::new();
        let api = API.get_or_init(|| {
            let file = std::env::var(VARIABLE).unwrap_or_else(|_| FILE.into());
            Self::load(&file).map_err(|e| {
                format!("{OP}: cannot load {file}, which several GPUs need ({VARIABLE} names another file): {e}")
            })
        });
        api.as_ref().map_err(Error::msg)
    }

    fn load(file: &str) -> std::result::Result<Self, libloading::Error> {
        // SAFETY: NCCL's initialisers have no requirements, and the types are those of its header.
        unsafe {
            let library = Library::new(file)?;
            Ok(Self {
                get_unique_id: *library.get(b"ncclGetUniqueId\0")?,
                comm_init_rank: *library.get(b"ncclCommInitRank\0")?,
                comm_destroy: *library.get(b"ncclCommDestroy\0")?,
                comm_abort: *library.get(b"ncclCommAbort\0")?,
                all_reduce: *library.get(b"ncclAllReduce\0")?,
                all_gather: *library.get(b"ncclAllGather\0")?,
                get_error_string: *library.get(b"ncclGetErrorString\0")?,
                _library: library,
            })
        }
    }

    fn check(&self, what: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: it returns a string that lives as long as the library.
        let message = unsafe { CStr::from_ptr((self.get_error_string)(code)) };
        bail!("{OP}: {what}: {}", message.to_string_lossy())
    }
}

impl NcclId {
    /// The id of a new group.
    ///
    /// # Errors
    /// Where NCCL cannot be loaded (`libnccl.so.2`, or what `CANDLE_GDN_NCCL` names), or has no network to meet on.
    pub fn new() -> Result<Self> {
        let (api, mut id) = (Api::get()?, Self([0; 128]));
        // SAFETY: it writes the id.
        api.check("an id for the group", unsafe { (api.get_unique_id)(&mut id) })?;
        Ok(id)
    }
}

/// A rank that is a GPU, with a host thread or process of its own. Its calls go to the device's stream and can be
/// captured as part of a CUDA graph. Kernels of NCCL wait for the other ranks for ever: if one is gone, a thread of the
/// host aborts them after a limit, and every later call is an error. Other work may take as long as it likes.
#[derive(Debug)]
pub struct NcclRank {
    rank: usize,
    size: usize,
    device: Device,
    comm: Arc<Communicator>,
}

#[derive(Debug)]
struct Communicator {
    /// Made by `comm_init_rank`. NCCL allows calls from any thread, one at a time: they hold `pending`.
    comm: Comm,
    pending: Mutex<Pending>,
    /// A rank did not answer within the limit or this one left, and the communicator was aborted.
    gone: AtomicBool,
    limit_ms: AtomicU64,
    stream: Arc<CudaStream>,
}

// SAFETY: see `comm`.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Joins as rank `rank` of `size`; returns when all have joined.
    fn join(id: NcclId, rank: usize, size: usize, limit: Duration, stream: Arc<CudaStream>) -> Result<Self> {
        let (api, mut comm) = (Api::get()?, std::ptr::null_mut());
        stream.context().bind_to_thread().map_err(Error::wrap)?;
        // SAFETY: it writes the communicator, for the device that is current.
        let code = unsafe { (api.comm_init_rank)(&mut comm, size as c_int, id, rank as c_int) };
        api.check(&format!("rank {rank} of {size}"), code)?;
        Ok(Self {
            comm,
            pending: Mutex::default(),
            gone: AtomicBool::new(false),
            limit_ms: AtomicU64::new(limit.as_millis() as u64),
            stream,
        })
    }

    fn check(&self) -> Result<()> {
        match self.gone.load(Ordering::Acquire) {
            true => bail!(
                "{OP}: expected all ranks to go on, but one did not come for {:?}, or this one left",
                self.limit()
            ),
            false => Ok(()),
        }
    }

    fn limit(&self) -> Duration {
        Duration::from_millis(self.limit_ms.load(Ordering::Relaxed))
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `call` on the communicator, which no other thread uses meanwhile.
    fn with(&self, call: impl FnOnce(&'static Api, Comm) -> Result<()>) -> Result<()> {
        let mut pending = self.pending();
        self.check()?;
        // A call that the watching thread aborted fails with an error of NCCL's own.
        call(Api::get()?, self.comm).map_err(|e| self.check().err().unwrap_or(e))?;
        // A captured call waits for nobody until its graph is launched, after which the ranks settle.
        let status = self.stream.capture_status().map_err(Error::wrap)?;
        if status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            pending.begin(Instant::now());
        }
        Ok(())
    }

    /// Watches on a thread of its own, until the communicator is dropped.
    fn watch(self: &Arc<Self>) -> Result<()> {
        /// How long a call may hold the communicator before it counts as one that waits.
        const PATIENCE: Duration = Duration::from_millis(500);
        let (watched, mut blocked) = (Arc::downgrade(self), None);
        let watch = move || loop {
            std::thread::sleep(PATIENCE / 5);
            let Some(communicator) = watched.upgrade() else { return };
            // A call holds the lock while it waits for room in the stream, which kernels that wait for a rank occupy.
            let mut free = communicator.pending.try_lock();
            let waits = match &mut free {
                Ok(pending) => {
                    blocked = None;
                    pending.are_late(Instant::now(), communicator.limit(), || communicator.is_busy())
                }
                Err(_) => blocked.get_or_insert_with(Instant::now).elapsed() > communicator.limit().max(PATIENCE),
            };
            // While no other thread can begin a call.
            let is_first = waits && communicator.lose();
            drop(free);
            if is_first {
                communicator.abort();
            }
            if communicator.gone.load(Ordering::Acquire) {
                return;
            }
        };
        std::thread::Builder::new().name("candle-gdn-nccl".into()).spawn(watch).map_err(Error::wrap)?;
        Ok(())
    }

    /// No call begins any more. True for the first caller, who then aborts.
    fn lose(&self) -> bool {
        !self.gone.swap(true, Ordering::AcqRel)
    }

    fn abort(&self) {
        if let Ok(api) = Api::get() {
            // SAFETY: NCCL allows this call, and no other, during another; none begins any more, and this one is made once. There
            // is no caller to return an error to.
            let _ = unsafe { (api.comm_abort)(self.comm) };
        }
    }

    /// Whether the stream has unfinished work.
    fn is_busy(&self) -> bool {
        let bound = self.stream.context().bind_to_thread().is_ok();
        // SAFETY: the stream lives; its context is current.
        bound && unsafe { cuStreamQuery(self.stream.cu_stream()) } == CUresult::CUDA_ERROR_NOT_READY
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let (gone, begun) = (*self.gone.get_mut(), Instant::now());
        while !gone && self.is_busy() {
            if begun.elapsed() > self.limit() {
                return self.abort();
            }
            std::thread::yield_now();
        }
        if let (false, Ok(api)) = (gone, Api::get()) {
            // SAFETY: destroyed once. There is no caller to return an error to.
            let _ = unsafe { (api.comm_destroy)(self.comm) };
        }
    }
}

impl NcclRank {
    /// Joins the group of `id`, all of whose `size` ranks call this at the same time, each with a device of its own
    /// ([`single_stream_device`](candle_gdn::single_stream_device)). Returns when all have.
    ///
    /// # Errors
    /// Where NCCL cannot be loaded or fails, for a rank that is not below `size`, on another device than a GPU, and where
    /// the others do not come for 60 seconds.
    pub fn new(id: NcclId, rank: usize, size: usize, device: &Device) -> Result<Self> {
        Self::new_within(LIMIT, id, rank, size, device)
    }

    /// [`new`](Self::new) with another limit, which is also that of the waits later on
    /// ([`with_limit`](Self::with_limit)).
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn new_within(limit: Duration, id: NcclId, rank: usize, size: usize, device: &Device) -> Result<Self> {
        let Device::Cuda(cuda) = device else { bail!("{OP}: device: expected CUDA, got {:?}", device.location()) };
        if rank >= size {
            bail!("{OP}: rank: expected one below {size}, got {rank}")
        }
        // NCCL waits for the others for ever, and only the end of the process stops that (its non-blocking mode would start a
        // thread for every later sum): a thread of its own waits, and is abandoned at the limit.
        let (stream, (joins, waits)) = (cuda.cuda_stream(), mpsc::channel());
        let join = move || {
            if let Err(mpsc::SendError(Ok(late))) = joins.send(Communicator::join(id, rank, size, limit, stream)) {
                late.lose();
                late.abort();
            }
        };
        std::thread::Builder::new().name("candle-gdn-nccl".into()).spawn(join).map_err(Error::wrap)?;
        let comm = match waits.recv_timeout(limit) {
            Ok(comm) => Arc::new(comm?),
            Err(_) => bail!("{OP}: rank {rank}: expected all {size} ranks to come, but one did not for {limit:?}"),
        };
        comm.watch()?;
        Ok(Self { rank, size, device: device.clone(), comm })
    }

    /// How long a rank's call waits for the other ranks, 60 seconds by default: longer than any pass.
    pub fn with_limit(self, limit: Duration) -> Self {
        self.comm.limit_ms.store(limit.as_millis() as u64, Ordering::Relaxed);
        self
    }

    fn run(&self, x: &Tensor, call: Kind) -> Result<Tensor> {
        if !x.device().same_device(&self.device) {
            bail!("{OP}: x: expected a tensor on {:?}, got one on {:?}", self.device.location(), x.device().location())
        }
        crate::cuda::apply(OP, None, &x.contiguous()?, |x, layout| self.launch(x, layout, call))
    }

    fn launch(&self, x: &CudaStorage, layout: &Layout, call: Kind) -> Result<(CudaStorage, Shape)> {
        // `ncclDataType_t`
        let dtype = match x.dtype() {
            DType::F16 => 6,
            DType::F32 => 7,
            DType::BF16 => 9,
            other => bail!("{OP}: x: expected F32, BF16 or F16, got {other:?}"),
        };
        let count = layout.shape().elem_count();
        let dims = match call {
            Kind::AllReduce => layout.dims().to_vec(),
            Kind::AllGather => [&[self.size], layout.dims()].concat(),
        };
        let shape = Shape::from(dims);
        let stream = &*stream_of(x)?;
        let mut out = alloc(None, x, shape.dims())?;
        if count > 0 {
            let size = x.dtype().size_in_bytes();
            let (x, y) = (read(x, stream)?, write(&mut out, stream)?);
            let src = x.at::<c_void>(layout.start_offset(), size).cast_const();
            let dst = y.at::<c_void>(0, size);
            let stream = stream.cu_stream().cast::<c_void>();
            self.comm.with(|api, comm| {
                // SAFETY: `count` elements are read and as many, or `size` times as many, written, on the stream of both.
                let code = unsafe {
                    match call {
                        Kind::AllReduce => (api.all_reduce)(src, dst, count, dtype, 0, comm, stream),
                        Kind::AllGather => (api.all_gather)(src, dst, count, dtype, comm, stream),
                    }
                };
                api.check("a sum or gathering of the ranks", code)
            })?;
        }
        Ok((out, shape))
    }
}

impl Collective for NcclRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_reduce(&self, x: &Tensor) -> Result<Tensor> {
        self.run(x, Kind::AllReduce)
    }

    fn all_gather(&self, x: &Tensor) -> Result<Tensor> {
        self.run(x, Kind::AllGather)
    }

    fn settle(&self) -> Result<()> {
        let done = self.comm.stream.record_event(None).map_err(Error::wrap)?;
        self.comm.check()?;
        let begun = Instant::now();
        self.comm.pending().begin(begun);
        while !done.try_is_complete().map_err(Error::wrap)? {
            std::thread::yield_now();
        }
        self.comm.pending().finish(begun);
        // Results of aborted kernels must not be used.
        self.comm.check()
    }

    fn is_lost(&self) -> bool {
        self.comm.gone.load(Ordering::Acquire)
    }

    fn leave(&self) {
        let pending = self.comm.pending();
        let is_first = self.comm.lose();
        drop(pending);
        if is_first {
            self.comm.abort();
        }
    }
}

#[derive(Clone, Copy)]
enum Kind {
    AllReduce,
    AllGather,
}
