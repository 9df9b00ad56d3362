//! Far memory for the collections of a program: more than this machine has, or may be used.
//!
//! ```no_run
//! use netvm::far::FarMemory;
//!
//! let far = FarMemory::builder().local(64 << 20).lender("10.0.0.5:7070").start()?;
//! let mut numbers = far.vec::<u64>();
//! numbers.extend(0..100_000_000);
//! far.sequential(&numbers);
//! println!("{}", numbers.iter().sum::<u64>());
//! # Ok::<(), netvm::Error>(())
//! ```
//!
//! [`FarMemory::alloc`] is an allocator for the collections of [`allocator_api2`] 0.2 and of hashbrown 0.15 (its feature `allocator-api2`), so what they hand out are ordinary
//! references: a page that is not in this machine is brought in when it is touched. All collections of one `FarMemory` share its budget of
//! local memory. docs/design/far.md has the whole.
//!
//! What the builder takes is here, too: [`TierPolicy`], [`FaultPath`], [`Erasure`], [`LinkChoice`], [`Secret`], [`Encryption`], [`Security`];
//! [`PagerStats`] is what [`FarMemory::stats`] gives.

mod blocks;
mod heap;

use std::fmt;
use std::mem::size_of_val;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::pager::{Access, Pager, PagerConfig};
use blocks::FarBlocks;
pub use heap::FarHeap;
use netvm_core::heap::Heap;
use netvm_sys::allocator;
use netvm_sys::uffd::PAGE_BYTES;

pub use crate::pager::{Erasure, FarRange, FaultPath, LenderState, PagerError, TierPolicy};
pub use crate::security::{Encryption, Secret, Security};
pub use crate::shm::LinkChoice;
pub use crate::stats::PagerStats;
pub use allocator_api2;
pub use netvm_sys::allocator::{Alloc as FarAlloc, Plain};

/// A vector in far memory.
pub type FarVec<T> = allocator_api2::vec::Vec<T, FarAlloc>;
/// A value, or a slice, in far memory.
pub type FarBox<T> = allocator_api2::boxed::Box<T, FarAlloc>;

/// Far memory of this process. Clones are the same.
///
/// Its thread, local memory and connections to its lenders go when the last clone, collection, range and export of it has gone; not if a block was
/// leaked, or a [`FarHeap`]'s not freed: then they live as long as the process. To start one takes milliseconds: make one, and share its clones. A child of a fork has none of it: touching it there is a segmentation fault, never a zero, and calls say [`PagerError::Forked`].
///
/// When a lender is lost whose pages no other has, the process ends with a sentence on standard error that names the lender: by SIGBUS, at once,
/// without destructors or a core dump.
#[derive(Clone)]
pub struct FarMemory {
    pager: Arc<Pager>,
    alloc: FarAlloc,
    blocks: Arc<FarBlocks>,
}

impl fmt::Debug for FarMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FarMemory").field("pager", &self.pager).finish_non_exhaustive()
    }
}

/// How far memory is set up; see [`FarMemory::builder`].
#[derive(Clone)]
pub struct FarBuilder {
    config: PagerConfig,
}

impl fmt::Debug for FarBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PagerConfig { local_bytes, lenders, replicas, .. } = &self.config;
        let mut all = f.debug_struct("FarBuilder");
        all.field("local_bytes", local_bytes).field("lenders", lenders).field("replicas", replicas);
        all.finish_non_exhaustive()
    }
}

impl FarMemory {
    /// How it is to be.
    pub fn builder() -> FarBuilder {
        let config = PagerConfig { name: program_name(), ..PagerConfig::default() };
        FarBuilder { config }
    }

    /// What is below: for callers who have addresses in place of values.
    pub fn pager(&self) -> &Arc<Pager> {
        &self.pager
    }

    /// An allocator for collections. Their blocks are in far memory; what the allocator itself has to remember is not.
    ///
    /// A block is addresses: lenders are asked for memory when pages have to leave this machine, and when they have none then, the
    /// process ends, as it does when a page is lost.
    pub fn alloc(&self) -> FarAlloc {
        self.alloc.clone()
    }

    /// An empty vector. A large one grows by moving its pages, not their bytes.
    pub fn vec<T>(&self) -> FarVec<T> {
        FarVec::new_in(self.alloc())
    }

    /// A value in far memory.
    ///
    /// # Errors
    /// [`PagerError::AreaFull`].
    pub fn boxed<T>(&self, value: T) -> Result<FarBox<T>> {
        FarBox::try_new_in(value, self.alloc()).map_err(|_| self.full(size_of::<T>()))
    }

