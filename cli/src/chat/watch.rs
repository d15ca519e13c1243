//! A bound on the memory that a template takes.

use crate::status;
use std::sync::mpsc::{channel, RecvTimeoutError};
use std::thread::spawn;
use std::time::Duration;

/// Bytes that rendering may take.
const MOST: u64 = 384 << 20;
const PAUSE: Duration = Duration::from_millis(2);

/// What `render` returns. minijinja adds lists to each other without a look at its fuel, so a list that is doubled again and again takes
/// all memory, and no callback sees it: from outside, another thread ends the program. Only Linux tells how much memory it has.
pub fn bounded<R>(render: impl FnOnce() -> R) -> R {
    let Some(before) = taken() else { return render() };
    let (running, ended) = channel::<()>();
    let watch = spawn(move || {
        while ended.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
            if taken().is_some_and(|now| now > before + MOST) {
                status!("error: the chat template: expected lists of at most {} MiB", MOST >> 20);
                std::process::exit(1);
            }
        }
    });
    let out = render();
    drop(running);
    // Nothing in it panics.
    let _ = watch.join();
    out
}

/// Bytes of memory that the process has written.
fn taken() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
