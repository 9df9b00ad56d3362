//! Memory that can be exported.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use netvm::node::{Mapping, Node};

use crate::call::call;
use crate::code::{Failure, Result};
use crate::ffi::{Opaque, Out, OutHandle, Own, Ref};

/// Memory of the library's.
pub struct Memory(Arc<Mapping>);

impl Memory {
    pub(crate) fn mapping(&self) -> Arc<Mapping> {
        Arc::clone(&self.0)
    }
}

impl Opaque for Memory {
    const TAG: u32 = 0x6E76_4D03;
    const NAME: &'static str = "memory";
}

/// Zero memory.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_memory_alloc(bytes: usize, memory: OutHandle<Memory>) -> c_int {
    call(|| {
        memory.fill(|| {
            if bytes == 0 || bytes > isize::MAX as usize {
                return Err(Failure::argument(format!("memory cannot have {bytes} bytes")));
            }
            Ok(Memory(Node::memory(bytes)?))
        })
    })
}

/// Where it is, and how much.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_memory_query(
    memory: Ref<Memory>,
    address: Out<*mut c_void>,
    bytes: Out<usize>,
) -> c_int {
    call(|| query(&memory, &address, &bytes))
}

fn query(memory: &Ref<Memory>, address: &Out<*mut c_void>, bytes: &Out<usize>) -> Result<()> {
    let shared = memory.get()?.0.shared();
    address.set_if_wanted(shared.as_ptr().cast())?;
    bytes.set_if_wanted(shared.len())
}

/// Gives it up.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_memory_free(memory: Own<Memory>) -> c_int {
    call(|| memory.take().map(drop))
}
