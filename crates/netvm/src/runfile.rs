//! The run file: what the processes of one `netvm run` share.
//!
//! A small file, mapped by the supervisor and by every process of the run. It holds the run's parameters, the local budget
//! that all share, and each process's counters, so that the supervisor can sum them up even when a process was killed.
//!
//! ```text
//! word  0 magic   1 build   2 frames in use   3 most of them   4.. parameters   LENDERS.. text   MESSAGE.. text
//! COMMAND.. text   LEARN.. text   NAMES.. text   SLOTS: 1024 x { pid, its name space, start time, image, frames held, starving, pinned, inflow,
//! counters, detail }
//! ```
//! All updates are single atomic operations; a process that dies between two of them leaves at worst a slot for
//! [`RunFile::reap`], or for [`RunFile::reap_all`] once nobody of its name space of processes is left.
//!
//! The pagers of one process that divide its far memory share a budget the same way, in memory of that process, each with a slot
//! (docs/design/shards.md).

use crate::detail::PagerDetail;
use crate::error::{Error, Result};
use crate::lender::Class;
use crate::pager::{Erasure, FaultPath};
use crate::security::{Encryption, Secret, Security};
use crate::stats::PagerStats;
use netvm_core::tier::Policy;
use netvm_sys::filemap::FileWords;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

mod life;
pub use life::Stuck;

const MAGIC: u64 = u64::from_le_bytes(*b"netvmrn2");
/// Tells builds apart whose run files mean different things: a sum of the sources that say what is in one.
const BUILD_OF_THIS: u64 = {
    let layout = sum(0xCBF2_9CE4_8422_2325, include_bytes!("runfile.rs"));
    let processes = sum(layout, include_bytes!("runfile/life.rs"));
    sum(sum(processes, include_bytes!("stats.rs")), include_bytes!("detail.rs"))
};
const PAGE_BYTES: u64 = 4096;
/// With less a process does hardly get on, whatever others have: frames, and pages of the size that comes in together.
const FLOOR_FRAMES: u64 = 256;
const FLOOR_PAGES: u64 = 4;

const BUILD: usize = 1;
const USED: usize = 2;
const USED_MAX: usize = 3;
const AREA: usize = 4;
const SMALL_LOCAL: usize = 5;
const FAR_THRESHOLD: usize = 6;
const VERBOSE: usize = 7;
const STARVING: usize = 8;
const PROCESSES: usize = 9;
const SUPERVISOR: usize = 10;
const SUPERVISOR_STARTED: usize = 11;
const MESSAGE_CLAIMED: usize = 12;
const PRIVATE_LENDER: usize = 13;
const PROTECTION: usize = 14;
const TIER: usize = 15;
const SECRET: usize = 16;
const LOST: usize = 20;
const REPLICAS: usize = 21;
const BUDGET: usize = 22;
const ENCRYPT_PAGES: usize = 23;
const LEARN_CLAIMED: usize = 24;
const ERASURE: usize = 25;
const FAULT_PATH: usize = 26;
const PAGE_SIZE: usize = 27;
const LEFT: usize = 28;
/// Who had nothing for long, and got a little beyond the budget; and who holds the most. Pids, the first stay; their name spaces are below.
const STUCK: usize = 29;
const STUCK_BY: usize = 30;
const STUCK_BY_HELD: usize = 31;
/// The program that the supervisor has started, if the preloaded library is in it: pid, its name when it started, whether it has come to its end.
const PROGRAM: usize = 32;
const PROGRAM_NAME: usize = 33;
const PROGRAM_ENDED: usize = 35;
/// The supervisor's name space of processes: all of the run are in it, or in one within.
const SUPERVISOR_SPACE: usize = 36;
const STUCK_SPACE: usize = 37;
const STUCK_BY_SPACE: usize = 38;
/// The most bytes that a process wanted at once, for which it had no addresses.
const NO_ROOM: usize = 39;
/// Whether a program was told that there are no asynchronous reads.
const REFUSED: usize = 40;
const CLASSES: usize = 41;
const CLASSES_MAX: usize = 64;
const LENDERS: usize = CLASSES + CLASSES_MAX;
const TEXT_WORDS: usize = 512;
const MESSAGE: usize = LENDERS + TEXT_WORDS;
const COMMAND: usize = MESSAGE + TEXT_WORDS;
const LEARN: usize = COMMAND + TEXT_WORDS;
const NAMES: usize = LEARN + TEXT_WORDS;
const RETIRED: usize = NAMES + TEXT_WORDS;
const RETIRED_DETAIL: usize = RETIRED + PagerStats::FIELDS;
const SLOTS: usize = RETIRED_DETAIL + PagerDetail::SUMS;
const SLOT_COUNT: usize = 1024;
const SLOT_WORDS: usize = SLOT_DETAIL + PagerDetail::WORDS;
const WORDS: usize = SLOTS + SLOT_COUNT * SLOT_WORDS;

