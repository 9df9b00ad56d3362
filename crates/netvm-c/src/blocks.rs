//! Blocks of far memory, as malloc's.

use std::ffi::{c_int, c_void};

use crate::call::call;
use crate::code::Result;
use crate::ffi::{Address, Out, Ref};
use crate::pager::PagerHandle;

/// Where C finds a block.
fn pointer(pager: &PagerHandle, address: usize) -> Result<*mut c_void> {
    Ok(pager.0.memory(address, 1)?.as_ptr().cast())
}

/// A block.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_far_alloc(
    pager: Ref<PagerHandle>,
    bytes: usize,
    alignment: usize,
    block: Out<*mut c_void>,
) -> c_int {
    call(|| {
        block.set(std::ptr::null_mut())?;
        let pager = pager.get()?;
        block.set(pointer(pager, pager.1.allocate(bytes, alignment.max(1))?)?)
    })
}

/// The same with another length.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_far_realloc(
    pager: Ref<PagerHandle>,
    block: Address,
    bytes: usize,
    resized: Out<*mut c_void>,
) -> c_int {
    call(|| {
        // It may be where C has the old one, which stays if this fails.
        resized.check()?;
        let pager = pager.get()?;
        let address = match block.pointer() as usize {
            0 => pager.1.allocate(bytes, 1)?,
            address => pager.1.resize(address, bytes)?,
        };
        resized.set(pointer(pager, address)?)
    })
}

/// How much of it may be used.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_far_usable(pager: Ref<PagerHandle>, block: Address, bytes: Out<usize>) -> c_int {
    call(|| {
        bytes.check()?;
        bytes.set(pager.get()?.1.usable(block.pointer() as usize)?)
    })
}

/// Gives it back.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_far_free(pager: Ref<PagerHandle>, block: Address) -> c_int {
    call(|| match (pager.get()?, block.pointer() as usize) {
        (_, 0) => Ok(()),
        (pager, address) => Ok(pager.1.free(address)?),
    })
}
