//! A chart as SVG text.

use super::axis::{label, Axis, Scale};
use super::chart::{color, places, Chart, Series, FLOOR};
use anyhow::{anyhow, Result};
use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const SIZE: (u32, u32) = (900, 560);
const LEGEND: u32 = 170;
const HEAD: u32 = 62;
const INK: RGBColor = RGBColor(40, 40, 40);
const GRID: RGBColor = RGBColor(225, 225, 225);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn<T = ()> = std::result::Result<T, DrawingAreaErrorKind<std::io::Error>>;

pub fn svg(chart: &Chart) -> Result<String> {
    let mut out = String::new();
    let root = SVGBackend::with_string(&mut out, SIZE).into_drawing_area();
    let drawn = draw(&root, chart).and_then(|()| root.present());
    drop(root);
    match drawn {
        Ok(()) => Ok(out),
        Err(e) => Err(anyhow!("plot {:?}: {e}", chart.title)),
    }
}

fn draw(root: &Area, chart: &Chart) -> Drawn {
    root.fill(&WHITE)?;
    let text = |size: u32, color: RGBColor| ("sans-serif", size).into_font().color(&color);
    root.draw_text(&chart.title, &("sans-serif", 21).into_font().style(FontStyle::Bold).color(&INK), (24, 14))?;
    root.draw_text(&chart.subtitle, &text(15, FLOOR), (24, 40))?;

    let (_, below) = root.split_vertically(HEAD);
    let (plot, legend) = below.split_horizontally(SIZE.0 - LEGEND);
    let points = || chart.series.iter().flat_map(|series| &series.points);
    let values: Vec<_> = points().map(|point| point.0).collect();
    let x = Axis::new(Scale::Log, &values).at_values(&values);
    let y = Axis::new(chart.y_scale, &points().map(|point| point.1).collect::<Vec<_>>());
    let (columns, lines) = (x.ticks.len(), y.ticks.len());
    let mut context = ChartBuilder::on(&plot)
        .margin(10)
        .margin_left(14)
        .x_label_area_size(52)
        .y_label_area_size(66)
        .build_cartesian_2d(x, y)?;
    context
        .configure_mesh()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(INK)
        .x_labels(columns)
        .y_labels(lines)
        .x_label_formatter(&label)
        .y_label_formatter(&label)
        .x_desc(chart.x)
        .y_desc(chart.y)
        .label_style(text(15, INK))
        .axis_desc_style(text(16, INK))
        .draw()?;

    let places = places(&chart.series);
    // Ours comes first and is drawn last, on top of what it covers.
    for (series, place) in chart.series.iter().zip(&places).rev() {
        let on_page: Vec<_> = series.points.iter().map(|point| context.backend_coord(point)).collect();
        line(root, series, *place, on_page.clone())?;
        if !series.floor {
            on_page.into_iter().try_for_each(|point| mark(root, point, *place))?;
        }
    }
    let (left, top) = legend.get_base_pixel();
    for (i, (series, place)) in chart.series.iter().zip(&places).enumerate() {
        let (x, y) = (left + 6, top + 24 + 26 * i as i32);
        line(root, series, *place, vec![(x, y), (x + 34, y)])?;
        if !series.floor {
            mark(root, (x + 17, y), *place)?;
        }
        let style = text(15, INK).pos(Pos::new(HPos::Left, VPos::Center));
        root.draw_text(&series.name, &style, (x + 42, y))?;
    }
    Ok(())
}

fn line(root: &Area, series: &Series, place: usize, points: Vec<(i32, i32)>) -> Drawn {
    match (series.floor, place) {
        (true, _) => root.draw(&DashedPathElement::new(points, 7, 5, FLOOR.stroke_width(2))),
        // Ours.
        (_, 0) => root.draw(&PathElement::new(points, color(0).stroke_width(3))),
        _ => root.draw(&PathElement::new(points, color(place).stroke_width(2))),
    }
}

/// Marks differ in form, for those who do not see the colours.
fn mark(root: &Area, (x, y): (i32, i32), place: usize) -> Drawn {
    let fill = color(place).filled();
    match place % 5 {
        0 => root.draw(&Circle::new((x, y), 5, fill)),
        1 => root.draw(&Rectangle::new([(x - 4, y - 4), (x + 4, y + 4)], fill)),
        2 => root.draw(&Polygon::new(vec![(x, y - 6), (x + 6, y + 5), (x - 6, y + 5)], fill)),
        3 => root.draw(&Polygon::new(vec![(x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)], fill)),
        _ => root.draw(&Polygon::new(vec![(x, y + 6), (x + 6, y - 5), (x - 6, y - 5)], fill)),
    }
}
