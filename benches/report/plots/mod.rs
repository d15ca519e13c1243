//! The plots of a machine: which there are, under stable names.

mod axis;
mod chart;
mod draw;

use crate::compare::{time, Column, Group, Suite, Tier, Work, OURS};
use crate::folder::Entry;
use crate::markdown::comma_l2;
use crate::rates::copy_rate;
use crate::stats::distinct;
use anyhow::Result;
use axis::Scale;
use chart::{Chart, Series};
use std::cmp::Reverse;

/// What is plotted of a work: its place on the x axis, if it belongs into the plot.
type Place = fn(&Work) -> Option<usize>;
type Draw = fn(&Suite, &Group) -> Option<Chart>;

/// The suites with the names of their plots.
const PLOTS: [(&str, &str, Draw); 9] = [
    ("decode", "decode", |suite, group| times(suite, group, |work| work.shape.batch)),
    ("prefill", "prefill", |suite, group| times(suite, group, single_sequence)),
    ("layer", "layer-tokens", |suite, group| times(suite, group, single_sequence)),
    ("layer", "layer-batch", |suite, group| times(suite, group, single_token)),
    ("layer", "chain", chain),
    ("rule", "cpu-rule", |suite, group| times(suite, group, single_sequence)),
    ("decode", "copy-rate", copy_rates),
    ("projections", "projections", variants),
    ("model", "steps", steps),
];

/// File names and SVG texts of all plots that have data.
pub fn plots(suites: &[Suite]) -> Result<Vec<(String, String)>> {
    let mut plots = vec![];
    for (name, file, draw) in PLOTS {
        let mut shown = by_rank(suites, name);
        // The layer is also shown as each tool has it: through candle, and made of kernels in torch.
        shown.truncate(if name == "layer" { usize::MAX } else { 1 });
        for (rank, suite) in shown.into_iter().enumerate() {
            let tool = if rank == 0 { String::new() } else { format!("-{}", short_name(suite)) };
            for group in &suite.groups {
                if let Some(chart) = draw(suite, group) {
                    let dash = if group.slug.is_empty() { "" } else { "-" };
                    plots.push((format!("{file}{dash}{}{tool}.svg", group.slug), draw::svg(&chart)?));
                }
            }
        }
    }
    Ok(plots)
}

fn single_token(work: &Work) -> Option<usize> {
    work.shape.batch.filter(|_| work.shape.tokens == Some(1))
}

fn single_sequence(work: &Work) -> Option<usize> {
    work.shape.tokens.filter(|_| work.shape.batch.unwrap_or(1) == 1)
}

/// `gpu` of `benches/gpu`.
fn short_name(suite: &Suite) -> String {
    let source = suite.source.to_string();
    source.rsplit(['/', ' ']).next().unwrap_or_default().into()
}

/// A suite of each source, since they do not mix; first what measured ours, and the most peers.
fn by_rank<'s, 'a>(suites: &'s [Suite<'a>], name: &str) -> Vec<&'s Suite<'a>> {
    let mut named: Vec<_> = suites.iter().filter(|suite| suite.name == name).collect();
    named.sort_by_key(|suite| Reverse((suite.has(OURS), suite.peers().len(), suite.works().count(), suite.source)));
    named
}

/// The works of the group on its best clock, cold if there are cold ones.
fn clocked<'s, 'a>(group: &'s Group<'a>) -> Option<(Tier, Option<&'a str>, Vec<&'s Work<'a>>)> {
    let entries = || group.works.iter().flat_map(|work| &work.entries);
    let ours = |tier: &Tier| group.works.iter().any(|work| work.ours(*tier).is_some());
    let any = |tier: &Tier| entries().any(|e| tier.of(&e.row).is_some());
    let tier = Tier::RANKED.into_iter().find(ours).or_else(|| Tier::RANKED.into_iter().find(any))?;
    let timed = |work: &&Work| work.entries.iter().any(|e| tier.of(&e.row).is_some());
    // Works are sorted, cold first.
    let l2 = group.works.iter().find(timed)?.l2;
    Some((tier, l2, group.works.iter().filter(|work| work.l2 == l2).collect()))
}

fn points(works: &[&Work], place: Place, y: impl Fn(&Work) -> Option<f64>) -> Vec<(f64, f64)> {
    let mut points: Vec<_> = works.iter().filter_map(|work| Some((place(work)? as f64, y(work)?))).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    // Of several works at one place (other lengths, other options) the first.
    points.dedup_by_key(|point| point.0);
    points
}

fn subtitle(suite: &Suite, tier: Tier, l2: Option<&str>) -> String {
    let source = suite.source.to_string();
    let clock = match tier {
        Tier::Gpu => "kernel time (CUPTI)".into(),
        Tier::Event => "CUDA events around a replayed graph".into(),
        Tier::Call => "CUDA events around each call".into(),
        _ if suite.source.is_cpu() => "wall time".to_string(),
        _ => "wall time with a synchronisation".into(),
    };
    format!("{clock}{}; {source}", comma_l2(l2))
}

fn title(what: &str, group: &Group) -> String {
    let comma = if group.title.is_empty() { "" } else { ", " };
    format!("{what}{comma}{}", group.title)
}

