//! The table that compares: a row a workload, a column a contender; one table a shape and clock.

use crate::compare::{time, Column, Group, Suite, Tier, Work, OURS};
use crate::folder::Entry;
use crate::markdown::{digits, error, or_gap, percent, ratio, Table, GAP};
use crate::rates::{copy_rate, matmul_rate, token_rate, Rate};
use crate::stats;
use std::collections::BTreeMap;

/// How speed is told besides times.
#[derive(Clone, Copy)]
pub enum Rates {
    None,
    Copy,
    Matmul,
    Tokens,
}

/// Every shape's tables, clock by clock, and what the contenders do.
pub fn tables(suite: &Suite, rates: Rates) -> String {
    let mut out = String::new();
    for group in &suite.groups {
        if !group.title.is_empty() {
            out += &format!("\n#### {}\n", group.title);
        }
        let mut tiers = suite.tiers();
        tiers.retain(|tier| group.works.iter().flat_map(|work| &work.entries).any(|e| tier.of(&e.row).is_some()));
        if tiers.is_empty() {
            out += "\nNothing was timed.\n";
        }
        for tier in tiers {
            out += &format!("\n{}, µs:\n\n{}", clocks(suite, tier), table(suite, group, tier, rates));
        }
    }
    out + &contenders(suite)
}

fn clocks(suite: &Suite, tier: Tier) -> &'static str {
    match tier {
        Tier::Wall if suite.entries().any(|e| e.row.host.is_some()) => "wall and host",
        tier => tier.name(),
    }
}

/// One shape, one clock.
fn table(suite: &Suite, group: &Group, tier: Tier, rates: Rates) -> String {
    let (mine, others): (Vec<_>, Vec<_>) = group.columns().into_iter().partition(|c| c.contender == OURS);
    let all: Vec<Column> = mine.iter().chain(&others).cloned().collect();
    let peers = suite.peers();
    // Rates of a clock that counts the host's work would tell more of the host than of the kernel.
    let rates = if matches!(tier, Tier::Call | Tier::Wall) && !suite.source.is_cpu() { None } else { Some(rates) };
    let host = tier == Tier::Wall && suite.entries().any(|e| e.row.host.is_some());
    let ratios = !mine.is_empty() && !peers.is_empty();

    let mut table: Option<Table> = None;
    // Contenders keep their columns; a rate that nothing has, or an L2 that nothing names, goes.
    let optional = |name: &String| name == "L2" || name == "floor" || name.ends_with("/s") || name.starts_with("% of");
    let mut gaps = vec![];
    for work in &group.works {
        let mut row = Cells::default();
        row.add(suite.by.header(), work.label.clone());
        row.add("L2", work.l2.unwrap_or_default().into());
        if rates.is_some() {
            row.add("floor", or_gap(work.floor(), digits));
        }
        for column in &mine {
            row.time(&column.name(&all), work.at(column), tier, mine.len() > 1, host);
        }
        if let Some(rates) = rates {
            row.rates(work, tier, rates, mine.is_empty());
        }
        for peer in &peers {
            let columns = others.iter().filter(|c| c.contender == *peer);
            columns.clone().for_each(|c| row.time(&c.name(&all), work.at(c), tier, false, host));
            // One that has no row of this shape keeps its place.
            if columns.count() == 0 {
                row.time(peer, None, tier, false, host);
            }
        }
        if ratios {
            peers.iter().for_each(|peer| row.add(&format!("/ {peer}"), or_gap(work.ratio(peer, tier), ratio)));
            if peers.len() > 1 {
                row.add("/ best", or_gap(work.ratio_to_best(tier), ratio));
            }
        }
        gaps = (0..row.headers.len()).filter(|&c| optional(&row.headers[c])).collect();
        table.get_or_insert_with(|| Table::new(row.headers)).row(row.cells);
    }
    table.map(|table| table.without_empty(gaps).render()).unwrap_or_default()
}

#[derive(Default)]
struct Cells {
    headers: Vec<String>,
    cells: Vec<String>,
}

