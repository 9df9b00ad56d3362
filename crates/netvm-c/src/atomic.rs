//! Atomics on a peer's words.

use std::ffi::c_int;

use crate::call::call;
use crate::code::Result;
use crate::ffi::{Out, Ref};
use crate::lasting::RegionHandle;

/// What the word was before; C may not want to know.
fn old<W: Copy>(place: &Out<W>, run: impl FnOnce() -> netvm::Result<W>) -> Result<()> {
    let word = run()?;
    place.set_if_wanted(word)
}

macro_rules! atomics {
    ($word:ty, $load:ident, $store:ident, $swap:ident, $compare_swap:ident, $add:ident, $and:ident, $or:ident, $xor:ident) => {
        /// Reads a word whole.
        #[unsafe(no_mangle)]
        pub extern "C" fn $load(region: Ref<RegionHandle>, offset: u64, value: Out<$word>) -> c_int {
            call(|| {
                value.check()?;
                value.set(region.get()?.now()?.atomic_load(offset)?)
            })
        }

        /// Writes a word whole.
        #[unsafe(no_mangle)]
        pub extern "C" fn $store(region: Ref<RegionHandle>, offset: u64, value: $word) -> c_int {
            call(|| Ok(region.get()?.now()?.atomic_store(offset, value)?))
        }

        /// Compares and exchanges.
        #[unsafe(no_mangle)]
        pub extern "C" fn $compare_swap(
            region: Ref<RegionHandle>,
            offset: u64,
            expected: $word,
            desired: $word,
            was: Out<$word>,
        ) -> c_int {
            call(|| {
                was.check()?;
                was.set(region.get()?.now()?.compare_swap(offset, expected, desired)?)
            })
        }

        atomics!($word, swap, $swap);
        atomics!($word, fetch_add, $add);
        atomics!($word, fetch_and, $and);
        atomics!($word, fetch_or, $or);
        atomics!($word, fetch_xor, $xor);
    };
    ($word:ty, $method:ident, $name:ident) => {
        /// See `netvm::atomic`.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(
            region: Ref<RegionHandle>,
            offset: u64,
            operand: $word,
            was: Out<$word>,
        ) -> c_int {
            call(|| {
                let region = region.get()?.now()?;
                old(&was, || region.$method(offset, operand))
            })
        }
    };
}

atomics!(
    u32,
    netvm_atomic_load_u32,
    netvm_atomic_store_u32,
    netvm_atomic_swap_u32,
    netvm_atomic_compare_swap_u32,
    netvm_atomic_fetch_add_u32,
    netvm_atomic_fetch_and_u32,
    netvm_atomic_fetch_or_u32,
    netvm_atomic_fetch_xor_u32
);
atomics!(
    u64,
    netvm_atomic_load_u64,
    netvm_atomic_store_u64,
    netvm_atomic_swap_u64,
    netvm_atomic_compare_swap_u64,
    netvm_atomic_fetch_add_u64,
    netvm_atomic_fetch_and_u64,
    netvm_atomic_fetch_or_u64,
    netvm_atomic_fetch_xor_u64
);
