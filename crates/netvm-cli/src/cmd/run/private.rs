//! Lenders for one run alone: in memory, or on a file.

use crate::size::Size;
use netvm::security::Security;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Where pages go when all other lenders are full.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileTier {
    pub folder: PathBuf,
    size: Option<Size>,
}

impl FromStr for FileTier {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.rsplit_once(':').and_then(|(folder, size)| Some((folder, size.parse().ok()?)));
        let (folder, size) = match parts {
            Some((folder, size)) => (folder, Some(size)),
            None => (text, None),
        };
        if folder.is_empty() {
            Err("name a folder".to_owned())
        } else {
            Ok(Self { folder: folder.into(), size })
        }
    }
}

impl FileTier {
    /// What was asked for, or most of what is free there.
    pub fn size(&self) -> Result<Size, String> {
        let room = netvm_sys::memfd::room_bytes(&self.folder).map_err(|error| {
            let folder = self.folder.display().to_string();
            // What is no size is a part of the folder's name.
            let hint = match folder.rsplit_once(':') {
                Some((_, end)) => format!("; {end:?} is no size such as 64G"),
                None => String::new(),
            };
            format!("cannot use a file in {folder}: {error}{hint}")
        })?;
        Ok(self.size.unwrap_or(Size(room / 10 * 9)))
    }
}

/// A lender for this run alone. It ends when its standard input does and no borrower is left.
pub struct PrivateLender {
    child: Child,
    address: String,
    folder: Option<PathBuf>,
}

/// It lends memory in pieces of this size.
const SLAB: Size = Size(16 << 20);
/// Between the end of a lender's connections and its own, while its file is freed.
const DEATH: Duration = Duration::from_millis(200);

/// The limit of the size of files, in bytes, if there is one.
fn file_bytes_max() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    limits
        .lines()
        .find_map(|line| line.strip_prefix("Max file size"))?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

