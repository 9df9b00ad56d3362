//! The picture of a run: faults, transfers and local memory over time, and what more local memory would save.

use std::collections::HashMap;
use std::error::Error;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use netvm::detail::PagerDetail;
use netvm_core::observe::Heat;
use plotters::prelude::*;

use crate::picture::{self, Area};
use crate::runs::{Look, Rates};

/// Looks that are kept: with more, every second one goes.
const LOOKS_MAX: usize = 4096;
/// Columns of the heat map: with more, two become one.
const COLUMNS_MAX: usize = 256;
const SIZE: (u32, u32) = (1100, 1600);
/// Points of the curve of what more local memory would save.
const MORE_POINTS: u64 = 100;
/// Room for the key of a panel, above it: inside it would lie on what is drawn.
const KEY_HEIGHT: u32 = 24;
/// Left of the axis.
const LABELS_WIDTH: u32 = 80;
const MARGIN: u32 = 10;
const INK: RGBColor = RGBColor(0x22, 0x2b, 0x33);
const GRID: RGBColor = RGBColor(0xe4, 0xe8, 0xec);
const BLUE: RGBColor = RGBColor(0x1b, 0x6c, 0xa8);
const GREEN: RGBColor = RGBColor(0x2a, 0x9d, 0x6f);
const ORANGE: RGBColor = RGBColor(0xd0, 0x6a, 0x2c);
const GREY: RGBColor = RGBColor(0x8a, 0x96, 0xa0);

/// What was seen of a run.
pub struct Report {
    program: String,
    looks: Vec<(Duration, Look)>,
    /// One of so many looks is kept.
    every: usize,
    seen: usize,
    /// When a column of the heat map begins, and the faults of its time.
    columns: Vec<(Duration, Heat)>,
    /// Looks that make a column, and those that made the last one.
    column_looks: usize,
    column_has: usize,
    /// What each process had at the last look.
    heats: HashMap<u32, Heat>,
}