const SLOT_PID: usize = 0;
/// Which program of which process it is: see [`life`].
const SLOT_SPACE: usize = 1;
const SLOT_STARTED: usize = 2;
const SLOT_IMAGE: usize = 3;
const SLOT_HELD: usize = 4;
const SLOT_STARVING: usize = 5;
/// Frames of pages that may not be evicted, and how many pages came lately: of shards only.
const SLOT_PINNED: usize = 6;
const SLOT_INFLOW: usize = 7;
const SLOT_STATS: usize = 8;
const SLOT_DETAIL: usize = SLOT_STATS + PagerStats::FIELDS;

/// Between two addresses: no path has it.
const BETWEEN: &str = "\0";

/// A slot that is being emptied.
const RETIRING: u64 = u64::MAX;

/// FNV-1a.
const fn sum(mut sum: u64, bytes: &[u8]) -> u64 {
    let mut index = 0;
    while index < bytes.len() {
        sum = (sum ^ bytes[index] as u64).wrapping_mul(0x0000_0100_0000_01B3);
        index += 1;
    }
    sum
}

/// What a run is given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunParams {
    /// Local memory for far pages of all processes together, in bytes.
    pub budget_bytes: u64,
    /// Address space for far memory in each process, in bytes.
    pub area_bytes: u64,
    /// Live small allocations up to this many bytes stay local in each process.
    pub small_local_bytes: u64,
    /// Allocations and mappings of at least this many bytes are far memory.
    pub far_threshold_bytes: u64,
    /// Addresses of the lenders, 4 KiB together at most.
    pub lenders: Vec<String>,
    /// What they are called, for people; empty: by their addresses.
    pub names: Vec<String>,
    /// How many of them hold each page, at least 1.
    pub replicas: u64,
    /// Or how many parts of each.
    pub erasure: Option<Erasure>,
    /// The secret to prove to them, and whether to encrypt.
    pub security: Security,
    /// Lenders get encrypted pages.
    pub encrypt_pages: bool,
    /// Process of the lender that serves this run alone, 0 for none.
    pub private_lender: u32,
    /// Where evicted pages may go.
    pub tier: Policy,
    /// Who serves page faults.
    pub fault_path: FaultPath,
    /// Bytes that come in together at a fault; 0: 4096.
    pub page_bytes: u64,
    /// Say more on standard error.
    pub verbose: bool,
    /// File of the record of what was wanted, empty for none.
    pub learn: String,
    /// The program and its arguments, for people; what is longer than 4 KiB is cut.
    pub command: String,
}

/// See the module's text.
#[derive(Debug)]
pub struct RunFile {
    words: FileWords,
    /// Pagers of this process that share the budget, each with a slot; 0: processes share it. Not in the file, which others write.
    shards: usize,
}

