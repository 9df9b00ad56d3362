//! Pictures that commands leave: drawn in memory, then written, so that a full disk is told in the words of the system.

use std::error::Error;
use std::fs::File;
use std::io::{self, Write};
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
    // XML has no such characters, which arguments of programs may have.
    let is_none = |letter: char| letter.is_control() && !matches!(letter, '\t' | '\n' | '\r');
    let picture = picture.replace(is_none, "\u{fffd}");
    let failed = |error: io::Error| format!("cannot write {}: {error}", path.display());
    let mut file = File::create(path).map_err(failed)?;
    file.write_all(picture.as_bytes()).map_err(|error| {
        // Half a picture is none. What was there before is gone since the file was opened.
        if path.symlink_metadata().is_ok_and(|metadata| metadata.is_file()) {
            let _ = std::fs::remove_file(path);
        }
        failed(error)
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_is_xml_or_it_is_not_there() {
        let path = std::env::temp_dir().join(format!("netvm-picture-{}.svg", std::process::id()));
        let draw = |root: &Area<'_>| {
            let text = Text::new("a\u{1}b\u{1b}[31m", (9, 9), ("sans-serif", 12));
            Ok(root.draw(&text)?)
        };
        write(&path, (99, 99), draw).unwrap();
        let picture = std::fs::read_to_string(&path).unwrap();
        assert!(picture.contains("a\u{fffd}b\u{fffd}[31m"), "{picture}");
        std::fs::remove_file(&path).unwrap();
        let error = write(Path::new("/dev/full"), (99, 99), draw).unwrap_err().to_string();
        assert!(error.contains("cannot write /dev/full") && Path::new("/dev/full").exists(), "{error}");
        // What cannot be written to stays as it is: a program that runs.
        // By another process: children of ours, of other tests, would have it open for writing when it is started.
        let copied = std::process::Command::new("cp").arg("/bin/sleep").arg(&path).status().unwrap();
        assert!(copied.success());
        let mut program = std::process::Command::new(&path).arg("60").spawn().unwrap();
        let error = write(&path, (99, 99), draw).unwrap_err().to_string();
        program.kill().unwrap();
        program.wait().unwrap();
        assert!(error.contains("Text file busy") && path.metadata().unwrap().len() > 1000, "{error}");
        std::fs::remove_file(&path).unwrap();
    }
}
