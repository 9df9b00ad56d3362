//! Pictures of benches whose rows stand beside each other: a bar for each, with its floor.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;

use super::report::Row;
use crate::picture;

/// Width, and most that one chart is high.
const SIZE: (u32, u32) = (1000, 900);
/// Room for the title of a chart, and for what its colours mean.
const TOP: i32 = 64;
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
        (
            "Far page fault, median microseconds (lower is better)",
            &["random-read", "random-rmw", "random-read-threads"][..],
        ),
        ("Sequential, GB/s (higher is better)", &["seq-read", "seq-write"]),
    ];
    draw(path, "swap", &charts.map(|(title, cases)| (title.to_owned(), bars(rows, cases))))
}

/// What part is local, and of what data, behind the name of a walk, which may have a hyphen.
fn part_of(case: &str) -> Option<&str> {
    let start = case.find(|c: char| c.is_ascii_digit())?;
    Some(case[start..].trim_end_matches("-threads"))
}

/// The same of `netvm bench fault --walks`: a chart for each placement, part that is local and kind of data. Swap has no placement.
///
/// # Errors
/// When the file cannot be written.
pub fn of_walks(rows: &[Row], path: &Path) -> Result<(), Box<dyn Error>> {
    let walks = |row: &Row| Some((row.placement?, part_of(&row.case)?.to_owned()));
    let mut charts: Vec<(&str, String)> = Vec::new();
    for chart in rows.iter().filter_map(walks) {
        if !charts.contains(&chart) {
            charts.push(chart);
        }
    }
    let chart = |(placement, part): (&'static str, String)| {
        let of =
            |row: &&Row| part_of(&row.case) == Some(&part) && row.placement.is_none_or(|of| of == placement);
        let rows: Vec<Row> = rows.iter().filter(of).cloned().collect();
        let mut cases: Vec<&str> = Vec::new();
        for row in &rows {
            if !cases.contains(&row.case.as_str()) {
                cases.push(&row.case);
            }
        }
        let (percent, data) = match part.strip_suffix("-half") {
            Some(percent) => (percent, "half-compressible"),
            None => (part.as_str(), "random"),
        };
        let title = format!("An access, {percent} % local, {data} data, {placement}: us (lower is better)");
        (title, bars(&rows, &cases))
    };
    let charts: Vec<_> = charts.into_iter().map(chart).collect();
    draw(path, "others", &charts)
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
    // Where only a part was measured, the rest is no empty chart.
    let charts = || charts.iter().filter(|(_, bars)| !bars.is_empty());
    let all: u32 = charts().map(|(_, bars)| height(bars)).sum();
    picture::write(path, (SIZE.0, all.max(TOP as u32)), |root| {
        let mut rest = root.clone();
        for (title, bars) in charts() {
            let (area, below) = rest.split_vertically(height(bars));
            chart(&area, title, bars, peers)?;
            rest = below;
        }
        Ok(())
    })
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

/// Horizontal bars with their labels to the left and their values at their end; a floor is a pale bar behind.
fn chart<DB: DrawingBackend>(
    area: &DrawingArea<DB, plotters::coord::Shift>,
    title: &str,
    bars: &[Bar],
    peers: &str,
) -> Result<(), Box<dyn Error>>
where
    DB::ErrorType: 'static,
{
    const LEFT_MIN: i32 = 290;
    let (width, height) = area.dim_in_pixel();
    let (width, height) = (width as i32, height as i32);
    let font = |size: f64| ("sans-serif", size).into_font().color(&INK);
    let wide =
        |text: &str, size: f64| area.estimate_text_size(text, &font(size)).map(|(wide, _)| wide as i32);
    area.draw(&Text::new(title.to_string(), (16, 12), font(18.0)))?;
    // Only what there is.
    let mut legend = [(NETVM, "netvm"), (PEER, peers)]
        .into_iter()
        .filter(|(color, _)| bars.iter().any(|bar| bar.color == *color))
        .collect::<Vec<_>>();
    legend.extend(bars.iter().any(|bar| bar.floor.is_some()).then_some((FLOOR, "floor (bare kernel)")));
    let mut x = 16;
    for (color, name) in legend {
        area.draw(&Rectangle::new([(x, 38), (x + 12, 50)], color.filled()))?;
        area.draw(&Text::new(name.to_string(), (x + 17, 38), font(13.0)))?;
        x += 17 + wide(name, 13.0)? + 18;
    }
    let most = bars.iter().map(|bar| bar.value.max(bar.floor.unwrap_or(0.0))).fold(0.0, f64::max);
    if most <= 0.0 || bars.is_empty() {
        return Ok(());
    }
    let step = ((height - TOP - 12) / bars.len() as i32).min(40);
    let size = f64::from(step.clamp(8, 20)) * 0.7;
    let mut left = LEFT_MIN;
    for bar in bars {
        left = left.max(16 + wide(&bar.label, size)? + 8);
    }
    let scale = f64::from(width - left - 130) / most;
    for (index, bar) in bars.iter().enumerate() {
        let y = TOP + index as i32 * step;
        let thick = step * 3 / 4;
        let style = font(size);
        let reach = |value: f64| left + (value * scale) as i32;
        area.draw(&Text::new(bar.label.clone(), (16, y + thick / 5), style.clone()))?;
        if let Some(floor) = bar.floor {
            area.draw(&Rectangle::new([(left, y), (reach(floor), y + thick)], FLOOR.filled()))?;
        }
        let inset = if bar.floor.is_some() { thick / 4 } else { 0 };
        area.draw(&Rectangle::new(
            [(left, y + inset), (reach(bar.value), y + thick - inset)],
            bar.color.filled(),
        ))?;
        // Behind the floor it would seem to be that of the floor, where more is better.
        let end = reach(bar.value);
        area.draw(&Text::new(
            if bar.value < 10.0 { format!("{:.2}", bar.value) } else { format!("{:.1}", bar.value) },
            (end + 6, y + thick / 5),
            style,
        ))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(name: &str, draw: impl Fn(&Path)) -> String {
        let path = std::env::temp_dir().join(format!("netvm-plot-{name}-{}.svg", std::process::id()));
        draw(&path);
        let picture = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        picture
    }

    fn row(case: &str, placement: Option<&'static str>, peer: Option<&'static str>) -> Row {
        let mut row = Row::new("fault", case, "us");
        (row.median, row.floor, row.placement, row.peer) = (Some(6.0), Some(4.0), placement, peer);
        row
    }

    #[test]
    fn the_legend_has_only_what_was_measured() {
        let nearby = row("random-read", Some("nearby"), None);
        let skipped = Row { median: None, ..row("random-read", None, Some("zram")) };
        let alone = picture("alone", |path| write(&[nearby.clone(), skipped.clone()], path).unwrap());
        assert!(
            alone.contains("floor (bare") && !alone.contains("swap") && !alone.contains("GB/s"),
            "{alone}"
        );
        let zram = row("random-read", None, Some("zram"));
        let beside = picture("beside", |path| write(&[nearby.clone(), zram.clone()], path).unwrap());
        assert!(beside.contains("swap") && beside.contains("random-read  zram"), "{beside}");
        let nothing = picture("nothing", |path| write(&[], path).unwrap());
        assert!(nothing.ends_with("</svg>\n"), "{nothing}");
    }

    #[test]
    fn a_value_stands_at_its_own_bar() {
        let below = Row { median: Some(1.0), ..row("seq-read", Some("nearby"), None) };
        let drawn = picture("below", |path| write(std::slice::from_ref(&below), path).unwrap());
        let text = drawn[..drawn.find("\n1.00\n").unwrap()].rsplit("<text x=\"").next().unwrap();
        let x: i32 = text.split('"').next().unwrap().parse().unwrap();
        // The floor, of four times as much, reaches to the right end.
        assert!(x < SIZE.0 as i32 / 2, "{x}");
    }

    #[test]
    fn walks_have_a_chart_for_each_part_and_placement() {
        let mut rows = Vec::new();
        for placement in ["same-cpu", "nearby"] {
            for case in
                ["uniform-50", "uniform-named-50", "uniform-50-threads", "chase-50-half", "uniform-10"]
            {
                rows.push(row(case, Some(placement), None));
                rows.push(row(case, Some(placement), Some("netvm-lender")));
            }
        }
        rows.push(row("uniform-50", None, Some("zram")));
        let drawn = picture("walks", |path| of_walks(&rows, path).unwrap());
        let count = |text: &str| drawn.matches(text).count();
        assert_eq!(count("An access, 50 % local, random data"), 2, "{drawn}");
        assert_eq!(count("10 % local, random data, nearby") + count("half-compressible data, same-cpu"), 2);
        assert_eq!(count("uniform-named-50  netvm-lender"), 2);
        assert_eq!((count("uniform-50  zram"), count("uniform-50-threads  netvm-lender")), (2, 2));
    }
}
