//! A memory cgroup for whoever is measured.

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use super::device::{text, tool};

/// A memory cgroup with a limit, removed when dropped.
#[derive(Debug)]
pub struct Cgroup {
    directory: PathBuf,
    /// Where the hierarchy was mounted for this bench only.
    mounted: Option<PathBuf>,
    /// Which groups were given the memory controller for this bench only.
    enabled: Option<PathBuf>,
}

/// What this bench's groups are called, before its number.
const NAME: &str = "netvm-bench-";

impl Cgroup {
    /// `None`: without a limit.
    pub fn new(limit_bytes: Option<u64>) -> Result<Self, Box<dyn Error>> {
        let name = format!("{NAME}{}", std::process::id());
        let mounts = fs::read_to_string("/proc/mounts")?;
        let mount_of = |kind: &str, option: &str| {
            mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find_map(|fields| {
                let matches = fields.len() > 3 && fields[2] == kind;
                (matches && (option.is_empty() || fields[3].split(',').any(|word| word == option)))
                    .then(|| PathBuf::from(fields[1]))
            })
        };
        if let Some(root) = mount_of("cgroup2", "") {
            let controllers = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
            if controllers.split_whitespace().any(|controller| controller == "memory") {
                let control = root.join("cgroup.subtree_control");
                let has = fs::read_to_string(&control)?.split_whitespace().any(|word| word == "memory");
                fs::write(&control, "+memory")?;
                let enabled = (!has).then_some(control);
                let cgroup = Self { directory: root.join(name), mounted: None, enabled };
                fs::create_dir(&cgroup.directory)?;
                return cgroup.limited("memory.max", limit_bytes);
            }
        }
        let (root, mounted) = match mount_of("cgroup", "memory") {
            Some(root) => (root, None),
            None => {
                let root = std::env::temp_dir().join(format!("{name}-mount"));
                fs::create_dir(&root)?;
                if let Err(error) =
                    tool("mount", &["-t", "cgroup", "-o", "memory", "netvm-bench", text(&root)])
                {
                    let _ = fs::remove_dir(&root);
                    return Err(format!("no memory cgroup here: {error}").into());
                }
                (root.clone(), Some(root))
            }
        };
        let cgroup = Self { directory: root.join(name), mounted, enabled: None };
        fs::create_dir(&cgroup.directory)?;
        cgroup.limited("memory.limit_in_bytes", limit_bytes)
    }

    fn limited(self, file: &str, limit_bytes: Option<u64>) -> Result<Self, Box<dyn Error>> {
        if let Some(bytes) = limit_bytes {
            fs::write(self.directory.join(file), bytes.to_string())?;
        }
        Ok(self)
    }

    /// The most memory that its processes have had.
    pub fn bytes_peak(&self) -> Result<u64, Box<dyn Error>> {
        let read = |file| fs::read_to_string(self.directory.join(file));
        let peak = read("memory.peak").or_else(|_| read("memory.max_usage_in_bytes"));
        Ok(peak
            .map_err(|error| format!("this kernel does not tell the peak of a group's memory: {error}"))?
            .trim()
            .parse()?)
    }

    /// The file that takes processes into the group, by their numbers.
    pub fn entrance(&self) -> PathBuf {
        self.directory.join("cgroup.procs")
    }

    pub fn add(&self, pid: u32) -> Result<(), Box<dyn Error>> {
        Ok(fs::write(self.entrance(), pid.to_string())?)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that has just ended may still be leaving the group.
        for _ in 0..100 {
            if fs::remove_dir(&self.directory).is_ok() || !self.directory.exists() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        if self.directory.exists() {
            tell!("netvm bench: the cgroup {} could not be removed", self.directory.display());
        }
        if let (Some(control), Some(root)) = (&self.enabled, self.directory.parent()) {
            // Another bench beside this one may count on it: the last one takes it away only if it was the first.
            let is_ours =
                |entry: fs::DirEntry| entry.file_name().to_str().is_some_and(|name| name.starts_with(NAME));
            let others = fs::read_dir(root).map(|entries| entries.flatten().any(is_ours)).unwrap_or(true);
            if !others && let Err(error) = fs::write(control, "-memory") {
                tell!("netvm bench: the memory controller stays on in {}: {error}", control.display());
            }
        }
        if let Some(root) = &self.mounted {
            if let Err(error) = tool("umount", &[text(root)]) {
                tell!("netvm bench: {error}");
            }
            let _ = fs::remove_dir(root);
        }
    }
}
