//! `timing.md`: how each clock ranks the same kernels. benches/timing.md says what that means.

use crate::compare::{Column, Group, Suite, Tier, Work, OURS};
use crate::folder::{Entry, Folder};
use crate::markdown::{digits, Table, GAP};
use std::collections::BTreeSet;

/// Of the shapes, the one whose ranks are listed.
const USUAL: &str = "16/32";
const SUITES: [&str; 2] = ["decode", "prefill"];

/// Nothing where `call` was not measured.
pub fn page(folder: &Folder, suites: &[Suite]) -> Option<String> {
    let sections =
        suites.iter().filter(|suite| SUITES.contains(&suite.name)).filter_map(|suite| section(folder, suite));
    let sections: Vec<_> = sections.collect();
    (!sections.is_empty()).then(|| {
        format!(
            "# {}: the same kernels by four clocks\n\nTimes are medians in µs a call, cold L2 cache; in brackets the rank \
             by that clock. What each clock answers: `benches/timing.md`.\n{}",
            folder.name,
            sections.concat()
        )
    })
}

fn section(folder: &Folder, suite: &Suite) -> Option<String> {
    let works: Vec<_> = suite.works().filter(|work| compared(work).len() > 1).collect();
    let first = works.first()?;
    let runs: BTreeSet<_> = works.iter().flat_map(|work| compared(work)).map(|entry| entry.file).collect();
    let runs = runs.iter().map(|file| &folder.files[*file].run);
    let runs = runs.map(|run| format!("`{}` at commit {}, {}", run.command, run.commit, run.date));
    let mut out = format!("\n## {}, by {}\n\n{}:\n\n", suite.name, suite.source, runs.collect::<Vec<_>>().join("; "));
    for tier in [Tier::Event, Tier::Call, Tier::Wall] {
        let orders = works.iter().filter_map(|work| Some((order(work, Tier::Gpu)?, order(work, tier)?)));
        let orders: Vec<_> = orders.collect();
        let fastest = orders.iter().filter(|(gpu, other)| gpu[0] != other[0]).count();
        let any = orders.iter().filter(|(gpu, other)| gpu != other).count();
        out += &format!(
            "- `{}` against `gpu`: another fastest kernel in {fastest} of {n} works, another order in {any} of {n}\n",
            tier.name(),
            n = orders.len()
        );
    }
    let has = |group: &&Group| group.works.iter().any(|work| std::ptr::eq(work, *first));
    let usual = suite.groups.iter().find(|group| group.title == USUAL && !ranks(suite, group).is_empty());
    Some(out + &usual.or_else(|| suite.groups.iter().find(has)).map(|group| ranks(suite, group)).unwrap_or_default())
}

/// The kernels of a work that both clocks of the question saw. Beside its kernels by name `auto` is one of them again.
fn compared<'a>(work: &Work<'a>) -> Vec<&'a Entry> {
    let seen = |entry: &&Entry| [Tier::Gpu, Tier::Call].iter().all(|tier| tier.of(&entry.row).is_some());
    let cold = work.l2.is_none_or(|l2| l2 == "cold");
    let named = |entry: &Entry| entry.row.contender == OURS && entry.row.variant.as_deref() != Some("auto");
    let several = work.entries.iter().any(|entry| named(entry));
    let again = |entry: &Entry| several && entry.row.contender == OURS && !named(entry);
    work.entries.iter().copied().filter(|entry| cold && seen(entry) && !again(entry)).collect()
}

/// The kernels from the fastest on, by their places in `compared`; nothing where one of them has no such time.
fn order(work: &Work, tier: Tier) -> Option<Vec<usize>> {
    let times: Vec<_> = compared(work).iter().map(|entry| tier.of(&entry.row)).collect::<Option<_>>()?;
    let mut order: Vec<_> = (0..times.len()).collect();
    order.sort_by(|a, b| f64::total_cmp(&times[*a], &times[*b]));
    Some(order)
}

fn ranks(suite: &Suite, group: &Group) -> String {
    let tiers = Tier::RANKED;
    let header = [suite.by.header(), "kernel"].into_iter().chain(tiers.map(Tier::name));
    let mut table = Table::new(header);
    for work in group.works.iter().filter(|work| compared(work).len() > 1) {
        for entry in compared(work) {
            let rank = |tier: Tier| {
                let us = tier.of(&entry.row)?;
                let faster = |other: &&Entry| tier.of(&other.row).is_some_and(|time| time < us);
                Some(format!("{} ({})", digits(us), 1 + compared(work).into_iter().filter(faster).count()))
            };
            let cells = tiers.map(|tier| rank(tier).unwrap_or_else(|| GAP.into()));
            table.row([work.label.clone(), Column::of(entry).name(&[])].into_iter().chain(cells));
        }
    }
    table.titled(&group.title)
}
