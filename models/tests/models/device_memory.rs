//! Device memory that runs out: every allocation of a run fails in turn, then all do. The driver's function for it stands in
//! this program, before the driver's own: what allocates is linked against this one.

use crate::faults::completed;
use crate::golden::DEMO;
use crate::support::{gpus, single_stream_devices, soak};
use candle_core::{DType, Result};
use candle_gdn_models::{Engine, EngineOptions, GraphChoice};
use std::cell::Cell;

/// Of the allocations of a run so many are made to fail, unless `CANDLE_GDN_SOAK` says how many.
const TRIES: usize = 150;

thread_local! {
    /// Allocations of this thread so far.
    static COUNT: Cell<usize> = const { Cell::new(0) };
    /// The first that fails, and how many do.
    static FAIL: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// From now on, after `from` allocations `count` fail.
fn fail(from: usize, count: usize) {
    COUNT.set(0);
    FAIL.set((from, count));
}

#[cfg(feature = "cuda")]
mod driver {
    use super::{COUNT, FAIL};
    use candle_core::cuda_backend::cudarc::driver::sys::{CUdeviceptr, CUresult, CUstream};
    use std::ffi::{c_char, c_void};

    type Allocate = unsafe extern "C" fn(*mut CUdeviceptr, usize, CUstream) -> CUresult;

    extern "C" {
        fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    }

    /// `RTLD_NEXT`: in the libraries behind this program.
    const NEXT: *mut c_void = -1isize as *mut c_void;

    #[no_mangle]
    unsafe extern "C" fn cuMemAllocAsync(address: *mut CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult {
        let (number, (from, count)) = (COUNT.replace(COUNT.get() + 1), FAIL.get());
        if (from..from.saturating_add(count)).contains(&number) {
            return CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        }
        // SAFETY: the function of this name has this type; its caller's promises are those of this one's.
        unsafe {
            let next = dlsym(NEXT, c"cuMemAllocAsync".as_ptr());
            assert!(!next.is_null(), "the driver allocates");
            std::mem::transmute::<*mut c_void, Allocate>(next)(address, bytes, stream)
        }
    }
}

/// Some of `0..count`, or all.
fn spread(count: usize) -> impl Iterator<Item = usize> {
    let tries = soak().unwrap_or(TRIES);
    (0..count).step_by(count.div_ceil(tries.max(1)).max(1))
}

/// All requests are completed with the same tokens, whichever allocation fails; where all fail from one on, those that are
/// not say why, and the next engine has all it needs.
#[test]
fn an_engine_loses_no_request_for_want_of_memory() -> Result<()> {
    for device in &gpus(single_stream_devices()) {
        let model = DEMO.model(DType::F32, device)?;
        completed(&model, GraphChoice::Auto, || {})?; // what is made once is there
        let want = completed(&model, GraphChoice::Auto, || fail(0, 0))?;
        assert!(want.iter().all(|want| want.is_ok()));
        let count = COUNT.get();
        assert!(count > 100, "the driver's function is this one: {count}");
        for n in spread(count) {
            let got = completed(&model, GraphChoice::Auto, || fail(n, 1));
            fail(0, 0);
            assert_eq!(got?, want, "allocation {n} of {count} fails");
        }
        for n in [0, count / 3, count - count / 3] {
            let got = completed(&model, GraphChoice::Auto, || fail(n, usize::MAX));
            fail(0, 0);
            let got = got?;
            let lost = got.iter().filter(|got| matches!(got, Err(why) if why.contains("OUT_OF_MEMORY")));
            assert!(lost.count() > 0, "from allocation {n} of {count} on: {got:?}");
            assert!(got.iter().zip(&want).all(|(got, want)| got.is_err() || got == want), "{got:?}");
            assert_eq!(completed(&model, GraphChoice::Auto, || {})?, want, "after allocation {n} of {count}");
        }
    }
    Ok(())
}

/// A model and an engine that cannot be made are an error.
#[test]
fn what_cannot_be_made_says_that_memory_is_short() -> Result<()> {
    for device in &gpus(single_stream_devices()) {
        // Without graphs: where one cannot be captured, an engine does without.
        let options = EngineOptions { cuda_graph: GraphChoice::Off, ..EngineOptions::new(3, 64) };
        let make = || DEMO.model(DType::F32, device).and_then(|model| Engine::new(&model, options.clone()).map(drop));
        fail(0, 0);
        make()?;
        let count = COUNT.get();
        assert!(count > 50, "a model has more weights than {count}");
        for n in spread(count) {
            fail(n, 1);
            let made = make();
            fail(0, 0);
            let message = made.err().map(|e| e.to_string()).unwrap_or_default();
            assert!(message.contains("OUT_OF_MEMORY"), "allocation {n} of {count}: {message:?}");
        }
        make()?;
    }
    Ok(())
}