    /// `len` zeros. Those that are never written cost nothing.
    ///
    /// # Errors
    /// [`PagerError::AreaFull`].
    pub fn zeroed<T: Plain>(&self, len: usize) -> Result<FarBox<[T]>> {
        allocator::zeroed(&self.alloc, len).map_err(|_| self.full(len.saturating_mul(size_of::<T>())))
    }

    /// Bytes without a type, which other processes may be given: [`crate::memory::Memory`] is made from them.
    ///
    /// # Errors
    /// [`PagerError::AreaFull`].
    pub fn range(&self, bytes: usize) -> Result<FarRange> {
        self.check_process()?;
        self.pager.allocate(bytes)
    }

    fn check_process(&self) -> Result<()> {
        if self.blocks.is_here() { Ok(()) } else { Err(PagerError::Forked.into()) }
    }

    fn full(&self, bytes: usize) -> Error {
        if !self.blocks.is_here() {
            return PagerError::Forked.into();
        }
        PagerError::AreaFull { bytes, area_bytes: self.pager.area().len() }.into()
    }

    /// Another local budget, in bytes, while the program runs. A smaller one holds when this returns: what is beyond it has been evicted, which may
    /// take a second where a lender does not answer.
    ///
    /// # Errors
    /// [`PagerError::BudgetRange`] below 4 MiB for each shard, below what pins need, and above [`FarBuilder::local_max`];
    /// [`PagerError::CopiesLost`] and [`PagerError::TooFewLenders`] where pages would have to leave, and lenders are lost: then nothing has changed.
    pub fn set_local(&self, bytes: u64) -> Result<()> {
        self.check_process()?;
        self.pager.set_local_bytes(bytes)
    }

    /// Writes what was wanted so far to the file of [`FarBuilder::learn`], for the next run; nothing without one.
    ///
    /// # Errors
    /// [`Error::Other`] when it cannot be written: that of the last run stays.
    pub fn keep_record(&self) -> Result<()> {
        self.check_process()?;
        self.pager.keep_record()
    }

    /// Begins to bring these in, as far as there are frames that nobody uses; does not wait for them.
    pub fn will_need<T>(&self, values: &[T]) {
        self.on_pages(values, true, |address, bytes| self.pager.will_need(address, bytes));
    }

    /// These are going to be used soon, in this order, wherever each of them is: their pages come many at a time, to where they are used without a fault. Does not
    /// wait for them. For what is looked up here and there and known a little before: the next hundred or so probes of a hash join, the neighbours of a
    /// vertex. All that is named and not used yet should have room in half of the local memory.
    pub fn will_need_each<'a, T: ?Sized + 'a>(&self, values: impl IntoIterator<Item = &'a T>) {
        let places = values.into_iter().map(|value| (std::ptr::from_ref(value).addr(), size_of_val(value)));
        self.pager.will_need_each(places);
    }

    /// These are not needed for now: their pages leave local memory before others, and keep their contents.
    pub fn wont_need<T>(&self, values: &[T]) {
        self.on_pages(values, false, |address, bytes| self.pager.page_out(address, bytes));
    }

    /// These are going to be used from the first to the last: what comes next is fetched from the first fault on. As [`FarMemory::random`], this is
    /// for collections of more than 32 KiB: the pages of smaller ones have been others', and will be.
    pub fn sequential<T>(&self, values: &[T]) {
        self.advise(values, false, Access::Sequential);
    }

    /// These are going to be used here and there: nothing is fetched that was not asked for, but for the rest of a page
    /// ([`FarBuilder::page_bytes`]), and what was wanted after the same pages before.
    pub fn random<T>(&self, values: &[T]) {
        self.advise(values, false, Access::Random);
    }

    /// Nothing is known of how these are going to be used any more.
    pub fn normal<T>(&self, values: &[T]) {
        self.advise(values, true, Access::Normal);
    }