impl RunFile {
    /// Creates the file.
    ///
    /// # Errors
    /// When the path exists or cannot be written, or the lender list is longer than 4 KiB.
    pub fn create(path: &Path, params: &RunParams) -> Result<Arc<Self>> {
        let words = FileWords::create(path, WORDS).map_err(|e| Error::system("create the run file", &e))?;
        let run = Self { words, shards: 0 };
        let frames = params.budget_bytes / PAGE_BYTES;
        for (index, value) in [
            (BUILD, BUILD_OF_THIS),
            (BUDGET, frames),
            (AREA, params.area_bytes),
            (SMALL_LOCAL, params.small_local_bytes),
            (FAR_THRESHOLD, params.far_threshold_bytes),
            (VERBOSE, params.verbose.into()),
            (REPLICAS, params.replicas),
            (ERASURE, Erasure::to_word(params.erasure).into()),
            (ENCRYPT_PAGES, params.encrypt_pages.into()),
            (PRIVATE_LENDER, params.private_lender.into()),
            (
                TIER,
                match params.tier {
                    Policy::Auto => 0,
                    Policy::Lender => 1,
                    Policy::Packed => 2,
                },
            ),
            (FAULT_PATH, params.fault_path.number().into()),
            (PAGE_SIZE, params.page_bytes.max(PAGE_BYTES)),
            (SUPERVISOR, std::process::id().into()),
            (SUPERVISOR_STARTED, netvm_sys::stat::start_time(std::process::id()).unwrap_or(0)),
            (SUPERVISOR_SPACE, netvm_sys::stat::pid_space().unwrap_or(0)),
        ] {
            run.word(index).store(value, Relaxed);
        }
        run.set_security(&params.security);
        run.set_text_cut(COMMAND, &params.command);
        if !run.set_text(LEARN, &params.learn) {
            return Err(Error::Other("the path of the record is longer than 4 KiB".into()));
        }
        if !run.set_text(LENDERS, &params.lenders.join(BETWEEN)) {
            return Err(Error::Other("the list of lenders is longer than 4 KiB".into()));
        }
        if !run.set_text(NAMES, &params.names.join(BETWEEN)) {
            return Err(Error::Other("the names of the lenders are longer than 4 KiB".into()));
        }
        run.word(0).store(MAGIC, Release);
        Ok(Arc::new(run))
    }

    /// Opens the file of a run.
    ///
    /// # Errors
    /// When it cannot be read, is not a run file, or is one of another build of netvm.
    pub fn open(path: &Path) -> Result<Arc<Self>> {
        let open = |words| FileWords::open(path, words).map_err(|e| Error::system("open the run file", &e));
        let (magic, build) = {
            let start = FileWords::open_start(path, BUILD + 1);
            let start = start.map_err(|e| Error::system("open the run file", &e))?;
            (start.words()[0].load(Acquire), start.words()[BUILD].load(Relaxed))
        };
        let prefix = |magic: u64| magic & 0x00FF_FFFF_FFFF_FFFF;
        if prefix(magic) != prefix(MAGIC) {
            return Err(Error::Other(format!("{} is not a run file of this netvm", path.display())));
        }
        if (magic, build) != (MAGIC, BUILD_OF_THIS) {
            return Err(Error::Other(format!(
                "{} is of another build of netvm than this; the program netvm and libnetvm_preload.so must be built and installed \
                 together",
                path.display()
            )));
        }
        Ok(Arc::new(Self { words: open(WORDS)?, shards: 0 }))
    }

    /// The run's parameters.
    pub fn params(&self) -> RunParams {
        RunParams {
            budget_bytes: self.word(BUDGET).load(Relaxed).saturating_mul(PAGE_BYTES),
            area_bytes: self.word(AREA).load(Relaxed),
            small_local_bytes: self.word(SMALL_LOCAL).load(Relaxed),
            far_threshold_bytes: self.word(FAR_THRESHOLD).load(Relaxed),
            lenders: self.list(LENDERS),
            names: self.list(NAMES),
            replicas: self.word(REPLICAS).load(Relaxed),
            erasure: Erasure::from_word(self.word(ERASURE).load(Relaxed) as u32).unwrap_or_default(),
            security: self.security(),
            encrypt_pages: self.word(ENCRYPT_PAGES).load(Relaxed) != 0,
            private_lender: self.word(PRIVATE_LENDER).load(Relaxed) as u32,
            tier: match self.word(TIER).load(Relaxed) {
                1 => Policy::Lender,
                2 => Policy::Packed,
                _ => Policy::Auto,
            },
            fault_path: FaultPath::from_number(self.word(FAULT_PATH).load(Relaxed) as u32)
                .unwrap_or_default(),
            page_bytes: self.word(PAGE_SIZE).load(Relaxed),
            verbose: self.word(VERBOSE).load(Relaxed) != 0,
            learn: self.text(LEARN),
            command: self.text(COMMAND),
        }
    }

