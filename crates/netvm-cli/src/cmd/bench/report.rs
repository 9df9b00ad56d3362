//! Rows of measurements: the one JSON form that all benches share, and the table for people.

use std::borrow::Cow;
use std::io::Write;

use serde::Serialize;

use super::super::super::size::Size;

/// One measured number in the form that all benches of the project share. Unused keys are null.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The bench: `fault`, `frames`.
    pub bench: &'static str,
    /// What was done, e.g. `random-read`.
    pub case: String,
    /// What carried the bytes, e.g. `tcp`, `tcp-encrypted` or `tcp-x4` over four connections.
    pub link: Option<Cow<'static, str>>,
    /// Which CPUs the two sides ran on.
    pub placement: Option<&'static str>,
    /// Bytes in one operation.
    pub size_bytes: Option<u64>,
    /// Median of one operation in `unit`.
    pub median: Option<f64>,
    /// 99th percentile of one operation in `unit`.
    pub p99: Option<f64>,
    /// Unit of `median`, `p99` and `floor`.
    pub unit: &'static str,
    /// Operations per second over the whole run.
    pub per_s: Option<f64>,
    /// Median of the floor in `unit`.
    pub floor: Option<f64>,
    /// How far from the floor: always "how many times worse", so 1 is the floor and lower is better.
    pub ratio: Option<f64>,
    /// What was measured; null for netvm itself.
    pub peer: Option<&'static str>,
    /// Operations measured; 0 when the case was skipped.
    pub n: u64,
    /// Lowest and highest median over the repetitions, in `unit`. For the table only.
    #[serde(skip)]
    pub spread: Option<(f64, f64)>,
    /// A remark for the table, such as why the case was skipped.
    #[serde(skip)]
    pub note: String,
}

impl Row {
    /// An empty row of a bench.
    pub fn new(bench: &'static str, case: impl Into<String>, unit: &'static str) -> Self {
        Self {
            bench,
            case: case.into(),
            link: None,
            placement: None,
            size_bytes: None,
            median: None,
            p99: None,
            unit,
            per_s: None,
            floor: None,
            ratio: None,
            peer: None,
            n: 0,
            spread: None,
            note: String::new(),
        }
    }
}

/// Writes one JSON object per line.
///
/// # Errors
/// That of the writer, e.g. a closed pipe.
pub fn write_json(rows: &[Row], out: &mut impl Write) -> std::io::Result<()> {
    for row in rows {
        serde_json::to_writer(&mut *out, row)?;
        writeln!(out)?;
    }
    Ok(())
}

const COLUMNS: usize = 12;
/// Words to the left, numbers to the right.
const NUMBERS: std::ops::RangeInclusive<usize> = 4..=10;

fn heading(unit: &str) -> [String; COLUMNS] {
    let median = format!("median, {unit}");
    let (p99, floor) = (format!("p99, {unit}"), format!("floor, {unit}"));
    [
        "placement",
        "link",
        "what",
        "case",
        "size",
        &median,
        "spread",
        &p99,
        "per s",
        &floor,
        "ratio",
        "remarks",
    ]
    .map(str::to_owned)
}

fn line(row: &Row) -> [String; COLUMNS] {
    let number = |value: Option<f64>| value.map_or("-".into(), short);
    [
        row.placement.unwrap_or("-").into(),
        row.link.as_deref().unwrap_or("-").into(),
        row.peer.unwrap_or("netvm").into(),
        row.case.clone(),
        row.size_bytes.map_or("-".into(), |bytes| Size(bytes).to_string()),
        number(row.median),
        row.spread.map_or(String::new(), |(low, high)| format!("{}..{}", short(low), short(high))),
        number(row.p99),
        row.per_s.map_or("-".into(), thousands),
        number(row.floor),
        row.ratio.map_or("-".into(), |ratio| format!("{ratio:.2}x")),
        row.note.clone(),
    ]
}