    /// Brings these in and keeps them in local memory, until the pin is dropped: `&[T]`, `&mut [T]`, or a whole collection.
    ///
    /// Pages that are given to a pipe or a socket without a copy (vmsplice, MSG_ZEROCOPY) must be pinned until they have been read there, or
    /// other contents may be read.
    ///
    /// # Errors
    /// [`PagerError::PinnedTooMuch`] when all pins together need more than three quarters of the budget; [`PagerError::OutsideFarMemory`] for
    /// memory of another kind.
    pub fn pin<T, V: Deref<Target = [T]>>(&self, values: V) -> Result<Pin<'_, V>> {
        let bytes = size_of_val::<[T]>(&values);
        let (address, bytes) = match self.pages(&values, true) {
            Some(pages) => pages,
            None if bytes == 0 => (0, 0),
            None => {
                return Err(PagerError::OutsideFarMemory { address: values.as_ptr() as usize, bytes }.into());
            }
        };
        if bytes > 0 {
            self.check_process()?;
            self.pager.pin(address, bytes)?;
        }
        Ok(Pin { values, pager: &self.pager, address, bytes })
    }

    /// Sets all of these to zero, and gives back what they used, here and at the lenders.
    pub fn discard<T: Plain>(&self, values: &mut [T]) {
        let area = self.pager.area();
        allocator::discard(values, PAGE_BYTES, |address, bytes| {
            area.contains(&address) && self.pager.discard(address, bytes).is_ok()
        });
    }

    /// The lenders, in the order in which they were named: which of them are there, and what each holds and has answered. To be asked now and then: that
    /// one was lost, or is back, [`PagerStats`] count.
    pub fn lenders(&self) -> Vec<LenderState> {
        self.pager.lenders()
    }

    /// Who serves its faults: [`FaultPath::Auto`] has been decided.
    pub fn fault_path(&self) -> FaultPath {
        self.pager.fault_path()
    }

    /// What it did so far.
    pub fn stats(&self) -> PagerStats {
        self.pager.stats()
    }

    /// The pages of values: all that they touch, or those that are theirs alone. `None` for none, and when they are elsewhere.
    fn pages<T>(&self, values: &[T], all: bool) -> Option<(usize, usize)> {
        let (start, bytes) = (values.as_ptr() as usize, size_of_val(values));
        let end = start + bytes;
        let down = |address: usize| address / PAGE_BYTES * PAGE_BYTES;
        let up = |address: usize| address.next_multiple_of(PAGE_BYTES);
        let (first, last) = if all { (down(start), up(end)) } else { (up(start), down(end)) };
        (bytes > 0 && first < last && self.pager.area().contains(&start)).then(|| (first, last - first))
    }

    fn advise<T>(&self, values: &[T], all: bool, access: Access) {
        self.on_pages(values, all, |address, bytes| {
            if !self.blocks.is_in_span(address) {
                self.pager.advise(address, bytes, access);
            }
        });
    }

    fn on_pages<T>(&self, values: &[T], all: bool, run: impl FnOnce(usize, usize)) {
        if let Some((address, bytes)) = self.pages(values, all) {
            run(address, bytes);
        }
    }
}

impl From<PagerConfig> for FarBuilder {
    fn from(config: PagerConfig) -> Self {
        Self { config }
    }
}

impl FarBuilder {
    /// Local memory for far pages, in bytes: at least 4 MiB. 256 MiB if it is not given.
    #[must_use]
    pub fn local(mut self, bytes: u64) -> Self {
        self.config.local_bytes = bytes;
        self
    }

    /// How far [`FarMemory::set_local`] may raise that, in bytes, at most [`crate::pager::LOCAL_BYTES_MAX`]. It costs 20 bytes for each 4096, at once.
    #[must_use]
    pub fn local_max(mut self, bytes: u64) -> Self {
        self.config.local_bytes_max = bytes;
        self
    }

    /// One more lender, by its address: `HOST:PORT` or `unix:/path`.
    #[must_use]
    pub fn lender(mut self, address: impl Into<String>) -> Self {
        self.config.lenders.push(address.into());
        self
    }

    /// More lenders.
    #[must_use]
    pub fn lenders(mut self, addresses: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.config.lenders.extend(addresses.into_iter().map(Into::into));
        self
    }

    /// How many lenders have each page, 1 to 4: see `PagerConfig::replicas`.
    #[must_use]
    pub fn replicas(mut self, replicas: usize) -> Self {
        self.config.replicas = replicas;
        self
    }

    /// Each page in parts on different lenders, some of which may be lost: see `PagerConfig::erasure`.
    #[must_use]
    pub fn erasure(mut self, erasure: Erasure) -> Self {
        self.config.erasure = Some(erasure);
        self
    }

    /// Whether pages that leave are packed in local memory first, when that pays.
    #[must_use]
    pub fn tier(mut self, policy: TierPolicy) -> Self {
        self.config.tier = policy;
        self
    }

    /// Brings pages in by what the process did not only before, as always, but also in the run that left this file
    /// ([`FarMemory::keep_record`]): it is to allocate its far memory in the same order.
    #[must_use]
    pub fn learn(mut self, file: impl Into<std::path::PathBuf>) -> Self {
        self.config.learn = Some(file.into());
        self
    }

