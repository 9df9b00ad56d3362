//! How this machine is doing for memory: what the kernel tells in two small files.

use std::path::Path;

/// Bytes that are available, of a file like `/proc/meminfo`.
pub(super) fn available_bytes(path: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Whether a file tells of memory pressure as `/proc/pressure/memory` does: what [`LenderConfig::pressure_file`](super::LenderConfig::pressure_file) needs.
pub fn tells_pressure(path: &Path) -> bool {
    stall(path).is_some()
}

/// Hundredths of a percent of the last 10 s in which something waited for memory, of a file like `/proc/pressure/memory`.
pub(super) fn stall(path: &Path) -> Option<u32> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let percent = line.split_whitespace().find_map(|word| word.strip_prefix("avg10="))?;
    let percent: f64 = percent.parse().ok()?;
    (0.0..=100.0).contains(&percent).then_some((percent * 100.0) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_writes_and_nothing_else() {
        let path = std::env::temp_dir().join(format!("netvm-pressure-{}", std::process::id()));
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            (available_bytes(&path), stall(&path))
        };
        let psi = "some avg10=12.34 avg60=0.00 avg300=0.00 total=7\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=3\n";
        assert_eq!(read(psi), (None, Some(1234)));
        assert_eq!(read("MemTotal: 9 kB\nMemAvailable:   2048 kB\n"), (Some(2 << 20), None));
        for text in [
            "",
            "some",
            "some avg10=x",
            "some avg10=-1",
            "some avg10=NaN",
            "MemAvailable: -3 kB",
            "MemAvailable:",
        ] {
            assert_eq!(read(text), (None, None), "{text}");
        }
        assert_eq!(read(&format!("MemAvailable: {} kB", u64::MAX)), (None, None));
        std::fs::remove_file(&path).unwrap();
        assert_eq!((available_bytes(&path), stall(&path)), (None, None));
    }
}
