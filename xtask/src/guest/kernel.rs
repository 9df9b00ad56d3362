//! Debian's kernels: image, modules and headers of one release, and modules of ours that are built for it.

use super::debug;
use super::packages::Packages;
use super::tools::{self, Result};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The kernels that tests may ask for, by the name that they use.
pub const KERNELS: [(&str, &str, Architecture); 4] = [
    ("6.1", "6.1", Architecture::Amd64),
    ("6.12", "6.12", Architecture::Amd64),
    ("6.12-arm64", "6.12", Architecture::Arm64),
    (debug::NAME, "6.12", Architecture::Amd64),
];

/// The image without compression, in a kernel's folder.
pub const PLAIN_IMAGE: &str = "boot/plain";

/// What a kernel runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    Amd64,
    Arm64,
}

impl Architecture {
    /// As Debian calls it.
    pub fn debian(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// As the compiler and QEMU call it.
    pub fn machine(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }

    /// Before the names of compilers that make programs for it; empty for this machine's own.
    fn cross(self) -> String {
        if self.is_ours() { String::new() } else { format!("{}-linux-gnu-", self.machine()) }
    }

    /// The compiler that makes programs for it.
    pub fn compiler(self) -> String {
        format!("{}gcc", self.cross())
    }

    /// Whether this machine's programs run on it.
    pub fn is_ours(self) -> bool {
        self.machine() == std::env::consts::ARCH
    }
}

/// A kernel in the cache.
pub struct Kernel {
    pub name: &'static str,
    pub architecture: Architecture,
    /// Such as 6.1.0-56-amd64.
    release: String,
    /// Its packages, unpacked.
    folder: PathBuf,
    /// Modules by name: file, and the names of those that it needs, in the order in which they are loaded.
    modules: BTreeMap<String, (PathBuf, Vec<String>)>,
}

impl Kernel {
    /// The newest release of a series, from the cache if one is there. The debug kernel is built from `config`, which takes long: only if `build`
    /// says so.
    pub fn get(packages: &Packages, name: &str, config: &Path, build: bool) -> Result<Self> {
        let known = KERNELS.iter().find(|(known, ..)| *known == name);
        let &(name, series, architecture) = known.ok_or_else(|| {
            let all: Vec<&str> = KERNELS.iter().map(|(name, ..)| *name).collect();
            format!("there is no kernel {name}: choose one of {}", all.join(", "))
        })?;
        let folder = if name == debug::NAME {
            debug::folder(packages, series, config, build)?
        } else {
            packages.folder(&format!("linux-{series}-{}", architecture.debian()), |folder| {
                packages.fresh(|| unpack(packages, series, architecture, folder))
            })?
        };
        let all = tools::files(&folder.join("lib/modules"))?;
        let modules_folder = all.first().ok_or_else(|| format!("no modules in {}", folder.display()))?;
        let release = tools::name(modules_folder);
        let modules = read_dependencies(modules_folder)?;
        Ok(Self { name, architecture, release, folder, modules })
    }

    /// How many times as long as on Debian's kernels things take.
    pub fn slowness(&self) -> u32 {
        if self.is_debug() { debug::SLOWNESS } else { 1 }
    }

    /// Whether it looks for mistakes all the time.
    pub fn is_debug(&self) -> bool {
        self.name == debug::NAME
    }

    /// What QEMU boots. The code that unpacks an image is also what turns the fifth level of page tables on.
    pub fn image(&self, packed: bool) -> PathBuf {
        let plain = self.folder.join(PLAIN_IMAGE);
        if plain.exists() && !packed {
            plain
        } else {
            self.folder.join(format!("boot/vmlinuz-{}", self.release))
        }
    }

