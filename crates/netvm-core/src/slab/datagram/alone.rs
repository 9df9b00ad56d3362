//! Reads that whoever wants the page waits for by itself, over a socket that nobody else uses meanwhile.

use super::{Answer, Doubtful, Header, Kind, PAGE_BYTES, Place, Read, Reads, Request};

/// Whoever waits looks again and again for twice as long as an answer takes, if that takes at most so long; else it sleeps.
const LOOKED_FOR_NS_MAX: u64 = 50_000;
/// Where longer than this is to be waited nobody does by itself: others may have to wait for its end.
const PATIENCE_NS_MAX: u64 = 5_000_000;

/// Such a read.
#[derive(Debug)]
pub struct Alone {
    read: Read<()>,
    key: [u8; 16],
    part_bytes: u32,
    /// For how long to wait,
    pub patience_ns: u64,
    /// and for how long of that to look again and again, before sleeping.
    pub look_ns: u64,
    by_kernel: u8,
    by_process: u8,
    late: Option<u64>,
}

/// What is remembered of it meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    sequence: u64,
    pages: u32,
    asked_ns: u64,
}

/// How it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All is there.
    Whole,
    /// All has come, and is not what it must be.
    Wrong,
    /// Nobody is there, or the session is to be asked.
    Refused,
    /// Something has not come in time.
    Late,
}

/// What [`Reads::ended_alone`] is to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// How it has ended.
    pub ended: Ended,
    /// Answers of the lender's kernel,
    pub by_kernel: u8,
    /// and of its process.
    pub by_process: u8,
    /// The sequence of an answer to something else that has come meanwhile, the last one.
    pub late: Option<u64>,
}

impl Alone {
    /// What is to be remembered.
    pub fn begun(&self) -> Begun {
        let Read { sequence, bytes, asked_ns, .. } = self.read;
        Begun { sequence, pages: bytes / PAGE_BYTES, asked_ns }
    }

    /// What to send for it.
    pub fn requests(&self) -> impl Iterator<Item = Request> + use<> {
        self.read.requests(self.key, self.part_bytes)
    }

    /// The bytes that come next if nothing is lost or overtaken; not to be asked when all are there.
    pub fn expected(&self) -> Place {
        Place::of(self.read.missing.trailing_zeros(), self.part_bytes)
    }

    /// What a datagram of so many bytes is, with this header. [`Alone::arrived`] is to be told of bytes.
    pub fn answer(&mut self, header: &Header, datagram_bytes: usize) -> Answer {
        match self.read.page_of(header.sequence) {
            Some(page) => self.read.judge(page, self.part_bytes, header, datagram_bytes),
            None => {
                if header.kind != Kind::Read {
                    self.late = Some(header.sequence);
                }
                Answer::Nothing
            }
        }
    }

    /// The bytes of this place are there; true if those were all.
    pub fn arrived(&mut self, place: Place, kind: Kind) -> bool {
        self.read.missing &= !(1 << place.number(self.part_bytes));
        match kind {
            Kind::ByKernel => self.by_kernel += 1,
            _ => self.by_process += 1,
        }
        self.read.missing == 0
    }

    /// What is to be told of it.
    pub fn report(&self, ended: Ended) -> Report {
        let Self { by_kernel, by_process, late, .. } = *self;
        Report { ended, by_kernel, by_process, late }
    }
}

impl Report {
    /// As two numbers,
    pub const fn words(self) -> [u64; 2] {
        let late = match self.late {
            Some(late) => late,
            None => 0,
        };
        let answers = (self.by_kernel as u64) << 8 | (self.by_process as u64) << 16;
        [answers | (1 + self.ended as u64), late]
    }

    /// of which the first is 0 when there is none.
    pub const fn from_words([word, late]: [u64; 2]) -> Option<Self> {
        let ended = match word & 0xFF {
            1 => Ended::Whole,
            2 => Ended::Wrong,
            3 => Ended::Refused,
            4 => Ended::Late,
            _ => return None,
        };
        // One of all sequences is never known to be late.
        let late = if late == 0 { None } else { Some(late) };
        Some(Self { ended, by_kernel: (word >> 8) as u8, by_process: (word >> 16) as u8, late })
    }
}

impl<T: Copy> Reads<T> {
    /// Begins a read that whoever wants it waits for, of which [`Reads::can`] has been true, if that does not take too long. [`Reads::ended_alone`] is to be told of its end.
    pub fn ask_alone(&mut self, now_ns: u64, slab: u32, offset: u32, bytes: u32) -> Option<Alone> {
        let patience_ns = self.trust.patience_ns();
        if patience_ns > PATIENCE_NS_MAX {
            return None;
        }
        let read = self.begin(now_ns, 0, slab, offset, bytes, ());
        let mean_ns = self.trust.mean_ns();
        Some(Alone {
            read,
            key: self.key,
            part_bytes: self.part_bytes,
            patience_ns,
            look_ns: if mean_ns <= LOOKED_FOR_NS_MAX { 2 * mean_ns } else { 0 },
            by_kernel: 0,
            by_process: 0,
            late: None,
        })
    }

    /// A read that began then has ended `ns` nanoseconds later. One of another session, which had a clock of its own, is nothing.
    pub fn ended_alone(&mut self, begun: Begun, ns: u64, report: Report) {
        let Begun { sequence, pages, asked_ns } = begun;
        let since_first = |sequence: u64| sequence.wrapping_sub(self.first_sequence);
        if since_first(sequence) >= since_first(self.next_sequence) {
            return;
        }
        let now_ns = asked_ns.saturating_add(ns);
        self.counts.by_kernel += u64::from(report.by_kernel);
        self.counts.by_process += u64::from(report.by_process);
        if let Some(late) = report.late {
            self.came_late(now_ns, late);
        }
        if report.ended != Ended::Whole {
            self.counts.given_up += 1;
        }
        match report.ended {
            Ended::Whole => {
                self.trust.heard(now_ns, report.by_process == 0);
                self.trust.answered(ns);
            }
            Ended::Wrong => self.trust.wrong(now_ns, asked_ns),
            Ended::Refused => self.trust.lost(now_ns, asked_ns),
            Ended::Late => {
                self.doubt(now_ns);
                self.trust.late();
                self.doubtful.push_back(Doubtful { sequence, count: pages, asked_ns });
            }
        }
    }
}
