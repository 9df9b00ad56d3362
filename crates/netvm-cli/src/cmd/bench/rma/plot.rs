//! The picture of `netvm bench rma`: for each placement latency by size to the left and bandwidth by size to the right.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::super::report::Row;
use crate::picture;

const WIDTH: u32 = 1240;
const HEIGHT: u32 = 420;
const INK: RGBColor = RGBColor(0x22, 0x2b, 0x33);
const GRID: RGBColor = RGBColor(0xe4, 0xe8, 0xec);
const FLOOR: RGBColor = RGBColor(0x8a, 0x96, 0xa0);
const PUT: RGBColor = RGBColor(0x1b, 0x6c, 0xa8);
const GET: RGBColor = RGBColor(0x2a, 0x9d, 0x6f);
const FLUSH: RGBColor = RGBColor(0xd0, 0x6a, 0x2c);
const COPY: RGBColor = RGBColor(0x8a, 0x4f, 0xa8);

/// Rows of one name, by size.
struct Line {
    label: String,
    color: RGBColor,
    /// The paler, the later of several ways to connect.
    shade: usize,
    /// Of a case that has a plain twin: sleeping, misaligned.
    is_dashed: bool,
    points: Vec<(f64, f64)>,
}

impl Line {
    /// Mixed with white, the further the paler.
    fn style(&self) -> ShapeStyle {
        let share = 0.62f64.powi(self.shade as i32);
        let mix = |part: u8| (f64::from(part) * share + 255.0 * (1.0 - share)) as u8;
        let RGBColor(red, green, blue) = self.color;
        RGBColor(mix(red), mix(green), mix(blue)).stroke_width(2)
    }
}

/// What is drawn of a placement: names of cases, how they are called, and their colours.
struct Chart {
    title: &'static str,
    unit: &'static str,
    /// What takes less is better, and differs by powers of ten.
    is_latency: bool,
    cases: &'static [(&'static str, &'static str, RGBColor)],
    floors: &'static [(&'static str, &'static str)],
}

const LATENCY: Chart = Chart {
    title: "latency",
    unit: "us",
    is_latency: true,
    cases: &[
        ("put", "put, one way", PUT),
        ("put-block", "put, one way, sleeping", PUT),
        ("put-complete", "put and flush", FLUSH),
        ("put-complete-block", "put and flush, sleeping", FLUSH),
        ("get", "get", GET),
        ("get-block", "get, sleeping", GET),
    ],
    floors: &[
        ("ask-poll", "bare sockets, polling"),
        ("ask-block", "bare sockets, blocking"),
        ("copy", "bare copy"),
    ],
};

const BANDWIDTH: Chart = Chart {
    title: "bandwidth",
    unit: "GB/s",
    is_latency: false,
    cases: &[
        ("put-bw", "put", PUT),
        ("put-bw-misaligned", "put, one byte off", PUT),
        ("get-bw", "get", GET),
        ("get-bw-misaligned", "get, one byte off", GET),
        ("copy-bw", "copy between others", COPY),
    ],
    floors: &[("stream", "bare stream")],
};

impl Chart {
    fn lines(&self, rows: &[Row], placement: &str) -> Vec<Line> {
        let here = || rows.iter().filter(|row| row.placement == Some(placement) && row.unit == self.unit);
        let points = |case: &str, link: Option<&str>, is_floor: bool| -> Vec<(f64, f64)> {
            let mut points: Vec<(f64, f64)> = here()
                .filter(|row| row.case == case && (link.is_none() || row.link.as_deref() == link))
                .filter(|row| match row.peer {
                    Some(peer) => is_floor && peer.starts_with("floor"),
                    None => !is_floor,
                })
                .filter_map(|row| Some((row.size_bytes? as f64, row.median.filter(|value| *value > 0.0)?)))
                .collect();
            points.sort_by(|one, two| one.0.total_cmp(&two.0));
            points
        };
        let mut links: Vec<&str> =
            here().filter(|row| row.peer.is_none()).filter_map(|row| row.link.as_deref()).collect();
        links.dedup();
        let mut unique: Vec<&str> = Vec::new();
        for link in links {
            if !unique.contains(&link) {
                unique.push(link);
            }
        }
        let mut lines = Vec::new();
        for (case, name, color) in self.cases {
            let is_dashed = case.ends_with("-misaligned") || case.ends_with("-block");
            for (index, link) in unique.iter().enumerate() {
                let label = if unique.len() > 1 { format!("{name} ({link})") } else { (*name).to_owned() };
                let points = points(case, Some(link), false);
                lines.push(Line { label, color: *color, shade: index, is_dashed, points });
            }
        }
        for (case, name) in self.floors {
            let (label, points) = ((*name).to_owned(), points(case, None, true));
            lines.push(Line { label, color: FLOOR, shade: 0, is_dashed: case.ends_with("-block"), points });
        }
        lines.retain(|line| line.points.len() > 1);
        lines
    }