impl Cells {
    fn add(&mut self, header: &str, cell: String) {
        self.headers.push(header.into());
        self.cells.push(cell);
    }

    fn time(&mut self, name: &str, entry: Option<&Entry>, tier: Tier, mark_auto: bool, host: bool) {
        let mut cell = or_gap(time(entry, tier), digits);
        if mark_auto && cell != GAP && entry.is_some_and(Entry::is_auto) {
            cell.push('*');
        }
        if host {
            self.add(&format!("{name} wall"), cell);
            self.add(&format!("{name} host"), or_gap(time(entry, Tier::Host), digits));
        } else {
            self.add(name, cell);
        }
    }

    /// Of ours; where we have no part in it, of the fastest.
    fn rates(&mut self, work: &Work, tier: Tier, rates: Rates, no_ours: bool) {
        let entry = if no_ours { work.best_peer(tier) } else { work.ours(tier) };
        let mut ceiling = |rate: fn(&Entry, Tier) -> Rate, unit: &str, of: &str| {
            let rate = entry.map(|e| rate(e, tier)).unwrap_or_default();
            self.add(unit, or_gap(rate.value, digits));
            self.add(of, or_gap(rate.of_ceiling, percent));
        };
        match rates {
            Rates::Copy => ceiling(copy_rate, "GB/s", "% of copy"),
            Rates::Matmul => ceiling(matmul_rate, "TFLOP/s", "% of matmul"),
            Rates::Tokens => self.add("tokens/s", or_gap(entry.and_then(|e| token_rate(e, tier)), digits)),
            Rates::None => {}
        }
        self.add("% of floor", or_gap(stats::ratio(work.floor(), time(entry, tier)), percent));
    }
}

/// What a call of each contender does and how exact it was, over all rows of the suite, and the notes.
fn contenders(suite: &Suite) -> String {
    let columns = suite.columns();
    let outputs = stats::sorted(suite.entries().flat_map(|e| e.row.error.keys().map(String::as_str)));
    let header = ["contender", "includes", "launches"].map(String::from);
    let mut table = Table::new(header.into_iter().chain(outputs.iter().map(|o| format!("worst error of {o}"))));
    let mut notes = String::new();
    for column in &columns {
        let rows: Vec<_> = suite.entries().filter(|e| Column::of(e) == *column).map(|e| &e.row).collect();
        let includes = stats::sorted(rows.iter().filter_map(|row| row.includes.as_deref())).join(" / ");
        let launches = rows.iter().filter_map(|row| row.launches);
        let launches = match (launches.clone().min(), launches.max()) {
            (Some(min), Some(max)) if min < max => format!("{min} to {max}"),
            (Some(n), _) => n.to_string(),
            _ => GAP.into(),
        };
        let name = column.name(&columns);
        let worst = |output: &&str| {
            let errors = rows.iter().filter_map(|row| row.error.get(*output));
            match errors.clone().any(Option::is_none) {
                true => "NaN".into(),
                false => or_gap(errors.copied().flatten().reduce(f64::max), error),
            }
        };
        table.row([name.clone(), includes, launches].into_iter().chain(outputs.iter().map(worst)));
        notes += &said(&name, &rows.iter().map(|row| row.note.as_str()).collect::<Vec<_>>());
    }
    let mut out = String::new();
    if suite.entries().any(|e| e.row.includes.is_some() || e.row.launches.is_some() || !e.row.error.is_empty()) {
        out += &table.without_empty(1..3 + outputs.len()).titled("A call of each, and its worst errors");
    }
    if !notes.is_empty() {
        out += &format!("\nNotes:\n\n{notes}");
    }
    out
}

/// Each different note once, with its number.
fn said(name: &str, notes: &[&str]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    notes.iter().filter(|note| !note.is_empty()).for_each(|note| *counts.entry(note).or_default() += 1);
    let all = notes.len();
    counts.into_iter().map(|(note, n)| format!("- {name}: {note} ({n} of {all} rows)\n")).collect()
}
