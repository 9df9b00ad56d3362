//! The C library's allocation functions. `free`, `realloc` and `malloc_usable_size` go by the address: far or not.

use crate::backend::Far;
use crate::callers::{self, Own};
use crate::heap::{Fresh, HEAP};
use crate::run::{self, FAR_THRESHOLD_BYTES, SMALL_LOCAL_BYTES};
use crate::small;
use crate::sys::{self, PAGE_BYTES};
use crate::tls::{Internal, Words, words};
use crate::{__libc_calloc, __libc_free, __libc_malloc, __libc_memalign, __libc_realloc};
use std::arch::naked_asm;
use std::ffi::{c_char, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

/// Live bytes of the C library's heap, as far as threads have told.
static LOCAL_BYTES: AtomicI64 = AtomicI64::new(0);
/// A thread tells when it has this much to tell.
const TELL_BYTES: i64 = 64 << 10;
/// The caller of functions that the C library does not call for itself.
const PROGRAM: usize = 0;
/// What malloc(3) aligns to.
const ALIGNMENT: usize = 16;

#[inline]
fn count_local(bytes: i64) {
    let words = words();
    if !words.counts.get() {
        count_until_end(words);
    }
    let local = &words.local_bytes;
    let bytes = local.get() + bytes;
    if bytes.abs() < TELL_BYTES {
        local.set(bytes);
    } else {
        local.set(0);
        LOCAL_BYTES.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Key whose destructor tells what a thread has not told when it ends.
static COUNT_KEY: AtomicU32 = AtomicU32::new(0);

/// Before the program starts.
pub(crate) fn set_up_threads() -> Result<(), String> {
    small::set_up_key(&COUNT_KEY, count_ends)
}

#[cold]
fn count_until_end(words: &Words) {
    // First of all: the next call may allocate.
    words.counts.set(true);
    // SAFETY: the key exists (set up before the program started); any value but null has the destructor called. If there is no memory
    // for it, what this thread does not tell is lost.
    unsafe { libc::pthread_setspecific(COUNT_KEY.load(Ordering::Relaxed), std::ptr::dangling()) };
}

extern "C" fn count_ends(_: *mut c_void) {
    let words = words();
    // Destructors that run later may count again.
    words.counts.set(false);
    LOCAL_BYTES.fetch_add(words.local_bytes.replace(0), Ordering::Relaxed);
}

/// Usable bytes of a block of the C library's heap. The name malloc_usable_size is ours, and its own is not exported; the word in front
/// of a block has said this since the beginning: size, bit 1 for a block with a mapping of its own.
#[inline]
fn local_usable(block: *mut c_void) -> usize {
    // SAFETY: `block` is a live block of the C library's heap (not null, not far), which has its header in front.
    let header = unsafe { block.cast::<usize>().sub(1).read() };
    let header_bytes = if header & 2 != 0 { 2 * size_of::<usize>() } else { size_of::<usize>() };
    (header & !7).saturating_sub(header_bytes)
}

#[inline]
fn counted(block: *mut c_void) -> *mut c_void {
    if !block.is_null() {
        count_local(local_usable(block) as i64);
    }
    block
}

/// Whether a new allocation of `bytes` is to be far. Small ones of the C library never are.
#[inline]
fn goes_far(bytes: usize, caller: usize) -> bool {
    bytes >= FAR_THRESHOLD_BYTES.load(Ordering::Relaxed)
        || (LOCAL_BYTES.load(Ordering::Relaxed) >= SMALL_LOCAL_BYTES.load(Ordering::Relaxed) as i64
            && !callers::is_c_library(caller))
}

/// Defines a function of the C library that passes its arguments, and the address that it returns to as the one after them, on to `to`.
macro_rules! with_caller {
    ($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $to:ident, $x86_64:literal, $aarch64:literal) => {
        $(#[$doc])*
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            #[cfg(target_arch = "x86_64")]
            naked_asm!(concat!("mov ", $x86_64, ", qword ptr [rsp]"), "jmp {}", sym $to);
            #[cfg(target_arch = "aarch64")]
            naked_asm!(concat!("mov ", $aarch64, ", x30"), "b {}", sym $to);
        }
    };
}

fn out_of_memory() -> *mut c_void {
    sys::set_errno(libc::ENOMEM);
    null_mut()
}

/// A new far block. `alignment` is a power of two.
fn allocate_far(far: &dyn Far, bytes: usize, alignment: usize, zero: bool) -> *mut c_void {
    if bytes > isize::MAX as usize || alignment > isize::MAX as usize {
        return out_of_memory();
    }
    if alignment <= PAGE_BYTES
        && let Some(class) = small_class(bytes, alignment)
    {
        let block = small::allocate(far, class) as *mut c_void;
        if block.is_null() {
            return out_of_memory();
        }
        if zero {
            // SAFETY: the block was just allocated with at least `bytes`.
            unsafe { block.cast::<u8>().write_bytes(0, bytes) };
        }
        return block;
    }
    let _internal = Internal::enter();
    let Some(fresh) = HEAP.with(|heap| heap.allocate(far, bytes, bytes, alignment)) else {
        return out_of_memory();
    };
    let Fresh { address, zero: is_zero } = fresh;
    if zero && !is_zero {
        // SAFETY: the block was just allocated with at least `bytes`.
        unsafe { (address as *mut u8).write_bytes(0, bytes) };
    }
    address as *mut c_void
}

/// The class for `bytes` at a multiple of `alignment`, if there is one.
fn small_class(bytes: usize, alignment: usize) -> Option<usize> {
    if alignment <= ALIGNMENT {
        return (bytes <= small::BYTES_MAX).then(|| small::class_of(bytes));
    }
    let bytes = sys::round_up(bytes.max(1), alignment).filter(|&bytes| bytes <= small::BYTES_MAX)?;
    (small::class_of(bytes)..=small::class_of(small::BYTES_MAX))
        .find(|&class| small::class_bytes(class).is_multiple_of(alignment))
}

/// Bytes that the program may use of a far block.
fn far_usable(block: usize) -> usize {
    if let Some(class) = small::class_at(block) {
        return small::class_bytes(class);
    }
    let _internal = Internal::enter();
    HEAP.with(|heap| heap.usable(block)).unwrap_or_else(|| corrupt("a pointer", block))
}

fn corrupt(what: &str, block: usize) -> ! {
    let _internal = Internal::enter();
    sys::say(&format!(
        "{what} ({block:#x}) is no allocated block of the far heap; the program's heap is corrupt"
    ));
    std::process::abort()
}

fn free_far(block: usize) {
    if run::is_orphaned() {
        return;
    }
    // A far address exists, so far memory has started.
    let far = run::far();
    match small::class_at(block) {
        Some(class) => small::free(far, class, block),
        None => {
            let _internal = Internal::enter();
            let errno = sys::errno();
            if !HEAP.with(|heap| heap.free(far, block)) {
                corrupt("what free() was given", block);
            }
            sys::set_errno(errno);
        }
    }
}

with_caller! {
    /// malloc(3).
    ///
    /// # Safety
    /// As in C.
    fn malloc(bytes: usize) -> *mut c_void = malloc_for, "rsi", "x1"
}

extern "C" fn malloc_for(bytes: usize, caller: usize) -> *mut c_void {
    if !run::is_routed() {
        // SAFETY: a plain call.
        return unsafe { __libc_malloc(bytes) };
    }
    if goes_far(bytes, caller) {
        return allocate_far(run::far(), bytes, ALIGNMENT, false);
    }
    // SAFETY: a plain call.
    counted(unsafe { __libc_malloc(bytes) })
}

with_caller! {
    /// calloc(3).
    ///
    /// # Safety
    /// As in C.
    fn calloc(count: usize, bytes: usize) -> *mut c_void = calloc_for, "rdx", "x2"
}

extern "C" fn calloc_for(count: usize, bytes: usize, caller: usize) -> *mut c_void {
    if !run::is_routed() {
        // SAFETY: a plain call.
        return unsafe { __libc_calloc(count, bytes) };
    }
    let Some(all) = count.checked_mul(bytes) else { return out_of_memory() };
    if goes_far(all, caller) {
        return allocate_far(run::far(), all, ALIGNMENT, true);
    }
    // SAFETY: a plain call.
    counted(unsafe { __libc_calloc(count, bytes) })
}

/// free(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(block: *mut c_void) {
    if run::is_far(block as usize) {
        return free_far(block as usize);
    }
    if !block.is_null() && run::is_routed() {
        count_local(-(local_usable(block) as i64));
    }
    // SAFETY: not far, so it came from the C library (the caller's contract).
    unsafe { __libc_free(block) }
}

with_caller! {
    /// realloc(3).
    ///
    /// # Safety
    /// As in C.
    fn realloc(block: *mut c_void, bytes: usize) -> *mut c_void = realloc_for, "rdx", "x2"
}

/// # Safety
/// As realloc(3).
unsafe extern "C" fn realloc_for(block: *mut c_void, bytes: usize, caller: usize) -> *mut c_void {
    if block.is_null() {
        return malloc_for(bytes, caller);
    }
    let is_far = run::is_far(block as usize);
    if !is_far && !run::is_routed() {
        // SAFETY: not far, so it came from the C library (the caller's contract).
        return unsafe { __libc_realloc(block, bytes) };
    }
    if bytes == 0 {
        // SAFETY: the caller's contract.
        unsafe { free(block) };
        return null_mut();
    }
    if bytes > isize::MAX as usize {
        return out_of_memory();
    }
    if is_far {
        return realloc_far(block as usize, bytes);
    }
    let usable = local_usable(block);
    if bytes <= usable || !goes_far(bytes, caller) {
        // SAFETY: not far, so it came from the C library.
        let moved = unsafe { __libc_realloc(block, bytes) };
        if !moved.is_null() {
            count_local(local_usable(moved) as i64 - usable as i64);
        }
        return moved;
    }
    let moved = allocate_far(run::far(), bytes, ALIGNMENT, false);
    if !moved.is_null() {
        // SAFETY: two different live blocks of at least that many bytes; the old one is freed after its last use.
        unsafe {
            moved.cast::<u8>().copy_from_nonoverlapping(block.cast(), usable.min(bytes));
            free(block);
        }
    }
    moved
}

fn realloc_far(block: usize, bytes: usize) -> *mut c_void {
    if run::is_orphaned() {
        return out_of_memory();
    }
    let far = run::far();
    let usable = far_usable(block);
    let class = small::class_at(block);
    match class {
        // The same block as long as less than half of it would be wasted.
        Some(_) if bytes <= usable && bytes > usable / 2 => return block as *mut c_void,
        None if bytes > small::BYTES_MAX => {
            let _internal = Internal::enter();
            if let Some(address) = HEAP.with(|heap| heap.resize(far, block, bytes)) {
                return address as *mut c_void;
            }
            // The kernel may have pinned a page of it: copied, then.
        }
        _ => {}
    }
    let moved = allocate_far(far, bytes, ALIGNMENT, false);
    if moved.is_null() {
        return if bytes <= usable { block as *mut c_void } else { moved };
    }
    // SAFETY: two different live blocks of at least that many bytes.
    unsafe { moved.cast::<u8>().copy_from_nonoverlapping(block as *const u8, usable.min(bytes)) };
    free_far(block);
    moved
}

/// strdup(3), whose copies are the program's.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strdup(text: *const c_char) -> *mut c_char {
    // SAFETY: the caller's contract.
    unsafe { copy_of(text, libc::strlen(text)) }
}

/// strndup(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strndup(text: *const c_char, length_max: usize) -> *mut c_char {
    // SAFETY: the caller's contract.
    unsafe { copy_of(text, libc::strnlen(text, length_max)) }
}

