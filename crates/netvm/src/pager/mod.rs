//! The pager: far memory for this process, backed by lenders.
//!
//! One thread per process serves the page faults of the far area. It owns everything: the page table, the frames, the
//! connections. Other threads ask it for changes by [`Pager`]'s methods, each a short stop at the *doorbell*, a page whose
//! fault the pager takes as a call; so no descriptor is needed that the program could close. See docs/design/pager.md.

mod backing;
mod blocks;
mod budget;
mod calls;
mod collect;
mod end;
mod engine;
mod erasure;
mod errand;
mod error;
mod evict;
mod fault;
mod fork;
mod fresh;
mod hints;
mod home;
mod inthread;
mod learn;
mod lenders;
mod local;
mod look;
mod named;
mod path;
mod placement;
mod promised;
mod range;
mod relocate;
mod seals;
mod shards;
mod side;
mod table;
mod tier;
mod together;
mod transfers;
mod window;

pub use blocks::BlockAt;
pub use erasure::Erasure;
pub use error::PagerError;
pub use hints::{Access, ShortCalls};
pub use learn::{check_record, read_record};
pub use lenders::LenderState;
pub use netvm_core::tier::Policy as TierPolicy;
pub use netvm_sys::paged::FrameDesign;
pub use path::{FaultPath, WakeCosts};
pub use range::FarRange;
pub(crate) use range::this_process;
pub use shards::{SHARDS_MAX, STRIPE_BYTES};

use crate::error::Result;
use crate::runfile::{RunFile, Slot};
use crate::security::Security;
use crate::shm::LinkChoice;
use crate::stats::PagerStats;
use calls::{Call, Doorbell};
use end::Desk;
use engine::Engine;
use error::system;
use inthread::InThread;
use netvm_sys::cpu::Hold;
use netvm_sys::fork::Process;
use netvm_sys::shared::SharedSlice;
use netvm_sys::thread::Gate;
use netvm_sys::uffd::PAGE_BYTES;
use shards::{Division, Neighbours, Shard, Stripes};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Least local memory a pager can work with, in bytes.
pub const LOCAL_BYTES_MIN: u64 = 4 << 20;

/// The most that comes in together at a fault, in bytes.
pub const PAGE_BYTES_MAX: usize = 2 << 20;

/// The most addresses a pager can reserve, in bytes: just under 16 TiB, as pages have numbers of 32 bits.
pub const AREA_BYTES_MAX: u64 = (1 << 44) - PAGE_BYTES_MAX as u64;

/// Most lenders that can hold one page.
pub const REPLICAS_MAX: usize = netvm_core::residency::COPIES_MAX;

/// What a started pager thread says when its descriptors are in a table of its own.
const OWN_TABLE: u32 = 1;

/// Most local memory of a pager, in bytes: half a terabyte less than a page.
pub const LOCAL_BYTES_MAX: u64 = netvm_core::residency::FRAME_MAX as u64 * PAGE_BYTES as u64;
/// Of [`PagerConfig::lender_timeout`].
pub const LENDER_TIMEOUT_MIN: Duration = Duration::from_millis(50);
const STACK_BYTES: usize = 256 << 10;

