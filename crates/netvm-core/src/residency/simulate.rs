//! How often each way to choose what is evicted would have missed, on a trace of accesses: to compare the pager's with others.

use alloc::collections::{BinaryHeap, VecDeque};
use alloc::vec;
use alloc::vec::Vec;

/// A way to choose which page leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// The one that came first.
    Fifo,
    /// The same, and the last sixteenth of the local memory holds what has just been evicted: that comes back without I/O (segmented FIFO:
    /// Turner and Levy, SIGMETRICS 1981).
    FifoVictims,
    /// The same, and what was needed again soon after its eviction is passed over twice: the pager's.
    Spared,
    /// First come, but whoever was used since the hand was there last stays: needs accessed bits.
    Clock,
    /// A small queue for newcomers, a main one for those that were used again, and a memory of who left (Yang et al., SOSP 2023): needs
    /// accessed bits.
    S3Fifo,
    /// The one that was used longest ago: needs to see each access.
    Lru,
    /// The one that is used again last (Belady, 1966): needs the future.
    Optimal,
}

impl Eviction {
    /// All of them, those that need least first.
    pub const ALL: [Self; 7] =
        [Self::Fifo, Self::FifoVictims, Self::Spared, Self::Clock, Self::S3Fifo, Self::Lru, Self::Optimal];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fifo => "FIFO",
            Self::FifoVictims => "FIFO + victims",
            Self::Spared => "netvm",
            Self::Clock => "CLOCK",
            Self::S3Fifo => "S3-FIFO",
            Self::Lru => "LRU",
            Self::Optimal => "optimal",
        }
    }
}

/// One part in so many of the local memory holds victims.
const VICTIMS_PART: usize = 16;
/// How often the pager passes a page over,
const SPARED: u8 = 2;
/// and that it comes back before one in so many local pages has been evicted is soon.
const SOON_PART: u64 = 2;

/// Accesses to pages, in order.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Numbered from 0 on, without gaps.
    accesses: Vec<u32>,
    pages: usize,
}

impl Trace {
    /// Of these pages. What is accessed several times in a row counts once.
    pub fn new(pages: &[u32]) -> Self {
        let mut known = pages.to_vec();
        known.sort_unstable();
        known.dedup();
        let mut accesses: Vec<u32> =
            pages.iter().filter_map(|page| known.binary_search(page).ok()).map(|page| page as u32).collect();
        accesses.dedup();
        Self { accesses, pages: known.len() }
    }

    /// Accesses, without repetitions in a row.
    pub fn len(&self) -> usize {
        self.accesses.len()
    }

    /// Whether nothing was accessed.
    pub fn is_empty(&self) -> bool {
        self.accesses.is_empty()
    }

    /// Different pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// How many accesses do not find their page among `frames` (at least 1) local ones, the first to each page included.
    pub fn misses(&self, eviction: Eviction, frames: usize) -> u64 {
        let frames = frames.max(1);
        match eviction {
            Eviction::Fifo => self.queue(frames, 0, false),
            Eviction::FifoVictims => self.queue(frames, frames / VICTIMS_PART, false),
            Eviction::Spared => self.queue(frames, frames / VICTIMS_PART, true),
            Eviction::Clock => self.clock(frames),
            Eviction::S3Fifo => self.s3_fifo(frames),
            Eviction::Lru => self.lru(frames),
            Eviction::Optimal => self.optimal(frames),
        }
    }

    fn queue(&self, frames: usize, victims_max: usize, spares: bool) -> u64 {
        #[derive(Clone, Copy, PartialEq)]
        enum Place {
            Away,
            Mapped,
            Victim,
        }
        let mapped_max = (frames - victims_max).max(1);
        let mut places = vec![Place::Away; self.pages];
        let mut spared = vec![0u8; self.pages];
        // When each page was evicted, from 1 on.
        let mut evicted = vec![0u64; self.pages];
        let (mut mapped, mut victims) = (VecDeque::new(), VecDeque::new());
        let (mut clock, mut misses) = (0u64, 0);
        for &page in &self.accesses {
            let index = page as usize;
            let soon = match places[index] {
                Place::Mapped => continue,
                Place::Victim => {
                    victims.retain(|&victim| victim != page);
                    true
                }
                Place::Away => {
                    misses += 1;
                    evicted[index] > 0 && clock - evicted[index] < frames as u64 / SOON_PART
                }
            };
            while mapped.len() >= mapped_max {
                let Some(oldest) = mapped.pop_front() else { break };
                let oldest_index = oldest as usize;
                if spared[oldest_index] > 0 {
                    spared[oldest_index] -= 1;
                    mapped.push_back(oldest);
                    continue;
                }
                clock += 1;
                evicted[oldest_index] = clock;
                places[oldest_index] = Place::Away;
                if victims_max > 0 {
                    places[oldest_index] = Place::Victim;
                    victims.push_back(oldest);
                    if victims.len() > victims_max
                        && let Some(gone) = victims.pop_front()
                    {
                        places[gone as usize] = Place::Away;
                    }
                }
            }
            places[index] = Place::Mapped;
            spared[index] = if spares && soon { SPARED } else { 0 };
            mapped.push_back(page);
        }
        misses
    }

