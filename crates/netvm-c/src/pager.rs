//! Far memory: more than this machine has.

use std::ffi::{CString, c_char, c_int};
use std::sync::{Arc, OnceLock};

use netvm::far::{FarBuilder, FarHeap};
use netvm::memory::Memory;
use netvm::pager::{Access, Erasure, FaultPath, Pager, PagerConfig, TierPolicy};
use netvm::stats::PagerStats;

use crate::call::call;
use crate::code::{Failure, Result};
use crate::ffi::{Address, In, Opaque, Options, Out, OutArray, OutHandle, Own, Ref, Text, cut};
use crate::node::{LINKS, flag, named, or_usual, security};

/// `netvm_pager`. Its thread serves page faults as long as there is memory of it.
pub struct PagerHandle(pub(crate) Arc<Pager>, pub(crate) FarHeap);

impl Opaque for PagerHandle {
    const TAG: u32 = 0x6E76_4606;
    const NAME: &'static str = "pager";
}

/// `netvm_pager_options`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PagerOptions {
    size: usize,
    pub(crate) lenders: In<Text>,
    pub(crate) lender_count: usize,
    pub(crate) local_bytes: u64,
    pub(crate) area_bytes: u64,
    pub(crate) secret_file: Text,
    pub(crate) secret: In<[u8; 32]>,
    pub(crate) encryption: u32,
    pub(crate) replicas: u32,
    pub(crate) local_bytes_max: u64,
    pub(crate) encrypt_pages: u32,
    pub(crate) erasure: u32,
    pub(crate) learn_file: Text,
    pub(crate) fault_path: u32,
    pub(crate) page_bytes: u32,
    pub(crate) tier: u32,
    pub(crate) shards: u32,
    pub(crate) lender_timeout_ns: i64,
    pub(crate) name: Text,
    pub(crate) link: u32,
    pub(crate) pinned: u32,
    pub(crate) cpu: u32,
    pub(crate) reserved: u32,
}

impl Default for PagerOptions {
    fn default() -> Self {
        Self {
            size: 0,
            lenders: In::NULL,
            lender_count: 0,
            local_bytes: 0,
            area_bytes: 0,
            secret_file: Text::NULL,
            secret: In::NULL,
            encryption: 0,
            replicas: 0,
            local_bytes_max: 0,
            encrypt_pages: 0,
            erasure: 0,
            learn_file: Text::NULL,
            fault_path: 0,
            page_bytes: 0,
            tier: 0,
            shards: 0,
            lender_timeout_ns: 0,
            name: Text::NULL,
            link: 0,
            pinned: 0,
            cpu: 0,
            reserved: 0,
        }
    }
}

pub(crate) const FAULT_PATHS: [(&str, u32, FaultPath); 5] = [
    ("NETVM_FAULTS_AUTO", 0, FaultPath::Auto),
    ("NETVM_FAULTS_THREAD", 1, FaultPath::Thread),
    ("NETVM_FAULTS_SAME_CPU", 2, FaultPath::SameCpu),
    ("NETVM_FAULTS_SPIN", 3, FaultPath::Spin),
    ("NETVM_FAULTS_IN_THREAD", 4, FaultPath::InThread),
];

pub(crate) const TIERS: [(&str, u32, TierPolicy); 3] = [
    ("NETVM_TIER_AUTO", 0, TierPolicy::Auto),
    ("NETVM_TIER_LENDER", 1, TierPolicy::Lender),
    ("NETVM_TIER_PACKED", 2, TierPolicy::Packed),
];

impl PagerOptions {
    fn config(&self) -> Result<PagerConfig> {
        let lenders = self.lenders.array(self.lender_count)?;
        let lenders: Result<Vec<String>> =
            lenders.iter().map(|lender| Ok(lender.get("address of a lender")?.to_owned())).collect();
        let not_parts =
            |_| Failure::argument("erasure is 0 or NETVM_ERASURE(k, m): k is 2, 4 or 8, m is 1 to 4");
        let erasure = Erasure::from_word(self.erasure).map_err(not_parts)?;
        if self.reserved != 0 {
            return Err(Failure::argument("what is reserved must be 0"));
        }
        let cpu = match (flag(self.pinned, "pinned")?, self.cpu) {
            (true, cpu) => Some(cpu as usize),
            (false, 0) => None,
            (false, _) => return Err(Failure::argument("there is a cpu, but pinned is 0")),
        };
        let fault_path = named(&FAULT_PATHS, self.fault_path, "fault_path")?;
        let tier = named(&TIERS, self.tier, "tier")?;
        let usual = PagerConfig::default();
        let bytes_or = |bytes: u64, usual: u64| if bytes == 0 { usual } else { bytes };
        Ok(PagerConfig {
            lenders: lenders?,
            replicas: self.replicas.max(1) as usize,
            erasure,
            local_bytes: bytes_or(self.local_bytes, usual.local_bytes),
            local_bytes_max: self.local_bytes_max,
            encrypt_pages: flag(self.encrypt_pages, "encrypt_pages")?,
            lender_timeout: or_usual(self.lender_timeout_ns, usual.lender_timeout)?,
            name: self.name.optional("name")?.map_or_else(netvm::far::program_name, str::to_owned),
            link: named(&LINKS, self.link, "link")?,
            cpu,
            fault_path,
            page_bytes: bytes_or(self.page_bytes.into(), usual.page_bytes as u64) as usize,
            tier,
            shards: self.shards.max(1) as usize,
            learn: self.learn_file.optional("name of the record")?.map(Into::into),
            area_bytes: bytes_or(self.area_bytes, usual.area_bytes),
            security: security(self.secret_file, self.secret, self.encryption)?,
            ..usual
        })
    }
}

