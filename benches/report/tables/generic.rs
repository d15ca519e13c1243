//! Suites that this program does not know: all that their rows say.

use crate::compare::{Column, Suite, Tier};
use crate::markdown::{digits, error, or_gap, Table};
use crate::rates::copy_rate;

pub fn table(suite: &Suite) -> String {
    let header = ["workload", "L2", "contender", "gpu", "event", "call", "wall", "host", "floor", "GB/s", "launches"];
    let mut table = Table::new(header.into_iter().chain(["errors", "note"]));
    for entry in suite.entries() {
        let row = &entry.row;
        let [gpu, event, call, wall, host] =
            [Tier::Gpu, Tier::Event, Tier::Call, Tier::Wall, Tier::Host].map(|tier| or_gap(tier.of(row), digits));
        let best = Tier::RANKED.into_iter().find(|tier| tier.of(row).is_some());
        let rate = best.and_then(|tier| copy_rate(entry, tier).value);
        let errors = row.error.iter().map(|(output, e)| format!("{output} {}", e.map_or("NaN".into(), error)));
        table.row([
            row.workload.clone(),
            row.l2.clone().unwrap_or_default(),
            Column::of(entry).name(&[]),
            gpu,
            event,
            call,
            wall,
            host,
            or_gap(row.floor_us, digits),
            or_gap(rate, digits),
            row.launches.map(|n| n.to_string()).unwrap_or_default(),
            errors.collect::<Vec<_>>().join(", "),
            row.note.clone(),
        ]);
    }
    table.without_empty([1].into_iter().chain(3..13)).titled("µs")
}
