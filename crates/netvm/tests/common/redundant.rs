//! Far memory that several lenders hold, what must be in it, and lenders that misbehave.

use super::{Random, Serving};
use netvm::lender::LinkChoice;
use netvm::pager::{LOCAL_BYTES_MIN, Pager, PagerConfig};
use netvm::stats::PagerStats;
use netvm_core::limits::{HEADER_BYTES, HELLO_BYTES};
use netvm_core::wire::{Header, Kind};
use netvm_sys::shared::SharedSlice;
use std::cell::Cell;
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub const PAGE: usize = 4096;
pub const MEMORY: usize = 4 * LOCAL_BYTES_MIN as usize;
pub const SLABS: u64 = 64;

pub fn start_with(lenders: &[&str], change: impl FnOnce(&mut PagerConfig)) -> (Arc<Pager>, SharedSlice) {
    let mut config = PagerConfig {
        link: LinkChoice::Socket,
        local_bytes: LOCAL_BYTES_MIN,
        lenders: lenders.iter().map(|&lender| lender.to_owned()).collect(),
        area_bytes: 1 << 34,
        ..PagerConfig::default()
    };
    change(&mut config);
    let pager = Pager::start(config).unwrap();
    let address = pager.area().start;
    pager.map(address, MEMORY, 3).unwrap();
    let memory = pager.memory(address, MEMORY).unwrap();
    (pager, memory)
}

/// A lender until the process ends: pagers whose memory is mapped have no end either, and end the process when it is lost.
pub fn lend() -> &'static Serving {
    Box::leak(Box::new(Serving::new(SLABS)))
}

/// Far memory and what must be in it: the first word of each page.
pub struct Model {
    pub memory: SharedSlice,
    words: Vec<u64>,
    random: Random,
    /// The longest that one access took.
    pub slowest: Cell<Duration>,
}

impl Model {
    pub fn new(memory: SharedSlice, seed: u64) -> Self {
        let mut model = Self {
            memory,
            words: vec![0; memory.len() / PAGE],
            random: Random::new(seed),
            slowest: Cell::default(),
        };
        (0..model.words.len()).for_each(|page| model.write(page));
        model
    }

    pub fn write(&mut self, page: usize) {
        // Noise, so that no two pages look alike.
        let word = self.random.next();
        let mut bytes = [0; PAGE];
        let mut noise = Random::new(word);
        bytes.as_chunks_mut().0.iter_mut().for_each(|chunk| *chunk = noise.next().to_le_bytes());
        bytes[..8].copy_from_slice(&word.to_le_bytes());
        self.timed(|| self.memory.write_from(page * PAGE, &bytes).unwrap());
        self.words[page] = word;
    }

    pub fn check(&self, page: usize) {
        let mut word = [0; 8];
        self.timed(|| self.memory.read_into(page * PAGE, &mut word).unwrap());
        assert_eq!(u64::from_le_bytes(word), self.words[page], "page {page}");
    }

    pub fn timed(&self, access: impl FnOnce()) {
        let started = Instant::now();
        access();
        self.slowest.set(self.slowest.get().max(started.elapsed()));
    }

    #[track_caller]
    pub fn must_not_have_stalled_for(&self, limit: Duration) {
        println!("slowest access: {:?}", self.slowest.get());
        assert!(self.slowest.get() < limit, "{:?}", self.slowest.get());
    }

    pub fn churn(&mut self, steps: usize) {
        for _ in 0..steps {
            let page = self.random.next() as usize % self.words.len();
            self.check(page);
            if self.random.next().is_multiple_of(3) {
                self.write(page);
            }
        }
    }

    pub fn check_all(&self) {
        (0..self.words.len()).for_each(|page| self.check(page));
    }
}

/// Goes on until the counters are as wanted.
#[track_caller]
pub fn until(pager: &Pager, model: &mut Model, what: &str, so: impl Fn(&PagerStats) -> bool) -> PagerStats {
    let started = Instant::now();
    loop {
        model.churn(500);
        let stats = pager.stats();
        if so(&stats) {
            return stats;
        }
        assert!(started.elapsed() < Duration::from_secs(30), "never: {what}: {stats:?}");
    }
}

/// What a proxy does with the bytes of the lender.
pub const PASS: u32 = 0;
pub const HOLD: u32 = 1;
pub const DELAY: u32 = 2;
pub const ALTER: u32 = 3;
pub const STALE: u32 = 4;