/// How a pager is set up.
#[derive(Clone)]
pub struct PagerConfig {
    /// Local memory for far pages, in bytes, at most [`LOCAL_BYTES_MAX`]: at most this much of the far memory is in this machine at any time.
    pub local_bytes: u64,
    /// How far [`Pager::set_local_bytes`] may raise it, in bytes, at most [`LOCAL_BYTES_MAX`]: 20 bytes of memory for each 4096 of it, from the start.
    /// 0: not at all.
    pub local_bytes_max: u64,
    /// Addresses of the lenders: `HOST:PORT` or `unix:/path`.
    pub lenders: Vec<String>,
    /// How many lenders hold each page: 1 to 4, and to the number of lenders. With 2 or more, far memory survives the loss of all
    /// of them but one, and reads go to the one that answers soonest. With 1 and several lenders, pages are spread over them.
    pub replicas: usize,
    /// Each page in parts on different lenders instead, so that some of them may be lost: see docs/design/erasure.md. Takes less of
    /// their memory than replicas: (K+M)/K of what is far.
    pub erasure: Option<Erasure>,
    /// The secret to prove to them, and whether to encrypt.
    pub security: Security,
    /// Lenders get encrypted pages: they can neither read nor change one, nor return an older one, unnoticed. The key is this
    /// process's own, and never leaves it.
    pub encrypt_pages: bool,
    /// Whether lenders on this host are read and written without them.
    pub link: LinkChoice,
    /// Addresses to reserve, in bytes, at most [`AREA_BYTES_MAX`]: an upper limit on all far mappings together.
    pub area_bytes: u64,
    /// The run whose budget is shared, if any; then `local_bytes` is the whole run's.
    pub run: Option<Arc<RunFile>>,
    /// Name under which the lender lists this borrower.
    pub name: String,
    /// Who serves page faults.
    pub fault_path: FaultPath,
    /// Pagers that divide the far memory, 1 to [`SHARDS_MAX`], each with a thread and connections of its own, and one budget for all: for programs
    /// of which many threads fault at once. See docs/design/shards.md. Not in a run.
    pub shards: usize,
    /// How pages travel; `None` takes the best that the kernel has.
    pub design: Option<FrameDesign>,
    /// Where evicted pages go.
    pub tier: TierPolicy,
    /// Pages go to the first of `lenders` that has room, and stay there: for comparison with places that are chosen by class and heat.
    pub fixed_order: bool,
    /// The record of what was wanted goes on from the run that left this file, and can be kept there for the next: see docs/design/learn.md.
    pub learn: Option<PathBuf>,
    /// Longest prefetch window in pages, at most 256; 0 for none, also of what was wanted before.
    pub prefetch_pages_max: u32,
    /// Bytes that come in together at a fault, where they are far: a power of two from 4096 (the default) to [`PAGE_BYTES_MAX`]. Local memory
    /// has room for four of them at least.
    pub page_bytes: usize,
    /// Where blocks are, so that those on several pages come in as a whole; `None`: nobody knows.
    pub block_at: Option<BlockAt>,
    /// How long the pager spins for the next event before it sleeps, in microseconds.
    pub spin_us: u32,
    /// CPU to pin the pager's threads to; `None` lets it follow the program's faulting thread.
    pub cpu: Option<usize>,
    /// Process of a lender that serves this run alone and may be moved between CPUs with the pager.
    pub private_lender: Option<u32>,
    /// How long a lender may take to answer before it is given up, at least [`LENDER_TIMEOUT_MIN`]; with replicas, 0.7 s at most where others have what it has.
    pub lender_timeout: Duration,
    /// Called on the pager's thread before anything else.
    pub thread_hook: Option<fn()>,
}

impl Default for PagerConfig {
    fn default() -> Self {
        Self {
            local_bytes: 256 << 20,
            local_bytes_max: 0,
            lenders: Vec::new(),
            replicas: 1,
            erasure: None,
            security: Security::default(),
            encrypt_pages: false,
            link: LinkChoice::Auto,
            area_bytes: 1 << 40,
            run: None,
            name: String::new(),
            fault_path: FaultPath::default(),
            shards: 1,
            design: None,
            tier: TierPolicy::Auto,
            fixed_order: false,
            learn: None,
            prefetch_pages_max: 128,
            page_bytes: PAGE_BYTES,
            block_at: None,
            spin_us: 0,
            cpu: None,
            private_lender: None,
            lender_timeout: Duration::from_secs(4),
            thread_hook: None,
        }
    }
}

/// Far memory of this process. Its methods may be called from any thread of the program.
///
/// When it is dropped and nothing is mapped, its threads end, and lenders have their memory back; what is mapped then stays as long as the process lives.
pub struct Pager {
    area: Range<usize>,
    memory: SharedSlice,
    shards: Vec<Shard>,
    stripes: Stripes,
    /// With several shards.
    division: Option<Division>,
    /// What it may have now.
    local_bytes: AtomicU64,
    config: PagerConfig,
    /// Far memory is not inherited, but by programs that are run with it.
    process: Option<Process>,
    hold: Arc<Hold>,
    addresses: range::Addresses,
    /// Held by the thread that forks, from prepare to the end.
    forking: Mutex<Option<fork::ForkState>>,
    /// This is the child of a fork that could not be given far memory.
    orphaned: AtomicBool,
    /// The pager's thread has a table of descriptors of its own.
    own_table: AtomicBool,
}

