//! What commands print. Output that goes nowhere, to a reader that has gone or a disk that is full, stops no work; what was meant for standard
//! output and did not get there is an error of the command, when it ends.

use std::fmt::Arguments;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::OnceLock;

/// Why standard output does not have everything.
static LOST: OnceLock<io::Error> = OnceLock::new();

/// A line on standard output, the result of a command.
macro_rules! out {
    ($($what:tt)*) => { $crate::say::line(format_args!($($what)*)) };
}

/// A line on standard error: servers go on when nobody reads it, and so does everybody else.
macro_rules! tell {
    ($($what:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($what)*);
    }};
}

/// See [`out!`].
pub fn line(what: Arguments<'_>) {
    let mut out = io::stdout().lock();
    keep(out.write_fmt(what).and_then(|()| out.write_all(b"\n")));
}

/// Lines that end with a line break already.
pub fn text(what: &str) {
    keep(io::stdout().lock().write_all(what.as_bytes()));
}

fn keep(result: io::Result<()>) {
    if let Err(error) = result {
        let _ = LOST.set(error);
    }
}

/// What a command ends with that would end with `code`.
pub fn end(code: ExitCode) -> ExitCode {
    match LOST.get() {
        None => code,
        // Who closes a pipe has what it wanted; a server may long have told somebody that it is ready.
        Some(error) if error.kind() == io::ErrorKind::BrokenPipe => code,
        Some(error) => {
            tell!("netvm: cannot write to standard output: {error}");
            ExitCode::from(crate::cmd::run::EXIT_NETVM)
        }
    }
}
