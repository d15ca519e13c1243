//! How many tokens the draft head drafts: as many as have saved time.

use std::time::Duration;

/// The most drafts of a step: a layer's step supports up to 8 tokens, drafts and the certain one before them.
pub(crate) const MOST: usize = 7;

/// Classes of batches with one cost: 1 sequence, up to 2, up to 4, and so on.
const BATCHES: usize = 16;
/// Steps without drafts that are measured before the first draft.
const BASELINE: u32 = 3;
/// Measurements that a depth needs; the first one warms up and does not count.
const MEASURED: u32 = 2;
/// The least speed-up by which drafts are preferred to none.
const LEAST_GAIN: f64 = 1.02;
/// Steps between two trials of another depth, where nothing is drafted and where something is.
const TRIAL_AFTER: [u32; 2] = [256, 64];
/// Where nothing is drafted, a trial that changes nothing doubles the steps to the next one, at most this many times.
const DOUBLINGS: u32 = 2;
/// Steps of a trial: the first brings the head's cache up to date.
const TRIAL: u32 = 2;

/// The chance that each drafted token is accepted, if all before it are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chances {
    by_depth: [f64; MOST],
    seen: [u32; MOST],
}

impl Default for Chances {
    /// Good enough to be tried.
    fn default() -> Self {
        Self { by_depth: [0.7; MOST], seen: [0; MOST] }
    }
}

impl Chances {
    /// How many of `depth` drafted tokens are accepted on average.
    pub fn expected(&self, depth: usize) -> f64 {
        self.by_depth[..depth].iter().scan(1., |all, chance| Some(std::mem::replace(all, *all * chance) * chance)).sum()
    }

    /// The chances that a new sequence begins with.
    pub fn for_a_sequence(&self) -> Self {
        Self { seen: self.seen.map(|seen| seen.min(8)), ..*self }
    }

    /// The first `accepted` of `drafted` tokens were accepted. The last `memory` drafts count most.
    pub fn learn(&mut self, drafted: usize, accepted: usize, memory: u32) {
        for depth in 0..drafted.min(accepted + 1) {
            let (chance, seen) = (&mut self.by_depth[depth], &mut self.seen[depth]);
            *seen = (*seen + 1).min(memory);
            *chance += (f64::from(depth < accepted) - *chance) / f64::from(*seen + 1);
        }
    }
}

/// The time of a step.
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

/// Chooses the depth of the next step from the times of steps and the acceptance of drafts.
#[derive(Debug, Default)]
pub(crate) struct Depths {
    pub chances: Chances,
    /// By batch, then by depth, from none on.
    costs: [[Cost; MOST + 1]; BATCHES],
    /// Steps since the last trial, by batch.
    since: [u32; BATCHES],
    /// Trials in a row that changed nothing where nothing is drafted, by batch.
    vain: [u32; BATCHES],
    /// The time of steps without drafts before the first draft.
    patience: Duration,
    /// Their time so far.
    plain: Duration,
}

impl Depths {
    fn class(batch: usize) -> usize {
        (batch.next_power_of_two().trailing_zeros() as usize).min(BATCHES - 1)
    }

    /// Nothing is drafted before steps have taken `patience`.
    pub fn after(patience: Duration) -> Self {
        Self { patience, ..Self::default() }
    }

    /// A step of `batch` sequences with up to `depth` drafts each needed this time.
    pub fn measured(&mut self, batch: usize, depth: usize, time: Duration) {
        if depth == 0 {
            self.plain = self.plain.saturating_add(time);
        }
        self.costs[Self::class(batch)][depth].add(time.as_secs_f64());
    }

    /// Whether drafts for `batch` sequences save time, as far as is known.
    pub fn pays(&self, batch: usize) -> bool {
        if self.plain < self.patience {
            return false;
        }
        let costs = &self.costs[Self::class(batch)];
        let pays = |(depth, cost): (usize, &Cost)| {
            let tokens = 1. + self.chances.expected(depth);
            cost.samples >= MEASURED && tokens * costs[0].seconds > LEAST_GAIN * cost.seconds
        };
        let is_known = costs[0].samples >= BASELINE && costs[1].samples >= MEASURED;
        !is_known || costs.iter().enumerate().skip(1).any(pays)
    }

    /// How many tokens are drafted for each sequence, given its chances and the most drafts of use to it.
    pub fn choose(&mut self, rows: &[(Chances, usize)]) -> Vec<usize> {
        let class = Self::class(rows.len());
        let costs = &self.costs[class];
        if costs[0].samples < BASELINE || self.plain < self.patience || rows.iter().all(|(_, room)| *room == 0) {
            return vec![0; rows.len()];
        }
        let tokens =
            |depth: usize| -> f64 { rows.iter().map(|(chances, room)| 1. + chances.expected(depth.min(*room))).sum() };
        let (mut best, mut speed) = (0, LEAST_GAIN * tokens(0) / costs[0].seconds);
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
        let (since, vain) = (&mut self.since[class], &mut self.vain[class]);
        *since += 1;
        *vain = if best > 0 { 0 } else { *vain };
        let again = TRIAL_AFTER[usize::from(best > 0)] << *vain;
        if *since > again {
            // Deeper first, then none, in turn.
            let step = *since - again;
            // Another text may have made `again` less than the steps so far: then the trial is shorter.
            if step >= TRIAL {
                *since = 0;
                *vain = if best > 0 { 0 } else { DOUBLINGS.min(*vain + 1) };
            }
            best = (best + 1).min(MOST);
        } else if best > 0 && *since == again / 2 {
            best = 0;
        }
        self.split(rows, best, class)
    }

    /// Drafts a token where it gains more tokens a second than a step does.
    fn split(&self, rows: &[(Chances, usize)], depth: usize, class: usize) -> Vec<usize> {
        let costs = &self.costs[class];
        let drafted = (rows.len() * depth).max(1) as f64;
        let tokens: f64 = rows.iter().map(|(chances, room)| 1. + chances.expected(depth.min(*room))).sum();
        // Half of the time that a depth adds does not depend on the number of sequences.
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

/// The time of a depth that was not measured: the one before it adds the same again, or at first nothing.
fn expected(costs: &[Cost], depth: usize) -> f64 {
    let before = costs[depth - 1].seconds;
    let more = if depth > 1 { before - costs[depth - 2].seconds } else { 0. };
    before + more.max(0.)
}

#[cfg(test)]
#[path = "depth_tests.rs"]
mod tests;
