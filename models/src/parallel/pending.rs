//! Calls of a rank that its device may not have finished.

use std::time::{Duration, Instant};

/// When the last of them began; nothing where all have finished. Other work of the device does not count: a rank that makes no
/// call waits for nobody.
#[derive(Debug, Default)]
pub(super) struct Pending(Option<Instant>);

impl Pending {
    /// A call, or a graph that has calls, was given to the device at `now`.
    pub fn begin(&mut self, now: Instant) {
        self.0 = Some(now);
    }

    /// What [`begin`](Self::begin) reported at `begun` has finished, and all calls before it.
    pub fn finish(&mut self, begun: Instant) {
        self.0 = self.0.filter(|last| *last != begun);
    }

    /// Whether a rank is missing at `now`: a call is older than `limit`, and the device works still. A device that is idle has finished
    /// all calls.
    pub fn are_late(&mut self, now: Instant, limit: Duration, is_busy: impl FnOnce() -> bool) -> bool {
        let is_old = self.0.is_some_and(|begun| now.duration_since(begun) > limit);
        let are_late = is_old && is_busy();
        if is_old && !are_late {
            self.0 = None;
        }
        are_late
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn only_calls_are_late() {
        let start = Instant::now();
        let second = |n| start + Duration::from_secs(n);
        let mut pending = Pending::default();
        assert!(!pending.are_late(second(600), LIMIT, || true), "weights are loaded, and no call was made");
        pending.begin(second(600));
        assert!(!pending.are_late(second(660), LIMIT, || true), "within the limit, which begins with the call");
        assert!(pending.are_late(second(661), LIMIT, || true));
        pending.begin(second(662));
        assert!(!pending.are_late(second(700), LIMIT, || panic!("a capture does not permit the question")));
        pending.finish(second(600));
        assert!(pending.are_late(second(723), LIMIT, || true), "a later call has not finished");
        pending.finish(second(662));
        assert!(!pending.are_late(second(900), LIMIT, || true), "all have finished, and others give the device work");
        pending.begin(second(901));
        assert!(!pending.are_late(second(962), LIMIT, || false));
        assert!(!pending.are_late(second(963), LIMIT, || true), "an idle device had finished it");
    }
}
