//! Access to memory that may stop existing: a mapped file that somebody truncates.
//!
//! The kernel raises SIGBUS for a page beyond the end of its file. The functions here are a few instructions in a known place: a handler
//! for SIGBUS ([`install`]) continues a fault in them at an exit that tells of it, and passes every other one on to whoever
//! handled it before. A program that sets its own handler for SIGBUS later must pass on what it does not know.

use crate::before::Before;
use std::io;
use std::sync::Once;

#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".pushsection .text.netvm_guarded,\"ax\",@progbits",
    ".globl netvm_guarded_start",
    ".hidden netvm_guarded_start",
    ".globl netvm_guarded_copy",
    ".hidden netvm_guarded_copy",
    ".globl netvm_guarded_load",
    ".hidden netvm_guarded_load",
    ".globl netvm_guarded_exchange4",
    ".hidden netvm_guarded_exchange4",
    ".globl netvm_guarded_exchange8",
    ".hidden netvm_guarded_exchange8",
    ".globl netvm_guarded_end",
    ".hidden netvm_guarded_end",
    "netvm_guarded_start:",
    // rdi to, rsi from, rdx bytes; the stack is not used, so that the exit can return.
    "netvm_guarded_copy:",
    "2: cmp rdx, 32",
    "   jb 3f",
    "   movups xmm0, [rsi]",
    "   movups xmm1, [rsi + 16]",
    "   movups [rdi], xmm0",
    "   movups [rdi + 16], xmm1",
    "   add rsi, 32",
    "   add rdi, 32",
    "   sub rdx, 32",
    "   jmp 2b",
    "3: cmp rdx, 8",
    "   jb 4f",
    "   mov rax, [rsi]",
    "   mov [rdi], rax",
    "   add rsi, 8",
    "   add rdi, 8",
    "   sub rdx, 8",
    "   jmp 3b",
    "4: test rdx, rdx",
    "   jz 5f",
    "   mov al, [rsi]",
    "   mov [rdi], al",
    "   inc rsi",
    "   inc rdi",
    "   dec rdx",
    "   jmp 4b",
    "5: xor eax, eax",
    "   ret",
    // rdi word of 8 bytes, rsi where its value goes
    "netvm_guarded_load:",
    "   mov rax, [rdi]",
    "   mov [rsi], rax",
    "   xor eax, eax",
    "   ret",
    // rdi word, rsi expected, rdx new, rcx where its old value goes
    "netvm_guarded_exchange4:",
    "   mov eax, esi",
    "   lock cmpxchg dword ptr [rdi], edx",
    "   mov eax, eax",
    "   mov [rcx], rax",
    "   xor eax, eax",
    "   ret",
    "netvm_guarded_exchange8:",
    "   mov rax, rsi",
    "   lock cmpxchg qword ptr [rdi], rdx",
    "   mov [rcx], rax",
    "   xor eax, eax",
    "   ret",
    // The exit.
    "netvm_guarded_end:",
    "   mov eax, 1",
    "   ret",
    ".popsection",
);

#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(
    ".pushsection .text.netvm_guarded,\"ax\",%progbits",
    ".globl netvm_guarded_start",
    ".hidden netvm_guarded_start",
    ".globl netvm_guarded_copy",
    ".hidden netvm_guarded_copy",
    ".globl netvm_guarded_load",
    ".hidden netvm_guarded_load",
    ".globl netvm_guarded_exchange4",
    ".hidden netvm_guarded_exchange4",
    ".globl netvm_guarded_exchange8",
    ".hidden netvm_guarded_exchange8",
    ".globl netvm_guarded_end",
    ".hidden netvm_guarded_end",
    "netvm_guarded_start:",
    "netvm_guarded_copy:",
    "2: cmp x2, #16",
    "   b.lo 3f",
    "   ldp x3, x4, [x1], #16",
    "   stp x3, x4, [x0], #16",
    "   sub x2, x2, #16",
    "   b 2b",
    "3: cbz x2, 4f",
    "   ldrb w3, [x1], #1",
    "   strb w3, [x0], #1",
    "   sub x2, x2, #1",
    "   b 3b",
    "4: mov x0, #0",
    "   ret",
    "netvm_guarded_load:",
    "   ldar x2, [x0]",
    "   str x2, [x1]",
    "   mov x0, #0",
    "   ret",
    "netvm_guarded_exchange4:",
    "2: ldaxr w4, [x0]",
    "   cmp w4, w1",
    "   b.ne 3f",
    "   stlxr w5, w2, [x0]",
    "   cbnz w5, 2b",
    "3: str x4, [x3]",
    "   mov x0, #0",
    "   ret",
    "netvm_guarded_exchange8:",
    "2: ldaxr x4, [x0]",
    "   cmp x4, x1",
    "   b.ne 3f",
    "   stlxr w5, x2, [x0]",
    "   cbnz w5, 2b",
    "3: str x4, [x3]",
    "   mov x0, #0",
    "   ret",
    "netvm_guarded_end:",
    "   clrex",
    "   mov x0, #1",
    "   ret",
    ".popsection",
);

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod native {
    unsafe extern "C" {
        pub(super) fn netvm_guarded_start();
        pub(super) fn netvm_guarded_end();
        pub(super) fn netvm_guarded_copy(to: *mut u8, from: *const u8, bytes: usize) -> u32;
        pub(super) fn netvm_guarded_load(word: *const u64, value: *mut u64) -> u32;
        pub(super) fn netvm_guarded_exchange4(word: *mut u32, expected: u32, new: u32, old: *mut u64) -> u32;
        pub(super) fn netvm_guarded_exchange8(word: *mut u64, expected: u64, new: u64, old: *mut u64) -> u32;
    }
}