    /// The same for `shards` pagers of this process, which nobody else sees.
    ///
    /// # Errors
    /// ENOMEM.
    pub(crate) fn of_shards(budget_bytes: u64, shards: usize) -> Result<Arc<Self>> {
        let words = FileWords::anonymous(WORDS).map_err(|e| Error::system("get memory for a budget", &e))?;
        let run = Self { words, shards };
        run.set_budget(budget_bytes / PAGE_BYTES);
        Ok(Arc::new(run))
    }

    /// The place of one of them.
    pub(crate) fn join_shard(self: &Arc<Self>, number: usize) -> Slot {
        let base = SLOTS + number * SLOT_WORDS;
        self.word(base + SLOT_PID).store(std::process::id().into(), Release);
        self.word(PROCESSES).fetch_add(1, AcqRel);
        Slot { run: Arc::clone(self), base }
    }

    /// Another budget: nobody gets more while more is in use.
    pub(crate) fn set_budget(&self, frames: u64) {
        self.word(BUDGET).store(frames, Release);
    }

    /// Frames in use.
    pub(crate) fn used(&self) -> u64 {
        self.word(USED).load(Acquire)
    }

    /// The most that were in use at any time.
    pub(crate) fn used_peak(&self) -> u64 {
        self.word(USED_MAX).load(Relaxed)
    }

    /// What shards hold, and of that pinned.
    pub(crate) fn held_and_pinned(&self, number: usize) -> (u64, u64) {
        let base = SLOTS + number * SLOT_WORDS;
        (self.word(base + SLOT_HELD).load(Acquire), self.word(base + SLOT_PINNED).load(Acquire))
    }

    /// Frames of all shards that are pinned.
    pub(crate) fn pinned(&self) -> u64 {
        (0..self.shards).map(|number| self.held_and_pinned(number).1).sum()
    }

    /// What a shard always has besides its pins: as pins may take three quarters of the budget, all have this much.
    pub(crate) fn shard_floor(&self) -> u64 {
        self.word(BUDGET).load(Relaxed) / (4 * self.shards.max(1) as u64)
    }

    /// Counters of the whole run so far; `local_frames_peak` is the peak of the sum over processes.
    pub fn summary(&self) -> PagerStats {
        let mut sum = self.counters(RETIRED);
        for index in 0..SLOT_COUNT {
            sum.add(&self.counters(SLOTS + index * SLOT_WORDS + SLOT_STATS));
        }
        sum.local_frames_peak = self.used_peak();
        sum
    }

    /// The same of what is known besides counters; where faults were, of living processes only.
    pub fn detail(&self) -> PagerDetail {
        let mut sum = PagerDetail::from_words(|index| match index {
            0..PagerDetail::SUMS => self.word(RETIRED_DETAIL + index).load(Relaxed),
            _ => 0,
        });
        for (_, detail) in self.each_detail() {
            sum.add(&detail);
        }
        sum
    }

    /// Each process that uses far memory: its number and detail.
    pub fn each_detail(&self) -> Vec<(u32, PagerDetail)> {
        self.each(|base| PagerDetail::from_words(|index| self.word(base + SLOT_DETAIL + index).load(Relaxed)))
    }

    /// Frames that all processes together may use (4096 bytes each).
    pub fn budget_frames(&self) -> u64 {
        self.word(BUDGET).load(Relaxed)
    }

    /// Whether this is the first process that asks: it follows and keeps the record of the run.
    pub fn claim_record(&self) -> bool {
        self.word(LEARN_CLAIMED).swap(1, AcqRel) == 0
    }

