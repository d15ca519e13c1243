//! From where on another variant is the fastest.

use crate::compare::{states, Column, Group, Suite, Tier};
use crate::markdown::percent;

/// A variant loses its place only to one that is faster by more than this.
const TIE: f64 = 0.01;

/// A sentence a shape, clock and cache state.
pub fn sentences(suite: &Suite) -> String {
    let mut out = String::new();
    for group in &suite.groups {
        for tier in suite.tiers() {
            for l2 in states(&group.works) {
                if let Some(sentence) = crossover(group, tier, l2) {
                    let of = [&group.title, tier.name(), l2.unwrap_or_default()];
                    let of: Vec<_> = of.into_iter().filter(|part| !part.is_empty()).collect();
                    out += &format!("- {}: {sentence}\n", of.join(", "));
                }
            }
        }
    }
    if out.is_empty() {
        out
    } else {
        format!("\nThe fastest variant (within {}, the one before keeps its place):\n\n{out}", percent(TIE))
    }
}

/// Of works with at least two contenders, in the order of the tokens.
fn crossover(group: &Group, tier: Tier, l2: Option<&str>) -> Option<String> {
    let columns = group.columns();
    let mut reign: Vec<(&Column, &str, f64)> = vec![];
    let (mut first, mut last) = (None, None);
    for work in group.works.iter().filter(|work| work.l2 == l2) {
        let time = |column: &Column| tier.of(&work.at(column)?.row);
        let times: Vec<_> = columns.iter().filter_map(|column| Some((column, time(column)?))).collect();
        if times.len() < 2 {
            continue;
        }
        let (best, us) = *times.iter().min_by(|a, b| a.1.total_cmp(&b.1))?;
        let holder = reign.last().and_then(|(column, ..)| time(column));
        if holder.is_none_or(|held| held > us * (1. + TIE)) {
            reign.push((best, &work.label, holder.map_or(0., |held| 1. - us / held)));
        }
        first = first.or(Some(&work.label));
        last = Some(&work.label);
    }
    let name = |column: &Column| format!("`{}`", column.variant.unwrap_or(column.contender));
    let (winner, ..) = reign.first()?;
    let (first, last) = (first?, last?);
    if reign.len() == 1 {
        return Some(format!(
            "{} is the fastest at every T from {first} to {last}: there is no crossover.",
            name(winner)
        ));
    }
    let then: Vec<_> = reign[1..]
        .iter()
        .map(|(column, from, lead)| format!("from T={from} on {} is (there by {})", name(column), percent(*lead)))
        .collect();
    Some(format!("{} is the fastest from T={first}; {}.", name(winner), then.join("; ")))
}
