//! Ratios to the peers: all in one grid, and their geometric means.

use crate::compare::{states, Suite, Work};
use crate::markdown::{comma_l2, or_gap, ratio, Table, GAP};
use crate::stats::{distinct, geomean};

/// Ours over the best peer, shapes by workloads; a grid a clock.
pub fn overview(suite: &Suite) -> String {
    let mut out = String::new();
    let states = states(suite.works());
    for (tier, l2) in suite.tiers().into_iter().flat_map(|tier| states.iter().map(move |l2| (tier, *l2))) {
        let mut works: Vec<_> = suite.works().filter(|work| work.l2 == l2).collect();
        works.sort_by_key(|work| (work.shape.batch, work.shape.tokens, work.workload));
        let labels = distinct(works.iter().map(|work| work.label.as_str()));
        let mut table = Table::new(["heads"].into_iter().chain(labels.iter().copied()));
        for group in &suite.groups {
            let at = |label: &&str| group.works.iter().find(|work| work.l2 == l2 && work.label == *label);
            let cells: Vec<_> =
                labels.iter().map(|label| at(label).and_then(|work| work.ratio_to_best(tier))).collect();
            if cells.iter().any(Option::is_some) {
                let title = [group.title.clone()].into_iter();
                table.row(title.chain(cells.into_iter().map(|cell| or_gap(cell, ratio))));
            }
        }
        out += &table.titled(&format!("Ours over the best peer, {}{}", tier.name(), comma_l2(l2)));
    }
    out
}

/// Geometric means of our time over each peer's and over the best, by shape and overall; a table a clock.
pub fn geomeans(suite: &Suite) -> String {
    let peers = suite.peers();
    let states = states(suite.works());
    let mut out = String::new();
    for tier in suite.tiers() {
        let header = ["heads", "L2"].into_iter().chain(peers.iter().copied()).chain(["best peer"]);
        let mut table = Table::new(header);
        let mut line = |title: &str, l2: Option<&str>, works: &mut dyn Iterator<Item = &Work>| {
            let works: Vec<_> = works.filter(|work| work.l2 == l2).collect();
            let mean = |ratios: Vec<f64>| match geomean(ratios.iter().copied()) {
                Some(mean) => format!("{} ({})", ratio(mean), ratios.len()),
                None => GAP.into(),
            };
            let mut cells = vec![title.to_string(), l2.unwrap_or_default().into()];
            cells.extend(peers.iter().map(|p| mean(works.iter().filter_map(|w| w.ratio(p, tier)).collect())));
            cells.push(mean(works.iter().filter_map(|w| w.ratio_to_best(tier)).collect()));
            if cells[2..].iter().any(|cell| cell != GAP) {
                table.row(cells);
            }
        };
        for l2 in &states {
            if suite.groups.len() > 1 {
                suite.groups.iter().for_each(|group| line(&group.title, *l2, &mut group.works.iter()));
            }
            line("all", *l2, &mut suite.works());
        }
        let title = format!("Geometric means of ours over each peer's (of so many cells), {}", tier.name());
        out += &table.without_empty([1]).titled(&title);
    }
    out
}