    /// The process that made the run file.
    pub fn supervisor(&self) -> u32 {
        self.word(SUPERVISOR).load(Relaxed) as u32
    }

    /// Each process that uses far memory: its number and counters.
    pub fn each_process(&self) -> Vec<(u32, PagerStats)> {
        self.each(|base| self.counters(base + SLOT_STATS))
    }

    fn each<T>(&self, read: impl Fn(usize) -> T) -> Vec<(u32, T)> {
        let slot = |index: usize| {
            let base = SLOTS + index * SLOT_WORDS;
            let pid = self.word(base + SLOT_PID).load(Acquire);
            let pid = u32::try_from(pid).ok().filter(|&pid| pid != 0)?;
            let value = read(base);
            // While it was read the slot may have become another's.
            (self.word(base + SLOT_PID).load(Acquire) == u64::from(pid)).then_some((pid, value))
        };
        (0..SLOT_COUNT).filter_map(slot).collect()
    }

    fn counters(&self, base: usize) -> PagerStats {
        let mut values = [0; PagerStats::FIELDS];
        for (field, value) in values.iter_mut().enumerate() {
            *value = self.word(base + field).load(Relaxed);
        }
        PagerStats::from_values(values)
    }

    /// Processes that used far memory and live.
    pub fn processes(&self) -> u64 {
        self.word(PROCESSES).load(Relaxed)
    }

    /// Says what a lender lends, as far as whoever says it knows.
    pub fn set_class(&self, lender: u32, class: Class) {
        if (lender as usize) < CLASSES_MAX {
            self.word(CLASSES + lender as usize).store(class as u64 + 1, Relaxed);
        }
    }

    /// What each of the lenders lends.
    pub fn classes(&self) -> Vec<Class> {
        let class = |lender: usize| {
            let number = (lender < CLASSES_MAX).then(|| self.word(CLASSES + lender).load(Relaxed));
            Class::ALL.into_iter().find(|class| number == Some(*class as u64 + 1)).unwrap_or_default()
        };
        (0..self.list(LENDERS).len()).map(class).collect()
    }

    /// What the lenders are called.
    pub fn lender_names(&self) -> Vec<String> {
        let (lenders, names) = (self.list(LENDERS), self.list(NAMES));
        if names.len() == lenders.len() { names } else { lenders }
    }

    /// Names of the lenders that a process of the run has lost.
    pub fn lost_lenders(&self) -> Vec<String> {
        self.names_of(self.lost())
    }

    /// Names of those that a process of the run has left, as they asked for it: what they held was moved.
    pub fn left_lenders(&self) -> Vec<String> {
        self.names_of(self.left())
    }

    /// The same, a bit for each of the first 64.
    pub fn left(&self) -> u64 {
        self.word(LEFT).load(Relaxed)
    }

    fn names_of(&self, lenders: u64) -> Vec<String> {
        let numbered = self.lender_names().into_iter().take(64).enumerate();
        numbered.filter(|(index, _)| lenders >> index & 1 == 1).map(|(_, lender)| lender).collect()
    }

    /// The same, a bit for each of the first 64.
    pub fn lost(&self) -> u64 {
        self.word(LOST).load(Relaxed)
    }

    fn list(&self, base: usize) -> Vec<String> {
        self.text(base).split(BETWEEN).filter(|item| !item.is_empty()).map(str::to_owned).collect()
    }

    /// Why a process of the run could not go on, if one could not.
    pub fn message(&self) -> Option<String> {
        Some(self.text(MESSAGE)).filter(|text| !text.is_empty())
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.words.words()[index]
    }

    /// The file is its owner's alone, as is the folder that it is in.
    fn set_security(&self, security: &Security) {
        let encryption = match security.encryption {
            Encryption::Never => 0,
            Encryption::IfAsked => 1,
            Encryption::Always => 2,
        };
        let secret = security.secret.as_ref();
        for (index, chunk) in secret.iter().flat_map(|secret| secret.as_bytes().as_chunks().0).enumerate() {
            self.word(SECRET + index).store(u64::from_le_bytes(*chunk), Relaxed);
        }
        self.word(PROTECTION).store(encryption << 1 | u64::from(secret.is_some()), Relaxed);
    }

