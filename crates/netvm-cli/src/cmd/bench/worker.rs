//! The program under test of `netvm bench fault`: a process of its own that walks over memory and times itself.
//!
//! It obeys one-word commands on standard input (`fill`, then the cases) and answers each with one line of JSON, so that
//! its keeper can interleave it with others. It ends when its input ends.

use std::error::Error;
use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use netvm::lender::LinkChoice;
use netvm::pager::{Erasure, FaultPath, Pager, PagerConfig};
use netvm_sys::mapping::Mapping;
use netvm_sys::shared::SharedSlice;
use netvm_sys::thread::faults_of_thread;
use serde::{Deserialize, Serialize};

use super::super::run::Tier;
use super::PAGE_BYTES;

/// What a worker says when it has read something else than it had written.
pub const WRONG_DATA: &str = "wrong data";
const WORDS: usize = PAGE_BYTES / 8;

/// A random access below this many nanoseconds found its page in local memory; a fault costs at least twice as much.
const FAULT_NS_MIN: u64 = 1000;

/// Pages from one access to the next in the strided case.
const STRIDE_PAGES: usize = 17;

/// Behind the name of a walk: by all threads of the worker at once.
pub const BY_THREADS: &str = "-threads";

/// Bytes between two readings of the clock in the sequential cases.
pub const CHUNK_BYTES: usize = 1 << 20;

#[derive(Args, Debug)]
pub struct WorkerArgs {
    /// Lender of the far memory; without one the memory is ordinary
    #[arg(long)]
    lender: Vec<String>,
    /// How those are reached that are on this host
    #[arg(long, default_value = "socket")]
    link: LinkChoice,
    /// How many lenders hold each page
    #[arg(long, default_value_t = 1)]
    replicas: usize,
    /// Or how many parts of each
    #[arg(long)]
    erasure: Option<Erasure>,
    /// Lenders get encrypted pages
    #[arg(long)]
    encrypt_pages: bool,
    /// Who serves faults
    #[arg(long, default_value = "auto")]
    fault_path: FaultPath,
    #[arg(long, default_value_t = 1)]
    shards: usize,
    #[arg(long)]
    local_bytes: u64,
    #[arg(long)]
    size_bytes: u64,
    /// How long one case takes, about
    #[arg(long)]
    case_ms: u64,
    /// Of random accesses only those count for which the kernel waited for a device
    #[arg(long)]
    waits_only: bool,
    #[arg(long)]
    cpu: Option<usize>,
    #[arg(long)]
    pager_cpu: Option<usize>,
    /// Second half of every page is zero
    #[arg(long)]
    compressible: bool,
    /// Of every other MiB only
    #[arg(long)]
    mixed: bool,
    /// The hot part of phases is every fourth page
    #[arg(long)]
    scattered: bool,
    /// Pages go to the first lender that has room, and stay there
    #[arg(long)]
    fixed_order: bool,
    /// Where evicted pages go
    #[arg(long, value_enum, default_value = "auto")]
    tier: Tier,
    /// Threads of the cases with several
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// A lender that serves this worker alone
    #[arg(long)]
    private_lender: Option<u32>,
}

/// The access patterns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Case {
    /// One word of a random page.
    RandomRead,
    /// One word of a random page is read, incremented and written.
    RandomRmw,
    /// As [`Case::RandomRead`], by several threads at once.
    RandomReadThreads,
    /// Every page in order is read whole.
    SeqRead,
    /// Every page in order is overwritten whole.
    SeqWrite,
    /// One word of a random page, timed over all accesses.
    Uniform,
    /// The same, and 64 pages each are named before they are read, while those before them are.
    UniformNamed,
    /// As [`Case::Uniform`], where the page of rank k is read in proportion to 1/k.
    Zipf,
    /// One word of every page in order, round and round.
    Sequential,
    /// One word of every 17th page, round and round, until all have been read.
    Stride,
    /// All pages once in an order without order, round and round; where to go next depends on what was read.
    Chase,
    /// One word of a random page, nine times of ten in a quarter of all pages, which is another one each time.
    Phases,
}

impl Case {
    pub const ALL: [Case; 4] = [Case::RandomRead, Case::RandomRmw, Case::SeqRead, Case::SeqWrite];

