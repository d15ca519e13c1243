//! Where we are furthest behind: the best peer, and the floor.

use crate::compare::{time, Column, Suite, Tier, Work};
use crate::markdown::{digits, percent, ratio, Table};
use crate::stats;
use std::collections::BTreeMap;

/// As many cells as each list holds, and of each suite, lest the largest suite fill the list.
const WORST: usize = 16;
const WORST_OF_SUITE: usize = 4;

pub fn section(suites: &[Suite]) -> String {
    let mut out = String::new();
    let mut clocks: Vec<_> = suites.iter().filter_map(|suite| Some((suite.source, tier(suite)?))).collect();
    clocks.sort();
    clocks.dedup();
    for (source, clock) in clocks {
        let suites: Vec<_> = suites.iter().filter(|s| s.source == source && tier(s) == Some(clock)).collect();
        let works: Vec<_> = suites.iter().flat_map(|suite| suite.works().map(|work| (suite.name, work))).collect();
        let lists = behind_peers(&works, clock) + &above_floor(&works, clock);
        if !lists.is_empty() {
            out += &format!("\n### {source}, {}\n{lists}", clock.name());
        }
    }
    if out.is_empty() {
        out
    } else {
        format!("\n## Largest gaps\n{out}")
    }
}

/// The best clock that we have a time of: of a work one cell, not one a clock.
fn tier(suite: &Suite) -> Option<Tier> {
    suite.tiers().into_iter().find(|tier| suite.works().any(|work| work.ours(*tier).is_some()))
}

fn behind_peers(works: &[(&str, &Work)], tier: Tier) -> String {
    let mut table = Table::new(["suite", "workload", "L2", "ours", "best peer", "its time", "ours / best"]);
    for (suite, work, factor) in worst(works, |work| work.ratio_to_best(tier)) {
        let peer = work.best_peer(tier);
        table.row([
            suite.to_string(),
            work.workload.into(),
            work.l2.unwrap_or_default().into(),
            time(work.ours(tier), tier).map(digits).unwrap_or_default(),
            peer.map(|peer| Column::of(peer).name(&[])).unwrap_or_default(),
            time(peer, tier).map(digits).unwrap_or_default(),
            ratio(factor),
        ]);
    }
    list("Against the best peer, µs", table)
}

fn above_floor(works: &[(&str, &Work)], tier: Tier) -> String {
    let mut table = Table::new(["suite", "workload", "L2", "ours", "floor", "% of floor"]);
    for (suite, work, factor) in worst(works, |work| stats::ratio(time(work.ours(tier), tier), work.floor())) {
        table.row([
            suite.to_string(),
            work.workload.into(),
            work.l2.unwrap_or_default().into(),
            time(work.ours(tier), tier).map(digits).unwrap_or_default(),
            work.floor().map(digits).unwrap_or_default(),
            percent(1. / factor),
        ]);
    }
    list("Against the floor, µs", table)
}

/// The largest factors, largest first.
fn worst<'s, 'w, 'a>(
    works: &[(&'s str, &'w Work<'a>)],
    factor: impl Fn(&Work) -> Option<f64>,
) -> Vec<(&'s str, &'w Work<'a>, f64)> {
    let mut cells: Vec<_> = works.iter().filter_map(|(suite, work)| Some((*suite, *work, factor(work)?))).collect();
    cells.sort_by(|a, b| b.2.total_cmp(&a.2));
    let mut of_suite: BTreeMap<&str, usize> = BTreeMap::new();
    cells.retain(|(suite, ..)| {
        let n = of_suite.entry(suite).or_default();
        *n += 1;
        *n <= WORST_OF_SUITE
    });
    cells.truncate(WORST);
    cells
}

fn list(title: &str, table: Table) -> String {
    if table.is_empty() {
        return String::new();
    }
    format!("\n{title}:\n\n{}", table.without_empty([2]).render())
}