    /// The files of modules and of all that they need, in the order in which they are loaded. What is built into the kernel is left out, and
    /// so are names with a question mark that this kernel does not have.
    pub fn modules(&self, names: &[&str]) -> Result<Vec<PathBuf>> {
        let mut order: Vec<&Path> = Vec::new();
        let builtin =
            tools::read(&self.folder.join("lib/modules").join(&self.release).join("modules.builtin"))?;
        for name in names {
            let optional = name.ends_with('?');
            let name = name.trim_end_matches('?').replace('-', "_");
            if let Some((file, needs)) = self.modules.get(&name) {
                for file in needs.iter().filter_map(|need| Some(&self.modules.get(need)?.0)).chain([file]) {
                    if !order.contains(&file.as_path()) {
                        order.push(file);
                    }
                }
            } else if !optional && !builtin.lines().any(|line| module_name(line) == name) {
                return Err(format!("{} has no module {name}", self.release));
            }
        }
        Ok(order.into_iter().map(Path::to_owned).collect())
    }

    /// Builds the modules of a folder with a Kbuild file, for this kernel, in a copy of it below `work`. Gives the files.
    pub fn build(&self, source: &Path, work: &Path) -> Result<Vec<PathBuf>> {
        let copy = work.join(format!("{}-{}", tools::name(source), self.name));
        tools::make_folder(&copy)?;
        for file in tools::files(source)?.iter().filter(|file| file.is_file()) {
            tools::copy(file, &copy.join(tools::name(file)))?;
        }
        let headers = self.folder.join(format!("usr/src/linux-headers-{}", self.release));
        let mut make = Command::new("make");
        make.arg("-C").arg(headers).arg(format!("M={}", copy.display())).args([
            "-s",
            "W=1",
            "CONFIG_DEBUG_INFO_BTF_MODULES=",
        ]);
        // Only if it is there: the checker of the kernel's address spaces and locks.
        if tools::find("sparse").is_some() {
            make.args(["C=1", "CHECK=sparse -Wsparse-error"]);
        }
        tools::run(make.arg("KCFLAGS=-Werror").arg("modules"))?;
        Ok(tools::files(&copy)?
            .into_iter()
            .filter(|file| file.extension().is_some_and(|end| end == "ko"))
            .collect())
    }
}

/// "kernel/fs/ext4/ext4.ko.xz" is ext4.
fn module_name(path: &str) -> String {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.split('.').next().unwrap_or(name).replace('-', "_")
}

fn read_dependencies(folder: &Path) -> Result<BTreeMap<String, (PathBuf, Vec<String>)>> {
    let mut modules = BTreeMap::new();
    for line in tools::read(&folder.join("modules.dep"))?.lines() {
        if let Some((path, needs)) = line.split_once(':') {
            // depmod names the one that is loaded first last.
            let needs = needs.split_ascii_whitespace().rev().map(module_name).collect();
            modules.insert(module_name(path), (folder.join(path), needs));
        }
    }
    Ok(modules)
}

/// Puts the packages of a kernel into a folder, and makes them usable there.
fn unpack(packages: &Packages, series: &str, architecture: Architecture, folder: &Path) -> Result<()> {
    let debian = architecture.debian();
    let release = newest(packages.names(&format!("linux-image-{series}."))?, series, debian)
        .ok_or_else(|| format!("the package manager has no kernel {series} for {debian}"))?;
    let headers = format!("linux-headers-{release}:{debian}");
    let mut names = vec![format!("linux-image-{release}:{debian}"), headers.clone()];
    // Common headers, and the programs that build modules, which run here.
    let needed = packages.dependencies(&headers)?;
    let needed = needed.iter().map(|name| name.trim_matches(['<', '>']).split(':').next().unwrap_or(name));
    let built_with = |name: &&str| name.starts_with("linux-headers-") || name.starts_with("linux-kbuild-");
    names.extend(needed.filter(built_with).map(str::to_owned));
    packages.unpack(&names, folder)?;
    tools::run(Command::new("depmod").arg("-b").arg(folder).arg(&release))?;
    // It includes the common one by its place on a machine where it is installed.
    let makefile = folder.join(format!("usr/src/linux-headers-{release}/Makefile"));
    let common = tools::read(&makefile)?
        .replace("include /usr/src/", "include $(dir $(lastword $(MAKEFILE_LIST)))../");
    tools::write(&makefile, common)?;
    if architecture == Architecture::Amd64 {
        uncompress(&folder.join(format!("boot/vmlinuz-{release}")), &folder.join(PLAIN_IMAGE))?;
    }
    Ok(())
}

/// Unpacks an x86 image: the emulated machine would need half of its boot for that. An image that is not understood stays as it is.
fn uncompress(image: &Path, plain: &Path) -> Result<()> {
    let bytes = fs::read(image).map_err(|error| format!("cannot read {}: {error}", image.display()))?;
    let Some(payload) = payload(&bytes) else { return Ok(()) };
    let program = match payload {
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => "xz",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "zstd",
        _ => return Ok(()),
    };
    let packed = plain.with_extension("packed");
    tools::write(&packed, payload)?;
    let unpacked = tools::bytes(Command::new(program).arg("-dc").arg(&packed));
    let _ = fs::remove_file(&packed);
    tools::write(plain, unpacked?)
}

/// The compressed kernel in an image, as the kernel's boot protocol describes it: sectors of setup code at 0x1f1, offset and length of
/// the payload at 0x248. The length of the kernel follows in the payload's last four bytes.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let number = |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    let setup = match *image.get(0x1f1)? {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let from = ((setup + 1) * 512).checked_add(number(0x248)?)?;
    image.get(from..from.checked_add(number(0x24c)?.checked_sub(4)?)?)
}

