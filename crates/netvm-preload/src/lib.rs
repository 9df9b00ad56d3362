//! The library that `netvm run` preloads into an unmodified program: its memory becomes far memory.
//!
//! It owns the C library's allocation and mapping functions. Small allocations stay in the C library's heap until that has grown to
//! a limit; everything else is placed in the far area of a [`netvm::pager::Pager`], which is started by the first allocation that
//! needs it. See docs/design/preload.md for what goes where.
//!
//! Everything this library keeps for itself is local memory: the global allocator below is the C library's own, called by
//! the names that nobody interposes.
#![warn(missing_docs)]

mod backend;
mod callers;
mod direct;
mod fork;
mod given;
mod heap;
mod kept;
mod last;
mod lookup;
mod malloc;
mod maps;
mod privileges;
mod range;
mod real;
mod refuse;
mod rings;
mod run;
mod small;
mod space;
mod spawn;
mod sys;
mod syscall;
mod tls;

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::c_void;

unsafe extern "C" {
    pub(crate) fn __libc_malloc(bytes: usize) -> *mut c_void;
    pub(crate) fn __libc_calloc(count: usize, bytes: usize) -> *mut c_void;
    pub(crate) fn __libc_realloc(address: *mut c_void, bytes: usize) -> *mut c_void;
    pub(crate) fn __libc_memalign(alignment: usize, bytes: usize) -> *mut c_void;
    pub(crate) fn __libc_free(address: *mut c_void);
}

/// The C library's heap, whoever owns the symbol `malloc`.
struct LocalHeap;

/// What the C library's malloc aligns to.
const LOCAL_ALIGNMENT: usize = 16;

// SAFETY: forwards to the C library's allocator, which fulfils the contract of GlobalAlloc; alignments above its own go to
// memalign, whose blocks realloc does not keep aligned and which are therefore moved by hand.
unsafe impl GlobalAlloc for LocalHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: plain calls with a valid size and power-of-two alignment (Layout's invariant).
        unsafe {
            if layout.align() <= LOCAL_ALIGNMENT {
                __libc_malloc(layout.size()).cast()
            } else {
                __libc_memalign(layout.align(), layout.size()).cast()
            }
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`; the block is written only where it was just allocated.
        unsafe {
            if layout.align() <= LOCAL_ALIGNMENT {
                return __libc_calloc(1, layout.size()).cast();
            }
            let block = self.alloc(layout);
            if !block.is_null() {
                block.write_bytes(0, layout.size());
            }
            block
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, _: Layout) {
        // SAFETY: `block` came from this allocator (the caller's contract).
        unsafe { __libc_free(block.cast()) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: `block` came from this allocator with `layout` (the caller's contract), so both sizes are in bounds of the copy.
        unsafe {
            if layout.align() <= LOCAL_ALIGNMENT {
                return __libc_realloc(block.cast(), bytes).cast();
            }
            let moved: *mut u8 = __libc_memalign(layout.align(), bytes).cast();
            if !moved.is_null() {
                moved.copy_from_nonoverlapping(block, layout.size().min(bytes));
                __libc_free(block.cast());
            }
            moved
        }
    }
}

#[global_allocator]
static LOCAL_HEAP: LocalHeap = LocalHeap;
