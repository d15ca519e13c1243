//! Where the time of a step goes: parts that add up to what the host waits.

use crate::compare::{Column, Suite, Tier};
use crate::folder::Entry;
use crate::markdown::{digits, or_gap, percent, Table};

pub fn tables(suite: &Suite) -> String {
    suite.entries().filter(|entry| !entry.row.parts.is_empty()).map(table).collect()
}

/// A row a part; then the time that no kernel runs, and all of it.
fn table(entry: &Entry) -> String {
    let row = &entry.row;
    let busy: f64 = row.parts.iter().map(|part| part.us).sum();
    let whole = Tier::Wall.of(row).map_or(busy, |wall| wall.max(busy));
    let floor = |bytes: Option<u64>| entry.ceilings.floor_us(bytes, None);
    let mut table = Table::new(["part", "launches", "MB", "floor", "time", "of all"]);
    let mut line = |name: &str, launches: Option<u32>, bytes: Option<u64>, us: f64| {
        table.row([
            name.to_string(),
            launches.map(|n| n.to_string()).unwrap_or_default(),
            or_gap(bytes.map(|bytes| bytes as f64 / 1e6), digits),
            or_gap(floor(bytes), digits),
            digits(us),
            percent(us / whole),
        ]);
    };
    for part in &row.parts {
        line(&part.name, Some(part.launches), part.bytes, part.us);
    }
    line("no kernel", None, None, whole - busy);
    line("all, as the host waits", row.launches, row.bytes, whole);
    table.titled(&format!("Where it goes, {}, {}, µs", row.workload, Column::of(entry).name(&[])))
}
