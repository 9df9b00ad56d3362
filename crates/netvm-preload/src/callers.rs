//! Who calls malloc: the C library for itself, or the program.
//!
//! fork(2) in the C library reads and writes blocks of its own (FILEs, the state of name services, tables of thread-specific data)
//! while nobody serves faults: after the last handler before the fork, and before the first one of the child. They must not be far.

use crate::tls::Internal;
use std::ffi::{CStr, c_char, c_void};
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
    /// Of the C library, a name that nobody else takes.
    fn gnu_get_libc_version() -> *const c_char;
}

/// Finds out where they are. Before the program's own code.
///
/// # Errors
/// When they are not found: then forks would hang.
pub(crate) fn set_up() -> Result<(), String> {
    // SAFETY: the callback takes no data.
    unsafe { libc::dl_iterate_phdr(Some(note), std::ptr::null_mut()) };
    if CODE.iter().any(|[_, bytes]| bytes.load(Ordering::Relaxed) == 0) {
        return Err(
            "cannot tell the C library's own memory from the program's: this C library is not known".into()
        );
    }
    // Such as of tcmalloc, mimalloc, and jemalloc where it is a part of the program.
    if !is_c_library(crate::__libc_malloc as *const () as usize) {
        return Err("this program's allocator takes the names of the C library's own (__libc_malloc), and cannot have far memory; run \
                    the program without that allocator"
            .into());
    }
    Ok(())
}

/// An allocation function of the program's own, in place of the one here.
pub(crate) struct Own {
    name: &'static CStr,
    address: AtomicUsize,
}

/// Not known yet.
const UNKNOWN: usize = 0;
/// It is ours.
const OURS: usize = 1;

impl Own {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicUsize::new(UNKNOWN) }
    }

    /// Its address; `None` where it is ours.
    pub(crate) fn get(&self) -> Option<usize> {
        let mut address = self.address.load(Ordering::Relaxed);
        if address == UNKNOWN {
            address = find(self.name);
            // The name may lead there from here, too: what counts is where it leads to.
            if is_ours(address) {
                address = OURS;
            }
            self.address.store(address, Ordering::Relaxed);
        }
        (address != OURS).then_some(address)
    }
}

/// Whether this is code of this library.
pub(crate) fn is_ours(code: usize) -> bool {
    code != 0 && library_of(code) == library_of(note as *const () as usize)
}

/// What the program's calls of this name reach; 0: nothing.
fn find(name: &CStr) -> usize {
    let _internal = Internal::enter();
    // SAFETY: the name is a C string.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) as usize }
}

/// Whether a sanitizer looks after the program's memory: by system calls of its own, and at addresses of its choice.
pub(crate) fn is_sanitized() -> bool {
    find(c"__sanitizer_set_death_callback") != 0
}

/// Where the library with this code begins.
fn library_of(code: usize) -> usize {
    // SAFETY: all zeros are a valid Dl_info, and dladdr fills it in when it knows the code.
    unsafe {
        let mut found = std::mem::zeroed::<libc::Dl_info>();
        libc::dladdr(code as *const c_void, &mut found);
        found.dli_fbase as usize
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
    let known = [gnu_get_libc_version as *const () as usize, __tls_get_addr as *const () as usize];
    for (code, _) in CODE.iter().zip(known).filter(|&(_, address)| address.wrapping_sub(base) < end) {
        code[0].store(base, Ordering::Relaxed);
        code[1].store(end, Ordering::Relaxed);
    }
    0
}