    /// Those that read single words and are timed over all accesses, whether they fault or not.
    pub const WALKS: [Case; 6] =
        [Case::Uniform, Case::UniformNamed, Case::Zipf, Case::Sequential, Case::Stride, Case::Chase];

    pub fn name(self) -> &'static str {
        match self {
            Case::RandomRead => "random-read",
            Case::RandomRmw => "random-rmw",
            Case::RandomReadThreads => "random-read-threads",
            Case::SeqRead => "seq-read",
            Case::SeqWrite => "seq-write",
            Case::Uniform => "uniform",
            Case::UniformNamed => "uniform-named",
            Case::Zipf => "zipf",
            Case::Sequential => "sequential",
            Case::Stride => "stride",
            Case::Chase => "chase",
            Case::Phases => "phases",
        }
    }

    /// A case by what its keeper calls it, and how many threads walk.
    fn asked_for(name: &str, threads: usize) -> Option<(Case, usize)> {
        let named = |name: &str| Case::value_variants().iter().copied().find(|case| case.name() == name);
        let walk = || named(name.strip_suffix(BY_THREADS)?).filter(|case| Case::WALKS.contains(case));
        named(name).map(|case| (case, 1)).or_else(|| Some((walk()?, threads)))
    }
}

/// What a worker says about one repetition of one case.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Empty, or why the case failed.
    pub error: String,
    /// Random cases: microseconds of an access that faulted. Sequential: GB/s over all.
    pub median: f64,
    /// 99th percentile; for the sequential cases the GB/s that 99 % of the chunks reach.
    pub p99: f64,
    /// Faulting accesses, or pages in the sequential cases.
    pub n: u64,
    /// Faults (or pages) per second of the whole repetition.
    pub per_s: f64,
    /// Sequential cases: a pass before those that count, which takes out what the case before has left.
    #[serde(default)]
    pub first_pass: Option<Box<Outcome>>,
    /// Local memory in use at most, in bytes, as far as known.
    pub local_bytes_peak: u64,
    /// Bytes of packed pages: part of the local memory, or of a swap device beside it.
    #[serde(default)]
    pub pool_bytes: u64,
    /// Pages that have changed places, so far.
    #[serde(default)]
    pub sorted: u64,
    /// On swap: seconds that it took, and what swap of this machine brought in and took out meanwhile.
    #[serde(default)]
    pub seconds: f64,
    #[serde(default)]
    pub in_bytes: u64,
    #[serde(default)]
    pub out_bytes: u64,
}

struct Worker {
    memory: SharedSlice,
    /// What keeps the memory alive.
    owner: Owner,
    pages: usize,
    compressible: bool,
    mixed: bool,
    scattered: bool,
    /// Of [`Case::Phases`], so far.
    phases: usize,
    template: [u64; WORDS],
    /// Per page: which content was written last, how often its first word was incremented since, and the sum of its words.
    generations: Vec<u32>,
    increments: Vec<u32>,
    sums: Vec<u64>,
    random: u64,
    /// For each thread of the cases with several.
    walkers: Vec<Walker>,
    case: Duration,
    waits_only: bool,
}

/// Where a thread's last walk ended.
#[derive(Clone, Copy)]
struct Walker {
    page: usize,
    random: u64,
}

enum Owner {
    Far(std::sync::Arc<Pager>),
    Plain(Mapping),
}

/// Runs a worker until its input ends.
///
/// # Errors
/// When the memory cannot be had.
pub fn run(args: &WorkerArgs) -> Result<(), Box<dyn Error>> {
    if let Some(cpu) = args.cpu {
        netvm_sys::cpu::pin(cpu)?;
    }
    let mut worker = Worker::new(args)?;
    for line in std::io::stdin().lock().lines() {
        let outcome = match line?.as_str() {
            "fill" => worker.fill().map(|()| Outcome::default()),
            name => match Case::asked_for(name, worker.walkers.len()) {
                Some((case, threads)) => worker.measure(case, threads),
                None => Err(format!("unknown case {name}").into()),
            },
        };
        let outcome =
            outcome.unwrap_or_else(|error| Outcome { error: error.to_string(), ..Outcome::default() });
        let mut out = std::io::stdout().lock();
        serde_json::to_writer(&mut out, &outcome)?;
        writeln!(out)?;
        out.flush()?;
    }
    Ok(())
}

