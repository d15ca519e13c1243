//! `summary.md`: at most 25 lines for a README to take.

use crate::compare::{time, Suite, Tier, Work};
use crate::folder::Folder;
use crate::markdown::{comma_l2, digits, or_gap, Table};
use std::collections::BTreeSet;

/// Of the shapes, Qwen3-Next's if it is there.
const USUAL: &str = "16/32";

/// The suites shown, and of their workloads those that fit.
const SHOWN: [(&str, &str); 3] = [("decode", "B="), ("prefill", ""), ("rule", "")];

/// Columns that fit a page.
const COLUMNS: usize = 10;

pub fn summary(folder: &Folder, suites: &[Suite]) -> String {
    let parts = SHOWN.into_iter().filter_map(|(name, prefix)| part(folder, suites, name, prefix));
    parts.collect::<Vec<_>>().join("\n")
}

/// Ours, the best peer's and the floor of one suite: of the newest file that has peers, else of the newest.
fn part(folder: &Folder, suites: &[Suite], name: &str, prefix: &str) -> Option<String> {
    let candidates = suites.iter().filter(|suite| suite.name == name && suite.tiers().iter().any(|t| ours(suite, *t)));
    let suite = candidates.max_by_key(|suite| {
        let newest = suite.entries().map(|e| e.file).max();
        (!suite.peers().is_empty(), newest, suite.source)
    })?;
    let tier = suite.tiers().into_iter().find(|tier| ours(suite, *tier))?;
    let usual = suite.groups.iter().find(|group| group.title == USUAL);
    let group = usual.or_else(|| suite.groups.iter().max_by_key(|group| group.works.len()))?;
    let l2 = group.works.iter().find(|work| work.ours(tier).is_some())?.l2;
    let mut works: Vec<_> = group.works.iter().filter(|work| work.l2 == l2 && work.ours(tier).is_some()).collect();
    works.truncate(COLUMNS);

    let mut table = Table::of_rows(works.iter().map(|work| format!("{prefix}{}", work.label)));
    let mut line = |title: &str, cell: &dyn Fn(&Work) -> Option<f64>| {
        let cells: Vec<_> = works.iter().map(|work| cell(work)).collect();
        if cells.iter().any(Option::is_some) {
            table.row([title.to_string()].into_iter().chain(cells.into_iter().map(|cell| or_gap(cell, digits))));
        }
    };
    line("candle-gdn, µs", &|work| time(work.ours(tier), tier));
    line("best peer, µs", &|work| time(work.best_peer(tier), tier));
    line("floor, µs", &|work| work.floor());
    let shown = || works.iter().flat_map(|work| [work.ours(tier), work.best_peer(tier)]).flatten();
    let files: BTreeSet<_> = shown().map(|entry| entry.file).collect();
    let runs = || files.iter().map(|file| &folder.files[*file].run);
    let best: BTreeSet<_> = works.iter().filter_map(|w| w.best_peer(tier)).map(|e| e.row.contender.as_str()).collect();
    let best = if best.is_empty() { String::new() } else { format!("; best peer of {}", joined(best)) };
    let l2 = comma_l2(l2);
    let title = if group.title.is_empty() { name.into() } else { format!("{name} {}", group.title) };
    Some(format!(
        "{title}, {} time{l2}, {}{best} ({}; commit {}, {}):\n\n{}",
        tier.name(),
        joined(runs().map(|run| run.machine.device.as_str()).collect()),
        joined(runs().map(|run| format!("`{}`", run.command)).collect()),
        joined(runs().map(|run| run.commit.as_str()).collect()),
        joined(runs().map(|run| run.date.as_str()).collect()),
        table.render()
    ))
}

fn joined(names: BTreeSet<impl Into<String>>) -> String {
    names.into_iter().map(Into::into).collect::<Vec<_>>().join(", ")
}

fn ours(suite: &Suite, tier: Tier) -> bool {
    suite.works().any(|work| work.ours(tier).is_some())
}
