//! The picture of `netvm bench transfer`: rates by size, a line for each way, with the spread of its rounds.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;

use super::super::report::Row;
use crate::picture::{self, Area};
use crate::size::Size;

const SIZE: (u32, u32) = (1000, 460);
const INK: RGBColor = RGBColor(0x22, 0x2b, 0x33);
const GRID: RGBColor = RGBColor(0xe4, 0xe8, 0xec);
const FLOOR: RGBColor = RGBColor(0x8a, 0x96, 0xa0);
/// In the order of the rows; peers take the last ones.
const COLORS: [RGBColor; 12] = [
    RGBColor(0xb4, 0xbc, 0xc4),
    RGBColor(0x4a, 0x55, 0x5f),
    RGBColor(0x1b, 0x6c, 0xa8),
    RGBColor(0x2a, 0x9d, 0x6f),
    RGBColor(0xd0, 0x6a, 0x2c),
    RGBColor(0x8a, 0x4f, 0xa8),
    RGBColor(0xc2, 0x3b, 0x5c),
    RGBColor(0xa0, 0x8a, 0x5a),
    RGBColor(0x6a, 0x73, 0x7c),
    RGBColor(0x3a, 0xa8, 0xb0),
    RGBColor(0xd8, 0xa4, 0x2c),
    RGBColor(0x5b, 0x5f, 0xc7),
];

/// How a row is called in the picture.
fn name(row: &Row) -> String {
    let method = row.case.strip_prefix("transfer-").unwrap_or(&row.case);
    match (row.peer, row.link.as_deref()) {
        (Some("bare"), link) => format!("into a file, {}", link.unwrap_or_default()),
        (Some(peer), _) => peer.to_owned(),
        (None, Some(link)) if link.contains("-x") => format!("{method}, {link}"),
        (None, Some("cma")) => format!("{method}, same machine"),
        _ => method.to_owned(),
    }
}

/// Writes an SVG file.
///
/// # Errors
/// When the file cannot be written.
pub fn write(rows: &[Row], path: &Path) -> Result<(), Box<dyn Error>> {
    picture::write(path, SIZE, |root| draw(root, rows))
}

fn draw(root: &Area<'_>, rows: &[Row]) -> Result<(), Box<dyn Error>> {
    let mut sizes: Vec<u64> = rows.iter().filter_map(|row| row.size_bytes).collect();
    sizes.dedup();
    let mut names: Vec<String> = Vec::new();
    for row in rows {
        let name = name(row);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let floor = rows.iter().find_map(|row| row.floor).unwrap_or(0.0);
    let highest = rows.iter().filter_map(|row| row.spread).map(|(_, high)| high).fold(floor, f64::max);
    let (chart, legend) = root.split_horizontally(SIZE.0 as i32 - 190);
    let style = ("sans-serif", 13).into_font().color(&INK);
    let last = sizes.len().saturating_sub(1) as f64;
    let mut context = ChartBuilder::on(&chart)
        .caption("File transfer over TCP loopback, GB/s by size", ("sans-serif", 18).into_font().color(&INK))
        .margin(12)
        .x_label_area_size(34)
        .y_label_area_size(52)
        .build_cartesian_2d(-0.2..last + 0.2, 0.0..highest * 1.08)?;
    let label = |at: &f64| {
        let whole = (at - at.round()).abs() < 0.01 && *at >= -0.01;
        let size = sizes.get(at.round().max(0.0) as usize).filter(|_| whole);
        size.map_or(String::new(), |bytes| Size(*bytes).to_string())
    };
    context
        .configure_mesh()
        .x_labels(sizes.len() * 2 + 1)
        .x_label_formatter(&label)
        .y_desc("GB/s")
        .axis_desc_style(style.clone())
        .label_style(style.clone())
        .axis_style(FLOOR)
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .draw()?;
    let floor_line = [(-0.2, floor), (last + 0.2, floor)];
    context.draw_series(DashedLineSeries::new(floor_line, 6, 4, FLOOR.stroke_width(2)))?;
    for (index, name_of) in names.iter().enumerate() {
        let color = COLORS[index % COLORS.len()];
        // Beside each other, so that spreads can be told apart.
        let shift = (index as f64 - names.len() as f64 / 2.0) * 0.03;
        let of = || rows.iter().filter(|row| name(row) == *name_of);
        let at = |row: &Row| {
            let index = row.size_bytes.and_then(|bytes| sizes.iter().position(|size| *size == bytes));
            index.unwrap_or(0) as f64 + shift
        };
        let points: Vec<(f64, f64)> = of().filter_map(|row| Some((at(row), row.median?))).collect();
        context.draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(2)))?;
        context.draw_series(points.iter().map(|point| Circle::new(*point, 3, color.filled())))?;
        let spreads = of().filter_map(|row| Some((at(row), row.spread?)));
        context.draw_series(
            spreads.map(|(x, (low, high))| PathElement::new([(x, low), (x, high)], color.stroke_width(1))),
        )?;
        let y = 52 + index as i32 * 20;
        legend.draw(&PathElement::new([(0, y + 7), (22, y + 7)], color.stroke_width(2)))?;
        legend.draw(&Circle::new((11, y + 7), 3, color.filled()))?;
        legend.draw(&Text::new(name_of.clone(), (30, y), style.clone()))?;
    }
    let y = 52 + names.len() as i32 * 20;
    legend.draw(&PathElement::new([(0, y + 7), (6, y + 7)], FLOOR.stroke_width(2)))?;
    legend.draw(&PathElement::new([(16, y + 7), (22, y + 7)], FLOOR.stroke_width(2)))?;
    legend.draw(&Text::new("bare TCP stream", (30, y), style))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_and_size_is_in_the_picture() {
        let row = |case: &str, link: &'static str, peer, bytes, rate: f64| {
            let mut row = Row::new("transfer", case, "GB/s");
            (row.link, row.peer, row.size_bytes) = (Some(link.into()), peer, Some(bytes));
            (row.median, row.spread, row.floor) = (Some(rate), Some((rate / 2.0, rate * 2.0)), Some(2.0));
            row
        };
        let mut rows = Vec::new();
        for bytes in [480_000, 12_000_000, 1 << 30] {
            rows.push(row("transfer-copy", "tcp", None, bytes, 1.0));
            rows.push(row("transfer-onesided", "cma", None, bytes, 3.0));
            rows.push(row("transfer-copy", "tcp", Some("rsync"), bytes, 0.5));
        }
        let path = std::env::temp_dir().join(format!("netvm-plot-transfer-{}.svg", std::process::id()));
        write(&rows, &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        for text in ["copy", "onesided, same machine", "rsync", "bare TCP stream", "1 GiB", "468.8 KiB"] {
            assert!(svg.contains(text), "{text}");
        }
    }
}