/// A finaliser with full avalanche (splitmix64).
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// Has so many threads do the same, told by their numbers.
fn at_once<T: Send>(
    threads: usize,
    run: impl Fn(usize) -> Result<T, String> + Sync,
) -> Result<Vec<T>, String> {
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || run(thread))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err("a thread of the worker panicked".to_owned()))
        };
        threads.into_iter().map(join).collect()
    })
}

impl Worker {
    fn new(args: &WorkerArgs) -> Result<Self, Box<dyn Error>> {
        let bytes = usize::try_from(args.size_bytes)?.next_multiple_of(CHUNK_BYTES);
        let (memory, owner) = match args.lender.is_empty() {
            false => {
                let pager = Pager::start(PagerConfig {
                    local_bytes: args.local_bytes,
                    lenders: args.lender.clone(),
                    replicas: args.replicas,
                    erasure: args.erasure,
                    encrypt_pages: args.encrypt_pages,
                    link: args.link,
                    fault_path: args.fault_path,
                    shards: args.shards,
                    area_bytes: 1 << 36,
                    name: "netvm bench".into(),
                    cpu: args.pager_cpu,
                    tier: args.tier.policy(),
                    fixed_order: args.fixed_order,
                    private_lender: args.private_lender,
                    ..PagerConfig::default()
                })?;
                let address = pager.area().start;
                pager.map(address, bytes, libc::PROT_READ | libc::PROT_WRITE)?;
                (pager.memory(address, bytes)?, Owner::Far(pager))
            }
            true => {
                let mapping = Mapping::anonymous(bytes)?;
                (mapping.shared(), Owner::Plain(mapping))
            }
        };
        let pages = bytes / PAGE_BYTES;
        Ok(Self {
            memory,
            owner,
            pages,
            compressible: args.compressible,
            mixed: args.mixed,
            scattered: args.scattered,
            phases: 0,
            template: std::array::from_fn(|word| mix(word as u64)),
            generations: vec![0; pages],
            increments: vec![0; pages],
            sums: vec![0; pages],
            random: 0x1234_5678_9ABC_DEF1,
            // Each begins in a part of its own.
            walkers: (0..args.threads.max(1))
                .map(|thread| Walker {
                    page: pages * thread / args.threads.max(1),
                    random: mix(thread as u64) | 1,
                })
                .collect(),
            case: Duration::from_millis(args.case_ms),
            waits_only: args.waits_only,
        })
    }

    /// Whether the second half of a page is zero.
    fn shrinks(&self, page: usize) -> bool {
        self.compressible || self.mixed && page / (CHUNK_BYTES / PAGE_BYTES) % 2 == 1
    }

    /// The word that belongs at a place now.
    fn expected(&self, page: usize, word: usize) -> u64 {
        if self.shrinks(page) && word >= WORDS / 2 {
            return 0;
        }
        let key = mix(((page as u64) << 32) | u64::from(self.generations[page]));
        let value = self.template[word] ^ key;
        if word == 0 { value.wrapping_add(u64::from(self.increments[page])) } else { value }
    }

    /// Overwrites a page with new content.
    fn write_page(&mut self, page: usize) -> Result<(), Box<dyn Error>> {
        self.generations[page] = self.generations[page].wrapping_add(1);
        self.increments[page] = 0;
        let key = mix(((page as u64) << 32) | u64::from(self.generations[page]));
        let random_words = if self.shrinks(page) { WORDS / 2 } else { WORDS };
        let mut bytes = [0; PAGE_BYTES];
        let mut sum = 0u64;
        // Vectors, and no copy of the template: the program's own time is part of what is measured.
        let slots = bytes.as_chunks_mut::<8>().0.iter_mut().zip(&self.template);
        for (slot, word) in slots.take(random_words) {
            sum = sum.wrapping_add(word ^ key);
            *slot = (word ^ key).to_ne_bytes();
        }
        self.sums[page] = sum;
        self.memory.write_from(page * PAGE_BYTES, &bytes).ok_or("page outside the memory")?;
        Ok(())
    }

