//! Which process this is, without a system call: a page that the kernel wipes in the child of a fork.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use netvm_sys::mapping::Mapping;

use crate::code::{Code, Failure, Result};

static PAGE: OnceLock<io::Result<Mapping>> = OnceLock::new();

/// This process's number: never 0, the same in all its threads, another one after a fork.
pub(crate) fn process() -> Result<u32> {
    let page = PAGE.get_or_init(|| {
        let page = Mapping::anonymous(4096)?;
        page.wipe_on_fork()?;
        Ok(page)
    });
    let page = page.as_ref().map_err(|error| {
        Failure::new(Code::System, format!("cannot map a page that a fork wipes (MADV_WIPEONFORK): {error}"))
    })?;
    let number = page.shared().with_u32(0, |word| match word.load(Ordering::Relaxed) {
        0 => {
            let number = std::process::id();
            word.store(number, Ordering::Relaxed);
            number
        }
        number => number,
    });
    number.ok_or_else(|| Failure::new(Code::Internal, "a page is too short for a word"))
}
