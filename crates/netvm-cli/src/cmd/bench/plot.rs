//! Pictures of benches whose rows stand beside each other: a bar for each, with its floor.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;

use super::report::Row;

/// Width, and most that one chart is high.
const SIZE: (u32, u32) = (1000, 900);
/// Room for the title of a chart.
const TOP: i32 = 44;
const NETVM: RGBColor = RGBColor(0x1b, 0x6c, 0xa8);
const FLOOR: RGBColor = RGBColor(0xb8, 0xc4, 0xce);
const PEER: RGBColor = RGBColor(0xe0, 0x9f, 0x3e);
const INK: RGBColor = RGBColor(0x22, 0x2b, 0x33);

/// One bar: what, how much, and the floor to mark on it.
struct Bar {
    label: String,
    value: f64,
    floor: Option<f64>,
    color: RGBColor,
}

/// Writes an SVG file with two bar charts, of what `netvm bench fault` measures.
///
/// # Errors
/// When the file cannot be written.
pub fn write(rows: &[Row], path: &Path) -> Result<(), Box<dyn Error>> {
    let charts = [
        ("Far page fault, median microseconds (lower is better)", &["random-read", "random-rmw"]),
        ("Sequential, GB/s (higher is better)", &["seq-read", "seq-write"]),
    ];
    draw(path, "swap", &charts.map(|(title, cases)| (title.to_owned(), bars(rows, cases))))
}

/// Writes an SVG file with a bar chart for each unit: what took so long, and what moved so much.
///
/// # Errors
/// When the file cannot be written.
pub fn by_unit(rows: &[Row], path: &Path, what: &str) -> Result<(), Box<dyn Error>> {
    let chart = |unit: &str, better: &str| {
        let of_unit: Vec<Row> = rows.iter().filter(|row| row.unit == unit).cloned().collect();
        let mut cases: Vec<&str> = of_unit.iter().map(|row| row.case.as_str()).collect();
        cases.dedup();
        (format!("{what}, median {unit} ({better} is better)"), bars(&of_unit, &cases))
    };
    draw(path, "others", &[chart("us", "lower"), chart("GB/s", "higher")])
}

/// The same of `netvm bench swap`.
///
/// # Errors
/// When the file cannot be written.
pub fn of_swap(rows: &[Row], path: &Path) -> Result<(), Box<dyn Error>> {
    let charts = [
        ("Random access to a swapped page, median us (lower is better)", "swap-rand"),
        ("Swapped in, in order, MB/s (higher is better)", "swap-seq"),
        ("Swapped out, while as much comes in, MB/s (higher is better)", "swap-seq-write"),
    ];
    draw(path, "others", &charts.map(|(title, case)| (title.to_owned(), bars(rows, &[case]))))
}

/// The same of `netvm bench failure`.
///
/// # Errors
/// When the file cannot be written.
pub fn of_failure(rows: &[Row], path: &Path) -> Result<(), Box<dyn Error>> {
    let of = |is: fn(&str) -> bool| -> Vec<&str> {
        rows.iter().map(|row| row.case.as_str()).filter(|case| is(case)).collect()
    };
    let charts = [
        (
            "Seconds that sort takes; pale: in RAM, without trouble",
            of(|case| !case.ends_with("-stall") && !case.ends_with("-repair")),
        ),
        ("Longest wait for a page, ms (lower is better)", of(|case| case.ends_with("-stall"))),
        ("Until all pages were protected again, seconds", of(|case| case.ends_with("-repair"))),
    ];
    draw(path, "others", &charts.map(|(title, cases)| (title.to_owned(), bars(rows, &cases))))
}

/// The same of `netvm bench tiers`.
///
/// # Errors
/// When the file cannot be written.
pub fn of_tiers(rows: &[Row], path: &Path) -> Result<(), Box<dyn Error>> {
    let title = "An access, us (lower is better); pale: the best order that is given";
    draw(path, "orders", &[(title.to_owned(), bars(rows, &["phases"]))])
}

