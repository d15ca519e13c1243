//! How many tokens the draft head drafts: as many as have been worth their time.

use std::time::Duration;

/// A step of a layer takes up to 8 tokens, drafts and the certain one before them.
pub(super) const MOST: usize = 7;

/// Batches of one cost: of 1 sequence, of up to 2, up to 4, and so on.
const BATCHES: usize = 16;
/// Steps without drafts that are measured before the first draft.
const BASELINE: u32 = 3;
/// Measurements of a depth that count; the first one warms up and does not.
const MEASURED: u32 = 2;
/// What drafts must save to be preferred to none.
const WORTH: f64 = 1.02;
/// Steps after which what was not chosen is looked at again, where nothing is drafted and where something is.
const LOOK_AGAIN: [u32; 2] = [256, 64];
/// A look that changes nothing doubles the steps to the next one where nothing is drafted, so many times at most.
const DOUBLINGS: u32 = 2;
/// Steps that such a look takes: the first brings the head's cache up to date.
const LOOK: u32 = 2;

/// The chance of each drafted token to be right, if all before it are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chances {
    of: [f64; MOST],
    seen: [u32; MOST],
}

impl Default for Chances {
    /// Good enough to be tried.
    fn default() -> Self {
        Self { of: [0.7; MOST], seen: [0; MOST] }
    }
}

impl Chances {
    /// How many of `depth` drafted tokens are right on average.
    pub fn expected(&self, depth: usize) -> f64 {
        self.of[..depth].iter().scan(1., |all, chance| Some(std::mem::replace(all, *all * chance) * chance)).sum()
    }

    /// Those that one sequence begins with.
    pub fn of_a_sequence(&self) -> Self {
        Self { seen: self.seen.map(|seen| seen.min(8)), ..*self }
    }

    /// Of `drafted` tokens the first `right` were. The last `memory` draws count most.
    pub fn learn(&mut self, drafted: usize, right: usize, memory: u32) {
        for depth in 0..drafted.min(right + 1) {
            let (chance, seen) = (&mut self.of[depth], &mut self.seen[depth]);
            *seen = (*seen + 1).min(memory);
            *chance += (f64::from(depth < right) - *chance) / f64::from(*seen + 1);
        }
    }
}

/// What a step took.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    seconds: f64,
    samples: u32,
}

impl Cost {
    fn add(&mut self, seconds: f64) {
        self.samples = (self.samples + 1).min(17);
        match self.samples {
            1 | 2 => self.seconds = seconds,
            // A step that was interrupted says little.
            n => self.seconds += (seconds.min(2. * self.seconds) - self.seconds) / f64::from(n - 1),
        }
    }
}

/// The depth for the next step, from what steps took and how drafts did.
#[derive(Debug, Default)]
pub(super) struct Depths {
    pub chances: Chances,
    /// By batch, then by depth, from none on.
    costs: [[Cost; MOST + 1]; BATCHES],
    /// Steps since something else was looked at, by batch.
    since: [u32; BATCHES],
    /// Looks in a row that changed nothing where nothing is drafted, by batch.
    vain: [u32; BATCHES],
    /// Steps take so long without drafts before the first draft.
    patience: Duration,
    /// What they took so far.
    plain: Duration,
}

impl Depths {
    fn of_batch(batch: usize) -> usize {
        (batch.next_power_of_two().trailing_zeros() as usize).min(BATCHES - 1)
    }

    /// Nothing is drafted before steps took `patience`.
    pub fn after(patience: Duration) -> Self {
        Self { patience, ..Self::default() }
    }

    /// A step of `batch` sequences that drafted up to `depth` tokens for each.
    pub fn measured(&mut self, batch: usize, depth: usize, took: Duration) {
        if depth == 0 {
            self.plain = self.plain.saturating_add(took);
        }
        self.costs[Self::of_batch(batch)][depth].add(took.as_secs_f64());
    }

