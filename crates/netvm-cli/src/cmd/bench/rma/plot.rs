//! The picture of `netvm bench rma`: bandwidth by size, puts and gets, aligned and one byte off, beside the bare stream.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;

use super::super::report::Row;

const PUT: RGBColor = RGBColor(0x1b, 0x6c, 0xa8);
const GET: RGBColor = RGBColor(0x2a, 0x9d, 0x6f);
const PUT_ODD: RGBColor = RGBColor(0x8f, 0xc1, 0xe3);
const GET_ODD: RGBColor = RGBColor(0x9a, 0xd9, 0xbb);
const FLOOR: RGBColor = RGBColor(0x8a, 0x96, 0xa0);

/// Writes an SVG file with one chart for each placement.
///
/// # Errors
/// When the file cannot be written.
pub fn write(rows: &[Row], path: &Path) -> Result<(), Box<dyn Error>> {
    let mut placements: Vec<&str> = rows.iter().filter_map(|row| row.placement).collect();
    placements.sort_unstable();
    placements.dedup();
    let root = SVGBackend::new(path, (900, 380 * placements.len().max(1) as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, placement) in root.split_evenly((placements.len().max(1), 1)).iter().zip(&placements) {
        let points = |case: &str, floor: bool| -> Vec<(f64, f64)> {
            let wanted = |row: &&Row| {
                row.case == case
                    && row.placement == Some(placement)
                    && row.peer.is_some_and(|peer| peer.starts_with("floor")) == floor
                    && (floor || row.peer.is_none())
            };
            let mut points: Vec<_> = rows
                .iter()
                .filter(wanted)
                .filter_map(|row| Some((row.size_bytes? as f64, row.median?)))
                .collect();
            points.sort_by(|one, two| one.0.total_cmp(&two.0));
            points
        };
        let lines = [
            ("put", points("put-bw", false), PUT),
            ("get", points("get-bw", false), GET),
            ("put, misaligned", points("put-bw-misaligned", false), PUT_ODD),
            ("get, misaligned", points("get-bw-misaligned", false), GET_ODD),
            ("bare stream", points("stream", true), FLOOR),
        ];
        let most = lines.iter().flat_map(|line| &line.1).map(|point| point.1).fold(0.1, f64::max);
        let mut chart = ChartBuilder::on(area)
            .caption(format!("GB/s by bytes of one operation, {placement}"), ("sans-serif", 18))
            .margin(14)
            .x_label_area_size(36)
            .y_label_area_size(48)
            .build_cartesian_2d((8f64..8_388_608f64).log_scale(), 0f64..most * 1.1)?;
        chart
            .configure_mesh()
            .x_desc("bytes")
            .x_label_formatter(&|bytes| format!("{bytes:.0}"))
            .y_desc("GB/s")
            .draw()?;
        for (name, points, color) in lines {
            chart
                .draw_series(LineSeries::new(points.clone(), color.stroke_width(2)))?
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
            chart.draw_series(points.into_iter().map(|point| Circle::new(point, 3, color.filled())))?;
        }
        let position = SeriesLabelPosition::UpperLeft;
        chart.configure_series_labels().position(position).border_style(BLACK.mix(0.2)).draw()?;
    }
    root.present()?;
    Ok(())
}