/// What the program's calls of malloc and realloc reach.
static OWN_MALLOC: Own = Own::new(c"malloc");
static OWN_REALLOC: Own = Own::new(c"realloc");

/// Whether the program has an allocator of its own: those functions that it lacks are ours, and allocate there, as the C library's do.
pub(crate) fn is_own() -> bool {
    OWN_MALLOC.get().is_some()
}

/// A string of the first `length` bytes of `text`.
///
/// # Safety
/// So many can be read.
unsafe fn copy_of(text: *const c_char, length: usize) -> *mut c_char {
    let copy = match OWN_MALLOC.get() {
        None => malloc_for(length + 1, PROGRAM),
        // SAFETY: the program's function of this name has this type.
        Some(own) => unsafe {
            std::mem::transmute::<usize, unsafe extern "C" fn(usize) -> *mut c_void>(own)(length + 1)
        },
    };
    let copy = copy.cast::<c_char>();
    if !copy.is_null() {
        // SAFETY: a new block of one byte more; the caller's contract.
        unsafe {
            copy.copy_from_nonoverlapping(text, length);
            copy.add(length).write(0);
        }
    }
    copy
}

/// reallocarray(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(block: *mut c_void, count: usize, bytes: usize) -> *mut c_void {
    let Some(all) = count.checked_mul(bytes) else { return out_of_memory() };
    match OWN_REALLOC.get() {
        // SAFETY: the caller's contract.
        None => unsafe { realloc_for(block, all, PROGRAM) },
        // SAFETY: the program's function of this name has this type; the caller's contract.
        Some(own) => unsafe {
            std::mem::transmute::<usize, unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void>(own)(
                block, all,
            )
        },
    }
}

