//! What a test script says about itself, in comments at its head.
//!
//! ```sh
//! # kernels: 6.1 6.12-arm64       on each of these, one after the other; 6.1+6.12 are two guests that are connected
//! # modules: nbd ext4 ublk_drv?   of the kernel, loaded before the script starts; with a question mark: if the kernel has it
//! # kmod: netvm_coherency         module of kmod/, put at /test/NAME.ko
//! # programs: netvm nbd-client    of this machine
//! # files: /usr/lib/x/plugin.so   of this machine, at the same place, with the libraries that they are linked with
//! # host: read only               this machine's files at /host, and what is built of ours at $BUILT below it, for programs that are many files
//! # examples: device_service      Rust's of examples/
//! # compiles: coherency           guest/tests/coherency.c, for the guest, put into /bin
//! # memory: 256                   MiB; of two guests that are connected they may have their own: 512 256
//! # image: packed                 as Debian has it: slower, and with five levels of page tables (x86)
//! # clock: counted                 time is what instructions take: figures do not depend on what else the host does; one guest only
//! # checks: none                   of memory, by the kernel: for what is measured
//! # waits: mostly                 for time to pass: it runs beside as many others as run at a time
//! # limit: 60                     seconds, from the start of the script
//! # ends: status 0                or: complaint TEXT, limit, lost
//! ```

use super::machine::End;
use super::tools::{self, Result};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A test.
#[derive(Debug, PartialEq, Eq)]
pub struct Script {
    pub path: PathBuf,
    pub kernels: Vec<String>,
    pub modules: Vec<String>,
    pub kmod: Vec<String>,
    pub programs: Vec<String>,
    pub files: Vec<PathBuf>,
    pub host: bool,
    pub examples: Vec<String>,
    pub compiles: Vec<String>,
    pub packed: bool,
    pub counted: bool,
    /// Whether the kernel checks its memory.
    pub checked: bool,
    /// Whether it hardly needs a CPU.
    pub waits: bool,
    /// Of the first guest, and of the second one.
    pub memory_mib: [u64; 2],
    pub limit: Duration,
    pub ends: Expected,
}

/// How it must end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    Status(i32),
    /// The kernel's complaint has this in it.
    Complaint(String),
    Limit,
    Lost,
}

impl Expected {
    pub fn is(&self, end: &End) -> bool {
        match (self, end) {
            (Self::Status(wanted), End::Status(status)) => wanted == status,
            (Self::Complaint(text), End::Complaint(line)) => line.contains(text.as_str()),
            (Self::Limit, End::Limit) | (Self::Lost, End::Lost) => true,
            _ => false,
        }
    }
}

