//! Puts the C library, its header, its manual pages and its pkg-config file into place. The tests of netvm-c install into a folder of
//! their own with it.
//!
//! The shared library is linked here, from the static one: rustc gives a library that it links itself a list of symbols without a
//! version, and linkers refuse a second list.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The first number changes when a program that worked would not any more.
pub const SONAME: &str = "libnetvm.so.0";
/// What the static library needs of the system.
const SYSTEM_LIBRARIES: &str = "-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc";

/// Where things go.
pub struct Place {
    /// In front of every path, but not part of it: for packagers.
    pub destdir: PathBuf,
    /// Such as /usr/local.
    pub prefix: PathBuf,
    /// Folder of libraries, below the prefix.
    pub libdir: String,
}

impl Place {
    /// A folder on this disk.
    pub fn folder(&self, name: &str) -> PathBuf {
        self.on_disk(&self.prefix.join(name))
    }

    /// The folder of libraries, on this disk.
    pub fn libraries(&self) -> PathBuf {
        self.folder(&self.libdir)
    }

    fn on_disk(&self, path: &Path) -> PathBuf {
        if self.destdir.as_os_str().is_empty() {
            return path.to_owned();
        }
        self.destdir.join(path.strip_prefix("/").unwrap_or(path))
    }
}

/// Installs the C library of the workspace `root`, of which `archive` is the static library that cargo built.
pub fn library(root: &Path, archive: &Path, version: &str, place: &Place) -> Result<(), String> {
    let source = root.join("crates/netvm-c");
    let libraries = place.libraries();
    let full = format!("libnetvm.so.{version}");
    copy(archive, &libraries.join("libnetvm.a"), 0o644)?;
    link(archive, &source.join("netvm.map"), &libraries.join(&full))?;
    link_name(&full, &libraries.join(SONAME))?;
    link_name(SONAME, &libraries.join("libnetvm.so"))?;
    let header = source.join("include/netvm.h");
    copy(&header, &place.folder("include").join("netvm.h"), 0o644)?;

    let template = read(&source.join("netvm.pc.in"))?;
    let prefix = place.prefix.display().to_string();
    let config = template
        .replace("@PREFIX@", &prefix)
        .replace("@LIBDIR@", &format!("${{prefix}}/{}", place.libdir))
        .replace("@VERSION@", version)
        .replace("@PRIVATE@", SYSTEM_LIBRARIES);
    write(&libraries.join("pkgconfig/netvm.pc"), &config)?;

    let manual = place.folder("share/man");
    for page in ["man3/netvm.3", "man7/netvm.7"] {
        let name = page.split_once('/').map_or(page, |(_, name)| name);
        copy(&source.join("man").join(name), &manual.join(page), 0o644)?;
    }
    // `man netvm_put` finds the overview.
    for function in functions(&read(&header)?) {
        write(&manual.join(format!("man3/{function}.3")), ".so man3/netvm.3\n")?;
    }
    Ok(())
}

fn link(archive: &Path, map: &Path, library: &Path) -> Result<(), String> {
    make_folder_of(library)?;
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = Command::new(&compiler);
    command.arg("-shared").arg("-o").arg(library);
    command.arg(format!("-Wl,-soname,{SONAME}")).arg(format!("-Wl,--version-script={}", map.display()));
    // Its threads and handlers must never lose their code.
    command.args(["-Wl,-z,nodelete", "-Wl,-z,defs", "-Wl,-z,relro", "-Wl,-z,now"]);
    command.args(["-Wl,--gc-sections", "-Wl,--strip-debug", "-Wl,--whole-archive"]);
    command.arg(archive).arg("-Wl,--no-whole-archive").args(SYSTEM_LIBRARIES.split(' '));
    let output = command.output().map_err(|error| format!("cannot run {}: {error}", compiler.display()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("cannot link {}:\n{}", library.display(), String::from_utf8_lossy(&output.stderr)))
}

/// The functions that a header declares.
pub fn functions(header: &str) -> Vec<String> {
    let declared = header.split("NETVM_API ").skip(1).filter_map(|text| {
        let (before, _) = text.split_once('(')?;
        let name = before.rsplit([' ', '*']).next()?;
        name.starts_with("netvm_").then(|| name.to_owned())
    });
    declared.collect()
}

/// Copies a file into a folder that is made if need be.
pub fn copy(from: &Path, to: &Path, mode: u32) -> Result<(), String> {
    make_folder_of(to)?;
    // Not written over: a running program may have it open.
    let _ = fs::remove_file(to);
    fs::copy(from, to)
        .map_err(|error| format!("cannot copy {} to {}: {error}", from.display(), to.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode))
        .map_err(|error| format!("cannot set the mode of {}: {error}", to.display()))
}

fn link_name(target: &str, name: &Path) -> Result<(), String> {
    let _ = fs::remove_file(name);
    symlink(target, name).map_err(|error| format!("cannot make the link {}: {error}", name.display()))
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

fn write(path: &Path, content: &str) -> Result<(), String> {
    make_folder_of(path)?;
    fs::write(path, content).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

fn make_folder_of(path: &Path) -> Result<(), String> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))
}