fn draw(path: &Path, peers: &str, charts: &[(String, Vec<Bar>)]) -> Result<(), Box<dyn Error>> {
    let height = |bars: &[Bar]| (TOP as u32 + 24 + bars.len() as u32 * 26).clamp(120, SIZE.1);
    let all = charts.iter().map(|(_, bars)| height(bars)).sum();
    let root = SVGBackend::new(path, (SIZE.0, all)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut rest = root.clone();
    for (title, bars) in charts {
        let (area, below) = rest.split_vertically(height(bars));
        chart(&area, title, bars, peers)?;
        rest = below;
    }
    root.present()?;
    Ok(())
}

fn bars(rows: &[Row], cases: &[&str]) -> Vec<Bar> {
    let mut bars = Vec::new();
    for case in cases {
        for row in rows.iter().filter(|row| row.case == *case) {
            let Some(value) = row.median else { continue };
            let (who, color) = match row.peer {
                None => (row.placement.unwrap_or("netvm"), NETVM),
                Some(peer) => (peer, PEER),
            };
            let floor = row.floor.filter(|_| row.peer.is_none());
            bars.push(Bar { label: format!("{case}  {who}"), value, floor, color });
        }
    }
    bars
}

/// Horizontal bars with their labels to the left and their values at the end; a floor is a pale bar behind.
fn chart<DB: DrawingBackend>(
    area: &DrawingArea<DB, plotters::coord::Shift>,
    title: &str,
    bars: &[Bar],
    peers: &str,
) -> Result<(), Box<dyn Error>>
where
    DB::ErrorType: 'static,
{
    const LEFT: i32 = 290;
    let (width, height) = area.dim_in_pixel();
    let (width, height) = (width as i32, height as i32);
    area.draw(&Text::new(title.to_string(), (16, 12), ("sans-serif", 18).into_font().color(&INK)))?;
    let legend = [(NETVM, "netvm"), (FLOOR, "floor (bare kernel)"), (PEER, peers)];
    for (index, (color, name)) in legend.iter().enumerate() {
        let x = width - 330 + index as i32 * 90 + if index == 2 { 60 } else { 0 };
        area.draw(&Rectangle::new([(x, 16), (x + 12, 28)], color.filled()))?;
        area.draw(&Text::new(name.to_string(), (x + 17, 16), ("sans-serif", 13).into_font().color(&INK)))?;
    }
    let most = bars.iter().map(|bar| bar.value.max(bar.floor.unwrap_or(0.0))).fold(0.0, f64::max);
    if most <= 0.0 || bars.is_empty() {
        return Ok(());
    }
    let step = ((height - TOP - 12) / bars.len() as i32).min(40);
    let scale = f64::from(width - LEFT - 130) / most;
    for (index, bar) in bars.iter().enumerate() {
        let y = TOP + index as i32 * step;
        let thick = step * 3 / 4;
        let style = ("sans-serif", f64::from(step.clamp(8, 20)) * 0.7).into_font().color(&INK);
        let reach = |value: f64| LEFT + (value * scale) as i32;
        area.draw(&Text::new(bar.label.clone(), (16, y + thick / 5), style.clone()))?;
        if let Some(floor) = bar.floor {
            area.draw(&Rectangle::new([(LEFT, y), (reach(floor), y + thick)], FLOOR.filled()))?;
        }
        let inset = if bar.floor.is_some() { thick / 4 } else { 0 };
        area.draw(&Rectangle::new(
            [(LEFT, y + inset), (reach(bar.value), y + thick - inset)],
            bar.color.filled(),
        ))?;
        let end = reach(bar.value.max(bar.floor.unwrap_or(0.0)));
        area.draw(&Text::new(
            if bar.value < 10.0 { format!("{:.2}", bar.value) } else { format!("{:.1}", bar.value) },
            (end + 6, y + thick / 5),
            style,
        ))?;
    }
    Ok(())
}
