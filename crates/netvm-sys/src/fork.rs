//! Which process this is, without a system call: a page that the kernel wipes in the child of a fork.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::mapping::Mapping;

static WORD: OnceLock<&'static AtomicU32> = OnceLock::new();

/// A number of whoever has this memory: never 0, the same in all threads and in children of vfork(2), another one after a fork.
///
/// # Errors
/// ENOMEM; EINVAL on a kernel without MADV_WIPEONFORK (before Linux 4.14). Never after the first call that had none.
#[inline]
pub fn process() -> io::Result<u32> {
    let word = match WORD.get() {
        Some(word) => word,
        None => make()?,
    };
    match word.load(Ordering::Relaxed) {
        0 => {
            let number = std::process::id();
            word.store(number, Ordering::Relaxed);
            Ok(number)
        }
        number => Ok(number),
    }
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
