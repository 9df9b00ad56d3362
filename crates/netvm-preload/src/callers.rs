//! Who calls malloc: the C library for itself, or the program.
//!
//! fork(2) in the C library reads and writes blocks of its own (FILEs, the state of name services, tables of thread-specific data)
//! while nobody serves faults: after the last handler before the fork, and before the first one of the child. They must not be far.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Code of the C library and of the dynamic linker, as first address and bytes.
static CODE: [[AtomicUsize; 2]; 2] = [const { [const { AtomicUsize::new(0) }; 2] }; 2];

/// Whether an address of code is in one of them.
#[inline]
pub(crate) fn is_c_library(code: usize) -> bool {
    // Written once, before other threads exist.
    CODE.iter().any(|[start, bytes]| {
        code.wrapping_sub(start.load(Ordering::Relaxed)) < bytes.load(Ordering::Relaxed)
    })
}

unsafe extern "C" {
    /// Of the dynamic linker, which others call when it has loaded them.
    fn __tls_get_addr(index: *mut c_void) -> *mut c_void;
}

/// Finds out where they are. Before the program's own code.
///
/// # Errors
/// When they are not found: then forks would hang.
pub(crate) fn set_up() -> Result<(), String> {
    // SAFETY: the callback takes no data.
    unsafe { libc::dl_iterate_phdr(Some(note), std::ptr::null_mut()) };
    if CODE.iter().all(|[_, bytes]| bytes.load(Ordering::Relaxed) > 0) {
        Ok(())
    } else {
        Err("cannot tell the C library's own memory from the program's: this C library is not known".into())
    }
}

unsafe extern "C" fn note(object: *mut libc::dl_phdr_info, _: usize, _: *mut c_void) -> i32 {
    // SAFETY: the dynamic linker's description of a loaded object, which it keeps during the call.
    let (base, headers) = unsafe {
        let object = &*object;
        (object.dlpi_addr as usize, std::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into()))
    };
    let loaded = headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
    let end = loaded.map(|header| header.p_vaddr as usize + header.p_memsz as usize).max().unwrap_or(0);
    let known = [crate::__libc_malloc as *const () as usize, __tls_get_addr as *const () as usize];
    for (code, _) in CODE.iter().zip(known).filter(|&(_, address)| address.wrapping_sub(base) < end) {
        code[0].store(base, Ordering::Relaxed);
        code[1].store(end, Ordering::Relaxed);
    }
    0
}
