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

/// What makes the kernel back shared memory by huge pages where a lender asks for them.
pub const HUGE_ADVISE: &str = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Whether a lender that asks for huge pages gets any; otherwise the kernel's setting, as it is written there.
pub fn lent_hugepages() -> Result<(), String> {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    match chosen(&setting.unwrap_or_default()) {
        Some("always" | "within_size" | "advise" | "force") => Ok(()),
        Some(other) => Err(other.to_owned()),
        None => Err("missing".to_owned()),
    }
}

/// The word in brackets of a setting like `always [madvise] never`.
fn chosen(setting: &str) -> Option<&str> {
    Some(setting.split_once('[')?.1.split_once(']')?.0)
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

    #[test]
    fn reads_the_chosen_word() {
        assert_eq!(chosen("always within_size advise [never] deny force\n"), Some("never"));
        assert_eq!(chosen(""), None);
    }
}