    fn check_page(&self, page: usize, bytes: &mut [u8; PAGE_BYTES]) -> Result<(), Box<dyn Error>> {
        self.memory.read_into(page * PAGE_BYTES, bytes).ok_or("page outside the memory")?;
        let mut sum = 0u64;
        for word in bytes.as_chunks::<8>().0 {
            sum = sum.wrapping_add(u64::from_ne_bytes(*word));
        }
        if sum == self.sums[page] { Ok(()) } else { Err(format!("{WRONG_DATA} in page {page}").into()) }
    }

    fn fill(&mut self) -> Result<(), Box<dyn Error>> {
        (0..self.pages).try_for_each(|page| self.write_page(page))
    }

    fn faults(&self) -> Option<u64> {
        match &self.owner {
            Owner::Far(pager) => Some(pager.stats().faults),
            Owner::Plain(_) => None,
        }
    }

    fn measure(&mut self, case: Case, threads: usize) -> Result<Outcome, Box<dyn Error>> {
        let mut outcome = match case {
            Case::RandomRead | Case::RandomRmw => self.random(case)?,
            Case::RandomReadThreads => self.random_by_threads()?,
            Case::SeqRead | Case::SeqWrite => self.sequential(case)?,
            Case::Uniform
            | Case::UniformNamed
            | Case::Zipf
            | Case::Sequential
            | Case::Stride
            | Case::Chase => self.walk(case, threads)?,
            Case::Phases => {
                self.phases += 1;
                self.walk(case, 1)?
            }
        };
        if let Owner::Far(pager) = &self.owner {
            let stats = pager.stats();
            outcome.local_bytes_peak = stats.local_frames_peak * PAGE_BYTES as u64;
            outcome.pool_bytes = stats.pool_frames * PAGE_BYTES as u64;
            outcome.sorted = stats.pages_sorted;
        }
        Ok(outcome)
    }

    fn random(&mut self, case: Case) -> Result<Outcome, Box<dyn Error>> {
        let mut histogram = super::histogram()?;
        let faults_before = self.faults();
        let mut waits = faults_of_thread().1;
        let start = Instant::now();
        let mut accesses = 0u64;
        let mut now = start;
        // The time of an access is from the end of the last one, so that nothing is left out.
        while now.duration_since(start) < self.case {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            let page = (self.random >> 20) as usize % self.pages;
            let word = if case == Case::RandomRmw { 0 } else { (self.random & 0x1FF) as usize };
            let offset = page * PAGE_BYTES + word * 8;
            let mut bytes = [0; 8];
            self.memory.read_into(offset, &mut bytes).ok_or("page outside the memory")?;
            let value = u64::from_ne_bytes(bytes);
            if value != self.expected(page, word) {
                return Err(format!("{WRONG_DATA} in page {page}, word {word}").into());
            }
            if case == Case::RandomRmw {
                self.memory.write_from(offset, &value.wrapping_add(1).to_ne_bytes()).ok_or("page outside")?;
                self.increments[page] += 1;
                self.sums[page] = self.sums[page].wrapping_add(1);
            }
            let end = Instant::now();
            let nanos = end.duration_since(now).as_nanos() as u64;
            now = end;
            accesses += 1;
            if nanos >= FAULT_NS_MIN && self.has_waited(&mut waits) {
                histogram.saturating_record(nanos);
            }
        }
        let seconds = now.duration_since(start).as_secs_f64();
        let counted = match (faults_before, self.faults()) {
            // A read-modify-write of a protected page is two faults but one access.
            (Some(before), Some(after)) => (after - before).min(accesses),
            _ => histogram.len(),
        };
        Ok(Outcome {
            median: histogram.value_at_quantile(0.5) as f64 / 1000.0,
            p99: histogram.value_at_quantile(0.99) as f64 / 1000.0,
            n: histogram.len(),
            per_s: counted as f64 / seconds,
            ..Outcome::default()
        })
    }

    /// Whether the access that has just ended waited for a device, as far as that is asked for; `waits` is how often it was so before.
    fn has_waited(&self, waits: &mut u64) -> bool {
        if !self.waits_only {
            return true;
        }
        let before = std::mem::replace(waits, faults_of_thread().1);
        *waits > before
    }