/// Times of ours, of each peer's fastest variant, and the floor.
fn times(suite: &Suite, group: &Group, place: Place) -> Option<Chart> {
    let (tier, l2, works) = clocked(group)?;
    let mut series = contenders(suite, &works, place, |entry| tier.of(&entry.row), tier);
    series.push(Series::floor(points(&works, place, |work| work.floor())));
    let by_batch = works.iter().any(|work| place(work).is_some() && work.shape.batch > Some(1));
    let (what, x) = match suite.name {
        "decode" => ("Decode, one token of each sequence", "sequences (B)"),
        "prefill" => ("Prefill of one sequence", "tokens"),
        "layer" if by_batch => ("The whole layer, one token of each sequence", "sequences (B)"),
        "layer" => ("The whole layer, one sequence", "tokens"),
        _ => ("The rule on the CPU, one sequence", "tokens"),
    };
    let (title, subtitle) = (title(what, group), subtitle(suite, tier, l2));
    Chart { title, subtitle, x, y: "time, µs", y_scale: Scale::Log, series }.if_any()
}

/// How much of the machine's copy rate decode reaches.
fn copy_rates(suite: &Suite, group: &Group) -> Option<Chart> {
    let (tier, l2, works) = clocked(group)?;
    let part = |entry: &Entry| copy_rate(entry, tier).of_ceiling.map(|part| part * 100.);
    Chart {
        title: title("Decode, share of the measured copy rate", group),
        subtitle: subtitle(suite, tier, l2),
        x: "sequences (B)",
        y: "% of the copy rate",
        y_scale: Scale::Percent,
        series: contenders(suite, &works, |work| work.shape.batch, part, tier),
    }
    .if_any()
}

/// A line for ours, as `Algo::Auto` has it, and one for each peer, of its fastest variants.
fn contenders(
    suite: &Suite,
    works: &[&Work],
    place: Place,
    y: impl Fn(&Entry) -> Option<f64>,
    tier: Tier,
) -> Vec<Series> {
    let mut series = vec![Series::new(OURS, points(works, place, |work| y(work.ours(tier)?)))];
    let peer = |peer: &str| Series::new(peer, points(works, place, |work| y(work.best_of(peer, tier)?)));
    series.extend(suite.peers().into_iter().map(peer));
    series
}

/// The layer's forms over PyTorch's operations one by one: a line a form.
fn chain(suite: &Suite, group: &Group) -> Option<Chart> {
    let columns = group.columns();
    let base = columns.iter().find(|column| column.contender == "torch" && column.variant == Some("six"))?;
    let (tier, l2, peers) = (Tier::Event, Some("cold"), suite.peers());
    let works: Vec<_> = group.works.iter().filter(|work| work.l2 == l2).collect();
    let us = |work: &Work, column: &Column| time(work.at(column), tier);
    let part = |work: &Work, column: &Column| Some(100. * us(work, column)? / us(work, base)?);
    let of = |column: &Column| {
        let points = points(&works, single_sequence, |work| part(work, column));
        Series::new(&column.name(&columns), points)
    };
    let forms = columns.iter().filter(|column| *column != base && !peers.contains(&column.contender));
    Chart {
        title: title("The layer, time over that of six products in PyTorch", group),
        subtitle: subtitle(suite, tier, l2),
        x: "tokens",
        y: "% of torch six",
        y_scale: Scale::Percent,
        series: forms.map(of).collect(),
    }
    .if_any()
}

/// One, two or six products: a line a variant.
fn variants(suite: &Suite, group: &Group) -> Option<Chart> {
    let (tier, l2, works) = clocked(group)?;
    let columns = group.columns();
    let alone = columns.iter().all(|column| column.contender == columns[0].contender);
    let place: Place = |work| work.shape.tokens.or(work.shape.total_tokens);
    let name = |column: &Column| match column.variant {
        Some(variant) if alone => variant.to_string(),
        _ => column.name(&columns),
    };
    let of = |column: &Column| Series::new(&name(column), points(&works, place, |w| time(w.at(column), tier)));
    let mut series: Vec<_> = columns.iter().map(of).collect();
    series.push(Series::floor(points(&works, place, |work| work.floor())));
    Chart {
        title: title("Input projections, by number of matrix products", group),
        subtitle: subtitle(suite, tier, l2),
        x: "tokens",
        y: "time, µs",
        y_scale: Scale::Log,
        series,
    }
    .if_any()
}

/// Decode steps of whole models, replayed from a graph, and what the bytes allow.
fn steps(suite: &Suite, group: &Group) -> Option<Chart> {
    // As engines have it: with rings, where the model has them.
    let step = |work: &Work<'_>| {
        work.workload
            .split_once(" step B=")
            .filter(|(_, rest)| rest.ends_with("rings"))
            .map(|(model, _)| model.to_string())
    };
    let models = distinct(group.works.iter().filter_map(step));
    let rate = |work: &Work, us: Option<f64>| Some(1e6 * work.shape.batch? as f64 / us?);
    let graph = |work: &Work| {
        work.entries.iter().find_map(|e| Tier::Wall.of(&e.row).filter(|_| e.row.variant.as_deref() == Some("graph")))
    };
    let series = models.iter().flat_map(|model| {
        let works: Vec<_> = group.works.iter().filter(|work| step(work).as_ref() == Some(model)).collect();
        let of = |us: &dyn Fn(&Work) -> Option<f64>| points(&works, single_token, |work| rate(work, us(work)));
        let floor =
            Series { name: format!("{model}, bytes at the copy rate"), ..Series::floor(of(&|work| work.floor())) };
        [Series::new(model, of(&graph)), floor]
    });
    Chart {
        title: title("Decode steps of whole models", group),
        subtitle: subtitle(suite, Tier::Wall, None),
        x: "sequences",
        y: "tokens/s",
        y_scale: Scale::Log,
        series: series.collect(),
    }
    .if_any()
}