    fn clock(&self, frames: usize) -> u64 {
        let (mut used, mut local) = (vec![false; self.pages], vec![false; self.pages]);
        let mut ring = VecDeque::new();
        let mut misses = 0;
        for &page in &self.accesses {
            used[page as usize] = true;
            if local[page as usize] {
                continue;
            }
            misses += 1;
            while ring.len() >= frames {
                let Some(oldest) = ring.pop_front() else { break };
                if core::mem::take(&mut used[oldest as usize]) {
                    ring.push_back(oldest);
                } else {
                    local[oldest as usize] = false;
                }
            }
            // It is used for the first time; the hand looks for a second.
            (local[page as usize], used[page as usize]) = (true, false);
            ring.push_back(page);
        }
        misses
    }

    fn s3_fifo(&self, frames: usize) -> u64 {
        #[derive(Clone, Copy, PartialEq)]
        enum Place {
            Away,
            Small,
            Main,
            Ghost,
        }
        let small_max = (frames / 10).max(1);
        let main_max = frames.saturating_sub(small_max);
        let (mut places, mut uses) = (vec![Place::Away; self.pages], vec![0u8; self.pages]);
        let (mut small, mut main, mut ghost) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        let mut misses = 0;
        for &page in &self.accesses {
            let index = page as usize;
            if matches!(places[index], Place::Small | Place::Main) {
                uses[index] = (uses[index] + 1).min(3);
                continue;
            }
            misses += 1;
            while small.len() + main.len() >= frames {
                if small.len() >= small_max || main.is_empty() {
                    let Some(oldest) = small.pop_front() else { break };
                    let oldest_index = oldest as usize;
                    if core::mem::take(&mut uses[oldest_index]) > 0 && main_max > 0 {
                        places[oldest_index] = Place::Main;
                        main.push_back(oldest);
                    } else {
                        places[oldest_index] = Place::Ghost;
                        ghost.push_back(oldest);
                        if ghost.len() > main_max.max(1)
                            && let Some(gone) = ghost.pop_front()
                            && places[gone as usize] == Place::Ghost
                        {
                            places[gone as usize] = Place::Away;
                        }
                    }
                } else if let Some(oldest) = main.pop_front() {
                    let oldest_index = oldest as usize;
                    if uses[oldest_index] > 0 {
                        uses[oldest_index] -= 1;
                        main.push_back(oldest);
                    } else {
                        places[oldest_index] = Place::Away;
                    }
                }
            }
            uses[index] = 0;
            if places[index] == Place::Ghost && main_max > 0 {
                places[index] = Place::Main;
                main.push_back(page);
            } else {
                places[index] = Place::Small;
                small.push_back(page);
            }
        }
        misses
    }

    fn lru(&self, frames: usize) -> u64 {
        // A ring of neighbours, with a head behind the last page.
        let head = self.pages;
        let mut next: Vec<usize> = vec![usize::MAX; self.pages + 1];
        let mut before = next.clone();
        (next[head], before[head]) = (head, head);
        let (mut local, mut misses) = (0, 0);
        for &page in &self.accesses {
            let page = page as usize;
            if next[page] == usize::MAX {
                misses += 1;
                if local == frames {
                    let oldest = before[head];
                    let newer = before[oldest];
                    (next[newer], before[head]) = (head, newer);
                    (next[oldest], before[oldest]) = (usize::MAX, usize::MAX);
                } else {
                    local += 1;
                }
            } else {
                let (older, newer) = (next[page], before[page]);
                (next[newer], before[older]) = (older, newer);
            }
            let first = next[head];
            (next[head], before[page], next[page], before[first]) = (page, head, first, page);
        }
        misses
    }

