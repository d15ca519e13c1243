//! The loss curve as a picture.

use anyhow::{anyhow, Result};
use plotters::prelude::*;
use std::path::Path;

/// Draws the losses, one a step, and the mean of the last steps.
pub fn draw(losses: &[f32], path: &Path) -> Result<()> {
    let window = losses.len() / 20 + 1;
    let smooth: Vec<f32> = (1..=losses.len())
        .map(|end| {
            let last = &losses[end.saturating_sub(window)..end];
            last.iter().sum::<f32>() / last.len() as f32
        })
        .collect();
    let low = losses.iter().copied().fold(f32::INFINITY, f32::min).min(0.);
    let high = losses.iter().copied().fold(0., f32::max) * 1.05;
    let points = |y: &[f32]| (1usize..).zip(y.to_vec()).collect::<Vec<_>>();
    let picture = || -> Result<(), Box<dyn std::error::Error>> {
        let area = SVGBackend::new(path, (800, 480)).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .margin(16)
            .x_label_area_size(40)
            .y_label_area_size(50)
            .build_cartesian_2d(1..losses.len().max(2), low..high)?;
        let font = ("sans-serif", 15);
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .label_style(font)
            .axis_desc_style(font)
            .x_desc("step")
            .y_desc("loss (nats a token)")
            .draw()?;
        let (pale, strong) = (RGBColor(165, 200, 235), RGBColor(20, 80, 160));
        chart.draw_series(LineSeries::new(points(losses), pale))?.label("step").legend(key(pale));
        chart
            .draw_series(LineSeries::new(points(&smooth), strong.stroke_width(2)))?
            .label(format!("mean of {window}"))
            .legend(key(strong));
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .label_font(font)
            .background_style(WHITE)
            .border_style(BLACK)
            .draw()?;
        area.present()?;
        Ok(())
    };
    picture().map_err(|e| anyhow!("cannot draw {}: {e}", path.display()))
}

/// The sample of a line in the legend.
fn key(colour: RGBColor) -> impl Fn((i32, i32)) -> PathElement<(i32, i32)> {
    move |(x, y)| PathElement::new(vec![(x, y), (x + 20, y)], colour)
}