    fn random_by_threads(&mut self) -> Result<Outcome, Box<dyn Error>> {
        let faults_before = self.faults();
        let start = Instant::now();
        let worker = &*self;
        let histograms = at_once(worker.walkers.len(), |thread| {
            // Whoever comes next goes other ways than all of these: an order that was seen before is no random one to a pager that learns.
            worker.random_reads(mix(worker.random ^ (thread as u64 + 1) << 32) | 1).map_err(|e| e.to_string())
        })?;
        let seconds = start.elapsed().as_secs_f64();
        self.random = mix(self.random) | 1;
        let mut histogram = super::histogram()?;
        histograms.iter().try_for_each(|one| histogram.add(one))?;
        let counted = match (faults_before, self.faults()) {
            (Some(before), Some(after)) => after - before,
            _ => histogram.len(),
        };
        Ok(Outcome {
            median: histogram.value_at_quantile(0.5) as f64 / 1000.0,
            p99: histogram.value_at_quantile(0.99) as f64 / 1000.0,
            n: histogram.len(),
            per_s: counted as f64 / seconds,
            ..Outcome::default()
        })
    }

    /// What one of several threads does.
    fn random_reads(&self, mut random: u64) -> Result<hdrhistogram::Histogram<u64>, Box<dyn Error>> {
        let mut histogram = super::histogram()?;
        let start = Instant::now();
        let mut now = start;
        while now.duration_since(start) < self.case {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let (page, word) = ((random >> 20) as usize % self.pages, (random & 0x1FF) as usize);
            let mut bytes = [0; 8];
            let offset = page * PAGE_BYTES + word * 8;
            self.memory.read_into(offset, &mut bytes).ok_or("page outside the memory")?;
            if u64::from_ne_bytes(bytes) != self.expected(page, word) {
                return Err(format!("{WRONG_DATA} in page {page}, word {word}").into());
            }
            let end = Instant::now();
            let nanos = end.duration_since(now).as_nanos() as u64;
            now = end;
            if nanos >= FAULT_NS_MIN {
                histogram.saturating_record(nanos);
            }
        }
        Ok(histogram)
    }

