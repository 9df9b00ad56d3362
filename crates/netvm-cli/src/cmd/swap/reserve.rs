//! The memory that the kernel keeps for those who free memory: settings of the whole machine, raised while there is swap of ours.
//!
//! A server that sends what is swapped out needs some of it. On small machines the kernel's own choice is less than what swapping out
//! itself takes from it.

use serde::{Deserialize, Serialize};
use std::{fmt, fs};

/// Of all memory, the kernel should keep this part.
const PART: u64 = 16;
/// But no more than this, in KiB.
const RESERVE_KIB_MAX: u64 = 16 << 10;

/// A setting that was changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changed {
    path: String,
    old: u64,
    new: u64,
}

impl fmt::Display for Changed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.path.trim_start_matches("/proc/sys/").replace('/', ".");
        write!(f, "{name} is {} instead of {} until the last `netvm swap off`", self.new, self.old)
    }
}

/// Raises what is too little. What was changed, and what could not be.
pub fn raise() -> (Vec<Changed>, Vec<String>) {
    let reserve = |now: u64| now.max((total_kib() / PART).min(RESERVE_KIB_MAX));
    let settings: [(&str, &dyn Fn(u64) -> u64); 2] = [
        ("/proc/sys/vm/min_free_kbytes", &reserve),
        // It raises the limits for all but not what is there, so the part that only some may use is gone.
        ("/proc/sys/vm/watermark_boost_factor", &|_| 0),
    ];
    let (mut changed, mut failed) = (Vec::new(), Vec::new());
    for (path, wanted) in settings {
        let Some(old) = read(path) else { continue };
        let new = wanted(old);
        if new == old {
            continue;
        }
        match fs::write(path, new.to_string()) {
            Ok(()) => changed.push(Changed { path: path.to_owned(), old, new }),
            Err(error) => failed.push(format!(
                "the machine may stand still when memory is short everywhere ({path} should be {new}: {error})"
            )),
        }
    }
    (changed, failed)
}

/// Makes it as it was, as far as nobody else has changed it since.
pub fn restore(changed: &[Changed]) {
    for Changed { path, old, new } in changed {
        if read(path) == Some(*new) {
            let _ = fs::write(path, old.to_string());
        }
    }
}

fn read(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn total_kib() -> u64 {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