impl std::fmt::Debug for Pager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pager").field("area", &self.area).finish_non_exhaustive()
    }
}

/// Least local memory with pages of this size.
fn local_bytes_min(page_bytes: usize) -> u64 {
    LOCAL_BYTES_MIN.max(4 * page_bytes as u64)
}

impl Pager {
    /// Connects to the lenders, reserves the area and starts the pager's thread.
    ///
    /// # Errors
    /// [`PagerError::Userfaultfd`] when the kernel or its settings forbid it (the text says what helps), the lender's error when one
    /// cannot be reached, [`PagerError::LocalTooSmall`] below [`LOCAL_BYTES_MIN`] and four pages for each shard, [`PagerError::LocalTooLarge`], [`PagerError::BudgetRange`] with a limit below it, [`PagerError::AreaTooLarge`] above [`AREA_BYTES_MAX`], [`PagerError::AreaTooSmall`] below the local budget, [`PagerError::PageSize`], [`PagerError::FaultPath`] when faults
    /// cannot be served like that, [`PagerError::FrameDesign`], [`PagerError::Shards`], [`PagerError::LenderTimeout`], [`PagerError::Cpu`].
    pub fn start(config: PagerConfig) -> Result<Arc<Self>> {
        let fault_path = match config.fault_path {
            // Called from the program's malloc, which threads that measure would wait for.
            FaultPath::Auto if config.run.is_some() => FaultPath::SameCpu,
            FaultPath::Auto if config.shards > 1 => FaultPath::Thread,
            path => path.resolved(),
        };
        let config = PagerConfig { fault_path, ..config };
        let bytes = config.page_bytes;
        if !bytes.is_power_of_two() || !(PAGE_BYTES..=PAGE_BYTES_MAX).contains(&bytes) {
            return Err(PagerError::PageSize { bytes }.into());
        }
        if config.area_bytes > AREA_BYTES_MAX {
            return Err(PagerError::AreaTooLarge { bytes: config.area_bytes }.into());
        }
        if let Some(refused) = shards::refused(&config) {
            return Err(refused.into());
        }
        let min_bytes = config.shards as u64 * local_bytes_min(bytes);
        if config.local_bytes < min_bytes {
            return Err(PagerError::LocalTooSmall { bytes: config.local_bytes, min_bytes }.into());
        }
        if config.fault_path == FaultPath::InThread
            && let Some(refused) = inthread::refused(&config)
        {
            return Err(refused.into());
        }
        let (local_bytes, max_bytes) = (config.local_bytes, config.local_bytes_max);
        if local_bytes.max(max_bytes) > LOCAL_BYTES_MAX {
            return Err(PagerError::LocalTooLarge { bytes: local_bytes.max(max_bytes) }.into());
        }
        if max_bytes > 0 && max_bytes < local_bytes {
            return Err(PagerError::BudgetRange { bytes: local_bytes, min_bytes, max_bytes }.into());
        }
        if config.area_bytes < local_bytes.max(max_bytes) {
            let (bytes, local_bytes) = (config.area_bytes, local_bytes.max(max_bytes));
            return Err(PagerError::AreaTooSmall { bytes, local_bytes }.into());
        }
        if let (None, Some(file)) = (&config.run, &config.learn) {
            check_record(file)?;
        }
        if config.lender_timeout < LENDER_TIMEOUT_MIN {
            return Err(PagerError::LenderTimeout { timeout: config.lender_timeout }.into());
        }
        if let Some(cpu) = config.cpu {
            netvm_sys::cpu::may_use(cpu).map_err(|error| PagerError::Cpu { cpu, errno: (&error).into() })?;
        }
        let division = Division::new(&config)?;
        let neighbours = division.as_ref().map(|_| Neighbours::new(config.shards)).transpose()?.map(Arc::new);
        let addresses = engine::reserve(&config)?;
        let hold = Arc::new(Hold::new());
        let (mut shards, mut engines) = (Vec::with_capacity(config.shards), Vec::new());
        for number in 0..config.shards {
            let slot = match &division {
                Some(division) => Some(division.budget.join_shard(number)),
                None => join_run(&config)?,
            };
            let engine = Box::new(Engine::new(&config, &addresses, number, slot, neighbours.clone())?);
            let desk = Arc::new(Desk::new(&engine, &hold, config.cpu));
            let in_thread = match config.fault_path {
                FaultPath::InThread => Some(Arc::new(InThread::new(engine)?)),
                _ => {
                    engines.push(engine);
                    None
                }
            };
            shards.push(Shard { desk, in_thread });
        }
        let area = addresses.range();
        let pager = Arc::new(Self {
            stripes: Stripes { start: area.start, shards: shards.len() },
            area,
            memory: addresses.memory(),
            shards,
            division,
            local_bytes: AtomicU64::new(local_bytes),
            process: match &config.run {
                Some(_) => None,
                None => Some(this_process()?),
            },
            config,
            hold,
            addresses: range::Addresses::default(),
            forking: Mutex::new(None),
            orphaned: AtomicBool::new(false),
            own_table: AtomicBool::new(false),
        });
        let threads = engines.len();
        let mut own_tables = 0;
        for engine in engines {
            own_tables += usize::from(pager.spawn(engine)?);
        }
        if threads > 0 && own_tables == threads {
            // As with what each has alone.
            let copies: Vec<_> = neighbours.iter().flat_map(|neighbours| neighbours.descriptors()).collect();
            netvm_sys::thread::close_copies(&copies);
        }
        pager.share()?;
        Ok(pager)
    }

