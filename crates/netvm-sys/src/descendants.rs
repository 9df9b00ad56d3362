//! Processes that this one has started, and those that they have: whoever loses its parent becomes a child of this process, not of pid 1.

use std::io;

use crate::stat::{self, Stat};

/// The most memory that one of the children had at a time that have been waited for, or one of theirs, in bytes: `ru_maxrss` of getrusage(2).
pub fn largest_bytes() -> u64 {
    // SAFETY: plain numbers, for which all zeros are valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills in `usage`, which outlives the call.
    unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage) };
    u64::try_from(usage.ru_maxrss).unwrap_or(0) << 10
}

/// See the module's text. Ends on drop.
#[derive(Debug)]
pub struct Descendants {
    /// Children from before.
    others: Vec<u32>,
}

impl Descendants {
    /// Of all that is started from now on.
    ///
    /// # Errors
    /// EINVAL before Linux 3.4.
    pub fn follow() -> io::Result<Self> {
        adopt_orphans(true)?;
        let me = std::process::id();
        let others = processes().into_iter().filter(|&(_, parent)| parent == me).map(|(pid, _)| pid);
        Ok(Self { others: others.collect() })
    }

    /// All of them. Whoever has ended is among them until [`Descendants::reap`], so none is missed that becomes a child meanwhile.
    pub fn pids(&self) -> Vec<u32> {
        let mut found = vec![std::process::id()];
        let mut rest = processes();
        rest.retain(|(pid, _)| !self.others.contains(pid));
        let mut known = 0;
        while known < found.len() {
            known = found.len();
            rest.retain(|&(pid, parent)| {
                let is_child = found.contains(&parent);
                if is_child {
                    found.push(pid);
                }
                !is_child
            });
        }
        found.split_off(1)
    }

    /// Lets those go that have ended, but for `except`: who has started that itself waits for it.
    pub fn reap(&self, except: Option<u32>) {
        let me = std::process::id();
        for (pid, parent) in processes() {
            if parent == me && Some(pid) != except && !self.others.contains(&pid) {
                // SAFETY: a null status is not written.
                unsafe { libc::waitpid(pid as i32, std::ptr::null_mut(), libc::WNOHANG) };
            }
        }
    }
}

impl Drop for Descendants {
    fn drop(&mut self) {
        let _ = adopt_orphans(false);
    }
}

fn adopt_orphans(adopt: bool) -> io::Result<()> {
    // SAFETY: takes numbers only.
    match unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, libc::c_ulong::from(adopt), 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether a child has ended; it stays for whoever waits for it.
pub fn has_ended(child: u32) -> bool {
    // SAFETY: an all-zero siginfo_t is valid and outlives the call, which fills it in.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        libc::waitid(libc::P_PID, child, &mut info, options) < 0 || info.si_pid() != 0
    }
}

/// Each process and its parent.
fn processes() -> Vec<(u32, u32)> {
    stat::pids().filter_map(|pid| Some((pid, Stat::of(pid)?.parent))).collect()
}