extern "C" fn allocate_aligned(alignment: usize, bytes: usize, caller: usize) -> *mut c_void {
    if run::is_routed() && goes_far(bytes, caller) {
        // memalign(3) rounds odd alignments up.
        return match alignment.max(ALIGNMENT).checked_next_power_of_two() {
            Some(alignment) => allocate_far(run::far(), bytes, alignment, false),
            None => out_of_memory(),
        };
    }
    // SAFETY: a plain call; the C library checks its arguments.
    let block = unsafe { __libc_memalign(alignment, bytes) };
    if run::is_routed() { counted(block) } else { block }
}

with_caller! {
    /// memalign(3).
    ///
    /// # Safety
    /// As in C.
    fn memalign(alignment: usize, bytes: usize) -> *mut c_void = allocate_aligned, "rdx", "x2"
}

with_caller! {
    /// aligned_alloc(3).
    ///
    /// # Safety
    /// As in C.
    fn aligned_alloc(alignment: usize, bytes: usize) -> *mut c_void = allocate_aligned, "rdx", "x2"
}

/// posix_memalign(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, alignment: usize, bytes: usize) -> i32 {
    if !alignment.is_power_of_two() || !alignment.is_multiple_of(size_of::<usize>()) {
        return libc::EINVAL;
    }
    let errno = sys::errno();
    let block = allocate_aligned(alignment, bytes, PROGRAM);
    sys::set_errno(errno);
    if block.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: the caller's contract.
    unsafe { out.write(block) };
    0
}

/// valloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn valloc(bytes: usize) -> *mut c_void {
    allocate_aligned(PAGE_BYTES, bytes, PROGRAM)
}

/// pvalloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn pvalloc(bytes: usize) -> *mut c_void {
    match sys::round_up(bytes, PAGE_BYTES) {
        Some(bytes) => allocate_aligned(PAGE_BYTES, bytes, PROGRAM),
        None => out_of_memory(),
    }
}

/// malloc_usable_size(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(block: *mut c_void) -> usize {
    if block.is_null() {
        0
    } else if run::is_far(block as usize) {
        far_usable(block as usize)
    } else {
        local_usable(block)
    }
}
