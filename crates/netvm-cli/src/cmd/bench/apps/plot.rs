//! The picture of `netvm bench apps`: how many times longer each program takes, for each part of its memory that is local.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;

use super::super::report::Row;

const INK: RGBColor = RGBColor(0x22, 0x2b, 0x33);
const NETVM: RGBColor = RGBColor(0x1b, 0x6c, 0xa8);
const PEER: RGBColor = RGBColor(0xe0, 0x9f, 0x3e);
const LEFT: i32 = 200;
const TOP: i32 = 50;
const STEP: i32 = 18;
const WIDTH: u32 = 900;
/// Longer bars are cut off; their number is written all the same.
const RATIO_MAX: f64 = 10.0;

/// Writes an SVG file with a bar for each row that was measured.
///
/// # Errors
/// When the file cannot be written.
pub fn write(rows: &[Row], path: &Path) -> Result<(), Box<dyn Error>> {
    let bars: Vec<_> = rows.iter().filter_map(|row| Some((row, row.ratio?))).collect();
    let height = TOP + STEP * bars.len() as i32 + 20;
    let root = SVGBackend::new(path, (WIDTH, height as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let font = |size: i32| ("sans-serif", size).into_font().color(&INK);
    let title = "Programs with a part of their memory local (percent), times longer than in RAM";
    root.draw(&Text::new(title, (16, 14), font(18)))?;
    let scale = f64::from(WIDTH as i32 - LEFT - 90) / RATIO_MAX;
    let reach = |ratio: f64| LEFT + (ratio.min(RATIO_MAX) * scale) as i32;
    for (index, (row, ratio)) in bars.iter().enumerate() {
        let y = TOP + index as i32 * STEP;
        let (who, color) = row.peer.map_or(("", NETVM), |peer| (peer, PEER));
        root.draw(&Text::new(format!("{}  {who}", row.case), (16, y + 1), font(13)))?;
        root.draw(&Rectangle::new([(LEFT, y), (reach(*ratio), y + STEP - 4)], color.filled()))?;
        root.draw(&Text::new(format!("{ratio:.2}"), (reach(*ratio) + 6, y + 1), font(13)))?;
    }
    let ram = reach(1.0);
    root.draw(&PathElement::new(vec![(ram, TOP - 6), (ram, height - 16)], INK.stroke_width(1)))?;
    root.present()?;
    Ok(())
}
