//! `table.md` and `contest.md` of a machine: which table comes where.

mod between;
mod contest;
mod crossover;
mod gaps;
mod generic;
mod grid;
mod head;
mod means;
mod parts;
mod speedup;

use crate::compare::{By, Suite};
use crate::folder::{Folder, Source};
use grid::Rates;

/// The suites of benches/README.md in its order, with what sets their workloads apart and how their speed is told.
const GPU: [(&str, By, Rates); 8] = [
    ("decode", By::Batch, Rates::Copy),
    ("prefill", By::BatchTokens, Rates::Matmul),
    ("contest-decode", By::Batch, Rates::Copy),
    ("contest-prefill", By::Workload, Rates::Matmul),
    ("conv", By::BatchTokens, Rates::Copy),
    ("norm", By::BatchTokens, Rates::Copy),
    ("layer", By::TokensBatch, Rates::None),
    ("projections", By::Tokens, Rates::Matmul),
];
const CPU: [(&str, By, Rates); 4] = [
    ("rule", By::BatchTokens, Rates::Copy),
    ("conv", By::BatchTokens, Rates::Copy),
    ("norm", By::BatchTokens, Rates::Copy),
    ("model", By::TokensBatch, Rates::Tokens),
];

/// All sections of a machine but the full lists of the contest.
pub fn table(folder: &Folder) -> String {
    let mut out = head::head(folder);
    for (name, by, rates) in GPU {
        let tables = |suite: &Suite| match name {
            "contest-decode" | "contest-prefill" => contest::summary(suite),
            "decode" => grid::tables(suite, rates) + &speedup::tables(suite) + &means::geomeans(suite),
            "prefill" => {
                let grid = means::overview(suite) + &grid::tables(suite, rates);
                grid + &speedup::tables(suite) + &means::geomeans(suite)
            }
            "layer" => {
                let grid = grid::tables(suite, rates) + &speedup::tables(suite);
                grid + &between::table(suite) + &means::geomeans(suite)
            }
            "projections" => grid::tables(suite, rates) + &crossover::sentences(suite),
            _ => grid::tables(suite, rates) + &means::geomeans(suite),
        };
        section(&mut out, folder, name, false, by, tables);
    }
    for (name, by, rates) in CPU {
        let tables = |suite: &Suite| grid::tables(suite, rates) + &means::geomeans(suite);
        section(&mut out, folder, name, true, by, tables);
    }
    for name in folder.suites() {
        for cpu in [false, true] {
            if !known(name, cpu) {
                section(&mut out, folder, name, cpu, By::Workload, |suite| {
                    generic::table(suite) + &parts::tables(suite)
                });
            }
        }
    }
    out + &gaps::section(&suites(folder))
}

/// The contest's workloads one by one, if there are any.
pub fn contest(folder: &Folder) -> Option<String> {
    let mut out = String::new();
    for (name, _, rates) in GPU.into_iter().filter(|(name, ..)| name.starts_with("contest")) {
        let tables = |suite: &Suite| contest::failures(suite) + &grid::tables(suite, rates);
        section(&mut out, folder, name, false, By::Workload, tables);
    }
    (!out.is_empty()).then(|| format!("# {}: the contest's workloads\n\nColumns as in table.md.\n{out}", folder.name))
}

/// Every suite that compares, of every source.
pub fn suites(folder: &Folder) -> Vec<Suite<'_>> {
    let gpu = GPU.into_iter().map(|(name, by, _)| (name, by, false));
    let cpu = CPU.into_iter().map(|(name, by, _)| (name, by, true));
    let all = gpu.chain(cpu).flat_map(|(name, by, on_cpu)| {
        let sources = folder.sources(name).into_iter().filter(move |source| source.is_cpu() == on_cpu);
        sources.map(move |source| Suite::new(folder, name, source, by))
    });
    all.collect()
}

fn known(suite: &str, cpu: bool) -> bool {
    let suites: &[_] = if cpu { &CPU } else { &GPU };
    suites.iter().any(|(name, ..)| *name == suite)
}

/// A heading a suite, and one a source.
fn section(out: &mut String, folder: &Folder, name: &str, cpu: bool, by: By, body: impl Fn(&Suite) -> String) {
    let sources: Vec<&Source> = folder.sources(name).into_iter().filter(|source| source.is_cpu() == cpu).collect();
    for (i, source) in sources.into_iter().enumerate() {
        if !cpu && i == 0 {
            *out += &format!("\n## {name}\n");
        }
        *out += &if cpu { format!("\n## {name}, {source}\n") } else { format!("\n### {name}, by {source}\n") };
        *out += &body(&Suite::new(folder, name, source, by));
    }
}
