//! Functions of the C library that the program looks up by a handle: `dlsym(dlopen("libc.so.6"), "free")`, as ctypes, JNA and other bridges from
//! interpreted languages do. The linker would give them the C library's own, which know nothing of far memory.

use crate::callers;
use std::arch::naked_asm;
use std::ffi::{CStr, c_char, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicPtr, Ordering};

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// Versions that the dynamic linker's functions have had.
#[cfg(target_arch = "x86_64")]
const VERSIONS: [&CStr; 2] = [c"GLIBC_2.34", c"GLIBC_2.2.5"];
#[cfg(target_arch = "aarch64")]
const VERSIONS: [&CStr; 2] = [c"GLIBC_2.34", c"GLIBC_2.17"];

static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// The dynamic linker's own. The handles `RTLD_DEFAULT` and `RTLD_NEXT` mean what they mean for whoever calls it.
extern "C" fn real() -> *mut c_void {
    let known = DLSYM.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    for version in VERSIONS {
        // SAFETY: the names are C strings.
        let found = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
        if !found.is_null() {
            DLSYM.store(found, Ordering::Relaxed);
            return found;
        }
    }
    netvm_sys::thread::die("cannot find the dynamic linker's dlsym: this C library is not known")
}

/// A function of the C library that this library has, too, is this library's.
fn ours(name: *const c_char, found: *mut c_void) -> *mut c_void {
    if found.is_null() || !callers::is_c_library(found as usize) {
        return found;
    }
    // SAFETY: of the type that dlsym(3) has; `name` is the caller's, and was just found.
    let [first, next] = [libc::RTLD_DEFAULT, libc::RTLD_NEXT]
        .map(|handle| unsafe { transmute::<*mut c_void, Dlsym>(real())(handle, name) });
    // With another library behind this one that has it, too, it would be called by us, and call us.
    if next == found && callers::is_ours(first as usize) { first } else { found }
}

/// dlsym(3) with a handle that is one.
unsafe extern "C" fn by_handle(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: of the type that dlsym(3) has, with the caller's arguments.
    let found = unsafe { transmute::<*mut c_void, Dlsym>(real())(handle, name) };
    ours(name, found)
}

/// dlsym(3).
///
/// # Safety
/// As in the manual.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // The dynamic linker looks who calls it, for RTLD_DEFAULT (0) and RTLD_NEXT (-1): these are passed on as they came.
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {real}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "lea rcx, [rdi + 1]",
        "cmp rcx, 1",
        "ja {by_handle}",
        "jmp rax",
        real = sym real,
        by_handle = sym by_handle,
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        "stp x29, x30, [sp, #-32]!",
        "stp x0, x1, [sp, #16]",
        "bl {real}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "add x17, x0, #1",
        "cmp x17, #1",
        // A conditional branch does not reach as far.
        "b.ls 2f",
        "b {by_handle}",
        "2:",
        "br x16",
        real = sym real,
        by_handle = sym by_handle,
    );
}