    fn optimal(&self, frames: usize) -> u64 {
        // When the page of each access is accessed next.
        let mut next_use = vec![usize::MAX; self.accesses.len()];
        let mut last = vec![usize::MAX; self.pages];
        for (at, &page) in self.accesses.iter().enumerate().rev() {
            next_use[at] = core::mem::replace(&mut last[page as usize], at);
        }
        // The next use of each local page; what the heap says else is old.
        let mut current = vec![None; self.pages];
        let mut heap = BinaryHeap::new();
        let (mut local, mut misses) = (0, 0);
        for (at, &page) in self.accesses.iter().enumerate() {
            if current[page as usize].is_none() {
                misses += 1;
                if local == frames {
                    while let Some((when, victim)) = heap.pop() {
                        let place: &mut Option<usize> = &mut current[victim as usize];
                        if *place == Some(when) {
                            *place = None;
                            break;
                        }
                    }
                } else {
                    local += 1;
                }
            }
            current[page as usize] = Some(next_use[at]);
            heap.push((next_use[at], page));
        }
        misses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(seed: u64, accesses: usize, pages: u64) -> Vec<u32> {
        let mut state = seed;
        let mut below = |end: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % end
        };
        // Some are hot.
        (0..accesses)
            .map(|_| if below(2) == 0 { below(pages / 8 + 1) } else { below(pages) } as u32)
            .collect()
    }

    /// As they are told in textbooks.
    fn textbook(trace: &Trace, eviction: Eviction, frames: usize) -> u64 {
        let (mut local, mut misses): (Vec<u32>, _) = (Vec::new(), 0);
        for (at, &page) in trace.accesses.iter().enumerate() {
            if let Some(place) = local.iter().position(|&other| other == page) {
                if eviction == Eviction::Lru {
                    local.remove(place);
                    local.push(page);
                }
                continue;
            }
            misses += 1;
            if local.len() == frames {
                let leaves = match eviction {
                    Eviction::Optimal => {
                        let later = &trace.accesses[at..];
                        let next =
                            |page: &u32| later.iter().position(|other| other == page).unwrap_or(usize::MAX);
                        (0..frames).max_by_key(|&place| next(&local[place])).unwrap()
                    }
                    _ => 0,
                };
                local.remove(leaves);
            }
            local.push(page);
        }
        misses
    }

    #[test]
    fn queues_and_heaps_do_what_textbooks_say() {
        for seed in 0..20 {
            let trace = Trace::new(&random(seed, 600, 40));
            for frames in [1, 2, 3, 7, 20, 39] {
                for eviction in [Eviction::Fifo, Eviction::Lru, Eviction::Optimal] {
                    let found = trace.misses(eviction, frames);
                    assert_eq!(found, textbook(&trace, eviction, frames), "{eviction:?} {frames} {seed}");
                }
            }
        }
    }

    #[test]
    fn nobody_beats_the_future_and_everybody_misses_each_page_once() {
        for seed in 0..10 {
            let trace = Trace::new(&random(seed, 5000, 300));
            for frames in [1, 10, 75, 150, 299, 300, 400] {
                let best = trace.misses(Eviction::Optimal, frames);
                for eviction in Eviction::ALL {
                    let misses = trace.misses(eviction, frames);
                    assert!(misses >= best && misses <= trace.len() as u64, "{eviction:?} {frames}");
                    // With room for victims, what is mapped may be fewer pages than there are.
                    if frames >= trace.pages() && eviction != Eviction::S3Fifo {
                        assert_eq!(misses, trace.pages() as u64, "{eviction:?} {frames}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_hot_is_spared() {
        // Ten hot pages between pages that are used once.
        let accesses: Vec<u32> =
            (0..20_000u32).map(|at| if at % 2 == 0 { at / 2 % 10 } else { 10 + at }).collect();
        let trace = Trace::new(&accesses);
        let misses = |eviction| trace.misses(eviction, 64);
        assert!(misses(Eviction::Spared) < misses(Eviction::Fifo), "{:?}", Eviction::ALL.map(misses));
        assert_eq!(misses(Eviction::Lru), 10_010);
        // A loop over a little more than there is room for defeats whoever keeps the newest.
        let round: Vec<u32> = (0..5000u32).map(|at| at % 70).collect();
        let trace = Trace::new(&round);
        assert_eq!(trace.misses(Eviction::Lru, 64), 5000);
        assert!(trace.misses(Eviction::Optimal, 64) < 1000);
    }
}
