//! What a call passes from kernel to kernel: how many launches, and how much memory.

use crate::compare::Suite;
use crate::markdown::{digits, Table, GAP};

/// A row a work, a column a contender: launches, and megabytes at the peak.
pub fn table(suite: &Suite) -> String {
    let columns = suite.columns();
    let names = columns.iter().map(|column| column.name(&columns));
    let mut table = Table::new([suite.by.header().to_string()].into_iter().chain(names));
    for work in suite.works() {
        let cells = columns.iter().map(|column| {
            let Some(row) = work.at(column).map(|e| &e.row) else { return GAP.into() };
            let Some(bytes) = row.between_bytes else { return GAP.into() };
            let launches = row.launches.map_or(GAP.into(), |n| n.to_string());
            format!("{launches} / {}", digits(bytes as f64 / 1e6))
        });
        let cells: Vec<String> = cells.collect();
        if cells.iter().any(|cell| cell != GAP) {
            table.row([work.label.clone()].into_iter().chain(cells));
        }
    }
    table.titled("Launches / MB between them at the peak, outputs included")
}