/// A name, a colour, and a value for each point in time.
type Curve = (&'static str, RGBColor, Vec<(f64, f64)>);

impl Report {
    pub fn new(program: &str) -> Self {
        Self {
            program: program.to_owned(),
            looks: Vec::new(),
            every: 1,
            seen: 0,
            columns: Vec::new(),
            column_looks: 1,
            column_has: 0,
            heats: HashMap::new(),
        }
    }

    pub fn add(&mut self, at: Duration, look: Look, processes: &[(u32, PagerDetail)]) {
        self.add_heat(at, processes);
        self.seen += 1;
        if self.looks.len() >= LOOKS_MAX {
            let mut index = 0;
            self.looks.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.every *= 2;
        }
        if (self.seen - 1).is_multiple_of(self.every) {
            self.looks.push((at, look));
        }
    }

    fn add_heat(&mut self, at: Duration, processes: &[(u32, PagerDetail)]) {
        let mut new = Heat::default();
        for (pid, detail) in processes {
            let old = self.heats.insert(*pid, detail.heat);
            new.add(&old.map_or(detail.heat, |old| detail.heat.since(&old)));
        }
        self.heats.retain(|pid, _| processes.iter().any(|(living, _)| living == pid));
        match self.columns.last_mut().filter(|_| self.column_has < self.column_looks) {
            Some((_, heat)) => heat.add(&new),
            None => {
                if self.columns.len() >= COLUMNS_MAX {
                    let pairs = self.columns.chunks(2).map(|pair| {
                        let (at, mut heat) = pair[0];
                        pair[1..].iter().for_each(|(_, other)| heat.add(other));
                        (at, heat)
                    });
                    self.columns = pairs.collect();
                    self.column_looks *= 2;
                }
                self.columns.push((at, new));
                self.column_has = 0;
            }
        }
        self.column_has += 1;
    }

    /// Faults by time and address; the darker, the more, by powers.
    fn heat_map(&self, area: &Area<'_>) -> Result<(), Box<dyn Error>> {
        let pages_log2 = self.columns.iter().map(|(_, heat)| heat.pages_log2()).max().unwrap_or(0);
        let columns: Vec<(f64, Heat)> =
            self.columns.iter().map(|(at, heat)| (at.as_secs_f64(), heat.at(pages_log2))).collect();
        let used = |heat: &Heat| heat.counts().iter().rposition(|count| *count > 0).map_or(0, |bin| bin + 1);
        let bins = columns.iter().map(|(_, heat)| used(heat)).max().unwrap_or(0).max(1);
        let most = columns.iter().flat_map(|(_, heat)| heat.counts()).max().copied().unwrap_or(0);
        let bin_mib = f64::from(1u32 << pages_log2.min(31)) / 256.0;
        let end = self.looks.last().map_or(1.0, |(at, _)| at.as_secs_f64()).max(0.1);
        let highest = bins as f64 * bin_mib;
        let color = |count: u64| ORANGE.mix(0.15 + 0.85 * (count as f64).ln_1p() / (most as f64).ln_1p());
        let (above, area) = area.split_vertically(KEY_HEIGHT);
        if most > 0 {
            let column_ms = end * 1e3 / columns.len() as f64;
            let title = format!("faults in {column_ms:.0} ms and {bin_mib} MiB:");
            let entries = steps(most).into_iter().map(|count| (count.to_string(), color(count)));
            key(&above, &title, 12, entries)?;
        }
        let mut chart = ChartBuilder::on(&area)
            .margin(MARGIN)
            .x_label_area_size(36)
            .y_label_area_size(LABELS_WIDTH)
            .build_cartesian_2d(0.0..end, 0.0..highest)?;
        chart
            .configure_mesh()
            .x_desc("seconds")
            .y_desc("faults by address, MiB")
            .axis_style(INK)
            .label_style(("sans-serif", 14, &INK))
            .light_line_style(WHITE)
            .bold_line_style(GRID)
            .x_label_formatter(&|value| label(*value, end))
            .y_label_formatter(&|value| label(*value, highest))
            .draw()?;
        for (index, (from, heat)) in columns.iter().enumerate() {
            let to = columns.get(index + 1).map_or(end, |(at, _)| *at);
            for (bin, &count) in heat.counts().iter().enumerate().filter(|(_, count)| **count > 0) {
                let low = bin as f64 * bin_mib;
                let field = [(*from, low), (to, low + bin_mib)];
                chart.draw_series([Rectangle::new(field, color(count).filled())])?;
            }
        }
        Ok(())
    }

    /// Curves of what `value` says of neighbouring looks.
    fn rates(&self, name: &'static str, color: RGBColor, value: impl Fn(&Rates) -> f64) -> Curve {
        let mut looks: Vec<&(Duration, Look)> = self.looks.iter().collect();
        // The last look is when the processes have ended and counted what they had not: in a moment that would be a peak.
        if let [.., before, last_but_one, last] = &looks[..]
            && (last.0 - last_but_one.0) * 2 < last_but_one.0 - before.0
        {
            looks.remove(looks.len() - 2);
        }
        let pairs = looks.windows(2);
        let points =
            pairs.map(|pair| (pair[1].0.as_secs_f64(), value(&Rates::between(&pair[0].1, &pair[1].1))));
        (name, color, points.collect())
    }

    fn gauge(&self, name: &'static str, color: RGBColor, pages: impl Fn(&Look) -> u64) -> Curve {
        let mib = |look: &Look| pages(look) as f64 / 256.0;
        (name, color, self.looks.iter().map(|(at, look)| (at.as_secs_f64(), mib(look))).collect())
    }

    /// Writes the picture of what was seen up to now.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), Box<dyn Error>> {
        picture::write(path, SIZE, |root| self.draw(root))
    }

    fn draw(&self, root: &Area<'_>) -> Result<(), Box<dyn Error>> {
        let title: String = self.program.chars().take(100).collect();
        let root = root.titled(&format!("netvm run: {title}"), ("sans-serif", 20).into_font().color(&INK))?;
        let parts = root.split_evenly((5, 1));
        let end = self.looks.last().map_or(1.0, |(at, _)| at.as_secs_f64()).max(0.1);
        let seconds = ("seconds", 0.0..end);
        let faults = [
            self.rates("fetched from lenders", ORANGE, |rates| rates.fetched),
            self.rates("unpacked", GREEN, |rates| rates.unpacked),
            self.rates("touched for the first time", GREY, |rates| rates.zero_fills),
        ];
        chart(&parts[0], &seconds, "pages a second", &faults)?;
        let moved = [
            self.rates("from lenders", ORANGE, |rates| rates.bytes_in / 1e6),
            self.rates("to lenders", BLUE, |rates| rates.bytes_out / 1e6),
        ];
        chart(&parts[1], &seconds, "MB/s", &moved)?;
        let memory = [
            self.gauge("local memory allowed", GREY, |look| look.budget_frames),
            self.gauge("in use", BLUE, |look| look.stats.local_frames),
            self.gauge("of that, packed pages", GREEN, |look| look.stats.pool_frames),
            self.gauge("far memory that holds something", ORANGE, |look| look.stats.far_pages),
        ];
        chart(&parts[2], &seconds, "MiB", &memory)?;
        self.heat_map(&parts[3])?;
        self.more_local(&parts[4])
    }

    /// What would have been brought in with more local memory; nothing where nothing was.
    fn more_local(&self, area: &Area<'_>) -> Result<(), Box<dyn Error>> {
        let Some((_, last)) = self.looks.last().filter(|(_, look)| look.detail.reuse.back() > 0) else {
            return Ok(());
        };
        let (reuse, local) = (&last.detail.reuse, last.budget_frames);
        let back_with = |more| reuse.back_with(more) as f64 / 256.0;
        // As far as there is something to save, but not for ever.
        let wide = |times: &u64| back_with(local.saturating_mul(times - 1)) < back_with(0) / 100.0;
        let most = local.saturating_mul((2..32).find(wide).unwrap_or(32));
        let point = |at: u64| {
            let more = (most - local) / MORE_POINTS * at;
            ((local + more) as f64 / 256.0, back_with(more))
        };
        let curve: Curve = (
            "what would have come in, estimated for more local memory than there was",
            ORANGE,
            (0..=MORE_POINTS).map(point).collect(),
        );
        let locals = (local as f64 / 256.0)..(most as f64 / 256.0);
        chart(area, &("local memory, MiB", locals), "brought in, MiB", &[curve])
    }
}

