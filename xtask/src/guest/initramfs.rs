//! The root of a guest: an archive in the format of cpio(5), "newc".

use super::tools::{self, Result};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const FOLDER: u32 = 0o040_755;
const FILE: u32 = 0o100_000;
const DEVICE: u32 = 0o020_600;

/// An archive that is being made.
pub struct Initramfs {
    bytes: Vec<u8>,
    entries: u32,
    paths: BTreeSet<PathBuf>,
}

impl Initramfs {
    /// With a console, without which init has no output.
    pub fn new() -> Self {
        let mut new = Self { bytes: Vec::new(), entries: 0, paths: BTreeSet::new() };
        new.folders_of(Path::new("/dev/console"));
        new.entry("dev/console", DEVICE, (5, 1), &[]);
        new
    }

    /// Adds bytes as a file, `/test/script` say. A second file of that name is ignored.
    pub fn add(&mut self, path: &str, content: &[u8], executable: bool) {
        if self.paths.insert(PathBuf::from(path)) {
            self.folders_of(Path::new(path));
            let mode = FILE | if executable { 0o755 } else { 0o644 };
            self.entry(path.trim_start_matches('/'), mode, (0, 0), content);
        }
    }

    /// Adds a file of this machine.
    pub fn add_file(&mut self, path: &str, file: &Path, executable: bool) -> Result<()> {
        let content = fs::read(file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
        self.add(path, &content, executable);
        Ok(())
    }

    /// Adds a program of this machine below /bin, with the libraries that it is linked with.
    pub fn add_program(&mut self, file: &Path) -> Result<()> {
        self.add_linked(&format!("/bin/{}", tools::name(file)), file)
    }

    /// Adds a program or a library of this machine at `path`, with the libraries that it is linked with.
    pub fn add_linked(&mut self, path: &str, file: &Path) -> Result<()> {
        self.add_file(path, file, true)?;
        // "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x7f...)", "/lib64/ld-linux-x86-64.so.2 (0x7f...)"
        let Ok(libraries) = tools::output(Command::new("ldd").arg(file)) else {
            return Ok(()); // It is static.
        };
        for line in libraries.lines() {
            let path =
                line.split("=>").last().unwrap_or(line).split_ascii_whitespace().next().unwrap_or_default();
            if path.starts_with('/') {
                self.add_file(path, Path::new(path), true)?;
            }
        }
        Ok(())
    }

    /// The whole archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn folders_of(&mut self, path: &Path) {
        let parent = path.parent().filter(|parent| parent.parent().is_some());
        if let Some(parent) = parent.filter(|parent| !self.paths.contains(*parent)) {
            self.folders_of(parent);
            self.paths.insert(parent.to_owned());
            self.entry(parent.to_string_lossy().trim_start_matches('/'), FOLDER, (0, 0), &[]);
        }
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).unwrap_or(u32::MAX);
        // inode, mode, uid, gid, links, mtime, size, device of the file, device that it is, length of the name, checksum
        let length = u32::try_from(name.len()).unwrap_or(0) + 1;
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, length, 0];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(name.bytes().chain([0]));
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::Initramfs;

    #[test]
    fn an_archive_has_each_file_and_folder_once() {
        let mut archive = Initramfs::new();
        archive.add("/a/b/file", b"12345", true);
        archive.add("/a/b/other", b"", false);
        archive.add("/a/b/file", b"not this", true);
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        let names = ["dev", "dev/console", "a", "a/b", "a/b/file", "a/b/other", "TRAILER!!!"];
        let at: Vec<usize> = names.iter().map(|name| text.find(&format!("{name}\0")).unwrap()).collect();
        assert!(at.is_sorted());
        assert_eq!(text.matches("070701").count(), names.len());
        assert!(text.contains("12345") && !text.contains("not this"));
    }
}