/// Elsewhere files cannot be mapped ([`install`] says so), and nothing is guarded.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod native {
    pub(super) unsafe fn netvm_guarded_copy(_: *mut u8, _: *const u8, _: usize) -> u32 {
        1
    }
    pub(super) unsafe fn netvm_guarded_load(_: *const u64, _: *mut u64) -> u32 {
        1
    }
    pub(super) unsafe fn netvm_guarded_exchange4(_: *mut u32, _: u32, _: u32, _: *mut u64) -> u32 {
        1
    }
    pub(super) unsafe fn netvm_guarded_exchange8(_: *mut u64, _: u64, _: u64, _: *mut u64) -> u32 {
        1
    }
}

static BEFORE: Before = Before::new();

/// Sees to it that faults in this module's functions are told and do not end the process.
///
/// # Errors
/// Unsupported on processors other than x86-64 and 64-bit ARM.
pub fn install() -> io::Result<()> {
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return Err(io::ErrorKind::Unsupported.into());
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    {
        static INSTALLED: Once = Once::new();
        // It fails for no reason that there could be.
        INSTALLED.call_once(|| {
            // SAFETY: `on_sigbus` touches nothing but its arguments and an atomic, and is never unloaded before the process ends.
            let _ = unsafe { BEFORE.take(libc::SIGBUS, on_sigbus, libc::SA_ONSTACK, false) };
        });
        Ok(())
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
extern "C" fn on_sigbus(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid ucontext_t to a handler with SA_SIGINFO.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    #[cfg(target_arch = "x86_64")]
    let at = &mut context.uc_mcontext.gregs[libc::REG_RIP as usize];
    #[cfg(target_arch = "aarch64")]
    let at = &mut context.uc_mcontext.pc;
    let (start, end) =
        (native::netvm_guarded_start as *const () as usize, native::netvm_guarded_end as *const () as usize);
    if (start..end).contains(&(*at as usize)) {
        *at = end as _;
        return;
    }
    // SAFETY: the kernel's arguments.
    unsafe { BEFORE.pass_on(signal, info, std::ptr::from_mut(context).cast()) };
}

/// Copies `bytes` bytes between ranges that do not overlap; `None` when memory of one of them has gone: some may have been copied.
///
/// # Safety
/// Both ranges are mapped, `to` writable; what may be gone are the pages of a file behind them, if [`install`] was called.
pub(crate) unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) -> Option<()> {
    // SAFETY: forwarded from the caller.
    let failed = unsafe { native::netvm_guarded_copy(to, from, bytes) };
    (failed == 0).then_some(())
}

/// Reads a word of 8 bytes whole.
///
/// # Safety
/// As [`copy`]; the word is aligned.
pub(crate) unsafe fn load(word: *const u64) -> Option<u64> {
    let mut value = 0;
    // SAFETY: forwarded from the caller; `value` is ours.
    let failed = unsafe { native::netvm_guarded_load(word, &mut value) };
    (failed == 0).then_some(value)
}

/// Compares and swaps a word in one step; returns what it was.
///
/// # Safety
/// As [`copy`]; the word is aligned.
pub(crate) unsafe fn exchange4(word: *mut u32, expected: u32, new: u32) -> Option<u32> {
    let mut old = 0;
    // SAFETY: forwarded from the caller; `old` is ours.
    let failed = unsafe { native::netvm_guarded_exchange4(word, expected, new, &mut old) };
    (failed == 0).then_some(old as u32)
}

/// As [`exchange4`], of 8 bytes.
///
/// # Safety
/// As [`exchange4`].
pub(crate) unsafe fn exchange8(word: *mut u64, expected: u64, new: u64) -> Option<u64> {
    let mut old = 0;
    // SAFETY: forwarded from the caller; `old` is ours.
    let failed = unsafe { native::netvm_guarded_exchange8(word, expected, new, &mut old) };
    (failed == 0).then_some(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_any_length_and_alignment() {
        let from: Vec<u8> = (0..200).collect();
        for len in [0, 1, 7, 8, 9, 31, 32, 33, 64, 100] {
            for (to_at, from_at) in [(0, 0), (1, 0), (0, 3), (5, 7)] {
                let mut to = vec![0xEE; 120];
                // SAFETY: both vectors are long enough.
                unsafe { copy(to.as_mut_ptr().add(to_at), from.as_ptr().add(from_at), len) }.unwrap();
                assert_eq!(to[to_at..to_at + len], from[from_at..from_at + len]);
                assert!(to[..to_at].iter().chain(&to[to_at + len..]).all(|&byte| byte == 0xEE));
            }
        }
        let mut word = 5u64;
        // SAFETY: an aligned local.
        unsafe {
            assert_eq!((exchange8(&mut word, 5, u64::MAX), load(&word)), (Some(5), Some(u64::MAX)));
            assert_eq!(exchange8(&mut word, 5, 9), Some(u64::MAX));
            let half = (&raw mut word).cast::<u32>();
            assert_eq!(exchange4(half, u32::MAX, 3), Some(u32::MAX));
        }
        assert_eq!(word, 0xFFFF_FFFF_0000_0003);
    }
}