/// The newest release among names of packages.
fn newest(names: Vec<String>, series: &str, debian: &str) -> Option<String> {
    let releases = names.into_iter().filter_map(|name| {
        let release = name.strip_prefix("linux-image-")?.to_owned();
        let version = release.strip_suffix(debian)?.strip_suffix('-')?;
        // Neither -cloud nor -rt.
        let plain = version.strip_suffix("+deb12").unwrap_or(version);
        let numbers: Option<Vec<u32>> = plain.split(['.', '-']).map(|part| part.parse().ok()).collect();
        let right = version.strip_prefix(series)?.starts_with('.');
        right.then_some((numbers?, release))
    });
    releases.max().map(|(_, release)| release)
}

#[cfg(test)]
mod tests {
    use super::{module_name, newest, payload};

    #[test]
    fn the_newest_release_is_chosen_by_number() {
        let names = [
            "6.1.0-9-amd64",
            "6.1.0-56-amd64",
            "6.1.0-57-cloud-amd64",
            "6.1.0-58-amd64-unsigned",
            "6.1.0-59-arm64",
        ];
        let names = |prefix: &str| names.iter().map(|name| format!("{prefix}{name}")).collect::<Vec<_>>();
        assert_eq!(newest(names("linux-image-"), "6.1", "amd64").as_deref(), Some("6.1.0-56-amd64"));
        assert_eq!(newest(names("linux-headers-"), "6.1", "amd64"), None);
        let backports =
            vec!["linux-image-6.12.117+deb12-arm64".to_owned(), "linux-image-6.12.9+deb12-arm64".to_owned()];
        assert_eq!(newest(backports.clone(), "6.12", "arm64").as_deref(), Some("6.12.117+deb12-arm64"));
        assert_eq!(newest(backports, "6.1", "arm64"), None);
    }

    #[test]
    fn the_payload_of_an_image_is_where_its_header_says() {
        let mut image = vec![0; 0x300];
        image[0x1f1] = 1;
        image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&12_u32.to_le_bytes());
        assert_eq!(payload(&image), None, "it is too short");
        image.resize(1024 + 16, 0);
        image.extend(b"contents\0\0\0\0");
        assert_eq!(payload(&image), Some(&b"contents"[..]));
        image[0x24c..0x250].copy_from_slice(&3_u32.to_le_bytes());
        assert_eq!(payload(&image), None);
        image[0x248..0x250].fill(0xff);
        assert_eq!(payload(&image), None);
        assert_eq!(payload(b"short"), None);
    }

    #[test]
    fn modules_are_known_by_what_lsmod_calls_them() {
        assert_eq!(module_name("kernel/drivers/char/hw_random/virtio-rng.ko.xz"), "virtio_rng");
        assert_eq!(module_name("ext4.ko"), "ext4");
    }
}
