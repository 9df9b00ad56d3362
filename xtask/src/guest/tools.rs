//! Files and programs, with errors that say which.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Errors are for people.
pub type Result<T> = std::result::Result<T, String>;

pub fn make_folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(|error| format!("cannot make {}: {error}", path.display()))
}

pub fn read(path: &Path) -> Result<String> {
    let bytes = fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

pub fn write(path: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    fs::write(path, content).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

pub fn copy(from: &Path, to: &Path) -> Result<()> {
    let copied = fs::copy(from, to).map(|_| ());
    copied.map_err(|error| format!("cannot copy {} to {}: {error}", from.display(), to.display()))
}

/// The entries of a folder, by name.
pub fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(folder).map_err(|error| format!("cannot list {}: {error}", folder.display()))?;
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    Ok(paths)
}

/// The name of a file without its folder.
pub fn name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// Runs a program, whose output is shown only if it fails.
pub fn run(command: &mut Command) -> Result<()> {
    output(command).map(|_| ())
}

/// What a program prints, as text.
pub fn output(command: &mut Command) -> Result<String> {
    Ok(String::from_utf8_lossy(&bytes(command)?).into_owned())
}

/// What a program prints.
pub fn bytes(command: &mut Command) -> Result<Vec<u8>> {
    let program = command.get_program().to_string_lossy().into_owned();
    let done =
        command.stdin(Stdio::null()).output().map_err(|error| format!("cannot run {program}: {error}"))?;
    if done.status.success() {
        return Ok(done.stdout);
    }
    let said = String::from_utf8_lossy(&done.stdout);
    let words: Vec<_> = command.get_args().map(OsStr::to_string_lossy).collect();
    Err(format!("{program} {} has failed:\n{said}{}", words.join(" "), String::from_utf8_lossy(&done.stderr)))
}

/// Where a program is, also if the user's path does not lead there.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let folders = path.split(':').chain(["/usr/sbin", "/usr/bin", "/sbin", "/bin"]);
    folders.map(|folder| Path::new(folder).join(program)).find(|path| path.is_file())
}