impl Script {
    pub fn read(path: &Path) -> Result<Self> {
        Self::parse(path, &tools::read(path)?).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn parse(path: &Path, text: &str) -> Result<Self> {
        let mut script = Self {
            path: path.to_owned(),
            kernels: vec!["6.12".to_owned()],
            modules: Vec::new(),
            kmod: Vec::new(),
            programs: Vec::new(),
            files: Vec::new(),
            host: false,
            examples: Vec::new(),
            compiles: Vec::new(),
            packed: false,
            counted: false,
            checked: true,
            waits: false,
            memory_mib: [256; 2],
            limit: Duration::from_secs(120),
            ends: Expected::Status(0),
        };
        for line in text.lines().take_while(|line| line.starts_with('#')) {
            let Some((key, value)) = line.trim_start_matches('#').trim().split_once(": ") else { continue };
            let words = || value.split_ascii_whitespace().map(str::to_owned).collect();
            let number = |value: &str, least: u64, most: u64| {
                let number =
                    value.trim().parse::<u64>().ok().filter(|number| (least..=most).contains(number));
                number.ok_or_else(|| format!("{key} must be a number from {least} to {most}, not {value}"))
            };
            match key {
                "kernels" => script.kernels = words(),
                "modules" => script.modules = words(),
                "kmod" => script.kmod = words(),
                "programs" => script.programs = words(),
                "files" => script.files = value.split_ascii_whitespace().map(PathBuf::from).collect(),
                "host" if value.trim() == "read only" => script.host = true,
                "host" => return Err(format!("the host's files are read only, not {value}")),
                "examples" => script.examples = words(),
                "compiles" => script.compiles = words(),
                "image" if value.trim() == "packed" => script.packed = true,
                "image" => return Err(format!("an image is packed or not mentioned, not {value}")),
                "memory" => {
                    let (first, second) = value.trim().split_once(' ').unwrap_or((value, value));
                    script.memory_mib = [number(first, 128, 4096)?, number(second, 128, 4096)?];
                }
                "clock" if value.trim() == "counted" => script.counted = true,
                "clock" => return Err(format!("a clock is counted or not mentioned, not {value}")),
                "checks" if value.trim() == "none" => script.checked = false,
                "checks" => return Err(format!("checks are none or not mentioned, not {value}")),
                "waits" if value.trim() == "mostly" => script.waits = true,
                "waits" => return Err(format!("a test waits mostly or nothing is said, not {value}")),
                "limit" => script.limit = Duration::from_secs(number(value, 1, 14_400)?),
                "ends" => script.ends = parse_end(value.trim())?,
                _ => {}
            }
        }
        Ok(script)
    }

    /// The name of the test.
    pub fn name(&self) -> String {
        self.path.file_stem().unwrap_or(self.path.as_os_str()).to_string_lossy().into_owned()
    }
}

fn parse_end(value: &str) -> Result<Expected> {
    match value.split_once(' ').unwrap_or((value, "")) {
        ("status", number) => {
            number.parse().map(Expected::Status).map_err(|_| format!("{number} is not an exit status"))
        }
        ("complaint", text) if !text.is_empty() => Ok(Expected::Complaint(text.to_owned())),
        ("limit", "") => Ok(Expected::Limit),
        ("lost", "") => Ok(Expected::Lost),
        _ => Err(format!("a test cannot end so: {value}")),
    }
}

#[cfg(test)]
mod tests {
    use super::{Expected, Script};
    use crate::guest::machine::End;
    use std::path::Path;

    #[test]
    fn the_head_of_a_script_is_read() {
        let text = "#!/bin/sh\n# Says: nothing.\n# kernels: 6.1 6.1+6.12\n# memory: 512\n# files: /a /b/c\n# clock: counted\n# checks: none\n# waits: mostly\n# ends: complaint BUG: x\n\n# limit: 7\n";
        let script = Script::parse(Path::new("guest/tests/one.sh"), text).unwrap();
        assert_eq!(script.name(), "one");
        assert_eq!(script.kernels, ["6.1", "6.1+6.12"]);
        assert_eq!(script.files, [Path::new("/a"), Path::new("/b/c")]);
        assert_eq!(
            (script.memory_mib, script.limit.as_secs()),
            ([512, 512], 120),
            "the head ends at the first other line"
        );
        assert!(script.ends.is(&End::Complaint("[    1.0] BUG: x".to_owned())));
        assert!(!script.ends.is(&End::Status(0)));
        assert!(script.counted && !script.checked && script.waits);
        let two = Script::parse(Path::new("x"), "# memory: 512 192\n").unwrap();
        assert_eq!(two.memory_mib, [512, 192]);
        for wrong in [
            "image: plain",
            "clock: fast",
            "checks: few",
            "waits: often",
            "memory: 1",
            "memory: lots",
            "memory: 512 1",
            "memory: 512 192 192",
            "ends: status",
            "ends: well",
            "ends: complaint",
        ] {
            Script::parse(Path::new("x"), &format!("# {wrong}\n")).unwrap_err();
        }
        let plain = Script::parse(Path::new("x"), "").unwrap();
        assert_eq!((plain.ends, plain.counted, plain.checked), (Expected::Status(0), false, true));
        assert!(!plain.waits);
    }
}
