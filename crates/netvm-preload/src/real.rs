//! The C library's functions behind those of the same name here.

use crate::tls::Internal;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function of the C library behind the one of the same name here.
pub(crate) struct Real {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Real {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Null where the C library is older than the function.
    pub(crate) fn find(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        let _internal = Internal::enter();
        // SAFETY: the name is a C string; dlsym returns null or the next definition of the symbol.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Ordering::Relaxed);
        found
    }

    pub(crate) fn address(&self) -> *mut c_void {
        let found = self.find();
        if found.is_null() {
            crate::sys::give_up(&format!("the C library has no {}", self.name.to_string_lossy()));
        }
        found
    }
}

/// Defines functions of the C library by name, and what finds all of them.
macro_rules! reals {
    ($($name:ident = $symbol:literal),* $(,)?) => {
        $(pub(super) static $name: Real = Real::new($symbol);)*

        /// Finds all of them: a child of vfork(2) must not look for them itself.
        pub(crate) fn set_up() {
            $($name.find();)*
        }
    };
}
pub(crate) use reals;

/// Defines a function of the C library that does something first and afterwards.
macro_rules! around {
    ($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) -> $result:ty, $guard:expr) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            let _guard = $guard;
            // SAFETY: this is the C library's function of that name, whose type POSIX and the manual give.
            let real: unsafe extern "C" fn($($type),*) -> $result = unsafe { std::mem::transmute(real::$name.address()) };
            // SAFETY: forwarded from the caller.
            unsafe { real($($argument),*) }
        }
    };
}
pub(crate) use around;

/// Defines a function of the C library that goes on where `$before` says, with all of its arguments, however many: this library's, or the C library's,
/// whose frame it becomes. So it may be a cancellation point.
macro_rules! jumps {
    ($($(#[$doc:meta])* $name:ident = $before:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() {
            #[cfg(target_arch = "x86_64")]
            std::arch::naked_asm!(
                "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                "call {}",
                "mov r11, rax",
                "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "jmp r11",
                sym $before
            );
            #[cfg(target_arch = "aarch64")]
            std::arch::naked_asm!(
                "stp x29, x30, [sp, #-80]!",
                "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]", "stp x4, x5, [sp, #48]", "stp x6, x7, [sp, #64]",
                "bl {}",
                "mov x16, x0",
                "ldp x0, x1, [sp, #16]", "ldp x2, x3, [sp, #32]", "ldp x4, x5, [sp, #48]", "ldp x6, x7, [sp, #64]",
                "ldp x29, x30, [sp], #80",
                "br x16",
                sym $before
            );
        }
    )*};
}
pub(crate) use jumps;