/// Passes bytes on, as `mode` says; pages are in units of so many bytes there.
pub fn proxy(lender: &str, mode: &Arc<AtomicU32>, unit: usize) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (lender, mode) = (lender.to_owned(), Arc::clone(mode));
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let far = TcpStream::connect(&lender).unwrap();
            let _ = (near.set_nodelay(true), far.set_nodelay(true));
            let ways =
                [(near.try_clone(), far.try_clone(), false), (far.try_clone(), near.try_clone(), true)];
            for (from, to, answers) in ways {
                let (from, to, mode) = (from.unwrap(), to.unwrap(), Arc::clone(&mode));
                std::thread::spawn(move || match answers {
                    true => pass_answers(from, to, &mode, unit),
                    false => drop(pass_requests(from, to, &mode, unit)),
                });
            }
        }
    });
    address
}

pub fn hold_or_delay(mode: &AtomicU32) {
    while mode.load(Ordering::Relaxed) == HOLD {
        std::thread::sleep(Duration::from_millis(5));
    }
    if mode.load(Ordering::Relaxed) == DELAY {
        std::thread::sleep(Duration::from_millis(40));
    }
}

/// Request by request; of each page it keeps what was written first.
pub fn pass_requests(
    mut from: TcpStream,
    mut to: TcpStream,
    mode: &AtomicU32,
    unit: usize,
) -> std::io::Result<()> {
    let mut hello = [0; HELLO_BYTES];
    from.read_exact(&mut hello)?;
    to.write_all(&hello)?;
    let mut first = HashMap::new();
    let (mut bytes, mut payload) = ([0; HEADER_BYTES], Vec::new());
    while from.read_exact(&mut bytes).is_ok() {
        let header = Header::decode(&bytes).unwrap();
        payload.resize(header.payload_bytes as usize, 0);
        from.read_exact(&mut payload)?;
        hold_or_delay(mode);
        if header.kind == Kind::Write {
            for (page, contents) in payload.chunks_mut(unit).enumerate() {
                let old = first.entry((header.handle, header.offset as usize / unit + page));
                let old = old.or_insert_with(|| contents.to_vec());
                if mode.load(Ordering::Relaxed) == STALE {
                    contents.copy_from_slice(old);
                }
            }
        }
        to.write_all(&bytes)?;
        to.write_all(&payload)?;
    }
    to.shutdown(Shutdown::Write)
}

pub fn pass_answers(mut from: TcpStream, mut to: TcpStream, mode: &AtomicU32, unit: usize) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        hold_or_delay(mode);
        if mode.load(Ordering::Relaxed) == ALTER && count > unit {
            // The end of a page, very likely: what is read comes after its header.
            bytes[count - 1] ^= 1;
        }
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// It is found while pages are copied, before anybody has asked for one: of lenders by these addresses, with redundancy that `change`
/// sets, the first begins to lie and the second ends. All others answer late for a while, so that the first is one that is asked.
pub fn a_liar_is_blamed_by_a_repair(
    lenders: &[&'static Serving],
    unit: usize,
    change: impl FnOnce(&mut PagerConfig),
) {
    let (mode, others) = (Arc::new(AtomicU32::new(PASS)), Arc::new(AtomicU32::new(PASS)));
    let address = |(index, lender): (usize, &&Serving)| match index {
        0 => proxy(&lender.address, &mode, unit),
        1 => lender.address.clone(),
        _ => proxy(&lender.address, &others, unit),
    };
    let addresses: Vec<String> = lenders.iter().enumerate().map(address).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let (pager, memory) = start_with(&addresses, change);
    let mut model = Model::new(memory, 11);
    model.churn(3000);
    others.store(DELAY, Ordering::Relaxed);
    model.churn(100);
    others.store(PASS, Ordering::Relaxed);
    // What is under way is over.
    std::thread::sleep(Duration::from_millis(300));
    mode.store(ALTER, Ordering::Relaxed);
    lenders[1].stop.stop();
    lenders[1].stop.stop();
    let end = Instant::now() + Duration::from_secs(20);
    while pager.stats().wrong_pages == 0 {
        assert!(Instant::now() < end, "{:?}", pager.stats());
        std::thread::sleep(Duration::from_millis(20));
    }
    mode.store(PASS, Ordering::Relaxed);
    model.check_all();
    model.churn(3000);
    model.check_all();
    let stats = pager.stats();
    assert_eq!((stats.wrong_pages, stats.lenders_lost), (1, 2), "{stats:?}");
}
