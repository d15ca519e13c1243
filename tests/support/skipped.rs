//! Tests that cannot run here say so.

use std::fmt::Display;
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A test, or a part of it, is left out: says so on stderr, which the harness does not hold back, and how many there were
/// at the program's end. Where `CI_FULL=1` asks for everything it is a failure.
pub fn skipped(why: impl Display) {
    assert!(std::env::var_os("CI_FULL").is_none_or(|full| full != "1"), "CI_FULL=1, but left out: {why}");
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn at_end() {
        let _ = writeln!(std::io::stderr(), "left out: {} tests or parts of them", COUNT.load(Ordering::Relaxed));
    }
    extern "C" {
        fn atexit(call: extern "C" fn()) -> std::ffi::c_int;
    }
    if COUNT.fetch_add(1, Ordering::Relaxed) == 0 {
        // SAFETY: a function without arguments that does not unwind.
        let _ = unsafe { atexit(at_end) };
    }
    let _ = writeln!(std::io::stderr(), "left out: {}: {why}", std::thread::current().name().unwrap_or_default());
}
