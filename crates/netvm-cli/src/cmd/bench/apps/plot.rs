//! The picture of `netvm bench apps`: how many times worse off each program is, for each part of its memory that is local.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::super::report::Row;
use crate::picture::{self, Area};

const INK: RGBColor = RGBColor(0x22, 0x2b, 0x33);
const GRID: RGBColor = RGBColor(0xe4, 0xe8, 0xec);
const NETVM: RGBColor = RGBColor(0x1b, 0x6c, 0xa8);
const PEER: RGBColor = RGBColor(0xe0, 0x9f, 0x3e);
const LEFT: i32 = 250;
const TOP: i32 = 76;
const BOTTOM: i32 = 40;
const STEP: i32 = 18;
const WIDTH: i32 = 900;
/// Right of the axis, for the number at its end.
const RIGHT: i32 = 70;

/// A logarithmic axis of ratios: in a linear one the largest would leave nothing of the others.
struct Axis {
    ticks: Vec<f64>,
}

impl Axis {
    /// From a tick at or below 1 to the first that none of the ratios is beyond.
    fn of(ratios: &[f64]) -> Self {
        let ticks: Vec<f64> =
            (-3..=6).flat_map(|power| [1.0, 2.0, 5.0].map(|step| f64::powi(10.0, power) * step)).collect();
        let (low, high) =
            ratios.iter().fold((1.0, 2.0), |(low, high), &ratio| (ratio.min(low), ratio.max(high)));
        // What is a little below 1 needs no tick of its own.
        let from = ticks.iter().rposition(|tick| *tick <= low * 1.1).unwrap_or(0);
        let to = ticks.iter().position(|tick| *tick >= high).unwrap_or(ticks.len() - 1);
        Self { ticks: ticks[from..=to].to_vec() }
    }

    fn reach(&self, ratio: f64) -> i32 {
        let [low, high] = [self.ticks[0], self.ticks[self.ticks.len() - 1]];
        let share = (ratio.clamp(low / 1.1, high) / low).ln() / (high / low).ln();
        LEFT + (share * f64::from(WIDTH - LEFT - RIGHT)) as i32
    }
}

/// Writes an SVG file with a bar for each row that was measured.
///
/// # Errors
/// When the file cannot be written.
pub fn write(rows: &[Row], path: &Path) -> Result<(), Box<dyn Error>> {
    let bars: Vec<_> = rows.iter().filter_map(|row| Some((row, row.ratio?))).collect();
    let bottom = TOP + STEP * bars.len() as i32 + 4;
    picture::write(path, (WIDTH as u32, (bottom + BOTTOM) as u32), |root| draw(root, &bars, bottom))
}

fn draw(root: &Area<'_>, bars: &[(&Row, f64)], bottom: i32) -> Result<(), Box<dyn Error>> {
    let font = |size: i32| ("sans-serif", size).into_font().color(&INK);
    let centered = font(13).pos(Pos::new(HPos::Center, VPos::Top));
    root.draw(&Text::new(
        "Programs with a part of their memory local, against all in RAM",
        (16, 12),
        font(18),
    ))?;
    let what = "time over that in RAM; redis: requests per second in RAM over those here; lower is better";
    root.draw(&Text::new(what, (16, 36), font(13)))?;
    let axis = Axis::of(&bars.iter().map(|(_, ratio)| *ratio).collect::<Vec<_>>());
    for &tick in &axis.ticks {
        let x = axis.reach(tick);
        root.draw(&PathElement::new(vec![(x, TOP - 4), (x, bottom)], GRID.stroke_width(1)))?;
        root.draw(&Text::new(format!("{tick}"), (x, bottom + 4), centered.clone()))?;
    }
    let middle = i32::midpoint(LEFT, WIDTH - RIGHT);
    root.draw(&Text::new("times worse than in RAM, logarithmic", (middle, bottom + 21), centered.clone()))?;
    let ram = axis.reach(1.0);
    for (index, (row, ratio)) in bars.iter().enumerate() {
        let y = TOP + index as i32 * STEP;
        let (who, color) = row.peer.map_or(("netvm", NETVM), |peer| (peer, PEER));
        let (program, percent) = row.case.rsplit_once('-').unwrap_or((&row.case, ""));
        root.draw(&Text::new(format!("{program}, {percent} % local, {who}"), (16, y + 1), font(13)))?;
        let end = axis.reach(*ratio);
        let bar = [(ram.min(end), y), (ram.max(end).max(ram + 1), y + STEP - 4)];
        root.draw(&Rectangle::new(bar, color.filled()))?;
        root.draw(&Text::new(format!("{ratio:.2}"), (bar[1].0 + 6, y + 1), font(13)))?;
    }
    root.draw(&PathElement::new(vec![(ram, TOP - 4), (ram, bottom)], INK.stroke_width(1)))?;
    root.draw(&Text::new("in RAM", (ram, TOP - 19), centered))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_is_drawn_longer() {
        let axis = Axis::of(&[0.97, 1.3, 43.0, 146.0]);
        assert_eq!(axis.ticks, [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0]);
        assert!(axis.reach(146.0) - axis.reach(43.0) > 50 && axis.reach(200.0) == WIDTH - RIGHT);
        assert!(axis.reach(1.0) == LEFT && axis.reach(0.97) < LEFT && axis.reach(1.3) > LEFT);
        // As far as from 1 to 2, to the left.
        let axis = Axis::of(&[0.5, 1.2]);
        assert_eq!(axis.ticks, [0.5, 1.0, 2.0]);
        assert!((axis.reach(1.0) - axis.reach(0.5)).abs_diff(axis.reach(2.0) - axis.reach(1.0)) <= 1);
        assert_eq!(Axis::of(&[]).ticks, [1.0, 2.0]);
        // However little or much it is.
        for ratio in [0.0, 1e9] {
            let axis = Axis::of(&[ratio]);
            assert!((LEFT - 60..=WIDTH - RIGHT).contains(&axis.reach(ratio)), "{ratio}");
        }
    }
}
