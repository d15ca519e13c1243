//! How many times as fast as the tensor operations of a framework.

use crate::compare::{states, time, Suite};
use crate::markdown::{comma_l2, digits, or_gap, Table};
use crate::stats::ratio;

/// A table a clock: each baseline's time and the speedup over it.
pub fn tables(suite: &Suite) -> String {
    let baselines = suite.baselines();
    let names: Vec<_> = baselines.iter().map(|column| column.name(&baselines)).collect();
    let mut out = String::new();
    let states = states(suite.works());
    for (tier, l2) in suite.tiers().into_iter().flat_map(|tier| states.iter().map(move |l2| (tier, *l2))) {
        let columns = names.iter().flat_map(|name| [name.clone(), format!("× {name}")]);
        let header = ["heads".to_string(), suite.by.header().into(), "candle-gdn".into()];
        let mut table = Table::new(header.into_iter().chain(columns));
        for group in &suite.groups {
            for work in group.works.iter().filter(|work| work.l2 == l2) {
                let ours = time(work.ours(tier), tier);
                let theirs: Vec<_> = baselines.iter().map(|column| time(work.at(column), tier)).collect();
                if ours.is_none() || theirs.iter().all(Option::is_none) {
                    continue;
                }
                let cells = theirs.iter().flat_map(|us| [or_gap(*us, digits), or_gap(ratio(*us, ours), digits)]);
                table.row([group.title.clone(), work.label.clone(), or_gap(ours, digits)].into_iter().chain(cells));
            }
        }
        out += &table.titled(&format!("Speedup over tensor operations, {}, µs{}", tier.name(), comma_l2(l2)));
    }
    out
}
