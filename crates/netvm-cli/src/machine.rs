//! Facts about this machine.

/// A figure of /proc/meminfo, in bytes; `None` where there is none.
pub fn meminfo(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    field(&text, name)
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_meminfo() {
        let text = "MemTotal:       24600000 kB\nMemFree:  1 kB\nHugePages_Total:       3\n";
        assert_eq!(field(text, "MemFree"), Some(1024));
        assert_eq!(field(text, "HugePages_Total"), None);
        assert_eq!(field(text, "Mem"), None);
        assert!(meminfo("MemTotal").unwrap() > 1 << 20);
    }
}