    /// The page that follows `page`.
    fn next_page(&self, case: Case, Walker { page, random }: &mut Walker, value: u64) -> usize {
        let page = *page;
        match case {
            Case::Sequential => (page + 1) % self.pages,
            Case::Stride => {
                let next = page + STRIDE_PAGES;
                if next < self.pages { next } else { (next + 1) % STRIDE_PAGES }
            }
            // A full cycle through the numbers below a power of two, less those that are no pages. The value is as expected, so it
            // adds nothing, which nobody knows before it is there.
            Case::Chase => {
                let numbers = self.pages.next_power_of_two() - 1;
                let mut next = page.wrapping_add((value ^ self.expected(page, 1)) as usize);
                loop {
                    next = next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223) & numbers;
                    if next < self.pages {
                        return next;
                    }
                }
            }
            _ => {
                *random ^= *random << 13;
                *random ^= *random >> 7;
                *random ^= *random << 17;
                let random = *random >> 11;
                if case == Case::Phases && !random.is_multiple_of(10) {
                    let part = self.pages / 4;
                    if self.scattered {
                        return (random / 10) as usize % part * 4 + self.phases * 3 % 4;
                    }
                    // Not in the order in which they were filled.
                    return (random / 10) as usize % part + part * (self.phases * 3 % 4);
                }
                if matches!(case, Case::Uniform | Case::UniformNamed | Case::Phases) {
                    return random as usize % self.pages;
                }
                let part = random as f64 / (1u64 << 53) as f64;
                let rank = (self.pages as f64).powf(part) as u64 - 1;
                // The often read ones lie anywhere.
                (rank.wrapping_mul(0x9E37_79B1) % self.pages as u64) as usize
            }
        }
    }

    /// Says that these pages are going to be read: to the pager, or to the kernel, which reads ahead what is swapped out.
    fn name(&self, pages: &[usize]) {
        match &self.owner {
            Owner::Far(pager) => {
                let start = pager.area().start;
                pager.will_need_each(pages.iter().map(|page| (start + page * PAGE_BYTES, 1)));
            }
            Owner::Plain(mapping) => {
                // A hint.
                for &page in pages {
                    mapping.will_need(page, PAGE_BYTES);
                }
            }
        }
    }

    /// What one thread walks: where it ends, and how many accesses that took.
    fn walk_alone(&self, case: Case, mut walker: Walker) -> Result<(Walker, u64), String> {
        const BETWEEN_CLOCKS: usize = 64;
        let mut accesses = 0u64;
        let names = case == Case::UniformNamed;
        let mut ahead = walker;
        let mut name = || {
            let pages: [usize; BETWEEN_CLOCKS] = std::array::from_fn(|_| {
                let page = ahead.page;
                ahead.page = self.next_page(case, &mut ahead, 0);
                page
            });
            self.name(&pages);
        };
        let start = Instant::now();
        if names {
            name();
        }
        while start.elapsed() < self.case {
            if names {
                name();
            }
            for _ in 0..BETWEEN_CLOCKS {
                let (page, mut bytes) = (walker.page, [0; 8]);
                self.memory.read_into(page * PAGE_BYTES + 8, &mut bytes).ok_or("page outside the memory")?;
                let value = u64::from_ne_bytes(bytes);
                if value != self.expected(page, 1) {
                    return Err(format!("{WRONG_DATA} in page {page}"));
                }
                walker.page = self.next_page(case, &mut walker, value);
            }
            accesses += BETWEEN_CLOCKS as u64;
        }
        Ok((walker, accesses))
    }

    /// Single words, timed over all: by so many threads the time that each of them takes for one.
    fn walk(&mut self, case: Case, threads: usize) -> Result<Outcome, Box<dyn Error>> {
        let faults_before = self.faults();
        let start = Instant::now();
        let walked = match threads {
            1 => vec![self.walk_alone(case, self.walkers[0])?],
            _ => at_once(threads, |thread| self.walk_alone(case, self.walkers[thread]))?,
        };
        let seconds = start.elapsed().as_secs_f64();
        let mut accesses = 0;
        for (walker, (now, of_one)) in self.walkers.iter_mut().zip(walked) {
            *walker = now;
            accesses += of_one;
        }
        let each = seconds * threads as f64 / accesses as f64;
        let faults = faults_before.and_then(|before| Some(self.faults()? - before));
        Ok(Outcome {
            median: each * 1e6,
            p99: each * 1e6,
            n: accesses,
            per_s: faults.unwrap_or(0) as f64 / seconds,
            ..Outcome::default()
        })
    }

    fn sequential(&mut self, case: Case) -> Result<Outcome, Box<dyn Error>> {
        let first_pass = Some(Box::new(self.passes(case, Duration::ZERO)?));
        Ok(Outcome { first_pass, ..self.passes(case, self.case)? })
    }

    /// All pages in order, until the time is over. Whole passes only, so that what is still local from the last one weighs the same
    /// every time.
    fn passes(&mut self, case: Case, time: Duration) -> Result<Outcome, Box<dyn Error>> {
        let chunk_pages = CHUNK_BYTES / PAGE_BYTES;
        let mut histogram = super::histogram()?;
        let mut bytes = [0; PAGE_BYTES];
        let mut walked = 0u64;
        let start = Instant::now();
        while walked == 0 || start.elapsed() < time {
            for chunk in 0..self.pages / chunk_pages {
                let begun = Instant::now();
                for page in chunk * chunk_pages..(chunk + 1) * chunk_pages {
                    match case {
                        Case::SeqWrite => self.write_page(page)?,
                        _ => self.check_page(page, &mut bytes)?,
                    }
                }
                histogram.saturating_record(begun.elapsed().as_nanos() as u64);
            }
            walked += self.pages as u64;
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok(Outcome {
            median: (walked as f64 * PAGE_BYTES as f64) / seconds / 1e9,
            p99: CHUNK_BYTES as f64 / histogram.value_at_quantile(0.99) as f64,
            n: walked,
            per_s: walked as f64 / seconds,
            ..Outcome::default()
        })
    }
}
