//! A plot as data.

use super::axis::Scale;
use plotters::style::RGBColor;

/// The x axis is logarithmic.
pub struct Chart {
    pub title: String,
    pub subtitle: String,
    pub x: &'static str,
    pub y: &'static str,
    pub y_scale: Scale,
    pub series: Vec<Series>,
}

pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    /// A dashed line without marks.
    pub floor: bool,
}

impl Series {
    pub fn new(name: &str, points: Vec<(f64, f64)>) -> Series {
        Series { name: name.into(), points, floor: false }
    }

    pub fn floor(points: Vec<(f64, f64)>) -> Series {
        Series { name: "floor".into(), points, floor: true }
    }
}

impl Chart {
    /// Without the series that have no points; nothing if but one place on the x axis is left, or the floor alone.
    pub fn if_any(mut self) -> Option<Chart> {
        self.series.retain(|series| !series.points.is_empty());
        let mut places = self.series.iter().filter(|series| !series.floor).flat_map(|s| &s.points).map(|point| point.0);
        let first = places.next()?;
        places.any(|place| place != first).then_some(self)
    }
}

pub const FLOOR: RGBColor = RGBColor(90, 90, 90);

/// Okabe and Ito's colours, which the colour-blind tell apart; yellow is left out, too pale on white.
const PALETTE: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(0, 0, 0),
];

/// Contenders that have a colour and a mark of their own in every plot.
const KNOWN: [&str; 5] = ["candle-gdn", "flashinfer", "flashqla", "fla", "mistral.rs"];

/// A place in the palette for each series; marks go by it too.
pub fn places(series: &[Series]) -> Vec<usize> {
    let own = |series: &Series| KNOWN.iter().position(|name| *name == series.name);
    let taken: Vec<_> = series.iter().filter_map(own).collect();
    let mut free = (0..).filter(|place| !taken.contains(place));
    series.iter().map(|s| if s.floor { 0 } else { own(s).or_else(|| free.next()).unwrap_or(0) }).collect()
}

pub fn color(place: usize) -> RGBColor {
    PALETTE[place % PALETTE.len()]
}
