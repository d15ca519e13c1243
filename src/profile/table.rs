//! Statistics of a launch.

use super::clock::Time;
use super::{Clock, Launch, Warp};
use serde::Serialize;
use std::collections::{BTreeSet, HashMap};

/// Cycles of a launch by role and scope.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Table {
    /// Blocks that ran.
    pub blocks: usize,
    /// Warps that ran.
    pub warps: usize,
    /// Multiprocessors they ran on.
    pub multiprocessors: usize,
    /// Events recorded.
    pub events: usize,
    /// Events that found no room: where this is not zero the end of some warps is missing from the scopes, and counted
    /// as unstamped.
    pub dropped: u64,
    /// Microseconds from the first warp's begin to the last one's end, to about twice the step of [`Table::clock`].
    /// `None` without a clock.
    pub span_us: Option<f64>,
    /// The same in cycles.
    pub span_cycles: Option<f64>,
    /// `None` where the global timer did not move during the launch.
    pub clock: Option<Clock>,
    /// In the order in which they appear.
    pub roles: Vec<RoleRow>,
}

/// The warps of one role.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RoleRow {
    /// The role.
    pub role: &'static str,
    /// How many there are.
    pub warps: usize,
    /// The median life of one, in cycles.
    pub median_lifetime: u64,
    /// The lives of all, in cycles.
    pub total_lifetime: u64,
    /// The part of all lives in no scope: stamping, and what a kernel has no scope for.
    pub unstamped: f64,
    /// In the order in which they first appear in a warp.
    pub scopes: Vec<ScopeRow>,
}

/// One scope in the warps of one role.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScopeRow {
    /// The scope.
    pub scope: &'static str,
    /// Passages through it.
    pub count: usize,
    /// The median length of one, in cycles. Percentiles are by nearest rank.
    pub median: u64,
    /// The 95th percentile.
    pub p95: u64,
    /// The longest.
    pub max: u64,
    /// All of them in cycles, less the scopes inside them.
    pub total: u64,
    /// `total` over the role's `total_lifetime`: with [`RoleRow::unstamped`] these add up to one.
    pub share: f64,
}

impl Launch {
    /// The statistics.
    pub fn table(&self) -> Table {
        let time = Time::new(self);
        let mut order = vec![];
        let mut roles = HashMap::<&str, Vec<&Warp>>::new();
        for warp in &self.warps {
            let warps = roles.entry(warp.role).or_default();
            if warps.is_empty() {
                order.push(warp.role);
            }
            warps.push(warp);
        }
        let ns = |warp: &Warp, i: usize| time.ns(warp, warp.cycles[i], time.first_ns);
        let first = self.warps.iter().map(|w| ns(w, 0)).fold(f64::INFINITY, f64::min);
        let last = self.warps.iter().map(|w| ns(w, 1)).fold(f64::NEG_INFINITY, f64::max);
        Table {
            blocks: self.warps.iter().map(|w| w.block).collect::<BTreeSet<_>>().len(),
            warps: self.warps.len(),
            multiprocessors: self.warps.iter().map(|w| w.sm).collect::<BTreeSet<_>>().len(),
            events: self.warps.iter().map(|w| w.events.len()).sum(),
            dropped: self.warps.iter().map(|w| u64::from(w.dropped)).sum(),
            span_us: time.clock.map(|_| (last - first) / 1e3),
            span_cycles: time.clock.map(|c| (last - first) * c.ghz),
            clock: time.clock,
            roles: order.iter().map(|role| RoleRow::new(role, &roles[role])).collect(),
        }
    }
}

impl RoleRow {
    fn new(role: &'static str, warps: &[&Warp]) -> Self {
        /// Lengths of a scope's passages, their sum without inner scopes, and when it first begins in any warp.
        #[derive(Default)]
        struct Sum {
            lengths: Vec<u64>,
            total: u64,
            first: Option<(u64, usize)>,
        }
        let mut scopes = HashMap::<&'static str, Sum>::new();
        for warp in warps {
            for (i, (event, own)) in warp.events.iter().zip(own_cycles(warp)).enumerate() {
                let sum = scopes.entry(event.scope).or_default();
                sum.lengths.push(event.cycles);
                sum.total += own;
                let place = (event.begin, i);
                sum.first = Some(sum.first.map_or(place, |first| first.min(place)));
            }
        }
        let mut lives: Vec<u64> = warps.iter().map(|w| w.lifetime()).collect();
        lives.sort_unstable();
        let total_lifetime = lives.iter().sum::<u64>();
        let share = |cycles: u64| if total_lifetime > 0 { cycles as f64 / total_lifetime as f64 } else { 0.0 };
        let mut scopes: Vec<_> = scopes.into_iter().collect();
        scopes.sort_by_key(|(_, sum)| sum.first);
        let stamped = scopes.iter().map(|(_, sum)| sum.total).sum::<u64>();
        let scopes = scopes.into_iter().map(|(scope, Sum { mut lengths, total, .. })| {
            lengths.sort_unstable();
            let [median, p95, max] = [0.5, 0.95, 1.0].map(|part| percentile(&lengths, part));
            ScopeRow { scope, count: lengths.len(), median, p95, max, total, share: share(total) }
        });
        Self {
            role,
            warps: warps.len(),
            median_lifetime: percentile(&lives, 0.5),
            total_lifetime,
            unstamped: share(total_lifetime.saturating_sub(stamped)),
            scopes: scopes.collect(),
        }
    }
}

/// The cycles of each event without those of the events inside it.
fn own_cycles(warp: &Warp) -> Vec<u64> {
    let mut own: Vec<u64> = warp.events.iter().map(|e| e.cycles).collect();
    let mut open: Vec<usize> = vec![];
    for (i, event) in warp.events.iter().enumerate() {
        while open.last().is_some_and(|&outer| warp.events[outer].end() <= event.begin) {
            open.pop();
        }
        if let Some(&outer) = open.last() {
            let inside = event.end().min(warp.events[outer].end()) - event.begin;
            own[outer] = own[outer].saturating_sub(inside);
        }
        open.push(i);
    }
    own
}

/// By nearest rank; 0 of nothing.
fn percentile(sorted: &[u64], part: f64) -> u64 {
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(0)
}

impl Table {
    /// The table as JSON: the fields of this struct by their names, `null` for `None`.
    pub fn json(&self) -> String {
        let table = serde_json::to_value(self).expect("numbers and names are JSON");
        format!("{table:#}\n")
    }
}
