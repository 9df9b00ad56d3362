//! Pictures that commands leave: drawn in memory, then written, so that a full disk is told in the words of the system.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

/// What is drawn on.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Writes an SVG file of what `draw` draws on white.
///
/// # Errors
/// Those of `draw`; a sentence when the file cannot be written.
pub fn write(
    path: &Path,
    size: (u32, u32),
    draw: impl FnOnce(&Area<'_>) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    let mut picture = String::new();
    let root = SVGBackend::with_string(&mut picture, size).into_drawing_area();
    root.fill(&WHITE)?;
    draw(&root)?;
    root.present()?;
    drop(root);
    std::fs::write(path, picture).map_err(|error| format!("cannot write {}: {error}", path.display()).into())
}
