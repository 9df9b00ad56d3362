//! The debug kernel: Linux as Debian has it, configured by `guest/debug.config` so that it looks for mistakes all the time.

use super::kernel::PLAIN_IMAGE;
use super::packages::Packages;
use super::tools::{self, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// What tests call it.
pub const NAME: &str = "debug";
/// Where it is in the cache.
const FOLDER: &str = "linux-debug-amd64";
/// How many times as long things may take on it.
pub const SLOWNESS: u32 = 4;
/// Memory that it needs more than others, for what it knows of each byte.
pub const MEMORY_MIB: u64 = 192;
/// The configuration that it was built with, in its folder.
const CONFIG: &str = "guest.config";
/// What a kernel is built with beside gcc: whether it is there, and the package.
const NEEDED: [(&str, &str); 4] = [
    ("/usr/bin/flex", "flex"),
    ("/usr/bin/bison", "bison"),
    ("/usr/bin/bc", "bc"),
    ("/usr/include/libelf.h", "libelf-dev"),
];
/// Folders of the source that modules of ours do not need, with most of its bytes.
const NEEDLESS: [&str; 10] =
    ["Documentation", "drivers", "sound", "samples", "fs", "net", "lib", "mm", "kernel", "rust"];

/// Its folder in the cache. If it is not there, or of another configuration than that in the file `config`, it is built only if `build` says so.
pub fn folder(packages: &Packages, series: &str, config: &Path, build: bool) -> Result<PathBuf> {
    let folder = packages.cache().join(FOLDER);
    let wanted = tools::read(config)?;
    if fs::read_to_string(folder.join(CONFIG)).ok().as_ref() != Some(&wanted) {
        if !build {
            return Err(format!("it takes long to build: cargo xtask guest --kernel {NAME}"));
        }
        if folder.exists() {
            remove(&folder)?;
        }
    }
    packages.folder(FOLDER, |folder| make(packages, series, config, folder))
}

/// Builds it into a folder, laid out as Debian's packages are.
fn make(packages: &Packages, series: &str, config: &Path, folder: &Path) -> Result<()> {
    if let Some((_, package)) = NEEDED.iter().find(|(path, _)| !Path::new(path).exists()) {
        return Err(format!("{package} is not installed, with which kernels are built"));
    }
    if std::env::consts::ARCH != "x86_64" {
        return Err("the debug kernel is built on x86-64 only".to_owned());
    }
    let started = Instant::now();
    let package = format!("linux-source-{series}");
    packages.fresh(|| packages.unpack(&[format!("{package}:all")], folder))?;
    let archive = folder.join("usr/src").join(format!("{package}.tar.xz"));
    let source = folder.join("usr/src/source");
    tools::make_folder(&source)?;
    tools::run(
        Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&source).arg("--strip-components=1"),
    )?;
    remove(&archive)?;
    let make = || {
        let mut make = Command::new("make");
        make.arg("-s").arg("-C").arg(&source);
        make
    };
    let wanted = fs::canonicalize(config).unwrap_or_else(|_| config.to_owned());
    tools::run(make().arg(format!("KCONFIG_ALLCONFIG={}", wanted.display())).arg("allnoconfig"))?;
    let (wanted, got) = (tools::read(&wanted)?, tools::read(&source.join(".config"))?);
    if let Some(missing) = missing(&wanted, &got) {
        return Err(format!("{package} cannot be configured with {missing}"));
    }
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    println!("== building the debug kernel, which takes a quarter of an hour of CPU time");
    tools::run(make().arg(format!("-j{jobs}")).args(["bzImage", "modules"]))?;
    let release = tools::output(make().arg("kernelrelease"))?.trim().to_owned();
    let boot = folder.join("boot");
    let modules = folder.join("lib/modules").join(&release);
    tools::make_folder(&boot)?;
    tools::make_folder(&modules)?;
    tools::copy(&source.join("arch/x86/boot/bzImage"), &boot.join(format!("vmlinuz-{release}")))?;
    tools::run(Command::new("strip").arg("-o").arg(folder.join(PLAIN_IMAGE)).arg(source.join("vmlinux")))?;
    tools::copy(&source.join("modules.builtin"), &modules.join("modules.builtin"))?;
    // It has no modules of its own.
    tools::write(&modules.join("modules.dep"), "")?;
    for needless in NEEDLESS {
        remove(&source.join(needless))?;
    }
    remove(&source.join("vmlinux"))?;
    remove(&source.join("vmlinux.o"))?;
    let headers = source.with_file_name(format!("linux-headers-{release}"));
    fs::rename(&source, &headers).map_err(|error| format!("cannot rename {}: {error}", source.display()))?;
    // Whoever comes later knows it by this.
    tools::write(&folder.join(CONFIG), wanted)?;
    println!("== built in {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

/// A line that was asked for and did not come true.
fn missing<'a>(wanted: &'a str, got: &str) -> Option<&'a str> {
    let mut asked = wanted.lines().filter(|line| line.trim_start_matches("# ").starts_with("CONFIG_"));
    asked.find(|line| !got.lines().any(|has| has == *line))
}

fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    removed.map_err(|error| format!("cannot remove {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::missing;

    #[test]
    fn what_the_kernel_cannot_have_is_named() {
        let wanted = "# Words of ours.\n\nCONFIG_A=y\nCONFIG_B=12\n# CONFIG_C is not set\n";
        assert_eq!(missing(wanted, "CONFIG_A=y\n# CONFIG_C is not set\nCONFIG_B=12\n"), None);
        assert_eq!(missing(wanted, "CONFIG_A=y\nCONFIG_B=123\n# CONFIG_C is not set\n"), Some("CONFIG_B=12"));
        assert_eq!(missing(wanted, "CONFIG_A=y\nCONFIG_B=12\n"), Some("# CONFIG_C is not set"));
        assert_eq!(missing(wanted, "CONFIG_A=y\nCONFIG_B=12\nCONFIG_C=y\n"), Some("# CONFIG_C is not set"));
    }
}