/// Writes an aligned table for each unit, which its headings name.
///
/// # Errors
/// That of the writer, e.g. a closed pipe.
pub fn write_table(rows: &[Row], out: &mut impl Write) -> std::io::Result<()> {
    let mut units: Vec<&str> = Vec::new();
    for row in rows {
        if !units.contains(&row.unit) {
            units.push(row.unit);
        }
    }
    for (index, unit) in units.into_iter().enumerate() {
        if index > 0 {
            writeln!(out)?;
        }
        let of_unit = rows.iter().filter(|row| row.unit == unit).map(line);
        let lines: Vec<_> = std::iter::once(heading(unit)).chain(of_unit).collect();
        let mut widths = [0; COLUMNS];
        for line in &lines {
            for (width, cell) in widths.iter_mut().zip(line) {
                *width = (*width).max(cell.chars().count());
            }
        }
        // Columns that would be empty are left out: no peer, no link, no spread.
        let kept = |column: usize| {
            column == 3 || lines[1..].iter().any(|line| !matches!(line[column].as_str(), "" | "-"))
        };
        for (index, line) in lines.iter().enumerate() {
            let mut text = String::new();
            for (column, (cell, width)) in
                line.iter().zip(widths).enumerate().filter(|(column, _)| kept(*column))
            {
                let pad = " ".repeat(width - cell.chars().count());
                let padded =
                    if NUMBERS.contains(&column) { format!("{pad}{cell}") } else { format!("{cell}{pad}") };
                text.push_str(&padded);
                text.push_str("  ");
            }
            let text = text.trim_end();
            writeln!(out, "{text}")?;
            if index == 0 {
                let wide: usize =
                    (0..COLUMNS).filter(|column| kept(*column)).map(|column| widths[column] + 2).sum();
                writeln!(out, "{}", "-".repeat(wide - 2))?;
            }
        }
    }
    Ok(())
}

/// Three significant digits or so.
fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size > 0.0 && size < 0.1 => format!("{value:.4}"),
        _ => format!("{value:.2}"),
    }
}

fn thousands(value: f64) -> String {
    if value >= 10_000.0 { format!("{:.0}k", value / 1000.0) } else { format!("{value:.0}") }
}

/// Median of a few numbers, and their lowest and highest. `None` without numbers.
pub fn median_and_spread(values: &[f64]) -> Option<(f64, (f64, f64))> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (&low, &high) = (sorted.first()?, sorted.last()?);
    let middle = sorted.len() / 2;
    let median =
        if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
    Some((median, (low, high)))
}

/// The value below which `share` of the values lie. `None` without values.
pub fn percentile(values: &mut [f64], share: f64) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    let rank = (((values.len() - 1) as f64) * share).round() as usize;
    Some(*values.select_nth_unstable_by(rank, f64::total_cmp).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median_and_spread(&[]), None);
        assert_eq!(median_and_spread(&[3.0, 1.0, 2.0]), Some((2.0, (1.0, 3.0))));
        assert_eq!(median_and_spread(&[4.0, 1.0]), Some((2.5, (1.0, 4.0))));
        assert_eq!(percentile(&mut [5.0, 1.0, 3.0], 0.5), Some(3.0));
    }

    #[test]
    fn tables_have_their_units_in_the_headings() {
        let row = |case: &str, unit, median| {
            let mut row = Row::new("rma", case, unit);
            (row.median, row.size_bytes, row.link) = (Some(median), Some(4096), Some("tcp".into()));
            row
        };
        let mut out = Vec::new();
        write_table(&[row("put", "us", 5.25), row("put-bw", "GB/s", 1.5), row("get", "us", 12.0)], &mut out)
            .unwrap();
        let expected = "\
link  what   case   size  median, us
------------------------------------
tcp   netvm  put   4 KiB        5.25
tcp   netvm  get   4 KiB        12.0

link  what   case     size  median, GB/s
----------------------------------------
tcp   netvm  put-bw  4 KiB          1.50
";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }

    #[test]
    fn json_has_all_keys() {
        let mut out = Vec::new();
        write_json(&[Row::new("fault", "random-read", "us")], &mut out).unwrap();
        let expected = r#"{"bench":"fault","case":"random-read","link":null,"placement":null,"size_bytes":null,"median":null,"p99":null,"unit":"us","per_s":null,"floor":null,"ratio":null,"peer":null,"n":0}"#;
        assert_eq!(String::from_utf8(out).unwrap().trim(), expected);
    }
}
