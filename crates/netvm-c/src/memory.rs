//! Memory that can be exported, and where it is.

use std::ffi::{c_char, c_int, c_void};

use netvm::memory::{HugePages, Memory};
use netvm::node::{Location, Node, Rights};
use netvm_core::limits::NAME_BYTES_MAX;

use crate::call::call;
use crate::code::{Failure, Result};
use crate::ffi::{Address, Descriptor, Opaque, Out, OutArray, OutHandle, Own, Ref, Target, cut};
use crate::lasting::{PeerHandle, RegionHandle};
use crate::node::{RIGHTS, named};

impl Opaque for Memory {
    const TAG: u32 = 0x6E76_4D03;
    const NAME: &'static str = "memory";
}

pub(crate) const HUGE: u32 = 1;
pub(crate) const HUGE_ONLY: u32 = 2;
pub(crate) const PRIVATE: u32 = 4;

/// Zero memory.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_memory_alloc(bytes: usize, flags: u32, memory: OutHandle<Memory>) -> c_int {
    call(|| {
        memory.fill(|| {
            if bytes == 0 || bytes > isize::MAX as usize {
                return Err(Failure::argument(format!("memory cannot have {bytes} bytes")));
            }
            Ok(match flags {
                0 => Memory::new(bytes)?,
                HUGE => Memory::huge(bytes, HugePages::Preferred)?,
                HUGE_ONLY => Memory::huge(bytes, HugePages::Required)?,
                PRIVATE => Node::private_memory(bytes)?.into(),
                other => {
                    return Err(Failure::argument(format!("{other:#x} is no flag of memory, or several")));
                }
            })
        })
    })
}

/// The program's own memory.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_memory_register(
    address: Target,
    bytes: usize,
    rights: c_int,
    memory: OutHandle<Memory>,
) -> c_int {
    call(|| {
        memory.fill(|| {
            let rights = named(&RIGHTS, rights, "combination of rights")?;
            if bytes == 0 {
                return Err(Failure::argument("memory cannot have 0 bytes"));
            }
            Ok(address.registered(bytes, rights == Rights::ReadWrite)?.into())
        })
    })
}

/// A file's bytes.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_memory_file(
    descriptor: Descriptor,
    rights: c_int,
    memory: OutHandle<Memory>,
) -> c_int {
    call(|| {
        memory.fill(|| {
            let rights = named(&RIGHTS, rights, "combination of rights")?;
            Ok(Memory::file(&descriptor.file()?, rights)?)
        })
    })
}

/// A part of memory.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_memory_range(
    memory: Ref<Memory>,
    offset: usize,
    bytes: usize,
    range: OutHandle<Memory>,
) -> c_int {
    call(|| range.fill(|| Ok(memory.get()?.range(offset, bytes)?)))
}

/// Where it is, and how much.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_memory_query(
    memory: Ref<Memory>,
    address: Out<*mut c_void>,
    bytes: Out<usize>,
) -> c_int {
    call(|| {
        let shared = memory.get()?.shared();
        address.set_if_wanted(shared.as_ptr().cast())?;
        bytes.set_if_wanted(shared.len())
    })
}

/// Gives it up.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_memory_free(memory: Own<Memory>) -> c_int {
    call(|| memory.take().map(drop))
}

/// `netvm_location`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Place {
    pub(crate) offset: u64,
    pub(crate) name: [c_char; NAME_BYTES_MAX + 1],
}

impl From<&Location> for Place {
    fn from(location: &Location) -> Self {
        Self { offset: location.offset, name: cut(&location.name) }
    }
}

fn tell(found: &[Location], places: &OutArray<Place>, room: usize, count: &Out<usize>) -> Result<()> {
    for (index, location) in found.iter().take(room).enumerate() {
        places.set(index, room, location.into())?;
    }
    count.set(found.len())
}

/// Which exports an address is in.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_node_find(
    node: Ref<Node>,
    address: Address,
    places: OutArray<Place>,
    room: usize,
    count: Out<usize>,
) -> c_int {
    call(|| {
        places.check(room)?;
        count.check()?;
        tell(&node.get()?.find(address.pointer()), &places, room, &count)
    })
}

/// Which of a peer's segments that we have open an address of its process is in.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_peer_find(
    peer: Ref<PeerHandle>,
    address: u64,
    places: OutArray<Place>,
    room: usize,
    count: Out<usize>,
) -> c_int {
    call(|| {
        places.check(room)?;
        count.check()?;
        tell(&peer.get()?.now()?.find(address)?, &places, room, &count)
    })
}

/// Where a byte is in the peer's process.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_region_address(region: Ref<RegionHandle>, offset: u64, address: Out<u64>) -> c_int {
    call(|| {
        address.check()?;
        address.set(region.get()?.now()?.remote_address(offset)?)
    })
}
