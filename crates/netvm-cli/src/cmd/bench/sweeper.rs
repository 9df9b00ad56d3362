//! What benches keep in folders of the machine goes with them, also when a signal ends them.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::child::Helper;

/// So often it is tried to remove something, a tenth of a second apart.
const ATTEMPTS: usize = 50;

/// Arguments of the process that removes.
#[derive(Args, Debug)]
pub struct SweeperArgs {
    paths: Vec<PathBuf>,
}

/// Removes a file, or a folder with everything in it, when it is dropped or this process ends, however it does.
#[derive(Debug)]
pub struct Sweeper {
    _process: Helper,
}

impl Sweeper {
    /// For something that is this process's own: it need not be there yet.
    ///
    /// # Errors
    /// That of starting a process.
    pub fn start(path: &Path) -> Result<Self, Box<dyn Error>> {
        let path = path.to_str().ok_or("the path of what is to be removed is no text")?;
        let command = ["bench", "sweeper", path].map(str::to_owned);
        // Ctrl-C is not for it.
        Ok(Self { _process: Helper::start(&command, true)? })
    }

    /// The same for a new folder.
    ///
    /// # Errors
    /// When it cannot be made, also because it is there already: then it is somebody else's.
    pub fn of_new_folder(path: &Path) -> Result<Self, Box<dyn Error>> {
        std::fs::create_dir(path).map_err(|error| format!("cannot make {}: {error}", path.display()))?;
        Self::start(path).inspect_err(|_| {
            let _ = std::fs::remove_dir(path);
        })
    }
}

/// The process that removes: when its input ends.
///
/// # Errors
/// None: nobody would read it.
pub fn sweep(args: &SweeperArgs) -> Result<(), Box<dyn Error>> {
    let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
    args.paths.iter().for_each(|path| remove(path));
    Ok(())
}

/// Other processes of a bench that was killed may still put something into a folder until they notice.
fn remove(path: &Path) {
    for _ in 0..ATTEMPTS {
        let Ok(meta) = path.symlink_metadata() else { return };
        let gone = if meta.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
        if gone.is_ok() {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
