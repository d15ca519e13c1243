//! What ran on the GPU and when, from CUPTI's activity records.

#[cfg(not(feature = "cupti"))]
mod collect {
    use anyhow::{bail, Result};
    use candle_gdn_benches::parts::Activity;

    pub fn check() -> Result<()> {
        bail!("this program was built without CUPTI: build it with --features cupti, or ask for --tiers event,wall")
    }

    pub fn record(_: impl FnOnce() -> Result<()>) -> Result<Vec<Activity>> {
        check().map(|()| vec![])
    }
}

#[cfg(feature = "cupti")]
mod collect {
    use anyhow::{anyhow, Context, Result};
    use candle_core::cuda_backend::cudarc::cupti::result::activity as api;
    use candle_core::cuda_backend::cudarc::cupti::sys;
    use candle_core::cuda_backend::cudarc::driver::sys::CUcontext;
    use candle_gdn_benches::parts::Activity;
    use std::alloc::{alloc, dealloc, Layout};
    use std::ffi::CStr;
    use std::sync::{Mutex, OnceLock};
    use sys::CUpti_ActivityKind as Kind;

    static ACTIVITIES: Mutex<Vec<Activity>> = Mutex::new(vec![]);
    const KINDS: [Kind; 3] = [
        Kind::CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
        Kind::CUPTI_ACTIVITY_KIND_MEMCPY,
        Kind::CUPTI_ACTIVITY_KIND_MEMSET,
    ];
    const BUFFER: Layout = match Layout::from_size_align(8 << 20, 8) {
        Ok(layout) => layout,
        Err(_) => unreachable!(),
    };

    extern "C" fn requested(buffer: *mut *mut u8, size: *mut usize, max_records: *mut usize) {
        // SAFETY: the layout is not empty, and CUPTI hands the buffer to `completed`.
        unsafe {
            *buffer = alloc(BUFFER);
            *size = if (*buffer).is_null() { 0 } else { BUFFER.size() };
            *max_records = 0; // as many as fit
        }
    }

    extern "C" fn completed(_: CUcontext, _: u32, buffer: *mut u8, _: usize, valid: usize) {
        let mut found = vec![];
        let mut record = std::ptr::null_mut();
        // SAFETY: CUPTI owns the record until the buffer is freed, and its kind says which struct it is. Of a kernel only
        // fields are read that stand at the same place in every version since CUPTI 12.
        unsafe {
            while api::get_next_record(buffer, valid, &mut record).is_ok() {
                let (name, start, end) = match (*record).kind {
                    Kind::CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL | Kind::CUPTI_ACTIVITY_KIND_KERNEL => {
                        let kernel = &*record.cast::<sys::CUpti_ActivityKernel9>();
                        let name = if kernel.name.is_null() { c"kernel" } else { CStr::from_ptr(kernel.name) };
                        (name.to_string_lossy().into_owned(), kernel.start, kernel.end)
                    }
                    Kind::CUPTI_ACTIVITY_KIND_MEMCPY => {
                        let copy = &*record.cast::<sys::CUpti_ActivityMemcpy>();
                        ("memcpy".into(), copy.start, copy.end)
                    }
                    Kind::CUPTI_ACTIVITY_KIND_MEMSET => {
                        let fill = &*record.cast::<sys::CUpti_ActivityMemset>();
                        ("memset".into(), fill.start, fill.end)
                    }
                    _ => continue,
                };
                found.push(Activity { name, start, end });
            }
            dealloc(buffer, BUFFER);
        }
        ACTIVITIES.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).extend(found);
    }

    /// Whether CUPTI can be used at all.
    pub fn check() -> Result<()> {
        static READY: OnceLock<Result<(), String>> = OnceLock::new();
        let ready = READY.get_or_init(|| {
            api::register_callbacks(Some(requested), Some(completed)).map_err(|e| format!("{e:?}"))?;
            // Asked for once, so that a refusal (another profiler, missing rights) is known before the first row.
            set(true).and_then(|()| set(false)).map_err(|e| format!("{e:#}"))
        });
        ready.clone().map_err(|e| anyhow!("CUPTI cannot be used here ({e}); --tiers event,wall does without it"))
    }

    fn set(on: bool) -> Result<()> {
        for kind in KINDS {
            if on { api::enable(kind) } else { api::disable(kind) }.map_err(|e| anyhow!("{e:?}"))?;
        }
        Ok(())
    }

    /// What ran on the device while `work` did, which must end with the device idle. In order of starting.
    pub fn record(work: impl FnOnce() -> Result<()>) -> Result<Vec<Activity>> {
        let take = || std::mem::take(&mut *ACTIVITIES.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        check()?;
        set(true)?;
        let done = work();
        let flushed = api::flush_all(1).map_err(|e| anyhow!("{e:?}")); // 1: also buffers that are not full
        set(false)?;
        let mut activities = take();
        done?;
        flushed.context("CUPTI: flush")?;
        activities.sort_by_key(|a| a.start);
        Ok(activities)
    }
}

pub use collect::{check, record};
