//! Where we are furthest behind: the best peer, and the floor.

use crate::compare::{time, Column, Suite, Tier, Work};
use crate::markdown::{digits, or_gap, percent, ratio, Table};
use crate::stats;
use std::collections::BTreeMap;

/// As many cells as each list holds, and of each suite, lest the largest suite fill the list.
const WORST: usize = 16;
const WORST_OF_SUITE: usize = 4;

pub fn section(suites: &[Suite]) -> String {
    let mut out = String::new();
    for (source, clock) in stats::sorted(suites.iter().filter_map(|suite| Some((suite.source, tier(suite)?)))) {
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
    let header = ["best peer", "its time", "ours / best"];
    let factor = |work: &Work| work.ratio_to_best(tier);
    list("Against the best peer, µs", header, works, tier, factor, |work, factor| {
        let peer = work.best_peer(tier);
        [
            peer.map(|peer| Column::of(peer).name(&[])).unwrap_or_default(),
            or_gap(time(peer, tier), digits),
            ratio(factor),
        ]
    })
}

fn above_floor(works: &[(&str, &Work)], tier: Tier) -> String {
    let factor = |work: &Work| stats::ratio(time(work.ours(tier), tier), work.floor());
    list("Against the floor, µs", ["floor", "% of floor"], works, tier, factor, |work, factor| {
        [or_gap(work.floor(), digits), percent(1. / factor)]
    })
}

/// The works with the largest factors, ours beside `cells`.
fn list<const N: usize>(
    title: &str,
    header: [&str; N],
    works: &[(&str, &Work)],
    tier: Tier,
    factor: impl Fn(&Work) -> Option<f64>,
    cells: impl Fn(&Work, f64) -> [String; N],
) -> String {
    let mut table = Table::new(["suite", "workload", "L2", "ours"].into_iter().chain(header));
    for (suite, work, factor) in worst(works, factor) {
        let ours = or_gap(time(work.ours(tier), tier), digits);
        let work_is = [suite, work.workload, work.l2.unwrap_or_default()].map(String::from);
        table.row(work_is.into_iter().chain([ours]).chain(cells(work, factor)));
    }
    table.without_empty([2]).titled(title)
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
