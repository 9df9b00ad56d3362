//! Which process this is, without a system call: a page that the kernel wipes in the child of a fork.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::mapping::Mapping;

/// The number of this process, in a page that is wiped.
static WORD: OnceLock<&'static AtomicU32> = OnceLock::new();
/// The last number that this process, or one that it comes from, was given. It is inherited.
static LAST: AtomicU32 = AtomicU32::new(0);

/// Whoever has this memory: all threads of a process, and its children of vfork(2), but none of fork(2). It is not told by the
/// process's number, which may be another's one day: also a grandchild's, when its grandparent has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Process(u32);

impl Process {
    /// This one.
    ///
    /// # Errors
    /// ENOMEM; EINVAL on a kernel without MADV_WIPEONFORK (before Linux 4.14). Never after a call that had none.
    #[inline]
    pub fn this() -> io::Result<Self> {
        let word = match WORD.get() {
            Some(word) => word,
            None => make()?,
        };
        match word.load(Ordering::Relaxed) {
            0 => Ok(Self(number(word))),
            number => Ok(Self(number)),
        }
    }

    /// Whether it is this one.
    #[inline]
    pub fn is_this(self) -> bool {
        Self::this().is_ok_and(|this| this == self)
    }
}

/// The first call of a process.
#[cold]
fn number(word: &AtomicU32) -> u32 {
    let next = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    // Two threads may have come here.
    word.compare_exchange(0, next, Ordering::Relaxed, Ordering::Relaxed).map_or_else(|first| first, |_| next)
}

#[cold]
fn make() -> io::Result<&'static AtomicU32> {
    let page = Mapping::anonymous(4096)?;
    page.wipe_on_fork()?;
    let word = page.shared().as_ptr().cast::<AtomicU32>();
    std::mem::forget(page);
    // SAFETY: a mapping begins at a page and has at least one, so the word is aligned and inside; it stays mapped (forgotten above), and is
    // used as an atomic only.
    let word = unsafe { &*word };
    // Two threads may make one each; both then use the first.
    Ok(WORD.get_or_init(|| word))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ends with the code that `run` returns, in a child of a fork.
    fn in_a_child(run: impl FnOnce() -> i32) -> i32 {
        // SAFETY: the child looks at memory, forks and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = run();
            // SAFETY: ends the child.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: a local.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(libc::WIFEXITED(status), "{status:#x}");
        libc::WEXITSTATUS(status)
    }

    #[test]
    fn no_descendant_is_the_same_process() {
        let this = Process::this().unwrap();
        let in_threads: Vec<_> = (0..8).map(|_| std::thread::spawn(|| Process::this().unwrap())).collect();
        assert!(in_threads.into_iter().all(|thread| thread.join().unwrap() == this));
        let code = in_a_child(|| {
            // Two generations, of which the first does not ask before it forks.
            let grandchild = in_a_child(|| i32::from(this.is_this()));
            let child = Process::this().unwrap();
            let other = in_a_child(|| i32::from(this.is_this() || child.is_this()));
            grandchild | other << 1 | i32::from(child == this) << 2 | i32::from(!child.is_this()) << 3
        });
        assert_eq!(code, 0);
        assert!(this.is_this());
    }
}