    /// Whether drafts for `batch` sequences save time, as far as it is known.
    pub fn pays(&self, batch: usize) -> bool {
        if self.plain < self.patience {
            return false;
        }
        let costs = &self.costs[Self::of_batch(batch)];
        let pays = |(depth, cost): (usize, &Cost)| {
            let tokens = 1. + self.chances.expected(depth);
            cost.samples >= MEASURED && tokens * costs[0].seconds > WORTH * cost.seconds
        };
        let is_known = costs[0].samples >= BASELINE && costs[1].samples >= MEASURED;
        !is_known || costs.iter().enumerate().skip(1).any(pays)
    }

    /// How many tokens are drafted for each sequence, of which each has its chances and room for so many.
    pub fn choose(&mut self, rows: &[(Chances, usize)]) -> Vec<usize> {
        let at = Self::of_batch(rows.len());
        let costs = &self.costs[at];
        if costs[0].samples < BASELINE || self.plain < self.patience || rows.iter().all(|(_, room)| *room == 0) {
            return vec![0; rows.len()];
        }
        let tokens =
            |depth: usize| -> f64 { rows.iter().map(|(chances, room)| 1. + chances.expected(depth.min(*room))).sum() };
        let (mut best, mut speed) = (0, WORTH * tokens(0) / costs[0].seconds);
        for depth in 1..=MOST {
            let is_measured = costs[depth].samples >= MEASURED;
            let seconds = if is_measured { costs[depth].seconds } else { expected(costs, depth) };
            if tokens(depth) / seconds > speed {
                (best, speed) = (depth, tokens(depth) / seconds);
            }
            if !is_measured {
                break;
            }
        }
        let (since, vain) = (&mut self.since[at], &mut self.vain[at]);
        *since += 1;
        *vain = if best > 0 { 0 } else { *vain };
        let again = LOOK_AGAIN[usize::from(best > 0)] << *vain;
        if *since > again {
            // Deeper, or where that was, none: in turn.
            let look = *since - again;
            if look == LOOK {
                *since = 0;
                *vain = if best > 0 { 0 } else { DOUBLINGS.min(*vain + 1) };
            }
            best = (best + 1).min(MOST);
        } else if best > 0 && *since == again / 2 {
            best = 0;
        }
        self.each(rows, best, at)
    }

    /// A token is worth drafting where it gains more in the time that it takes than a step does.
    fn each(&self, rows: &[(Chances, usize)], depth: usize, at: usize) -> Vec<usize> {
        let costs = &self.costs[at];
        let drafted = (rows.len() * depth).max(1) as f64;
        let tokens: f64 = rows.iter().map(|(chances, room)| 1. + chances.expected(depth.min(*room))).sum();
        // Half of what a depth adds comes with the depth, however few sequences it is for.
        let one = (costs[depth].seconds - costs[0].seconds) / (2. * drafted);
        let least =
            if rows.len() == 1 || costs[depth].seconds <= 0. { 0. } else { one * tokens / costs[depth].seconds };
        let each = rows.iter().map(|(chances, room)| {
            let gains = (1..=depth.min(*room)).map(|d| chances.expected(d) - chances.expected(d - 1));
            gains.take_while(|gain| *gain >= least).count()
        });
        each.collect()
    }
}