/// Starts a pager.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_pager_start(options: Options<PagerOptions>, pager: OutHandle<PagerHandle>) -> c_int {
    call(|| {
        pager.fill(|| {
            let far = FarBuilder::from(options.get()?.config()?).start()?;
            Ok(PagerHandle(Arc::clone(far.pager()), FarHeap::new(&far)))
        })
    })
}

/// Lets go of it.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_pager_close(pager: Own<PagerHandle>) -> c_int {
    call(|| pager.take().map(drop))
}

/// Zero far memory.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_memory_far(
    pager: Ref<PagerHandle>,
    bytes: usize,
    memory: OutHandle<Memory>,
) -> c_int {
    call(|| {
        memory.fill(|| {
            if bytes == 0 {
                return Err(Failure::argument("memory cannot have 0 bytes"));
            }
            Ok(pager.get()?.0.allocate(bytes)?.into())
        })
    })
}

const PAGE_BYTES: usize = 4096;

pub(crate) const NORMAL: c_int = 0;
pub(crate) const SEQUENTIAL: c_int = 1;
pub(crate) const RANDOM: c_int = 2;
pub(crate) const WILL_NEED: c_int = 3;
pub(crate) const WONT_NEED: c_int = 4;
pub(crate) const DISCARD: c_int = 5;

/// All pages that the bytes touch, or those that are theirs alone: address and length, which may be 0.
fn pages(pager: &Pager, address: &Address, bytes: usize, all: bool) -> Result<(usize, usize)> {
    let start = address.pointer() as usize;
    // In the pager's far memory, so that what follows is no overflow.
    pager.check_allocated(start, bytes)?;
    let (down, up) = (|at: usize| at / PAGE_BYTES * PAGE_BYTES, |at: usize| at.next_multiple_of(PAGE_BYTES));
    let end = start + bytes;
    let (first, last) = if all { (down(start), up(end)) } else { (up(start), down(end)) };
    Ok((first, last.saturating_sub(first)))
}

/// Another local budget.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_pager_set_local(pager: Ref<PagerHandle>, bytes: u64) -> c_int {
    call(|| Ok(pager.get()?.0.set_local_bytes(bytes)?))
}

/// The record of what was wanted.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_pager_keep_record(pager: Ref<PagerHandle>) -> c_int {
    call(|| Ok(pager.get()?.0.keep_record()?))
}

/// How far memory is going to be used.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_far_advise(
    pager: Ref<PagerHandle>,
    address: Address,
    bytes: usize,
    advice: c_int,
) -> c_int {
    call(|| {
        let pager = &pager.get()?.0;
        if !(NORMAL..=DISCARD).contains(&advice) {
            return Err(Failure::argument(format!("{advice} is no advice")));
        }
        let (address, bytes) = pages(pager, &address, bytes, matches!(advice, NORMAL | WILL_NEED))?;
        if bytes == 0 {
            return Ok(());
        }
        match advice {
            SEQUENTIAL => pager.advise(address, bytes, Access::Sequential),
            RANDOM => pager.advise(address, bytes, Access::Random),
            WILL_NEED => pager.will_need(address, bytes),
            WONT_NEED => pager.page_out(address, bytes),
            DISCARD => pager.discard(address, bytes)?,
            _ => pager.advise(address, bytes, Access::Normal),
        }
        Ok(())
    })
}

/// Values here and there that are going to be used.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_far_will_need_each(
    pager: Ref<PagerHandle>,
    addresses: In<Address>,
    count: usize,
    bytes: usize,
) -> c_int {
    call(|| {
        let (pager, addresses) = (&pager.get()?.0, addresses.array(count)?);
        pager.will_need_each(addresses.iter().map(|address| (address.pointer() as usize, bytes)));
        Ok(())
    })
}

/// Keeps far memory in local memory.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_far_pin(pager: Ref<PagerHandle>, address: Address, bytes: usize) -> c_int {
    call(|| {
        let pager = &pager.get()?.0;
        match pages(pager, &address, bytes, true)? {
            (_, 0) => Ok(()),
            (address, bytes) => Ok(pager.pin(address, bytes)?),
        }
    })
}