    /// Starts the thread that owns `engine` from then on. Whether it has a descriptor table of its own.
    fn spawn(&self, engine: Box<Engine>) -> Result<bool> {
        let descriptors = engine.descriptors();
        let desk = Arc::clone(&self.shards[engine.number].desk);
        let of_thread = Arc::clone(&desk);
        let own_table = self.start_thread(move |opened| engine.run(&of_thread, opened))? == OWN_TABLE;
        desk.is_served.store(true, Ordering::Relaxed);
        self.own_table.store(own_table, Ordering::Relaxed);
        if own_table {
            // The thread has its own copies; ours would only be in the program's way.
            netvm_sys::thread::close_copies(&descriptors);
        }
        Ok(own_table)
    }

    /// Lets threads serve their faults, and starts the thread that does the rest.
    fn share(&self) -> Result<()> {
        let all: Vec<_> = self.shards.iter().filter_map(|shard| shard.in_thread.clone()).collect();
        if all.is_empty() {
            return Ok(());
        }
        inthread::install(self, &all)?;
        for (shared, shard) in all.into_iter().zip(&self.shards) {
            let desk = Arc::clone(&shard.desk);
            self.start_thread(move |opened| {
                shared.tend(&desk, opened);
                drop(shared);
                desk.has_ended.open(0);
            })?;
            shard.desk.is_served.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Starts a thread, and waits until it has opened the gate; what it passes through.
    fn start_thread(&self, body: impl FnOnce(&Gate) + Send + 'static) -> Result<u32> {
        let ready = Arc::new(Gate::new());
        let opened = Arc::clone(&ready);
        netvm_sys::thread::start(STACK_BYTES, self.config.thread_hook, Box::new(move || body(&opened)))
            .map_err(|source| system("start the pager's thread", source))?;
        Ok(ready.wait())
    }

    /// Addresses reserved for far memory. The caller decides which of them to [`Pager::map`].
    pub fn area(&self) -> Range<usize> {
        self.area.clone()
    }

    /// Far memory to read and write from Rust. The range should be mapped: others fault.
    ///
    /// # Errors
    /// [`PagerError::OutsideFarMemory`] when the range is not in the area.
    pub fn memory(&self, address: usize, bytes: usize) -> Result<SharedSlice> {
        let offset = address.checked_sub(self.area.start);
        let slice = offset.and_then(|offset| self.memory.sub(offset, bytes));
        slice.ok_or_else(|| PagerError::OutsideFarMemory { address, bytes }.into())
    }

    /// Makes a range fresh, zero far memory in place of whatever was there. `protection` is PROT_* of mmap(2).
    ///
    /// # Errors
    /// EINVAL outside the area or off page boundaries; ENOMEM.
    pub fn map(&self, address: usize, bytes: usize, protection: i32) -> Result<()> {
        let map = |address, bytes| Call::Map { address, bytes, protection };
        self.on_all_pieces(address, bytes, map, |address, bytes| Call::Unmap { address, bytes })
    }

    /// Returns a range to the reservation; its contents are gone.
    ///
    /// # Errors
    /// EINVAL outside the area or off page boundaries.
    pub fn unmap(&self, address: usize, bytes: usize) -> Result<()> {
        self.on_pieces(address, bytes, |address, bytes| Call::Unmap { address, bytes })
    }

    /// The range reads as zero from now on, as after madvise(MADV_DONTNEED).
    ///
    /// # Errors
    /// EINVAL outside the area or off page boundaries.
    pub fn discard(&self, address: usize, bytes: usize) -> Result<()> {
        self.on_pieces(address, bytes, |address, bytes| Call::Discard { address, bytes })
    }

    /// Moves contents from `old` to `new`, both mapped, with pins and advice; `old` reads as zero afterwards. With several shards page by page, by reading and writing
    /// them, unless they are a multiple of [`STRIPE_BYTES`] times the shards apart.
    ///
    /// # Errors
    /// EINVAL outside the area, off page boundaries, or where the ranges overlap.
    pub fn relocate(&self, old: usize, new: usize, bytes: usize) -> Result<()> {
        if old.abs_diff(new) < bytes {
            return Err(system(
                "move far memory onto itself",
                std::io::Error::from_raw_os_error(libc::EINVAL),
            ));
        }
        self.relocate_pieces(old, new, bytes)
    }

    /// mprotect(2) on a mapped range.
    ///
    /// # Errors
    /// As mprotect(2).
    pub fn protect(&self, address: usize, bytes: usize, protection: i32) -> Result<()> {
        self.on_pieces(address, bytes, |address, bytes| Call::Protect { address, bytes, protection })
    }

    /// Makes a mapped range plain local memory with the same contents, outside the budget and the pager's care for good: for memory whose
    /// pages something else must be able to find or keep. `protection` is PROT_* of mmap(2).
    ///
    /// # Errors
    /// EINVAL outside the area or off page boundaries; ENOMEM; [`PagerError::PagePinned`] when the kernel does not let go of a page.
    pub fn make_local(&self, address: usize, bytes: usize, protection: i32) -> Result<()> {
        self.on_pieces(address, bytes, |address, bytes| Call::MakeLocal { address, bytes, protection })
    }

    /// Starts to bring a range in (madvise(MADV_WILLNEED)); a hint.
    pub fn will_need(&self, address: usize, bytes: usize) {
        self.hint_shortly(address, bytes, |address, bytes| Call::WillNeed { address, bytes });
    }

    /// Who serves its faults, and where; never [`FaultPath::Auto`].
    pub fn fault_path(&self) -> FaultPath {
        self.config.fault_path
    }

    /// The thread that the pager holds on its own CPU: who starts threads or programs suspends it meanwhile.
    pub fn hold(&self) -> &Hold {
        &self.hold
    }

    /// Counters of this process as of now. Each of several shards counts its own connections as lenders.
    pub fn stats(&self) -> PagerStats {
        self.sum_of_stats()
    }

    /// Writes the record of what was wanted, for the next run: with [`PagerConfig::learn`].
    ///
    /// # Errors
    /// [`Error::Other`](crate::Error::Other) when the file cannot be written; that of the last run stays.
    pub fn keep_record(&self) -> Result<()> {
        if self.config.learn.is_some() { self.on_shards(Call::KeepRecord) } else { Ok(()) }
    }

    /// How one of its pagers is called.
    fn doorbell(&self, shard: usize) -> &Doorbell {
        &self.shards[shard].desk.doorbell
    }

    fn forking(&self) -> MutexGuard<'_, Option<fork::ForkState>> {
        self.forking.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn join_run(config: &PagerConfig) -> Result<Option<Slot>> {
    config.run.as_ref().map(|run| run.join(std::process::id())).transpose()
}