    /// Who serves page faults. With [`FaultPath::InThread`] the thread that faults does, which is fastest; what that asks of the program is
    /// said there.
    #[must_use]
    pub fn fault_path(mut self, path: FaultPath) -> Self {
        self.config.fault_path = path;
        self
    }

    /// Divides the addresses among so many pagers, 1 to 64, each with a thread and connections of its own, and one budget for all: for programs of
    /// which many threads fault at once, on more CPUs than two. [`FarBuilder::local`] is at least 4 MiB for each. With
    /// [`FaultPath::SameCpu`] there is only one.
    #[must_use]
    pub fn shards(mut self, shards: usize) -> Self {
        self.config.shards = shards;
        self
    }

    /// Whether lenders on this host are read and written without them.
    #[must_use]
    pub fn link(mut self, link: LinkChoice) -> Self {
        self.config.link = link;
        self
    }

    /// The CPU of the pager's thread; it follows the thread that faults if none is given. [`PagerError::Cpu`] if the process may not use it.
    #[must_use]
    pub fn cpu(mut self, cpu: usize) -> Self {
        self.config.cpu = Some(cpu);
        self
    }

    /// The secret to prove to the lenders.
    #[must_use]
    pub fn secret(mut self, secret: Secret) -> Self {
        self.config.security.secret = Some(secret);
        self
    }

    /// The secret to prove to the lenders, from its file.
    ///
    /// # Errors
    /// As [`Secret::from_file`].
    pub fn secret_file(self, path: impl AsRef<Path>) -> Result<Self> {
        Ok(self.secret(Secret::from_file(path.as_ref())?))
    }

    /// Whether the connections are encrypted.
    #[must_use]
    pub fn encryption(mut self, encryption: Encryption) -> Self {
        self.config.security.encryption = encryption;
        self
    }

    /// Secret, and encryption of the connections.
    #[must_use]
    pub fn security(mut self, security: Security) -> Self {
        self.config.security = security;
        self
    }

    /// Lenders get encrypted pages: see `PagerConfig::encrypt_pages`.
    #[must_use]
    pub fn encrypt_pages(mut self, encrypt: bool) -> Self {
        self.config.encrypt_pages = encrypt;
        self
    }

    /// Addresses to reserve, in bytes: the limit of all far memory together, less than 16 TiB. 1 TiB if it is not given.
    #[must_use]
    pub fn area(mut self, bytes: u64) -> Self {
        self.config.area_bytes = bytes;
        self
    }

    /// Bytes that come in together at a fault: see `PagerConfig::page_bytes`. Larger ones suit what is read in long pieces; what is read here and
    /// there waits for more than it wants.
    #[must_use]
    pub fn page_bytes(mut self, bytes: usize) -> Self {
        self.config.page_bytes = bytes;
        self
    }

    /// How long a lender may take to answer before it is given up, 50 ms or more.
    #[must_use]
    pub fn lender_timeout(mut self, timeout: Duration) -> Self {
        self.config.lender_timeout = timeout;
        self
    }

    /// The name under which the lenders list this process, cut to 255 bytes.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.config.name = name.into();
        self
    }

    /// Connects to the lenders and starts.
    ///
    /// # Errors
    /// As [`Pager::start`]; [`PagerError::PageSize`], [`PagerError::Shards`].
    pub fn start(self) -> Result<FarMemory> {
        let heap = Arc::new(Mutex::new(Heap::new()));
        let pager = Pager::start(PagerConfig { block_at: Some(blocks::block_at(&heap)), ..self.config })?;
        let blocks = Arc::new(FarBlocks::new(Arc::clone(&pager), heap)?);
        let alloc = FarAlloc::new(Arc::clone(&blocks) as Arc<dyn allocator::Blocks>);
        Ok(FarMemory { pager, alloc, blocks })
    }
}

/// The name of this program's file, without its folder: what [`FarBuilder::name`] is if nothing else is said.
pub fn program_name() -> String {
    let name = std::env::args_os().next().unwrap_or_default();
    Path::new(&name).file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Values that stay in local memory as long as it lives.
pub struct Pin<'a, V> {
    values: V,
    pager: &'a Pager,
    address: usize,
    bytes: usize,
}

impl<V> fmt::Debug for Pin<'_, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pin").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl<V: Deref> Deref for Pin<'_, V> {
    type Target = V::Target;

    fn deref(&self) -> &V::Target {
        &self.values
    }
}

impl<V: DerefMut> DerefMut for Pin<'_, V> {
    fn deref_mut(&mut self) -> &mut V::Target {
        &mut self.values
    }
}

impl<V> Drop for Pin<'_, V> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // It was pinned with these.
            let _ = self.pager.unpin(self.address, self.bytes);
        }
    }
}