/// Curves over an axis of this name and range.
fn chart(
    area: &Area<'_>,
    (name, range): &(&str, Range<f64>),
    unit: &str,
    curves: &[Curve],
) -> Result<(), Box<dyn Error>> {
    let values = curves.iter().flat_map(|(_, _, points)| points.iter().map(|point| point.1));
    let most = values.fold(0.0, f64::max).max(1.0) * 1.1;
    let (above, area) = area.split_vertically(KEY_HEIGHT);
    key(&above, "", 3, curves.iter().map(|(name, color, _)| ((*name).to_owned(), color.to_rgba())))?;
    let mut chart = ChartBuilder::on(&area)
        .margin(MARGIN)
        .x_label_area_size(36)
        .y_label_area_size(LABELS_WIDTH)
        .build_cartesian_2d(range.clone(), 0.0..most)?;
    chart
        .configure_mesh()
        .x_desc(*name)
        .y_desc(unit)
        .axis_style(INK)
        .label_style(("sans-serif", 14, &INK))
        .light_line_style(WHITE)
        .bold_line_style(GRID)
        .x_label_formatter(&|value| label(*value, range.end))
        .y_label_formatter(&|value| label(*value, most))
        .draw()?;
    for (_, color, points) in curves {
        chart.draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(2)))?;
    }
    Ok(())
}

/// What colours stand for, from left to right: a patch `height` high, and its name.
fn key(
    area: &Area<'_>,
    title: &str,
    height: i32,
    entries: impl Iterator<Item = (String, RGBAColor)>,
) -> Result<(), Box<dyn Error>> {
    let style = ("sans-serif", 14).into_font().color(&INK);
    // Texts are as wide as they are estimated to be, or less.
    let width =
        |text: &str| -> Result<i32, Box<dyn Error>> { Ok(area.estimate_text_size(text, &style)?.0 as i32) };
    let mut x = (MARGIN + LABELS_WIDTH) as i32;
    let middle = KEY_HEIGHT as i32 / 2 + 4;
    if !title.is_empty() {
        area.draw(&Text::new(title.to_owned(), (x, middle - 7), style.clone()))?;
        x += width(title)? + 12;
    }
    for (name, color) in entries {
        let patch = [(x, middle - height / 2), (x + 18, middle - height / 2 + height)];
        area.draw(&Rectangle::new(patch, color.filled()))?;
        x += 24;
        let wide = width(&name)?;
        area.draw(&Text::new(name, (x, middle - 7), style.clone()))?;
        x += wide + 20;
    }
    Ok(())
}

/// Numbers of faults for the key: powers of ten below the most, and that.
fn steps(most: u64) -> Vec<u64> {
    let powers = (0..20).map(|power| 10u64.pow(power)).take_while(|step| *step < most);
    powers.chain([most]).collect()
}

