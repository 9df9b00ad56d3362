//! Memory that can be exported: allocated here, a file, far memory, or the program's own.
//!
//! ```
//! # fn main() -> netvm::Result<()> {
//! use netvm::memory::Memory;
//! use netvm::node::{Node, Rights};
//!
//! let node = Node::new()?;
//! let memory = Memory::new(1 << 20)?;
//! let whole = node.export("whole", &memory, Rights::Read)?;
//! // The same bytes under another name, with another key and other rights.
//! let head = node.export("head", memory.range(0, 4096)?, Rights::ReadWrite)?;
//! # Ok(()) }
//! ```
//!
//! Nothing is pinned: the operating system may page it out, and peers are served as soon as it is back.

mod residency;

use std::fs::File;
use std::sync::Arc;

use netvm_core::key::Rights;
use netvm_sys::mapping::Mapping;
pub use netvm_sys::mapping::RawRange;
use netvm_sys::memfd::Memfd;
use netvm_sys::residency::{PAGE_BYTES, bring};
use netvm_sys::shared::SharedSlice;

use crate::error::{Error, Result};
use crate::pager::{FarRange, FaultPath, Pager};
use residency::Residency;
pub(crate) use residency::now;
#[doc(hidden)]
pub use residency::switch_checks_off;

/// For so many milliseconds a page that was there counts as there. The kernel pages out what has not been used for seconds; a pager
/// with little room may need a page after milliseconds.
const TRUST_MS: u32 = 20;
const TRUST_FAR_MS: u32 = 4;

/// Whether memory is made of huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// Fail when the system has too few in its pool.
    Required,
    /// Take usual pages then ([`Memory::is_huge`] tells).
    Preferred,
}

/// Memory, or a range of it. Clones are the same memory, which lives as long as one of them.
#[derive(Clone, Debug)]
pub struct Memory {
    owner: Arc<Whole>,
    shared: SharedSlice,
}

#[derive(Debug)]
struct Whole {
    owner: Owner,
    residency: Residency,
}

#[derive(Debug)]
enum Owner {
    Mapping(Arc<Mapping>),
    File { mapping: Mapping, writable: bool },
    Raw(RawRange),
    Far { pager: Arc<Pager>, memory: SharedSlice },
    FarRange(FarRange),
}

impl Memory {
    fn whole(owner: Owner) -> Self {
        let shared = match &owner {
            Owner::Mapping(mapping) => mapping.shared(),
            Owner::File { mapping, .. } => mapping.shared(),
            Owner::Raw(range) => range.shared(),
            Owner::Far { memory, .. } => *memory,
            Owner::FarRange(range) => range.shared(),
        };
        let trust_ms = match &owner {
            Owner::Mapping(mapping) if mapping.is_huge() => 0,
            Owner::Far { .. } | Owner::FarRange(_) => TRUST_FAR_MS,
            _ => TRUST_MS,
        };
        let residency = Residency::new(shared, trust_ms);
        Self { owner: Arc::new(Whole { owner, residency }), shared }
    }

    /// `bytes` of zero memory, rounded up to whole pages. Processes of this host can map it.
    ///
    /// # Errors
    /// [`Error::System`] when there is not so much, or no descriptor is left.
    pub fn new(bytes: usize) -> Result<Self> {
        Mapping::shareable(bytes)
            .map(|mapping| Arc::new(mapping).into())
            .map_err(|error| Error::system("map memory", &error))
    }

    /// As [`Memory::new`], of huge pages: fewer page faults, and never paged out.
    ///
    /// # Errors
    /// [`Error::System`]; ENOMEM for required huge pages when `vm.nr_hugepages` leaves too few, ENODEV where there are none.
    pub fn huge(bytes: usize, huge: HugePages) -> Result<Self> {
        match Mapping::huge(bytes) {
            Ok(mapping) => Ok(Arc::new(mapping).into()),
            Err(_) if huge == HugePages::Preferred => Self::new(bytes),
            Err(error) => Err(Error::system("map huge pages", &error)),
        }
    }

    /// All bytes that `file` has now. What peers write goes to the file, what others write to the file is seen by peers. When it
    /// is truncated, accesses to what is gone fail with [`Status::Fault`](netvm_core::wire::Status::Fault).
    ///
    /// It installs a handler for SIGBUS, which passes on what is not its own. The program may set one before, not afterwards (or passes on
    /// what it does not know).
    ///
    /// # Errors
    /// [`Error::System`] for an empty file, and when it was not opened for what `rights` say.
    pub fn file(file: &File, rights: Rights) -> Result<Self> {
        let writable = rights == Rights::ReadWrite;
        Mapping::of_file(file, writable)
            .map(|mapping| Self::whole(Owner::File { mapping, writable }))
            .map_err(|error| Error::system("map a file", &error))
    }

