//! Miss-ratio curves: a chart for each trace.

use std::error::Error;
use std::path::Path;

use netvm_core::residency::Eviction;
use plotters::prelude::*;

use super::PICTURE;
use crate::picture::{self, Area};

const WIDTH: u32 = 560;
const HEIGHT: u32 = 330;
const INK: RGBColor = RGBColor(0x22, 0x2b, 0x33);
const GRID: RGBColor = RGBColor(0xe4, 0xe8, 0xec);

fn color(eviction: Eviction) -> RGBColor {
    match eviction {
        Eviction::Fifo => RGBColor(0xa0, 0x8a, 0x5a),
        Eviction::FifoVictims => RGBColor(0xd0, 0x6a, 0x2c),
        Eviction::Spared => RGBColor(0x1b, 0x6c, 0xa8),
        Eviction::Clock => RGBColor(0x2a, 0x9d, 0x6f),
        Eviction::S3Fifo => RGBColor(0x8a, 0x4f, 0xa8),
        Eviction::Lru => RGBColor(0xc2, 0x3b, 0x5c),
        Eviction::Optimal => RGBColor(0x8a, 0x96, 0xa0),
    }
}

/// Of the names of ways, pixels.
const KEY_WIDTH_MIN: i32 = 115;
const KEY_HEIGHT: i32 = 18;

/// Percent of accesses that miss, by percent of pages that are local.
pub type Curves = (String, [(Eviction, [(u64, f64); PICTURE.len()]); Eviction::ALL.len()]);

/// Writes an SVG file.
///
/// # Errors
/// When it cannot be written.
pub fn write(traces: &[Curves], path: &Path) -> Result<(), Box<dyn Error>> {
    let columns = traces.len().clamp(1, 2);
    let lines = traces.len().div_ceil(columns).max(1);
    let size = (WIDTH * columns as u32, HEIGHT * lines as u32 + 60);
    picture::write(path, size, |root| draw(root, traces, columns, lines))
}

fn draw(root: &Area<'_>, traces: &[Curves], columns: usize, lines: usize) -> Result<(), Box<dyn Error>> {
    let root =
        root.titled("Accesses that miss, by local memory", ("sans-serif", 18).into_font().color(&INK))?;
    let wide = WIDTH as i32 * columns as i32 - 80;
    let each_line = (wide / KEY_WIDTH_MIN).min(Eviction::ALL.len() as i32);
    let (legend, charts) =
        root.split_vertically(8 + KEY_HEIGHT * Eviction::ALL.len().div_ceil(each_line as usize) as i32);
    for (index, eviction) in (0..).zip(Eviction::ALL) {
        let (x, y) = (60 + index % each_line * wide / each_line, index / each_line * KEY_HEIGHT);
        legend.draw(&PathElement::new([(x, y + 10), (x + 18, y + 10)], color(eviction).stroke_width(2)))?;
        let style = ("sans-serif", 13).into_font().color(&INK);
        legend.draw(&Text::new(eviction.name(), (x + 23, y + 3), style))?;
    }
    for (area, (name, curves)) in charts.split_evenly((lines, columns)).iter().zip(traces) {
        let most = curves.iter().flat_map(|(_, points)| points).map(|point| point.1).fold(1.0, f64::max);
        let mut chart = ChartBuilder::on(area)
            .caption(name, ("sans-serif", 15).into_font().color(&INK))
            .margin(10)
            .x_label_area_size(34)
            .y_label_area_size(48)
            .build_cartesian_2d(0.0..95.0, 0.0..most * 1.05)?;
        chart
            .configure_mesh()
            .x_desc("% of the pages local")
            .y_desc("% missed")
            .x_label_formatter(&|value| format!("{value:.0}"))
            .y_label_formatter(&|value| format!("{value:.0}"))
            .label_style(("sans-serif", 12).into_font().color(&INK))
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (eviction, points) in curves {
            let width = if *eviction == Eviction::Spared { 3 } else { 2 };
            let points = points.iter().map(|&(percent, missed)| (percent as f64, missed));
            chart.draw_series(LineSeries::new(points, color(*eviction).stroke_width(width)))?;
        }
    }
    Ok(())
}