/// A number on an axis that reaches to `most`.
fn label(value: f64, most: f64) -> String {
    match most {
        20_000.0.. => format!("{:.0}k", value / 1e3),
        2_000.0.. => format!("{:.1}k", value / 1e3),
        20.0.. => format!("{value:.0}"),
        1.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netvm::stats::PagerStats;
    use std::time::Instant;

    #[test]
    fn the_key_ends_with_the_most() {
        assert_eq!((steps(1), steps(10)), (vec![1], vec![1, 10]));
        assert_eq!(steps(123), [1, 10, 100, 123]);
        assert_eq!(steps(u64::MAX).len(), 21);
    }

    #[test]
    fn a_short_last_interval_is_no_peak() {
        let start = Instant::now();
        let mut report = Report::new("sort");
        for (ms, zero_fills) in [(0, 0), (50, 100), (100, 200), (101, 300)] {
            let at = Duration::from_millis(ms);
            let stats = PagerStats { zero_fills, ..PagerStats::default() };
            let detail = PagerDetail::default();
            report.add(at, Look { at: start + at, budget_frames: 10, stats, detail }, &[]);
        }
        let (.., points) = report.rates("touched", GREY, |rates| rates.zero_fills);
        let rates: Vec<_> = points.iter().map(|(_, rate)| rate.round()).collect();
        assert_eq!(rates, [2000.0, 3922.0]);
    }

    /// The vertical places of a text, and of the first curve of a colour behind it.
    fn text_and_curve(picture: &str, name: &str, color: &str) -> (i32, Vec<i32>) {
        let at = picture.find(name).unwrap();
        let text = picture[..at].rsplit(" y=\"").next().unwrap();
        let text = text.split('"').next().unwrap().parse().unwrap();
        let curve =
            picture[at..].lines().find(|line| line.contains("<polyline") && line.contains(color)).unwrap();
        let points = curve.split("points=\"").nth(1).unwrap().split('"').next().unwrap();
        let places = points.split_whitespace().map(|point| point.split(',').nth(1).unwrap().parse().unwrap());
        (text, places.collect())
    }

    #[test]
    fn keys_lie_on_nothing_that_is_drawn() {
        let mut report = Report::new("sort");
        let start = Instant::now();
        let mut detail = PagerDetail::default();
        for number in 0..20u64 {
            let at = Duration::from_millis(50 * number);
            let stats = PagerStats { remote_reads: 100 * number, ..PagerStats::default() };
            (0..number * 5).for_each(|fault| detail.heat.note(fault as u32 % 4));
            report.add(at, Look { at: start + at, budget_frames: 10, stats, detail }, &[(7, detail)]);
        }
        let path = std::env::temp_dir().join(format!("netvm-report-test-{}.svg", std::process::id()));
        report.write(&path).unwrap();
        let picture = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let (key, curve) = text_and_curve(&picture, "fetched from lenders", "#D06A2C");
        assert!(curve.iter().all(|place| *place > key + 14), "{key} {curve:?}");
        assert!(picture.contains("faults in 48 ms and"), "{picture}");
        // Nothing came in.
        assert!(!picture.contains("local memory, MiB"));
        for count in ["1", "10"] {
            assert!(picture.contains(&format!(">\n{count}\n<")), "no {count} in the key");
        }
    }

    #[test]
    fn what_more_memory_would_save_is_drawn() {
        let mut report = Report::new("sort");
        let start = Instant::now();
        let mut detail = PagerDetail::default();
        detail.reuse.evicted = 100_000;
        (0..50_000).for_each(|age| detail.reuse.note_back(age));
        for number in 0..3 {
            let at = Duration::from_millis(50 * number);
            report.add(
                at,
                Look { at: start + at, budget_frames: 2560, stats: PagerStats::default(), detail },
                &[],
            );
        }
        let path = std::env::temp_dir().join(format!("netvm-report-test-more-{}.svg", std::process::id()));
        report.write(&path).unwrap();
        let picture = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let (_, curve) = text_and_curve(&picture, "what would have come in", "#D06A2C");
        // Down to nothing.
        assert!(
            curve.is_sorted() && curve.len() > 50 && curve[curve.len() - 1] - curve[0] > 150,
            "{curve:?}"
        );
    }

    #[test]
    fn a_long_run_keeps_looks_of_all_its_length() {
        let mut report = Report::new("sort");
        let start = Instant::now();
        for number in 0..20_000u64 {
            let at = Duration::from_millis(50 * number);
            let stats = PagerStats { faults: number, ..PagerStats::default() };
            let mut detail = PagerDetail::default();
            for fault in 0..=number / 64 {
                detail.heat.note(fault as u32);
            }
            let look = Look { at: start + at, budget_frames: 10, stats, detail };
            report.add(at, look, &[(7, detail)]);
        }
        assert!((LOOKS_MAX / 2..=LOOKS_MAX).contains(&report.looks.len()));
        let last = report.looks.last().unwrap().0;
        assert!(report.looks[0].0.is_zero() && last > Duration::from_secs(990), "{last:?}");
        let steps: Vec<_> = report.looks.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
        assert!(steps.iter().all(|step| *step == steps[0]), "evenly");
        // Each fault is in one column of the map.
        let faults: u64 = report.columns.iter().flat_map(|(_, heat)| heat.counts()).sum();
        assert_eq!(faults, 19_999 / 64 + 1);
        assert!((COLUMNS_MAX / 2..=COLUMNS_MAX).contains(&report.columns.len()));
    }
}
