//! After a pass that fails: the next passes are smaller, and a request that fails again ends.

use super::event::Event;
use super::request::RequestId;

/// Passes that must succeed before the limits double, at least.
const SUCCESSES: usize = 64;

/// The size of passes. After one failed the next are smaller, since a device that is short of memory may have enough for those.
#[derive(Debug)]
pub(super) struct Recovery {
    /// The most sequences of a pass.
    pub limit: usize,
    /// The most prompt tokens of a pass.
    pub chunk: usize,
    /// Whether completions may have drafts, which take the memory of as many more tokens.
    pub drafts: bool,
    /// That without failures.
    most_chunk: usize,
    succeeded: usize,
    /// Passes that must succeed before the limits double: more where doubling has failed, so that requests get on between two trials.
    patience: usize,
    has_doubled: bool,
    passing: Passing,
    /// Requests that failed alone, with a single token, and drew no token since.
    alone: Vec<RequestId>,
}

/// The pass that runs.
#[derive(Debug, Default)]
struct Passing {
    requests: Vec<RequestId>,
    prompt_tokens: usize,
    /// Whether it may have drafts.
    drafts: bool,
}

impl Recovery {
    pub fn new(chunk: usize) -> Self {
        Self {
            limit: usize::MAX,
            chunk,
            drafts: true,
            most_chunk: chunk,
            succeeded: 0,
            patience: SUCCESSES,
            has_doubled: false,
            passing: Default::default(),
            alone: Vec::new(),
        }
    }

    /// A pass of these requests begins, with so many prompt tokens.
    pub fn begin(&mut self, requests: Vec<RequestId>, prompt_tokens: usize) {
        self.passing = Passing { requests, prompt_tokens, drafts: false };
    }

    /// A decode step of these requests begins; `drafts` is whether its drafter makes any where it may.
    pub fn begin_step(&mut self, requests: Vec<RequestId>, drafts: bool) {
        self.passing = Passing { requests, prompt_tokens: 0, drafts: drafts && self.drafts };
    }

    /// It succeeded, with these results.
    pub fn passed(&mut self, events: &[Event]) {
        self.passing.requests.clear();
        if !self.alone.is_empty() {
            let progresses = |event: &Event, alone: &RequestId| match event {
                Event::Token { id, .. } | Event::Finished { id, .. } => id == alone,
                _ => false,
            };
            self.alone.retain(|id| !events.iter().any(|event| progresses(event, id)));
        }
        self.succeeded += 1;
        if self.succeeded >= self.patience {
            (self.limit, self.succeeded) = (self.limit.saturating_mul(2), 0);
            (self.patience, self.has_doubled) = (SUCCESSES.max(self.patience / 2), true);
            self.chunk = self.chunk.saturating_mul(2).min(self.most_chunk);
            self.drafts = true;
        }
    }

    /// It failed. Returns the request that has failed alone for the second time, if there is one. It ends, so that all requests end
    /// even where every pass fails.
    pub fn failed(&mut self) -> Option<RequestId> {
        let Passing { requests, prompt_tokens, drafts } = std::mem::take(&mut self.passing);
        (self.succeeded, self.drafts) = (0, false);
        if std::mem::take(&mut self.has_doubled) {
            self.patience = self.patience.saturating_mul(4);
        }
        // None where it failed before it began.
        if !requests.is_empty() {
            self.limit = (requests.len() / 2).max(1);
        }
        // With fewer tokens than requests the size of a piece was not the reason.
        if prompt_tokens > requests.len().max(1) {
            self.chunk = prompt_tokens / 2;
            return None;
        }
        // It may pass without them.
        if drafts {
            return None;
        }
        let &[alone] = &requests[..] else { return None };
        let Some(index) = self.alone.iter().position(|id| *id == alone) else {
            self.alone.push(alone);
            return None;
        };
        self.alone.remove(index);
        // The size of its pieces was not the reason.
        self.chunk = self.most_chunk;
        Some(alone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests that fail alone in turn, with their sequences intact, end nevertheless.
    #[test]
    fn who_fails_alone_twice_ends() {
        let [a, b] = [0, 1].map(RequestId);
        let mut recovery = Recovery::new(8);
        let mut pass = |requests: &[RequestId], succeeds: bool| {
            recovery.begin(requests.to_vec(), 0);
            let lost = if succeeds { None } else { recovery.failed() };
            if succeeds {
                let token = |id: &RequestId| Event::Token { id: *id, token: 0, logprobs: None };
                recovery.passed(&requests.iter().map(token).collect::<Vec<_>>());
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

    /// A prompt whose first pieces pass, and the next one never, ends.
    #[test]
    fn pieces_get_smaller_before_a_request_ends() {
        let (a, mut recovery) = (RequestId(0), Recovery::new(8));
        let mut fails = |tokens: usize| {
            recovery.begin(vec![a], tokens);
            let lost = recovery.failed();
            recovery.begin(vec![a], 1);
            recovery.passed(&[]);
            (lost, recovery.chunk)
        };
        assert_eq!([8, 4, 2, 1].map(&mut fails), [4, 2, 1, 1].map(|chunk| (None, chunk)));
        assert_eq!(fails(1), (Some(a), 8), "others have the full size");
    }

    /// Where larger passes fail again and again, there is more and more time between two.
    #[test]
    fn trials_of_larger_passes_become_rare() {
        let mut recovery = Recovery::new(8);
        let mut passes = || {
            recovery.begin(vec![RequestId(0), RequestId(1)], 0);
            assert_eq!((recovery.failed(), recovery.limit), (None, 1));
            let double = |recovery: &mut Recovery| {
                recovery.passed(&[]);
                recovery.limit == 2
            };
            1 + (0..).take_while(|_| !double(&mut recovery)).count()
        };
        assert_eq!([(); 4].map(|()| passes()), [64, 256, 512, 1024]);
    }

    /// The first failure may be one of its drafts alone.
    #[test]
    fn a_step_with_drafts_says_nothing_of_its_request() {
        let (a, mut recovery) = (RequestId(0), Recovery::new(8));
        let step = |recovery: &mut Recovery| {
            recovery.begin_step(vec![a], true);
            (recovery.failed(), recovery.drafts)
        };
        assert_eq!(step(&mut recovery), (None, false));
        (1..SUCCESSES).for_each(|_| recovery.passed(&[]));
        assert!(!recovery.drafts);
        recovery.passed(&[]);
        assert_eq!((recovery.limit, recovery.drafts), (2, true));
        assert_eq!([(); 3].map(|()| step(&mut recovery).0), [None, None, Some(a)], "the second and third had none");
    }

    #[test]
    fn a_failure_before_a_pass_leaves_the_limit() {
        let mut recovery = Recovery::new(8);
        recovery.begin([0, 1, 2, 3].map(RequestId).to_vec(), 0);
        assert_eq!((recovery.failed(), recovery.limit), (None, 2));
        assert_eq!((recovery.failed(), recovery.limit), (None, 2));
    }
}
