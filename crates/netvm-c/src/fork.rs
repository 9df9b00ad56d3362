//! Which process this is, without a system call: a page that the kernel wipes in the child of a fork.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use netvm_sys::mapping::Mapping;

use crate::code::{Code, Failure, Result};
use crate::ffi::static_word;

static WORD: OnceLock<&'static AtomicU32> = OnceLock::new();

/// This process's number: never 0, the same in all its threads, another one after a fork.
#[inline]
pub(crate) fn process() -> Result<u32> {
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
fn make() -> Result<&'static AtomicU32> {
    let page = || {
        let page = Mapping::anonymous(4096)?;
        page.wipe_on_fork()?;
        Ok(page)
    };
    let page = page().map_err(|error: io::Error| {
        Failure::new(Code::System, format!("cannot map a page that a fork wipes (MADV_WIPEONFORK): {error}"))
    })?;
    // Two threads may make one each; both then use the first.
    Ok(WORD.get_or_init(|| static_word(page)))
}
