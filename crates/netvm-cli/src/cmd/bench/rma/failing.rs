//! How soon a peer is found that has died, or was stopped.

use std::error::Error;
use std::time::{Duration, Instant};

use netvm_sys::signal;

use super::super::report::Row;
use super::{Link, Other};

pub const KILLED: &str = "detect-killed";
pub const STOPPED: &str = "detect-stopped";
/// What is promised for both.
const LIMIT_MS: f64 = 5000.0;
/// Of those that die at once.
const ROUNDS: u64 = 5;

/// Ends the process, also one that has been stopped and could not be waited for.
struct Doomed(Other);

impl Drop for Doomed {
    fn drop(&mut self) {
        // It may have gone already.
        let _ = signal::send(self.0.partner.pid(), libc::SIGKILL);
    }
}

/// Milliseconds from a signal to the end of an operation that waits for the peer, which must fail.
fn detect(link: Link, encrypt: bool, signal: i32) -> Result<f64, Box<dyn Error>> {
    let mut other = Doomed(Other::start(link, encrypt, None)?);
    let (_here, region) = other.0.connect(link)?;
    region.fetch_add(0, 1u64)?;
    let pid = other.0.partner.pid();
    let start = Instant::now();
    signal::send(pid, signal)?;
    // What is mapped needs no peer: it goes on until the death is known.
    while region.fetch_add(0, 1u64).is_ok() {
        if start.elapsed() > Duration::from_secs(20) {
            return Err("nobody has found it".into());
        }
        std::thread::yield_now();
    }
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

fn row(case: &str, times: &mut [f64], note: &str) -> Row {
    times.sort_by(f64::total_cmp);
    let mut row = Row::new("rma", case, "ms");
    row.median = times.get(times.len() / 2).copied();
    row.spread = times.first().copied().zip(times.last().copied());
    (row.floor, row.n) = (Some(LIMIT_MS), times.len() as u64);
    row.ratio = row.median.map(|time| time / LIMIT_MS);
    row.note = note.to_owned();
    row
}

/// A peer that is killed: its kernel tells.
///
/// # Errors
/// When it cannot be had, or is not found.
pub fn killed(link: Link, encrypt: bool) -> Result<Row, Box<dyn Error>> {
    let times: Result<Vec<f64>, _> = (0..ROUNDS).map(|_| detect(link, encrypt, libc::SIGKILL)).collect();
    Ok(row(KILLED, &mut times?, "from SIGKILL to the error of an operation; the floor is the limit"))
}

/// A peer that is stopped, with the default keep-alive.
///
/// # Errors
/// As [`killed`].
pub fn stopped(link: Link, encrypt: bool) -> Result<Row, Box<dyn Error>> {
    let mut times = [detect(link, encrypt, libc::SIGSTOP)?];
    Ok(row(STOPPED, &mut times, "from SIGSTOP to the error, default keep-alive; the floor is the limit"))
}