/// What a depth may take that was not measured: as much more as the one before it took, or at first nothing.
fn expected(costs: &[Cost], depth: usize) -> f64 {
    let before = costs[depth - 1].seconds;
    let more = if depth > 1 { before - costs[depth - 2].seconds } else { 0. };
    before + more.max(0.)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of a model whose drafts take `cost(batch, depth)` and are right with a chance of `right` each. Returns tokens
    /// a second, and the depth of each step.
    fn run(steps: usize, batch: usize, right: f64, cost: impl Fn(usize) -> f64) -> (f64, Vec<usize>) {
        let (mut depths, mut seed, mut chosen) = (Depths::default(), 7u64, vec![]);
        let mut rows = vec![(depths.chances, usize::MAX); batch];
        let (mut tokens, mut seconds) = (0, 0.);
        for _ in 0..steps {
            let each = depths.choose(&rows);
            let depth = each.iter().copied().max().unwrap_or(0);
            for (row, &drafted) in rows.iter_mut().zip(&each) {
                let mut hits = 0;
                while hits < drafted {
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    if (seed >> 33) as f64 / (1u64 << 31) as f64 > right {
                        break;
                    }
                    hits += 1;
                }
                row.0.learn(drafted, hits, 32);
                depths.chances.learn(drafted, hits, 256);
                tokens += hits + 1;
            }
            seconds += cost(depth);
            depths.measured(batch, depth, Duration::from_secs_f64(cost(depth)));
            chosen.push(depth);
        }
        (tokens as f64 / seconds, chosen)
    }

    #[test]
    fn drafts_that_cost_more_than_they_bring_are_given_up() {
        for (batch, right, each) in [(1, 0.36, 0.7), (1, 0., 0.3), (8, 0.5, 1.), (1, 0.9, 2.)] {
            let (speed, _) = run(2000, batch, right, |depth| 1. + each * depth as f64);
            assert!(speed > 0.98 * batch as f64, "{batch} {right} {each}: {speed}");
        }
    }

    #[test]
    fn good_drafts_go_as_deep_as_they_pay() {
        // The best depth of each, found by hand: tokens a second of every depth.
        for (right, each) in [(0.9, 0.05), (0.9, 0.2), (0.7, 0.1), (0.36, 0.15)] {
            let speed = |depth: usize| {
                let tokens: f64 = (0..=depth).map(|d| f64::powi(right, d as i32)).sum();
                tokens / (1. + each * depth as f64)
            };
            let best = (0..=MOST).map(speed).fold(0., f64::max);
            for batch in [1, 4] {
                let (got, _) = run(4000, batch, right, |depth| 1. + each * depth as f64);
                let got = got / batch as f64;
                assert!(got > 0.96 * best, "{right} {each}, {batch}: {got} of {best}");
            }
        }
    }

    /// Looks grow rare, and what they find is found still.
    #[test]
    fn drafts_that_never_pay_are_hardly_tried() {
        let cost = |depth: usize| 1. + 0.4 * depth as f64;
        let (_, chosen) = run(20_000, 1, 0.1, cost);
        let looks = chosen.iter().filter(|depth| **depth > 0).count();
        assert!(looks <= 2 * (20_000 / 1024 + 5), "{looks}");
        let mut depths = Depths::default();
        let mut step = |right: bool| {
            let depth = depths.choose(&[(depths.chances, usize::MAX)])[0];
            depths.measured(1, depth, Duration::from_secs_f64(cost(depth)));
            depths.chances.learn(depth, if right { depth } else { 0 }, 256);
            depth
        };
        (0..5000).for_each(|_| {
            step(false);
        });
        let first = (0..20_000).position(|_| step(true) > 1);
        assert!(first.is_some_and(|first| first < 10_000), "{first:?}");
    }

    #[test]
    fn nothing_is_drafted_before_its_time() {
        let (mut depths, ms) = (Depths::after(Duration::from_millis(100)), Duration::from_millis(1));
        for step in 0..100 {
            assert!(!depths.pays(1) && !depths.pays(2), "{step}");
            assert_eq!(depths.choose(&[(Chances::default(), 9)]), [0], "{step}");
            depths.measured(1, 0, ms);
        }
        assert!(depths.pays(1));
        assert_eq!(depths.choose(&[(Chances::default(), 9)]), [1]);
    }

    #[test]
    fn what_never_pays_is_known() {
        let (mut depths, ms) = (Depths::default(), Duration::from_millis(1));
        assert!(depths.pays(1), "nothing is known");
        for depth in 0..2 {
            (0..3).for_each(|_| depths.measured(1, depth, ms * (1 + 2 * depth as u32)));
        }
        assert!(!depths.pays(1) && depths.pays(2));
        (0..30).for_each(|_| depths.measured(1, 1, ms));
        assert!(depths.pays(1));
    }

    #[test]
    fn no_room_no_drafts() {
        let mut depths = Depths::default();
        (0..9).for_each(|_| depths.measured(2, 0, Duration::from_millis(1)));
        let good = Chances { of: [0.9; MOST], seen: [9; MOST] };
        assert_eq!(depths.choose(&[(good, 0), (good, 0)]), [0, 0]);
        assert_eq!(depths.choose(&[(good, 0), (good, 1)]), [0, 1]);
    }
}
