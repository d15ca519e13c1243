//! How fast the work was done, next to what the machine can do.

use crate::compare::Tier;
use crate::folder::Entry;
use crate::stats::ratio;

/// The rate at which a row did its work, as a number and as a part of the ceiling.
#[derive(Default)]
pub struct Rate {
    pub value: Option<f64>,
    pub of_ceiling: Option<f64>,
}

/// Bytes a second against the measured copy.
pub fn copy_rate(entry: &Entry, tier: Tier) -> Rate {
    let value = entry.row.bytes.zip(tier.of(&entry.row)).map(|(bytes, us)| bytes as f64 / us / 1e3);
    Rate { value: positive(value), of_ceiling: ratio(positive(value), entry.ceilings.copy_gb_s) }
}

/// Operations a second against the measured matrix product.
pub fn matmul_rate(entry: &Entry, tier: Tier) -> Rate {
    let value = entry.row.flop.zip(tier.of(&entry.row)).map(|(flop, us)| flop as f64 / us / 1e6);
    Rate { value: positive(value), of_ceiling: ratio(positive(value), entry.ceilings.matmul_tflop_s) }
}

pub fn token_rate(entry: &Entry, tier: Tier) -> Option<f64> {
    let shape = entry.row.shape;
    let tokens = shape.total_tokens.or(shape.tokens)?;
    tier.of(&entry.row).map(|us| tokens as f64 / us * 1e6)
}

fn positive(value: Option<f64>) -> Option<f64> {
    value.filter(|value| *value > 0.)
}
