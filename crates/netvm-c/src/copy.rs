//! Copies from one peer to another.

use std::ffi::c_int;

use netvm::copy::{Copied, Copies};
use netvm::node::Node;

use crate::call::call;
use crate::ffi::{Out, Ref};
use crate::lasting::RegionHandle;
use crate::node::named;

/// How bytes were copied, with their numbers in C.
pub(crate) const WAYS: [(&str, c_int, Copied); 4] = [
    ("NETVM_COPIED_LOCALLY", 1, Copied::Locally),
    ("NETVM_COPIED_PUSHED", 2, Copied::Pushed),
    ("NETVM_COPIED_PULLED", 3, Copied::Pulled),
    ("NETVM_COPIED_THROUGH", 4, Copied::Through),
];

pub(crate) const COPIES: [(&str, c_int, Copies); 3] = [
    ("NETVM_COPIES_NEVER", 0, Copies::Never),
    ("NETVM_COPIES_KNOWN", 1, Copies::Known),
    ("NETVM_COPIES_ANYWHERE", 2, Copies::Anywhere),
];

/// Copies.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_copy(
    from: Ref<RegionHandle>,
    offset: u64,
    to: Ref<RegionHandle>,
    to_offset: u64,
    bytes: u64,
    way: Out<c_int>,
) -> c_int {
    call(|| {
        let copied = from.get()?.now()?.copy_to(offset, &*to.get()?.now()?, to_offset, bytes)?;
        let number = WAYS.iter().find(|(_, _, way)| *way == copied).map_or(0, |(_, number, _)| *number);
        way.set_if_wanted(number)
    })
}

/// Copies through this process.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_copy_through(
    from: Ref<RegionHandle>,
    offset: u64,
    to: Ref<RegionHandle>,
    to_offset: u64,
    bytes: u64,
) -> c_int {
    call(|| Ok(from.get()?.now()?.copy_through(offset, &*to.get()?.now()?, to_offset, bytes)?))
}

/// Whom the node connects to for others' copies.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_node_allow_copies(node: Ref<Node>, copies: c_int) -> c_int {
    call(|| {
        node.get()?.allow_copies(named(&COPIES, copies, "set of nodes to copy to")?);
        Ok(())
    })
}
