//! The folder that one run keeps its run file and its private lender's socket in.

use netvm::runfile::RunFile;
use netvm_sys::stat::{self, Stat};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const PREFIX: &str = "netvm-";

/// The folder of one run, removed on drop. Only this user can look into it.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// Makes the folder, in memory where possible, and removes those of runs whose supervisor was killed.
    ///
    /// # Errors
    /// A sentence, when there is no place for it.
    pub fn create() -> Result<Self, String> {
        let base = ["/dev/shm", "/tmp"].into_iter().map(Path::new).find(|path| path.is_dir());
        let base = base.ok_or("neither /dev/shm nor /tmp is there to keep the run's state in")?;
        sweep(base);
        for attempt in 0..100 {
            let path = base.join(format!("{PREFIX}{}-{attempt}", std::process::id()));
            match fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(format!("cannot create {}: {error}", path.display())),
            }
        }
        Err(format!("{0} is full of old runs; remove {0}/{PREFIX}*", base.display()))
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Where the run file goes.
    pub fn run_file(&self) -> PathBuf {
        self.0.join("run")
    }

    /// Where the private lender listens.
    pub fn socket(&self) -> PathBuf {
        self.0.join("lender")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Left behind at worst: a small file, until the next run sweeps.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// This user's runs that go on: process of `netvm run`, and what its processes share.
pub fn runs() -> Vec<(u32, Arc<RunFile>)> {
    let bases = ["/dev/shm", "/tmp"].into_iter().map(Path::new);
    let open = |(pid, path)| Some((pid, RunFile::open(&Folder::at(path).run_file()).ok()?));
    let mut runs: Vec<_> = bases.flat_map(folders).filter_map(open).filter(|(_, run)| goes_on(run)).collect();
    runs.sort_unstable_by_key(|&(pid, _)| pid);
    runs
}

/// Whether its `netvm run` lives, or, where that was killed, one of its processes.
pub fn goes_on(run: &RunFile) -> bool {
    run.is_supervised() || {
        run.reap();
        run.processes() > 0
    }
}

/// This user's folders, with the process that made each.
fn folders(base: &Path) -> Vec<(u32, PathBuf)> {
    let Ok(me) = fs::metadata("/proc/self").map(|meta| meta.uid()) else { return Vec::new() };
    let mine = |entry: fs::DirEntry| {
        let pid = entry.file_name().to_str()?.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()?;
        let meta = entry.metadata().ok()?;
        (meta.is_dir() && meta.uid() == me).then(|| (pid, entry.path()))
    };
    fs::read_dir(base).into_iter().flatten().flatten().filter_map(mine).collect()
}

/// Removes folders of this user's runs that are over but could not clean up: the supervisor was killed.
fn sweep(base: &Path) {
    for (_, path) in folders(base) {
        if is_over(&Folder::at(path.clone())) {
            // Somebody else may be sweeping too.
            let _ = fs::remove_dir_all(path);
        }
    }
}

impl Folder {
    /// A folder that is not ours to remove on drop.
    fn at(path: PathBuf) -> std::mem::ManuallyDrop<Self> {
        std::mem::ManuallyDrop::new(Self(path))
    }
}

/// Whether nothing of a run is left. Processes that have not used far memory yet are not in the run file: a private lender that still
/// listens is there for them; without one, their environment tells.
fn is_over(folder: &Folder) -> bool {
    let Ok(run) = RunFile::open(&folder.run_file()) else { return has_never_begun(folder) };
    if goes_on(&run) {
        return false;
    }
    if folder.socket().exists() {
        return UnixStream::connect(folder.socket()).is_err();
    }
    let mut entry = b"NETVM_RUN=".to_vec();
    entry.extend_from_slice(folder.run_file().as_os_str().as_bytes());
    !stat::pids().any(|pid| has_in_environment(pid, &entry))
}

/// From the folder to the run file a run needs no longer than its lenders take to answer.
const BEGINNING: Duration = Duration::from_secs(3600);

/// Whether this is of a run that was killed before it had a run file. One that another version made is none of ours.
fn has_never_begun(folder: &Folder) -> bool {
    let is_old =
        |meta: fs::Metadata| meta.modified().is_ok_and(|at| at.elapsed().is_ok_and(|age| age > BEGINNING));
    !folder.run_file().exists()
        && UnixStream::connect(folder.socket()).is_err()
        && fs::metadata(&folder.0).is_ok_and(is_old)
}

/// How often an environment that is empty or torn is looked at again, a millisecond apart. On a busy machine exec(2) may stand still in the
/// middle for as long as others run.
const LOOKS: usize = 1000;
/// As often an empty environment must have been at the same place: each exec(2) has another.
const LOOKS_EMPTY: usize = 100;

/// Where the empty environment of a process is. In the middle of exec(2) it has one for a moment.
fn empty_environment(pid: u32) -> Option<u64> {
    let (start, end) = Stat::of(pid)?.environment;
    (start == end && start != 0).then_some(start)
}

/// Whether a process was started with this entry. Others' processes cannot be in a run of ours.
fn has_in_environment(pid: u32, entry: &[u8]) -> bool {
    let mut empty = (None, 0);
    for _ in 0..LOOKS {
        match fs::read(format!("/proc/{pid}/environ")) {
            Ok(environment) if environment.split(|&byte| byte == 0).any(|word| word == entry) => return true,
            Ok(environment) if environment.ends_with(&[0]) => return false,
            Ok(environment) if environment.is_empty() => {
                let at = empty_environment(pid);
                empty = if at.is_some() && at == empty.0 { (at, empty.1 + 1) } else { (at, 0) };
                if empty.1 >= LOOKS_EMPTY {
                    return false;
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
                return false;
            }
            // None, a part, or an error while it is replaced.
            _ => {}
        }
        // It has ended, or is a thread of the kernel.
        if fs::read_link(format!("/proc/{pid}/exe")).is_err() {
            return false;
        }
        // In the middle of exec(2) a process seems to have none.
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use netvm::runfile::RunParams;

    #[test]
    fn the_folder_is_private_and_goes() {
        let folder = Folder::create().unwrap();
        let path = folder.0.clone();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o700);
        let params = RunParams { budget_bytes: 4 << 20, ..RunParams::default() };
        RunFile::create(&folder.run_file(), &params).unwrap();
        // Supervised by this process.
        assert!(!is_over(&folder));
        let other = Folder::create().unwrap();
        assert!(path.exists() && other.0 != path);
        drop(folder);
        assert!(!path.exists());
    }

    #[test]
    fn what_was_killed_at_its_beginning_goes_an_hour_later() {
        let folder = Folder::create().unwrap();
        assert!(!is_over(&folder));
        let earlier = std::time::SystemTime::now() - BEGINNING - Duration::from_secs(1);
        let change = || fs::File::open(&folder.0).unwrap().set_modified(earlier).unwrap();
        change();
        assert!(is_over(&folder));
        fs::write(folder.run_file(), "of another version").unwrap();
        change();
        assert!(!is_over(&folder));
    }

    #[test]
    fn an_environment_is_read_also_in_the_middle_of_exec() {
        // A process that execs all the time: whenever it is asked, it has the entry.
        let entry = "NETVM_TEST_ENTRY=in the middle";
        let script = "n=$1; [ $n -gt 300 ] && exit; exec sh -c \"$0\" \"$0\" $((n + 1))";
        let mut child = std::process::Command::new("sh")
            .args(["-c", script, script, "0"])
            .env("NETVM_TEST_ENTRY", "in the middle")
            .spawn()
            .unwrap();
        let mut looks = 0;
        while child.try_wait().unwrap().is_none() {
            let has = || has_in_environment(child.id(), entry.as_bytes());
            // Only at the end it has none, and never again.
            assert!(has() || !has(), "after {looks} looks");
            assert!(!has_in_environment(child.id(), b"NETVM_TEST_ENTRY=another"));
            looks += 1;
        }
        assert!(!has_in_environment(child.id(), entry.as_bytes()) && looks > 0);
    }

    #[test]
    fn who_has_no_environment_is_not_waited_for() {
        let mut child = std::process::Command::new("sleep").arg("60").env_clear().spawn().unwrap();
        // A look in vain waits for a millisecond, and there are 100 at most: how long that takes depends on the machine.
        let since = std::time::Instant::now();
        (0..300).for_each(|_| std::thread::sleep(std::time::Duration::from_millis(1)));
        let long = since.elapsed();
        let since = std::time::Instant::now();
        assert!(!has_in_environment(child.id(), b"NETVM_TEST_ENTRY=1"));
        assert!(since.elapsed() < long);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