    /// `bytes` of far memory at `address`, which should be mapped as long as they are exported.
    ///
    /// # Errors
    /// [`PagerError::OutsideFarMemory`](crate::pager::PagerError::OutsideFarMemory).
    pub fn far(pager: &Arc<Pager>, address: usize, bytes: usize) -> Result<Self> {
        let memory = pager.memory(address, bytes)?;
        Ok(Self::whole(Owner::Far { pager: Arc::clone(pager), memory }))
    }

    /// The `len` bytes from `offset` on.
    ///
    /// # Errors
    /// [`Error::Bounds`].
    pub fn range(&self, offset: usize, len: usize) -> Result<Self> {
        let bounds = Error::Bounds { offset: offset as u64, bytes: len as u64, len: self.len() as u64 };
        let shared = self.shared.sub(offset, len).ok_or(bounds)?;
        Ok(Self { owner: Arc::clone(&self.owner), shared })
    }

    /// Its bytes.
    pub fn shared(&self) -> SharedSlice {
        self.shared
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.shared.len()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether system calls on it are served: not on far memory whose faults the faulting thread serves.
    pub(crate) fn is_servable(&self) -> bool {
        let pager = match &self.owner.owner {
            Owner::Far { pager, .. } => pager,
            Owner::FarRange(range) => range.pager(),
            _ => return true,
        };
        pager.fault_path() != FaultPath::InThread
    }

    /// Whether it can be written.
    pub fn is_writable(&self) -> bool {
        match &self.owner.owner {
            Owner::Mapping(_) | Owner::Far { .. } | Owner::FarRange(_) => true,
            Owner::File { writable, .. } => *writable,
            Owner::Raw(range) => range.is_writable(),
        }
    }

    /// Whether it is made of huge pages.
    pub fn is_huge(&self) -> bool {
        matches!(&self.owner.owner, Owner::Mapping(mapping) if mapping.is_huge())
    }

    /// Whether it is known that `part` of it can be touched without waiting for it to come in.
    #[inline]
    pub(crate) fn is_known_here(&self, part: SharedSlice, now: u32) -> bool {
        self.owner.residency.is_known_here(part, now)
    }

    /// As [`Memory::is_known_here`], and asks the kernel.
    pub(crate) fn is_here(&self, part: SharedSlice, now: u32) -> bool {
        let Whole { owner, residency } = &*self.owner;
        let file = if let Owner::Mapping(mapping) = owner { mapping.file() } else { None };
        residency.is_here(part, now, file)
    }

    /// Whether it stays as long as one of the clones lives, whatever the program does.
    pub(crate) fn is_kept(&self) -> bool {
        matches!(&self.owner.owner, Owner::Mapping(_) | Owner::File { .. })
    }

    /// Waits until `part` of it is there, for as long as that takes, and touches it only where that cannot do harm, whatever the program
    /// does with the memory meanwhile. Where that is not possible it does not wait.
    pub(crate) fn bring(&self, part: SharedSlice, writes: bool) {
        if bring(part, writes).is_ok() || !self.is_kept() {
            return;
        }
        let first = PAGE_BYTES - part.as_ptr().addr() % PAGE_BYTES;
        for at in std::iter::once(0).chain((first..part.len()).step_by(PAGE_BYTES)) {
            let _ = part.touch(at);
        }
    }

    /// The file of all of this memory and nothing else, which importers of this host may map; none for a range of other memory, whose
    /// rest they must not see, and for memory that is not made for it.
    pub(crate) fn sharable_file(&self) -> Option<&Memfd> {
        let Owner::Mapping(mapping) = &self.owner.owner else { return None };
        mapping.file().filter(|_| self.shared == mapping.shared())
    }

    /// This memory, where processes of this host that the kernel lets do so may have it copied. A page of far memory may take as long to come
    /// in as its lender likes, and who copies could not give up: peers ask for that.
    pub(crate) fn copied_by_others(&self) -> Option<SharedSlice> {
        match &self.owner.owner {
            Owner::Mapping(_) | Owner::File { .. } | Owner::Raw(_) => Some(self.shared),
            Owner::Far { .. } | Owner::FarRange(_) => None,
        }
    }

    /// Where in this memory the byte at `address` of this process is.
    pub(crate) fn find(&self, address: u64) -> Option<u64> {
        let offset = address.checked_sub(self.shared.as_ptr().addr() as u64)?;
        (offset < self.len() as u64).then_some(offset)
    }
}

impl From<Arc<Mapping>> for Memory {
    fn from(mapping: Arc<Mapping>) -> Self {
        Self::whole(Owner::Mapping(mapping))
    }
}

impl From<FarRange> for Memory {
    fn from(range: FarRange) -> Self {
        Self::whole(Owner::FarRange(range))
    }
}

impl From<RawRange> for Memory {
    fn from(range: RawRange) -> Self {
        Self::whole(Owner::Raw(range))
    }
}

impl From<&Self> for Memory {
    fn from(memory: &Self) -> Self {
        memory.clone()
    }
}
