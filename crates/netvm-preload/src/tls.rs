//! This library's few words of thread-local memory.
//!
//! Rust's own thread-locals in a shared library are found through `__tls_get_addr`, which may call malloc: from inside malloc
//! that would never end. These words are of the initial-exec kind, which costs two instructions and never allocates; a
//! preloaded library is there from the start, so the kind is always possible.

use crate::small::Cache;
use std::cell::Cell;

/// What each thread has. All zero at first.
#[repr(C, align(64))]
pub(crate) struct Words {
    /// Above 0: this thread works for the library; its calls go straight to the C library.
    pub(crate) internal: Cell<u32>,
    /// Bytes of the C library's heap taken (or, below 0, given back) by this thread and not in the shared count yet.
    pub(crate) local_bytes: Cell<i64>,
    /// What is not in it will be told when this thread ends.
    pub(crate) counts: Cell<bool>,
    /// Free small blocks kept by this thread; null before the first and after the last.
    pub(crate) cache: Cell<*mut Cache>,
}

const _: () = assert!(size_of::<Words>() == 64);

#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".section .tbss.netvm_preload_words,\"awT\",@nobits",
    ".globl netvm_preload_words",
    ".hidden netvm_preload_words",
    ".type netvm_preload_words,@object",
    ".size netvm_preload_words,64",
    ".balign 64",
    "netvm_preload_words:",
    ".zero 64",
    ".text",
);

#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(
    ".section .tbss.netvm_preload_words,\"awT\",%nobits",
    ".globl netvm_preload_words",
    ".hidden netvm_preload_words",
    ".type netvm_preload_words,%object",
    ".size netvm_preload_words,64",
    ".balign 64",
    "netvm_preload_words:",
    ".zero 64",
    ".text",
);

/// The calling thread's words. Not `'static`: they end with the thread, so do not keep the reference.
#[inline(always)]
pub(crate) fn words<'a>() -> &'a Words {
    let address: *const Words;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the initial-exec sequence of the x86-64 psABI; it reads the thread pointer and one GOT entry.
    unsafe {
        std::arch::asm!(
            "mov {0}, qword ptr fs:[0]",
            "add {0}, qword ptr [rip + netvm_preload_words@GOTTPOFF]",
            out(reg) address,
            options(pure, readonly, nostack)
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the initial-exec sequence of the AArch64 ABI; it reads the thread pointer and one GOT entry.
    unsafe {
        std::arch::asm!(
            "mrs {0}, tpidr_el0",
            "adrp {1}, :gottprel:netvm_preload_words",
            "ldr {1}, [{1}, :gottprel_lo12:netvm_preload_words]",
            "add {0}, {0}, {1}",
            out(reg) address,
            out(reg) _,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    // SAFETY: the words of this thread live as long as it does, are zero-initialised (valid for every field), and only this
    // thread has their address, through `Cell`s.
    unsafe { &*address }
}

/// While it lives, this thread's calls go straight to the C library.
pub(crate) struct Internal(());

impl Internal {
    pub(crate) fn enter() -> Self {
        let internal = &words().internal;
        internal.set(internal.get() + 1);
        Self(())
    }
}

impl Drop for Internal {
    fn drop(&mut self) {
        let internal = &words().internal;
        internal.set(internal.get() - 1);
    }
}
