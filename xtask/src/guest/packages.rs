//! Kernels, headers and programs from the package manager, unpacked into a cache. Nothing of it is installed on this machine.
//!
//! apt gets a state of its own in the cache: it has to know packages of other architectures, and this machine's must not change.

use super::tools::{self, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How many parallel runs may unpack the same thing: each uses a folder of its own, and the first one wins.
fn part(folder: &Path) -> PathBuf {
    folder.with_extension(format!("{}.part", std::process::id()))
}

/// The cache and the private state of apt in it.
pub struct Packages {
    /// Everything that was unpacked.
    cache: PathBuf,
}

impl Packages {
    /// `$NETVM_GUEST_CACHE`, or netvm-guest in the user's folder of caches.
    pub fn open() -> Result<Self> {
        let cache = std::env::var_os("NETVM_GUEST_CACHE").map(PathBuf::from).or_else(|| {
            let caches =
                std::env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
            let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
            Some(caches.or_else(home)?.join("netvm-guest"))
        });
        let cache = cache.ok_or("there is no folder for kernels: set NETVM_GUEST_CACHE")?;
        tools::make_folder(&cache)?;
        Ok(Self { cache })
    }

    /// The folder of the cache.
    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// A folder of the cache that `fill` fills if it is not there yet. It is there whole or not at all.
    pub fn folder(&self, name: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let folder = self.cache.join(name);
        if folder.exists() {
            return Ok(folder);
        }
        let part = part(&folder);
        let _ = fs::remove_dir_all(&part);
        tools::make_folder(&part)?;
        let filled = fill(&part).and_then(|()| {
            // Whoever was faster has filled it with the same.
            fs::rename(&part, &folder)
                .or_else(|error| if folder.exists() { Ok(()) } else { Err(error) })
                .map_err(|error| format!("cannot rename {}: {error}", part.display()))
        });
        let _ = fs::remove_dir_all(&part);
        filled.map(|()| folder)
    }

    /// Does it, and once more with new lists of packages: they may be older than the packages.
    pub fn fresh<T>(&self, get: impl Fn() -> Result<T>) -> Result<T> {
        get().or_else(|_| {
            let _ = fs::remove_dir_all(self.cache.join("apt"));
            get()
        })
    }

    /// Downloads packages and unpacks them below a folder.
    pub fn unpack(&self, names: &[String], into: &Path) -> Result<()> {
        println!("== downloading {}", names.join(" "));
        let downloads = into.join("downloads");
        tools::make_folder(&downloads)?;
        tools::run(self.apt("apt-get")?.arg("download").arg("-qq").args(names).current_dir(&downloads))?;
        for file in tools::files(&downloads)? {
            tools::run(Command::new("dpkg-deb").arg("-x").arg(file).arg(into))?;
        }
        fs::remove_dir_all(&downloads)
            .map_err(|error| format!("cannot remove {}: {error}", downloads.display()))
    }

    /// The names of packages that begin so.
    pub fn names(&self, prefix: &str) -> Result<Vec<String>> {
        let output = tools::output(self.apt("apt-cache")?.arg("pkgnames").arg(prefix))?;
        Ok(output.lines().map(str::to_owned).collect())
    }

    /// What a package needs.
    pub fn dependencies(&self, name: &str) -> Result<Vec<String>> {
        let output = tools::output(self.apt("apt-cache")?.arg("depends").arg(name))?;
        let needs = output.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        Ok(needs.map(str::to_owned).collect())
    }

    /// A command of apt, on the private state, which is made and filled when it is not there.
    fn apt(&self, program: &str) -> Result<Command> {
        let state = self.folder("apt", |folder| {
            for name in [
                "etc/sources.list.d",
                "etc/apt.conf.d",
                "etc/preferences.d",
                "state/lists/partial",
                "cache/archives/partial",
            ] {
                tools::make_folder(&folder.join(name))?;
            }
            let system = Path::new("/etc/apt");
            // Sources of other makers have no kernels, and seldom packages for other architectures.
            for name in ["sources.list", "sources.list.d/debian.sources", "sources.list.d/debian.list"] {
                if system.join(name).exists() {
                    tools::copy(&system.join(name), &folder.join("etc").join(name))?;
                }
            }
            tools::write(&folder.join("state/status"), "")?;
            let mut update = Self::on(folder, "apt-get")?;
            tools::run(update.args(["update", "-qq"]))
        })?;
        Self::on(&state, program)
    }

    fn on(folder: &Path, program: &str) -> Result<Command> {
        let conf = folder.join("apt.conf");
        let path = folder.display();
        // Written each time, as the folder is renamed.
        let text = format!(
            "Dir::Etc \"{path}/etc\";\nDir::State \"{path}/state\";\nDir::State::status \"{path}/state/status\";\n\
             Dir::Cache \"{path}/cache\";\nAPT::Architectures {{\"amd64\"; \"arm64\";}};\nAPT::Sandbox::User \"\";\n\
             Acquire::Languages \"none\";\nAcquire::Retries \"2\";\nAPT::Update::Error-Mode \"any\";\n"
        );
        if fs::read_to_string(&conf).ok().as_deref() != Some(&text) {
            tools::write(&conf, &text)?;
        }
        let mut command = Command::new(program);
        command.env("APT_CONFIG", conf);
        Ok(command)
    }
}