/// Ends that.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_far_unpin(pager: Ref<PagerHandle>, address: Address, bytes: usize) -> c_int {
    call(|| {
        let pager = &pager.get()?.0;
        match pages(pager, &address, bytes, true)? {
            (_, 0) => Ok(()),
            (address, bytes) => Ok(pager.unpin(address, bytes)?),
        }
    })
}

/// `netvm_far_counts`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct FarCounts {
    pub(crate) faults: u64,
    pub(crate) pages_in: u64,
    pub(crate) pages_out: u64,
    pub(crate) far_bytes: u64,
    pub(crate) local_bytes: u64,
    pub(crate) local_bytes_peak: u64,
    pub(crate) pages_moved: u64,
    pub(crate) lenders_lost: u64,
}

/// What it did so far.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_pager_query(pager: Ref<PagerHandle>, counts: Out<FarCounts>) -> c_int {
    call(|| {
        counts.check()?;
        let stats = pager.get()?.0.stats();
        let bytes = |pages: u64| pages * PAGE_BYTES as u64;
        counts.set(FarCounts {
            faults: stats.faults,
            pages_in: stats.remote_reads,
            pages_out: stats.remote_writes,
            far_bytes: bytes(stats.far_pages),
            local_bytes: bytes(stats.local_frames),
            local_bytes_peak: bytes(stats.local_frames_peak),
            pages_moved: stats.pages_moved,
            lenders_lost: stats.lenders_lost,
        })
    })
}

/// `netvm_stat`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Stat {
    pub(crate) name: *const c_char,
    pub(crate) help: *const c_char,
    pub(crate) value: u64,
    pub(crate) gauge: u32,
    pub(crate) reserved: u32,
}

/// Name and help of each number, as C has texts; for ever.
fn stat_texts() -> &'static [(CString, CString)] {
    static TEXTS: OnceLock<Vec<(CString, CString)>> = OnceLock::new();
    TEXTS.get_or_init(|| {
        let text = |text: &str| CString::new(text.trim()).unwrap_or_default();
        PagerStats::NAMES.iter().zip(PagerStats::HELP).map(|(name, help)| (text(name), text(help))).collect()
    })
}

/// All that the pager counts.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_pager_stats(
    pager: Ref<PagerHandle>,
    stats: OutArray<Stat>,
    room: usize,
    count: Out<usize>,
) -> c_int {
    call(|| {
        stats.check(room)?;
        count.check()?;
        let values = pager.get()?.0.stats().values();
        for (index, ((name, help), value)) in stat_texts().iter().zip(values).enumerate().take(room) {
            let gauge = u32::from(PagerStats::is_gauge(PagerStats::NAMES[index]));
            let stat = Stat { name: name.as_ptr(), help: help.as_ptr(), value, gauge, reserved: 0 };
            stats.set(index, room, stat)?;
        }
        count.set(values.len())
    })
}

/// One of them.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_pager_stat(pager: Ref<PagerHandle>, name: Text, value: Out<u64>) -> c_int {
    call(|| {
        value.check()?;
        let (stats, name) = (pager.get()?.0.stats(), name.get("name")?);
        let named = PagerStats::NAMES.iter().zip(stats.values()).find(|(other, _)| **other == name);
        let none = || Failure::argument(format!("the pager counts nothing that is called {name:?}"));
        value.set(named.ok_or_else(none)?.1)
    })
}

/// Bytes of a text in a struct, the 0 at its end included.
const TEXT_BYTES: usize = 256;

/// `netvm_lender_state`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct LenderState {
    pub(crate) address: [c_char; TEXT_BYTES],
    pub(crate) why_lost: [c_char; TEXT_BYTES],
    pub(crate) held_bytes: u64,
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
    pub(crate) reads: u64,
    pub(crate) reads_ns: u64,
    pub(crate) lost: u32,
    pub(crate) reserved: u32,
}

impl From<&netvm::pager::LenderState> for LenderState {
    fn from(state: &netvm::pager::LenderState) -> Self {
        Self {
            address: cut(&state.address),
            why_lost: cut(state.lost.as_deref().unwrap_or_default()),
            held_bytes: state.held_bytes,
            read_bytes: state.read_bytes,
            written_bytes: state.written_bytes,
            reads: state.reads,
            reads_ns: state.reads_ns,
            lost: state.lost.is_some().into(),
            reserved: 0,
        }
    }
}

/// How each lender is.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_pager_lenders(
    pager: Ref<PagerHandle>,
    states: OutArray<LenderState>,
    room: usize,
    count: Out<usize>,
) -> c_int {
    call(|| {
        states.check(room)?;
        count.check()?;
        let lenders = pager.get()?.0.lenders();
        for (index, lender) in lenders.iter().enumerate().take(room) {
            states.set(index, room, lender.into())?;
        }
        count.set(lenders.len())
    })
}

/// Who serves faults.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_pager_fault_path(pager: Ref<PagerHandle>, path: Out<u32>) -> c_int {
    call(|| {
        path.check()?;
        path.set(pager.get()?.0.fault_path().number())
    })
}
