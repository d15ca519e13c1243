//! The contest's suites have some hundred workloads: a summary by size.

use crate::compare::{time, Suite, Tier, Work, OURS};
use crate::markdown::{digits, or_gap, ratio, Table, GAP};
use crate::record::Row;
use crate::stats::{distinct, geomean, median};
use std::collections::BTreeMap;

/// Upper ends of the buckets of total tokens.
const TOKENS: [usize; 5] = [64, 128, 256, 1024, 8192];

/// Median times by size, clock by clock, then what passed.
pub fn summary(suite: &Suite) -> String {
    let buckets = buckets(suite);
    let peers = suite.peers();
    let mut out = String::new();
    for tier in suite.tiers() {
        let header = [header(suite), "L2", "workloads", "floor", OURS].into_iter().map(String::from);
        let header = header.chain(peers.iter().map(|peer| peer.to_string()));
        let header = header.chain(peers.iter().map(|peer| format!("/ {peer}")));
        let mut table = Table::new(header.chain(["/ best".into()]));
        for ((l2, bucket), works) in &buckets {
            let times = |of: &dyn Fn(&Work) -> Option<f64>| or_gap(median(works.iter().filter_map(|w| of(w))), digits);
            let ratios = |of: &dyn Fn(&Work) -> Option<f64>| or_gap(geomean(works.iter().filter_map(|w| of(w))), ratio);
            let mut cells = vec![bucket.1.clone(), l2.unwrap_or_default().into(), works.len().to_string()];
            cells.push(times(&|work| work.floor()));
            cells.push(times(&|work| time(work.ours(tier), tier)));
            cells.extend(peers.iter().map(|peer| times(&|work| time(work.best_of(peer, tier), tier))));
            cells.extend(peers.iter().map(|peer| ratios(&|work| work.ratio(peer, tier))));
            cells.push(ratios(&|work| work.ratio_to_best(tier)));
            table.row(cells);
        }
        let optional: Vec<_> = [1, 3].into_iter().chain(4 + peers.len() + 1..6 + 2 * peers.len()).collect();
        let what = "medians in µs and geometric means of the ratios";
        out += &table.without_empty(optional).titled(&format!("{}, {what}", tier.name()));
    }
    out + &passed(suite, &buckets) + "\nWorkload by workload: [contest.md](contest.md).\n"
}

/// The workloads whose results were over their bound.
pub fn failures(suite: &Suite) -> String {
    let failed: Vec<_> = suite.entries().map(|e| &e.row).filter(|row| status(row) == Status::Failed).collect();
    if failed.is_empty() {
        return String::new();
    }
    let mut table = Table::new(["failed", "contender", "variant", "note"]);
    for row in failed {
        table.row([&row.workload, &row.contender, row.variant.as_deref().unwrap_or_default(), &row.note]);
    }
    format!("\n{}", table.without_empty([2]).render())
}

/// The largest number in it, and its name.
type Bucket = (usize, String);
type Buckets<'a, 'b> = BTreeMap<(Option<&'a str>, Bucket), Vec<&'b Work<'a>>>;

fn by_batch(suite: &Suite) -> bool {
    suite.name.ends_with("decode")
}

fn header(suite: &Suite) -> &'static str {
    if by_batch(suite) {
        "B"
    } else {
        "tokens"
    }
}

fn buckets<'a, 'b>(suite: &'b Suite<'a>) -> Buckets<'a, 'b> {
    let mut buckets = Buckets::new();
    for work in suite.works() {
        let bucket = if by_batch(suite) {
            let batch = work.shape.batch.unwrap_or(0);
            (batch, batch.to_string())
        } else {
            let tokens = work.shape.total_tokens.unwrap_or(0);
            match TOKENS.into_iter().find(|end| tokens <= *end) {
                Some(upto) => (upto, format!("≤ {upto}")),
                None => (usize::MAX, format!("> {}", TOKENS[TOKENS.len() - 1])),
            }
        };
        buckets.entry((work.l2, bucket)).or_default().push(work);
    }
    buckets
}

/// What counts of several rows comes first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Status {
    Failed,
    Passed,
    NotRun,
}

/// Notes say what failed. A row with errors but no times was checked alone if its note says so, else it was over its
/// bound.
fn status(row: &Row) -> Status {
    let timed = Tier::RANKED.iter().any(|tier| tier.of(row).is_some());
    let note = row.note.to_lowercase();
    let failed = ["over its bound", "over the", "failed"].iter().any(|word| note.contains(word));
    match row.error.values().any(Option::is_none) || failed {
        true => Status::Failed,
        false if timed => Status::Passed,
        false if row.error.is_empty() => Status::NotRun,
        false if note.is_empty() => Status::Failed,
        false => Status::Passed,
    }
}

/// A contender fails a workload with any of its variants.
fn passed(suite: &Suite, buckets: &Buckets) -> String {
    let names = distinct(suite.columns().into_iter().map(|column| column.contender));
    let mut table = Table::new([header(suite)].into_iter().chain(names.iter().copied()));
    let mut sizes: BTreeMap<&Bucket, Vec<&&Work>> = BTreeMap::new();
    for ((_, bucket), works) in buckets {
        sizes.entry(bucket).or_default().extend(works);
    }
    for (bucket, works) in sizes {
        let count = |name: &str| {
            let mut workloads: BTreeMap<&str, Status> = BTreeMap::new();
            for work in &works {
                let of_work = workloads.entry(work.workload).or_insert(Status::NotRun);
                let rows = work.entries.iter().map(|e| &e.row).filter(|row| row.contender == name);
                *of_work = rows.map(status).fold(*of_work, Status::min);
            }
            let number = |status| workloads.values().filter(|s| **s == status).count();
            match (number(Status::Passed), number(Status::Failed)) {
                (0, 0) => GAP.into(),
                (passed, failed) => format!("{passed} / {failed} / {}", number(Status::NotRun)),
            }
        };
        table.row([bucket.1.clone()].into_iter().chain(names.iter().map(|name| count(name))));
    }
    table.titled("Workloads passed / failed / not run")
}