impl PrivateLender {
    /// Starts one that lends memory, or a file in `folder`: in slabs as the other lenders', of which the smallest have `slab`.
    pub fn start(
        socket: &Path,
        size: Size,
        slab: Option<Size>,
        security: &Security,
        folder: Option<&Path>,
    ) -> Result<Self, String> {
        let slab = slab.unwrap_or(SLAB).min(SLAB);
        if size < slab {
            return Err(match folder {
                None => format!(
                    "a private lender of {size} has no room for one slab of {slab}; give a --lend-size of at least that"
                ),
                Some(folder) => format!(
                    "a file of {size} in {} has no room for one slab of {slab}; give it at least that, in a folder that has so much room",
                    folder.display()
                ),
            });
        }
        // What is lent is a file, also where it is memory.
        if let Some(most) = file_bytes_max().filter(|&most| most < size.0) {
            return Err(format!(
                "a lender of {size} of its own is more than files may have here, {}: raise that limit (ulimit -f), or ask for less",
                Size(most)
            ));
        }
        let program =
            std::env::current_exe().map_err(|error| format!("cannot find netvm itself: {error}"))?;
        let mut command = Command::new(program);
        command.args(["lend", "--private", "--size", &size.0.to_string()]);
        command.args(["--slab", &slab.0.to_string(), "--listen"]);
        let address = format!("unix:{}", socket.display());
        command.arg(&address);
        if let Some(folder) = folder {
            command.arg("--file").arg(folder);
        }
        if security.secret.is_some() {
            command.args(["--secret", "-"]);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C is for the program: its memory must stay until it has ended.
            .process_group(0)
            .spawn()
            .map_err(|error| format!("cannot start a private lender: {error}"))?;
        if let (Some(secret), Some(input)) = (&security.secret, &mut child.stdin) {
            // Not among its arguments, which everybody can see. Should it have died, it said why.
            let _ = input.write_all(secret.to_content().as_bytes());
        }
        let mut line = String::new();
        if let Some(out) = child.stdout.take() {
            // No line means that it failed; it said why on standard error.
            let _ = BufReader::new(out).read_line(&mut line);
        }
        if line.is_empty() {
            let _ = child.wait();
            return Err(match folder {
                None => format!(
                    "the private lender of {size} did not start; give a smaller --lend-size, or a --lender"
                ),
                Some(folder) => format!(
                    "the file of {size} in {} could not be made; name another folder, or a smaller size",
                    folder.display()
                ),
            });
        }
        Ok(Self { child, address, folder: folder.map(Path::to_owned) })
    }

    /// How it has ended, if it has. It should not, as long as this lives.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        let until = Instant::now() + DEATH;
        loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < until => std::thread::sleep(DEATH / 20),
                other => return other.ok().flatten(),
            }
        }
    }

    /// What it lends.
    pub fn name(&self) -> String {
        match &self.folder {
            None => "the private lender".into(),
            Some(folder) => format!("the lender of the file in {}", folder.display()),
        }
    }

    /// The last words of a process that it had no room for, as the user of the run can follow them; `None` for other words.
    pub fn in_words_of_the_run(&self, message: &str) -> Option<String> {
        let name = self.name();
        if let Some(rest) = message.strip_prefix(&format!("the disk of lender {} ", self.address)) {
            return Some(format!("the disk of {name} {rest}"));
        }
        let rest = message.strip_prefix(&format!("lender {} is full: ", self.address))?;
        let advice = match self.folder {
            None => "give a larger --lend-size, or --file FOLDER for the rest",
            Some(_) => "give it a larger size (--file FOLDER:SIZE)",
        };
        let (room, rest) = rest.split_once(';')?;
        // Behind the advice to whoever starts lenders is what became of the program.
        let end = rest.rsplit_once(';').map_or("", |(_, end)| end);
        Some(format!("{name} is full: {room}; {advice}{}{end}", if end.is_empty() { "" } else { ";" }))
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for PrivateLender {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // It has no borrowers any more: it ends by itself, at once.
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netvm::{Error, LenderLimit};

    #[test]
    fn nobody_is_told_to_start_a_private_lender() {
        let mut lender = PrivateLender {
            child: Command::new("true").stdin(Stdio::null()).spawn().unwrap(),
            address: "unix:/run/lender".into(),
            folder: None,
        };
        let full = |lender: &str, limit| {
            let error = Error::LenderFull {
                lender: lender.into(),
                size_bytes: 32 << 20,
                used_bytes: 16 << 20,
                limit,
            };
            format!("{error}; far memory is lost")
        };
        let ours = full("unix:/run/lender", LenderLimit::Size);
        assert_eq!(
            lender.in_words_of_the_run(&ours).unwrap(),
            "the private lender is full: 16 of its 32 MiB are lent; give a larger --lend-size, or --file FOLDER for the rest; far memory is lost"
        );
        assert_eq!(lender.in_words_of_the_run(&full("unix:/run/lender2", LenderLimit::Size)), None);
        lender.folder = Some("/var/tmp".into());
        assert!(
            lender
                .in_words_of_the_run(&ours)
                .unwrap()
                .contains("/var/tmp is full: 16 of its 32 MiB are lent; give it a larger size")
        );
        let disk = lender.in_words_of_the_run(&full("unix:/run/lender", LenderLimit::Disk)).unwrap();
        assert!(disk.starts_with("the disk of the lender of the file in /var/tmp is full: 16 MiB"), "{disk}");
    }

    #[test]
    fn a_folder_may_have_a_size_behind_it() {
        let tier =
            |text: &str| text.parse::<FileTier>().map(|tier| (tier.folder.display().to_string(), tier.size));
        assert_eq!(tier("/var/tmp"), Ok(("/var/tmp".into(), None)));
        assert_eq!(tier("/var/tmp:4G"), Ok(("/var/tmp".into(), Some(Size(4 << 30)))));
        assert_eq!(tier("/odd:name"), Ok(("/odd:name".into(), None)));
        assert_eq!(tier("/odd:name:1M"), Ok(("/odd:name".into(), Some(Size(1 << 20)))));
        assert!(tier("").is_err() && tier(":4G").is_err());
    }
}