    fn draw<DB: DrawingBackend>(
        &self,
        area: &DrawingArea<DB, Shift>,
        rows: &[Row],
        placement: &str,
    ) -> Result<(), Box<dyn Error>>
    where
        DB::ErrorType: 'static,
    {
        let lines = self.lines(rows, placement);
        let all = || lines.iter().flat_map(|line| &line.points);
        if all().next().is_none() {
            return Ok(());
        }
        let most = all().map(|point| point.1).fold(f64::MIN, f64::max);
        let least = all().map(|point| point.1).fold(f64::MAX, f64::min);
        let widest = all().map(|point| point.0).fold(16.0, f64::max);
        // Names beside the lines, not over them.
        let (chart, names) = area.split_horizontally(area.dim_in_pixel().0 as i32 - 190);
        let (height, style) = (18, ("sans-serif", 13).into_font().color(&INK));
        for (index, line) in lines.iter().enumerate() {
            let y = 52 + index as i32 * height;
            let pieces: &[(i32, i32)] = if line.is_dashed { &[(0, 6), (16, 22)] } else { &[(0, 22)] };
            for (from, to) in pieces {
                names.draw(&PathElement::new([(*from, y + 7), (*to, y + 7)], line.style()))?;
            }
            names.draw(&Circle::new((11, y + 7), 3, line.style().filled()))?;
            names.draw(&Text::new(line.label.clone(), (28, y), style.clone()))?;
        }
        let caption = format!("{placement}: {}, {} by size", self.title, self.unit);
        let mut builder = ChartBuilder::on(&chart);
        builder.caption(caption, ("sans-serif", 17).into_font().color(&INK)).margin(12);
        builder.x_label_area_size(34).y_label_area_size(52);
        let sizes = (8f64..widest).log_scale().base(4.0).zero_point(0.0);
        if self.is_latency {
            let chart = builder.build_cartesian_2d(sizes, (least * 0.8..most * 1.25).log_scale())?;
            self.finish(chart, &lines)
        } else {
            let chart = builder.build_cartesian_2d(sizes, 0f64..most * 1.08)?;
            self.finish(chart, &lines)
        }
    }

    fn finish<'a, DB, X, Y>(
        &self,
        mut chart: ChartContext<'a, DB, Cartesian2d<X, Y>>,
        lines: &[Line],
    ) -> Result<(), Box<dyn Error>>
    where
        DB: DrawingBackend + 'a,
        DB::ErrorType: 'static,
        X: plotters::coord::ranged1d::Ranged<ValueType = f64>
            + plotters::coord::ranged1d::ValueFormatter<f64>,
        Y: plotters::coord::ranged1d::Ranged<ValueType = f64>
            + plotters::coord::ranged1d::ValueFormatter<f64>,
    {
        chart
            .configure_mesh()
            .x_labels(11)
            .x_label_formatter(&|bytes| size(*bytes))
            .y_label_formatter(&|value| short(*value))
            .y_desc(self.unit)
            .axis_desc_style(("sans-serif", 13).into_font().color(&INK))
            .label_style(("sans-serif", 12).into_font().color(&INK))
            .axis_style(FLOOR)
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .draw()?;
        for line in lines {
            let points = line.points.iter().copied();
            if line.is_dashed {
                chart.draw_series(DashedLineSeries::new(points, 6, 4, line.style()))?;
            } else {
                chart.draw_series(LineSeries::new(points, line.style()))?;
            }
            let dot = |&point: &(f64, f64)| Circle::new(point, 3, line.style().filled());
            chart.draw_series(line.points.iter().map(dot))?;
        }
        Ok(())
    }
}

/// Without the digits that binary fractions have.
fn short(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// `4K`, as axes have little room.
fn size(bytes: f64) -> String {
    let bytes = bytes.round() as u64;
    [(20, "M"), (10, "K")]
        .into_iter()
        .find(|(shift, _)| bytes >= 1 << shift)
        .map_or_else(|| bytes.to_string(), |(shift, letter)| format!("{}{letter}", bytes >> shift))
}

/// Writes an SVG file with two charts for each placement.
///
/// # Errors
/// When there is nothing to draw, or the file cannot be written.
pub fn write(rows: &[Row], path: &Path) -> Result<(), Box<dyn Error>> {
    let mut placements: Vec<&str> = rows.iter().filter_map(|row| row.placement).collect();
    placements.dedup();
    if placements.is_empty() {
        return Err("nothing was measured that could be drawn".into());
    }
    picture::write(path, (WIDTH, HEIGHT * placements.len() as u32), |root| {
        for (area, placement) in root.split_evenly((placements.len(), 1)).iter().zip(&placements) {
            let (left, right) = area.split_horizontally(WIDTH as i32 / 2);
            LATENCY.draw(&left, rows, placement)?;
            BANDWIDTH.draw(&right, rows, placement)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!([0.6000000000000001, 20.0, 0.25, 0.0].map(short), ["0.6", "20", "0.25", "0"]);
        assert_eq!([8.0, 4096.0, 65536.0, 8_388_608.0].map(size), ["8", "4K", "64K", "8M"]);
    }

    #[test]
    fn lines_are_of_what_was_measured_at_several_sizes() {
        let row = |case: &str, link: &'static str, bytes, median, peer| {
            let mut row = Row::new("rma", case, "us");
            (row.link, row.placement, row.peer) = (Some(link.into()), Some("here"), peer);
            (row.size_bytes, row.median) = (Some(bytes), Some(median));
            row
        };
        let rows = [
            row("get", "tcp", 4096, 3.0, None),
            row("get", "tcp", 8, 2.0, None),
            row("get", "tcp-x2", 8, 2.5, None),
            row("get", "tcp-x2", 64, 2.5, None),
            row("put", "tcp", 8, 2.0, None),
            row("ask-poll", "tcp", 8, 1.0, Some("floor-tcp")),
            row("ask-poll", "tcp", 64, 1.0, Some("floor-tcp")),
            row("get", "tcp", 64, 9.0, Some("ucx")),
        ];
        let lines = LATENCY.lines(&rows, "here");
        let labels: Vec<&str> = lines.iter().map(|line| line.label.as_str()).collect();
        assert_eq!(labels, ["get (tcp)", "get (tcp-x2)", "bare sockets, polling"]);
        assert_eq!(lines[0].points, [(8.0, 2.0), (4096.0, 3.0)]);
        assert!(LATENCY.lines(&rows, "elsewhere").is_empty());
        assert!(write(&[], Path::new("/nowhere")).is_err());
    }
}