    fn security(&self) -> Security {
        let protection = self.word(PROTECTION).load(Relaxed);
        let secret = (protection & 1 != 0).then(|| {
            let word = |index| self.word(SECRET + index).load(Relaxed).to_le_bytes();
            Secret::from_bytes(std::array::from_fn(|index| word(index / 8)[index % 8]))
        });
        let encryption = match protection >> 1 {
            0 => Encryption::Never,
            1 => Encryption::IfAsked,
            _ => Encryption::Always,
        };
        Security { secret, encryption, insecure: false }
    }

    /// One word of length, then bytes.
    fn set_text(&self, base: usize, text: &str) -> bool {
        let bytes = text.as_bytes();
        if bytes.len() > (TEXT_WORDS - 1) * 8 {
            return false;
        }
        for (index, chunk) in bytes.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.word(base + 1 + index).store(u64::from_le_bytes(word), Relaxed);
        }
        self.word(base).store(bytes.len() as u64, Release);
        true
    }

    /// As much of it as there is room for.
    fn set_text_cut(&self, base: usize, text: &str) {
        let longest = text.len().min((TEXT_WORDS - 1) * 8);
        let end = (0..=longest).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        self.set_text(base, &text[..end]);
    }

    fn text(&self, base: usize) -> String {
        let length = (self.word(base).load(Acquire) as usize).min((TEXT_WORDS - 1) * 8);
        let mut bytes = Vec::with_capacity(length + 8);
        for index in 0..length.div_ceil(8) {
            bytes.extend_from_slice(&self.word(base + 1 + index).load(Relaxed).to_le_bytes());
        }
        bytes.truncate(length);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// One process's place in the run. It is given back by [`RunFile::reap`] after the process's death, not on drop: far pages
/// live as long as the process.
#[derive(Debug)]
pub struct Slot {
    run: Arc<RunFile>,
    base: usize,
}

impl Slot {
    /// The run it is part of.
    pub fn run(&self) -> &RunFile {
        &self.run
    }

    /// Takes up to `frames` frames from the run's budget; returns how many there were.
    pub fn grow(&self, frames: u64) -> u64 {
        let mut granted = 0;
        let taken = self.run.word(USED).fetch_update(AcqRel, Acquire, |used| {
            granted = frames.min(self.run.budget_frames().saturating_sub(used));
            (granted > 0).then(|| used + granted)
        });
        if let Ok(before) = taken {
            self.word(SLOT_HELD).fetch_add(granted, AcqRel);
            self.run.word(USED_MAX).fetch_max(before + granted, Relaxed);
            granted
        } else {
            0
        }
    }

    /// What it needs to get on at all, in frames.
    pub fn floor(&self) -> u64 {
        FLOOR_FRAMES.max(FLOOR_PAGES.saturating_mul(self.run.word(PAGE_SIZE).load(Relaxed) / PAGE_BYTES))
    }

    /// Up to `frames` that are in nobody's budget, for a process that has had nothing for long: else it would wait as long as the others
    /// do not give anything. Leaves a note for the supervisor.
    pub fn grow_beyond(&self, frames: u64) -> u64 {
        let before = self.run.word(USED).fetch_add(frames, AcqRel);
        self.word(SLOT_HELD).fetch_add(frames, AcqRel);
        self.run.word(USED_MAX).fetch_max(before + frames, Relaxed);
        self.run.note_stuck(self.base);
        frames
    }

    /// Gives frames back.
    pub fn release(&self, frames: u64) {
        let mut given = 0;
        let held = self.word(SLOT_HELD);
        let taken = held.fetch_update(AcqRel, Acquire, |held| {
            given = frames.min(held);
            Some(held - given)
        });
        if taken.is_ok() {
            self.run.word(USED).fetch_sub(given, AcqRel);
        }
    }

    /// Frames that this process may hold while others starve.
    pub fn fair_share(&self) -> u64 {
        match self.run.shards {
            0 => self.run.budget_frames() / self.run.processes().max(1),
            shards => self.claim(shards),
        }
    }

    /// What a shard may hold while another starves: its pins, a floor, and of the rest the part of all pages that came lately which came to
    /// it. Then a page stays equally long wherever it is, as in one queue of them all. All claims together are the budget.
    fn claim(&self, shards: usize) -> u64 {
        let inflow = |base: usize| self.run.word(base + SLOT_INFLOW).load(Relaxed) + 1;
        let all: u64 = (0..shards).map(|number| inflow(SLOTS + number * SLOT_WORDS)).sum();
        let floor = self.run.shard_floor();
        let rest = self.run.budget_frames().saturating_sub(self.run.pinned() + floor * shards as u64);
        let part = u128::from(rest) * u128::from(inflow(self.base)) / u128::from(all);
        self.word(SLOT_PINNED).load(Relaxed) + floor + part as u64
    }

    /// Whether this is a shard.
    pub(crate) fn is_shard(&self) -> bool {
        self.run.shards > 0
    }

    /// How many pages came lately.
    pub(crate) fn inflow(&self) -> &AtomicU64 {
        self.word(SLOT_INFLOW)
    }

    /// Frames of other shards that are pinned; none where processes share the budget.
    pub(crate) fn pinned_elsewhere(&self) -> u64 {
        self.run.pinned().saturating_sub(self.word(SLOT_PINNED).load(Relaxed))
    }

    pub(crate) fn set_pinned(&self, frames: u64) {
        self.word(SLOT_PINNED).store(frames, Release);
    }

    /// Whether this process, or shard, has said that it starves.
    pub fn is_starving(&self) -> bool {
        self.word(SLOT_STARVING).load(Relaxed) != 0
    }

    /// Of a shard that starves: whether there is something to get.
    pub(crate) fn gets_what_others_give(&self) -> bool {
        self.is_shard() && self.is_starving() && self.run.word(USED).load(Relaxed) < self.run.budget_frames()
    }

    /// Whether another process starves.
    pub fn others_starve(&self) -> bool {
        self.run.word(STARVING).load(Relaxed) > self.word(SLOT_STARVING).load(Relaxed)
    }

    /// Whether any process starves, this one too.
    pub fn any_starve(&self) -> bool {
        self.run.word(STARVING).load(Relaxed) > 0
    }

    /// Says whether this process has less than its share and cannot get more.
    pub fn set_starving(&self, starving: bool) {
        let was = self.word(SLOT_STARVING).swap(starving.into(), AcqRel) != 0;
        match (was, starving) {
            (false, true) => drop(self.run.word(STARVING).fetch_add(1, AcqRel)),
            (true, false) => drop(self.run.word(STARVING).fetch_sub(1, AcqRel)),
            _ => {}
        }
    }

    /// Shows this process's counters to the supervisor.
    pub fn publish(&self, stats: &PagerStats, detail: &PagerDetail) {
        for (field, value) in stats.values().into_iter().enumerate() {
            self.word(SLOT_STATS + field).store(value, Relaxed);
        }
        for (index, value) in detail.words().enumerate() {
            self.word(SLOT_DETAIL + index).store(value, Relaxed);
        }
    }

    /// Adds lenders that this process has lost, and those that it has left, a bit for each.
    pub fn add_gone(&self, lost: u64, left: u64) {
        for (word, lenders) in [(LOST, lost), (LEFT, left)] {
            if lenders != 0 {
                self.run.word(word).fetch_or(lenders, Relaxed);
            }
        }
    }

    /// Leaves the reason for this process's end; the first of a run stays. Whether the supervisor lives and will show one.
    pub fn set_message(&self, message: &str) -> bool {
        if self.run.word(MESSAGE_CLAIMED).swap(1, AcqRel) == 0 {
            self.run.set_text_cut(MESSAGE, message);
        }
        self.run.is_supervised()
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        self.run.word(self.base + index)
    }
}

#[cfg(test)]
mod tests;
