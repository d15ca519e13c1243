//! After a pass that fails: the next passes have fewer sequences, and a request that fails again ends.

use super::request::RequestId;

/// Passes that must succeed before the limit doubles.
const SUCCESSES: usize = 64;

/// The most sequences of a pass: all, but fewer after one failed, since a device that is short of memory may have enough for
/// those.
#[derive(Debug)]
pub(super) struct Recovery {
    pub limit: usize,
    succeeded: usize,
    /// The requests of the pass that runs.
    passing: Vec<RequestId>,
    /// Requests that failed alone and were in no successful pass since.
    alone: Vec<RequestId>,
}

impl Default for Recovery {
    fn default() -> Self {
        Self { limit: usize::MAX, succeeded: 0, passing: Vec::new(), alone: Vec::new() }
    }
}

impl Recovery {
    /// A pass of these requests begins.
    pub fn begin(&mut self, requests: Vec<RequestId>) {
        self.passing = requests;
    }

    /// It succeeded.
    pub fn passed(&mut self) {
        let passing = std::mem::take(&mut self.passing);
        self.alone.retain(|id| !passing.contains(id));
        self.succeeded += 1;
        if self.succeeded == SUCCESSES {
            (self.limit, self.succeeded) = (self.limit.saturating_mul(2), 0);
        }
    }

    /// It failed. Returns the request that has failed alone for the second time, if there is one. It ends, so that all requests end
    /// even where every pass fails.
    pub fn failed(&mut self) -> Option<RequestId> {
        let passing = std::mem::take(&mut self.passing);
        (self.limit, self.succeeded) = ((passing.len() / 2).max(1), 0);
        let &[alone] = &passing[..] else { return None };
        if self.alone.contains(&alone) {
            return Some(alone);
        }
        self.alone.push(alone);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests that fail alone in turn, with their sequences intact, end nevertheless.
    #[test]
    fn who_fails_alone_twice_ends() {
        let [a, b] = [0, 1].map(RequestId);
        let mut recovery = Recovery::default();
        let mut pass = |requests: &[RequestId], succeeds: bool| {
            recovery.begin(requests.to_vec());
            let lost = if succeeds { None } else { recovery.failed() };
            if succeeds {
                recovery.passed();
            }
            (lost, recovery.limit)
        };
        assert_eq!(pass(&[a, b], false), (None, 1));
        assert_eq!((pass(&[a], false).0, pass(&[b], false).0), (None, None));
        pass(&[b], true);
        assert_eq!((pass(&[b], false).0, pass(&[a], false).0), (None, Some(a)));
        assert_eq!(pass(&[b], false).0, Some(b));
        (1..SUCCESSES).for_each(|_| assert_eq!(pass(&[], true), (None, 1)));
        assert_eq!(pass(&[], true), (None, 2));
    }
}
