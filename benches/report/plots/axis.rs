//! An axis: its scale, its range and where its ticks are. To plotters it is a coordinate.

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use std::ops::Range;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    Log,
    /// Linear, from 0 to at least 100.
    Percent,
}

#[derive(Clone)]
pub struct Axis {
    scale: Scale,
    /// Of the data, with some room around it.
    range: Range<f64>,
    pub ticks: Vec<f64>,
}

/// As many ticks as fit beside one another.
const TICKS: f64 = 18.;

impl Axis {
    pub fn new(scale: Scale, values: &[f64]) -> Axis {
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(0., f64::max);
        // A single point is no range.
        let room = (high / low).powf(0.04).max(1.1);
        let (range, ticks) = match scale {
            Scale::Log => (low / room..high * room, round_numbers(low / room..high * room)),
            Scale::Percent => {
                let end = high.max(100.) * 1.05;
                (0. ..end, (0..).map(|i| 20. * f64::from(i)).take_while(|tick| *tick <= end).collect())
            }
        };
        Axis { scale, range, ticks }
    }

    /// With ticks where something was measured, as far as they lie apart.
    pub fn at_values(mut self, values: &[f64]) -> Axis {
        let mut values = values.to_vec();
        values.sort_by(f64::total_cmp);
        self.ticks.clear();
        for value in values {
            if self.ticks.last().is_none_or(|last| self.part(value) - self.part(*last) >= 1. / TICKS) {
                self.ticks.push(value);
            }
        }
        self
    }

    /// Where on the axis, from 0 to 1.
    fn part(&self, value: f64) -> f64 {
        let Range { start, end } = self.range;
        match self.scale {
            Scale::Log => (value / start).ln() / (end / start).ln(),
            Scale::Percent => (value - start) / (end - start),
        }
    }
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (low, high): (i32, i32)) -> i32 {
        low + (f64::from(high - low) * self.part(*value)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() {
            vec![]
        } else {
            self.ticks.clone()
        }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

/// 1, 2 and 5 of each decade, or 1 alone where that is crowded.
fn round_numbers(range: Range<f64>) -> Vec<f64> {
    let digits: &[f64] = if range.end / range.start < 1e4 { &[1., 2., 5.] } else { &[1.] };
    let exponents = range.start.log10().floor() as i32..=range.end.log10().ceil() as i32;
    let ticks = exponents.flat_map(|e| digits.iter().map(move |digit| digit * 10f64.powi(e)));
    ticks.filter(|tick| range.contains(tick)).collect()
}

/// A tick's text: no zeros that say nothing.
pub fn label(value: &f64) -> String {
    let text = format!("{value:.6}");
    text.trim_end_matches('0').trim_end_matches('.').into()
}
