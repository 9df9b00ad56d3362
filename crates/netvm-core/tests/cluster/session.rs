//! One session between two nodes: both ends post whatever comes to mind, and check what comes of it.

use netvm_core::atomic::{Atomic, AtomicOp, Width};
use netvm_core::endpoint::{
    Answer, Endpoint, Event, Exports, OpError, Payload, Place, PostError, Want, WriteOptions,
};
use netvm_core::key::{Access, RemoteKey, Rights};
use netvm_core::limits::{HEADER_BYTES, OPS_MAX};
use netvm_core::notify::Notify;
use netvm_core::segment::{ExportTable, ImportTable, SegmentId};
use netvm_core::sim::{Pipe, Random};
use netvm_core::wire::{Header, Status};

use crate::node::{ADDED, CHAIN, Node, WORDS};
use crate::truth::{Truth, value_of};

const KEY: RemoteKey = RemoteKey::from_bytes([3; 16]);
const NUMBERS: u32 = 50;
const ASIDE_BYTES: u64 = 64;
const ASIDE: u8 = 0x5A;
/// A session is cut once in so many visits, and as often ended by one side.
const ENDS_ONCE_IN: u64 = 1000;

/// What all sessions have posted, and what came of it.
#[derive(Debug, Default)]
pub struct Counts {
    pub posted: u64,
    pub done: u64,
    pub refused: u64,
    pub lost: u64,
    pub unknown: u64,
    writes: u64,
    reads: u64,
    atomics: u64,
    notices: u64,
    fences: u64,
    flushes: u64,
    calls: u64,
    imports: u64,
    unimports: u64,
    revocations: u64,
    cut: u64,
    goodbyes: u64,
    full: u64,
}

impl Counts {
    /// A test that tries nothing passes: each kind has its part.
    pub fn check_that_all_was_tried(&self) {
        let many = [self.writes, self.reads, self.atomics, self.notices, self.fences];
        assert!(many.iter().all(|&count| count > self.posted / 50), "{self:?}");
        let few = [self.flushes, self.calls, self.imports, self.unimports, self.full];
        assert!(few.iter().all(|&count| count > self.posted / 5000), "{self:?}");
        let ends = [self.revocations, self.cut, self.goodbyes, self.lost, self.unknown, self.refused];
        assert!(ends.iter().all(|&count| count > self.posted / 100_000), "{self:?}");
    }
}

/// A buffer for so many bytes, with something that nobody writes.
fn fill(buffer: &mut Vec<u8>, len: usize) {
    buffer.clear();
    buffer.resize(len, 0xEE);
}

/// An operation of ours that waits for its end.
#[derive(Clone, Copy, Debug)]
enum Pending {
    Write {
        number: u64,
        may_be_refused: bool,
    },
    Read {
        cell: usize,
        least: u64,
    },
    Load {
        cell: usize,
        least: u64,
    },
    Atomic {
        word: usize,
        atomic: Atomic,
    },
    Flush {
        next: u64,
        must_fail: bool,
    },
    Call {
        bytes: usize,
    },
    Import {
        what: Segment,
    },
    Unimport,
    /// A read of the segment aside, when its owner had taken it away so often.
    Aside {
        revocations: u32,
    },
    /// A read of a handle that was given back.
    Stale,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Segment {
    Log,
    Words,
    Aside,
}

impl Segment {
    fn name(self) -> &'static str {
        ["log", "words", "aside"][self as usize]
    }
}

/// The segment that comes and goes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Aside {
    Closed,
    Opening,
    Open(u32),
    Closing(u32),
    /// Given back: whoever reads it now is refused, as shall be tried.
    Given(u32),
    Trying,
}

/// One end: an endpoint, what it exports, what it has under way.
struct End {
    node: usize,
    endpoint: Endpoint,
    exports: ExportTable,
    imports: ImportTable,
    aside: SegmentId,
    /// How often it has taken the segment aside away.
    revocations: u32,
    locals: Vec<Vec<u8>>,
    pending: Vec<Option<Pending>>,
    log: Option<u32>,
    words: Option<u32>,
    theirs: Aside,
    /// What was last seen in the other node's chain.
    seen: u64,
    flushing: bool,
    /// Writes that will be refused: since the last flush was posted, and before.
    refused_since: bool,
    refused_before: bool,
    flush_failed: bool,
    was_refused: bool,
}

/// What a peer may reach at one end, as the endpoint sees it.
struct View<'a> {
    exports: &'a ExportTable,
    imports: &'a mut ImportTable,
    truth: &'a mut Truth,
    node: &'a mut Node,
}

impl Exports for View<'_> {
    fn check(&mut self, handle: u32, offset: u64, bytes: u32, access: Access) -> Result<(), Status> {
        self.imports.check(self.exports, handle, offset, bytes, access).map(|_| ())
    }
    fn import(&mut self, name: &str, key: &RemoteKey) -> Result<(u32, u64, Rights), Status> {
        self.imports.import(self.exports, name, key)
    }
    fn unimport(&mut self, handle: u32) {
        self.imports.unimport(handle);
    }
    fn atomic(&mut self, handle: u32, offset: u64, atomic: &Atomic) -> Result<u64, Status> {
        let id = self.imports.check_atomic(self.exports, handle, offset, atomic)?;
        if id.index() == Segment::Words as usize {
            return Ok(self.node.execute(offset, atomic));
        }
        let word = &self.truth.memory[offset as usize..][..8];
        Ok(u64::from_le_bytes(word.try_into().expect("8 bytes")))
    }
    fn notifications(&mut self, handle: u32) -> u32 {
        self.imports.notifications(self.exports, handle).map_or(0, |(_, numbers)| numbers)
    }
    fn notify(&mut self, _handle: u32, notify: Notify) {
        self.truth.notified(notify);
    }
}

impl View<'_> {
    /// Puts bytes of a write into the log; the whole write begins at `offset` and has `len` bytes.
    fn put(&mut self, handle: u32, offset: u64, at: u32, len: u32, bytes: &[u8]) {
        let start = offset + u64::from(at);
        let id = self.imports.check(self.exports, handle, start, bytes.len() as u32, Access::Write);
        assert_eq!(id.map(SegmentId::index), Ok(Segment::Log as usize));
        self.truth.memory[start as usize..][..bytes.len()].copy_from_slice(bytes);
        if at + bytes.len() as u32 == len && len > 0 {
            self.truth.landed(offset as usize, len as usize);
        }
    }
}

impl End {
    fn new(node: usize, rails: usize, window: u32, log_bytes: usize) -> Self {
        let mut exports = ExportTable::default();
        let mut export = |what: Segment, bytes, rights, numbers| {
            exports.export(what.name(), KEY, rights, bytes, numbers).expect("exported")
        };
        export(Segment::Log, log_bytes as u64, Rights::ReadWrite, NUMBERS);
        export(Segment::Words, 8 * WORDS as u64, Rights::ReadWrite, 0);
        let aside = export(Segment::Aside, ASIDE_BYTES, Rights::Read, 0);
        Self {
            node,
            endpoint: Endpoint::new(rails, OPS_MAX as u32, window),
            exports,
            imports: ImportTable::default(),
            aside,
            revocations: 0,
            locals: vec![Vec::new(); OPS_MAX],
            pending: vec![None; OPS_MAX],
            log: None,
            words: None,
            theirs: Aside::Closed,
            seen: 0,
            flushing: false,
            refused_since: false,
            refused_before: false,
            flush_failed: false,
            was_refused: false,
        }
    }

    /// The bytes that the rail would send now, at most `max`.
    fn output(&self, rail: usize, max: usize, log: &[u8], out: &mut Vec<u8>) {
        out.clear();
        let (sent, frames) = self.endpoint.frames(rail);
        for frame in frames {
            out.extend_from_slice(&frame.header);
            match &frame.payload {
                Payload::None => {}
                Payload::Local { slot, .. } => out.extend_from_slice(&self.locals[usize::from(*slot)]),
                Payload::Segment { handle, offset, bytes } => {
                    let id = self.imports.check(&self.exports, *handle, *offset, *bytes, Access::Read);
                    let (offset, bytes) = (*offset as usize, *bytes as usize);
                    if id.expect("checked when it was queued").index() == Segment::Aside as usize {
                        out.extend(std::iter::repeat_n(ASIDE, bytes));
                    } else {
                        out.extend_from_slice(&log[offset..offset + bytes]);
                    }
                }
                Payload::Body(body) => out.extend_from_slice(body),
                Payload::Inline(inline) => out.extend_from_slice(inline.as_slice()),
            }
            if out.len() > sent + max {
                break;
            }
        }
        out.drain(..sent);
        out.truncate(max);
    }

    /// Takes what has arrived.
    fn feed(&mut self, rail: usize, mut bytes: &[u8], truth: &mut Truth, node: &mut Node) {
        let Self { endpoint, exports, imports, locals, .. } = self;
        let mut view = View { exports, imports, truth, node };
        while !bytes.is_empty() {
            if let Some(header) = endpoint.whole_write(rail, bytes) {
                let Header { handle, offset, payload_bytes, .. } = header;
                let (frame, tail) = bytes.split_at(HEADER_BYTES + payload_bytes as usize);
                bytes = tail;
                let allowed = view.check(handle, offset, payload_bytes, Access::Write);
                if allowed.is_ok() {
                    view.put(handle, offset, 0, payload_bytes, &frame[HEADER_BYTES..]);
                }
                endpoint.wrote(rail, &header, allowed, &mut view).expect("an honest peer");
                continue;
            }
            let (head, tail) = match endpoint.want(rail) {
                Want::Header(missing) => bytes.split_at(missing.min(bytes.len())),
                Want::Payload { bytes: missing, .. } => bytes.split_at(bytes.len().min(missing as usize)),
            };
            bytes = tail;
            let Want::Payload { place, at, bytes: missing } = endpoint.want(rail) else {
                endpoint.header(rail, head, &mut view).expect("an honest peer");
                continue;
            };
            match place {
                Place::Segment { handle, offset } => view.put(handle, offset, at, at + missing, head),
                Place::Local { slot } => {
                    locals[usize::from(slot)][at as usize..][..head.len()].copy_from_slice(head);
                }
                Place::Body => endpoint.body(rail, head),
                Place::Discard => {}
            }
            endpoint.landed(rail, head.len() as u32, &mut view).expect("an honest peer");
        }
    }

    /// So many bytes of the output have gone.
    fn sent(&mut self, rail: usize, bytes: usize, truth: &mut Truth, nodes: &mut [Node]) {
        let Self { endpoint, exports, imports, .. } = self;
        endpoint.sent(rail, bytes);
        endpoint.close_handles(&mut View { exports, imports, truth, node: &mut nodes[self.node] });
    }

    /// Takes the segment aside away from the peer, and offers it anew.
    fn revoke(&mut self) {
        let handles: Vec<u32> = self.imports.handles_of(self.aside).collect();
        assert!(self.exports.unexport(self.aside));
        for handle in handles {
            self.endpoint.revoke(handle, |_, bytes| vec![ASIDE; bytes as usize]);
        }
        self.revocations += 1;
        let export = self.exports.export(Segment::Aside.name(), KEY, Rights::Read, ASIDE_BYTES, 0);
        self.aside = export.expect("the place is free");
    }
}

/// See the module.
pub struct Session {
    ends: [End; 2],
    /// Of the writes from end 0 to end 1, and back.
    truths: [Truth; 2],
    /// By rail and the end that sends.
    pipes: Vec<[Pipe; 2]>,
    random: Random,
    now: u64,
    /// One side has said goodbye.
    leaving: bool,
    scratch: Vec<u8>,
}

impl Session {
    /// A session between two nodes.
    pub fn new(seed: u64, nodes: [usize; 2]) -> Self {
        let mut random = Random::new(seed);
        let rails = 1 + random.below(4) as usize;
        let windows = [2, 5, 16, 64, 64, 64, 64, 300];
        let window = windows[random.below(windows.len() as u64) as usize];
        let truths = [(); 2].map(|()| Truth::new(window as usize));
        let ends = nodes.map(|node| End::new(node, rails, window, truths[0].memory.len()));
        let cut = random.once_in(20).then(|| random.below(200_000));
        let mut pipe = || Pipe::new(random.draw(), 1 + random.below(30), cut.filter(|_| random.once_in(2)));
        let pipes = (0..rails).map(|_| [pipe(), pipe()]).collect();
        Self { ends, truths, pipes, random, now: 0, leaving: false, scratch: Vec::new() }
    }

    /// Both ends post something, the rails carry something, and what has ended is looked at. Perhaps the session ends.
    pub fn visit(&mut self, nodes: &mut [Node], counts: &mut Counts, may_end: bool) {
        if may_end && !self.leaving && self.random.once_in(ENDS_ONCE_IN) {
            self.leaving = true;
            counts.goodbyes += 1;
            self.ends[self.random.below(2) as usize].endpoint.goodbye(Status::Stopping, "enough");
        }
        for who in 0..2 {
            for _ in 0..self.random.below(20) {
                let full = self.post(who, nodes, counts) == Err(PostError::Full);
                counts.full += u64::from(full);
                if full {
                    break;
                }
            }
            if self.random.once_in(200) {
                self.ends[who].revoke();
                counts.revocations += 1;
            }
        }
        let whole = self.carry(nodes) && !(may_end && self.random.once_in(ENDS_ONCE_IN));
        let left = (0..2).any(|who| self.take_events(who, nodes, counts));
        if !whole || left {
            counts.cut += u64::from(!whole);
            self.end(nodes, counts);
            let seed = self.random.draw();
            *self = Self::new(seed, [self.ends[0].node, self.ends[1].node]);
        }
    }

    /// Moves bytes on all rails, in both directions; false when one broke.
    fn carry(&mut self, nodes: &mut [Node]) -> bool {
        self.now += 1;
        for rail in 0..self.pipes.len() {
            for from in 0..2 {
                let pipe = &mut self.pipes[rail][from];
                if self.ends[from].endpoint.has_output(rail) {
                    let max = 1 + self.random.below(5000) as usize;
                    self.ends[from].output(rail, max, &self.truths[1 - from].memory, &mut self.scratch);
                    let sent = pipe.send(self.now, &self.scratch);
                    self.ends[from].sent(rail, sent, &mut self.truths[1 - from], nodes);
                }
                let Some(bytes) = pipe.receive(self.now, 5000) else { return false };
                let to = &mut self.ends[1 - from];
                let node = to.node;
                to.feed(rail, &bytes, &mut self.truths[from], &mut nodes[node]);
            }
        }
        true
    }

    /// Both ends learn that it is over: each operation still ends, once.
    fn end(&mut self, nodes: &mut [Node], counts: &mut Counts) {
        for who in 0..2 {
            self.ends[who].endpoint.fail();
            self.take_events(who, nodes, counts);
            assert_eq!(self.ends[who].endpoint.pending(), 0);
            assert!(self.ends[who].pending.iter().all(Option::is_none), "an operation did not end");
            counts.notices += self.truths[who].delivered;
        }
    }

    /// Nothing new is posted; all that is under way ends, and what was written is there.
    pub fn settle(&mut self, nodes: &mut [Node], counts: &mut Counts) {
        // A session that one side has left is over when the other one hears of it; its successor is idle.
        let quiet = |session: &Self| {
            let nothing = |end: &End| {
                end.endpoint.pending() == 0
                    && (0..session.pipes.len()).all(|rail| !end.endpoint.has_output(rail))
            };
            !session.leaving && session.ends.iter().all(nothing)
        };
        let mut flushed = false;
        for step in 0.. {
            assert!(step < 100_000, "stuck");
            let whole = self.carry(nodes);
            let left = (0..2).any(|who| self.take_events(who, nodes, counts));
            if !whole || left {
                counts.cut += u64::from(!whole);
                return self.end(nodes, counts);
            }
            if quiet(self) {
                if flushed {
                    break;
                }
                flushed = true;
                for who in 0..2 {
                    self.post_flush(who, counts).expect("nothing else is under way");
                }
            }
        }
        for truth in &self.truths {
            truth.check_whole();
        }
        self.end(nodes, counts);
    }

    fn post_flush(&mut self, who: usize, counts: &mut Counts) -> Result<(), PostError> {
        let next = self.truths[who].next();
        let end = &mut self.ends[who];
        let slot = end.endpoint.post_flush(0)?;
        let must_fail = end.refused_since && !end.flush_failed;
        end.pending[usize::from(slot)] = Some(Pending::Flush { next, must_fail });
        (end.refused_before, end.refused_since, end.flushing) = (end.refused_since, false, true);
        counts.flushes += 1;
        counts.posted += 1;
        Ok(())
    }

    /// Posts something, or finds that it would make no sense now.
    fn post(&mut self, who: usize, nodes: &mut [Node], counts: &mut Counts) -> Result<(), PostError> {
        let other = self.ends[1 - who].node;
        let revocations = self.ends[1 - who].revocations;
        let (random, end, truth) = (&mut self.random, &mut self.ends[who], &mut self.truths[who]);
        let (Some(log), Some(words)) = (end.log, end.words) else {
            let opening = end.pending.iter().flatten().count();
            return if opening > 0 { Ok(()) } else { self.open(who, counts) };
        };
        let is_read = || end.pending.iter().any(|pending| matches!(pending, Some(Pending::Aside { .. })));
        let (slot, pending) = match random.below(32) {
            0..14 => return self.post_write(who, log, counts),
            14..19 => {
                let cell = random.below(truth.cells() as u64) as usize;
                let (least, (offset, len)) = (truth.least(cell), truth.place(cell));
                counts.reads += 1;
                if random.once_in(3) {
                    let load = Atomic::new(AtomicOp::Load, Width::Eight, 0);
                    let slot = end.endpoint.post_atomic(0, log, offset as u64, &load)?;
                    (slot, Pending::Load { cell, least })
                } else {
                    let slot = end.endpoint.post_read(0, log, offset as u64, len as u32)?;
                    fill(&mut end.locals[usize::from(slot)], len);
                    (slot, Pending::Read { cell, least })
                }
            }
            19..28 => {
                let word = random.below(WORDS as u64) as usize;
                let atomic = match random.below(2) {
                    _ if word != CHAIN => Atomic::new(AtomicOp::Add, Width::Eight, 1),
                    0 => Atomic::new(AtomicOp::Swap, Width::Eight, nodes[other].new_link().into()),
                    _ => Atomic::compare_swap(Width::Eight, end.seen, nodes[other].new_link().into()),
                };
                counts.atomics += 1;
                let slot = end.endpoint.post_atomic(0, words, 8 * word as u64, &atomic)?;
                (slot, Pending::Atomic { word, atomic })
            }
            28 if !end.flushing => return self.post_flush(who, counts),
            29 => {
                let body: Vec<u8> = (0..random.below(100) as u8).collect();
                counts.calls += 1;
                let bytes = body.len();
                (end.endpoint.post_call(0, bytes as u32, body)?, Pending::Call { bytes })
            }
            30 | 31 => match end.theirs {
                Aside::Closed => {
                    let slot = end.endpoint.post_import(0, Segment::Aside.name(), &KEY)?;
                    end.theirs = Aside::Opening;
                    counts.imports += 1;
                    (slot, Pending::Import { what: Segment::Aside })
                }
                Aside::Open(handle) if random.once_in(3) => {
                    let slot = end.endpoint.post_unimport(0, handle)?;
                    end.theirs = Aside::Closing(handle);
                    counts.unimports += 1;
                    (slot, Pending::Unimport)
                }
                Aside::Open(handle) => {
                    let slot = end.endpoint.post_read(0, handle, 8, 50)?;
                    fill(&mut end.locals[usize::from(slot)], 50);
                    (slot, Pending::Aside { revocations })
                }
                // It stays open until the last answer has been sent.
                Aside::Given(_) if is_read() => return Ok(()),
                Aside::Given(handle) => {
                    let slot = end.endpoint.post_read(0, handle, 0, 1)?;
                    fill(&mut end.locals[usize::from(slot)], 1);
                    end.theirs = Aside::Trying;
                    (slot, Pending::Stale)
                }
                _ => return Ok(()),
            },
            _ => return Ok(()),
        };
        end.pending[usize::from(slot)] = Some(pending);
        counts.posted += 1;
        Ok(())
    }

    /// Imports the two segments that stay.
    fn open(&mut self, who: usize, counts: &mut Counts) -> Result<(), PostError> {
        let end = &mut self.ends[who];
        for what in [Segment::Log, Segment::Words] {
            let slot = end.endpoint.post_import(0, what.name(), &KEY)?;
            end.pending[usize::from(slot)] = Some(Pending::Import { what });
            counts.imports += 1;
            counts.posted += 1;
        }
        Ok(())
    }

    fn post_write(&mut self, who: usize, log: u32, counts: &mut Counts) -> Result<(), PostError> {
        let (random, end, truth) = (&mut self.random, &mut self.ends[who], &mut self.truths[who]);
        let number = truth.next();
        let (offset, len) = truth.place(number as usize % truth.cells());
        let is_bad = random.once_in(100);
        let is_bare = !is_bad && random.once_in(8);
        let notice = random.below(u64::from(NUMBERS)) as u16;
        let notify = match random.below(6) {
            0 if !is_bad => Some(Notify::Count { number: notice }),
            1 if !is_bad => Some(Notify::Post { number: notice, value: value_of(number) }),
            _ => None,
        };
        let options = WriteOptions { fence: random.once_in(6), notify };
        let bytes = &mut self.scratch;
        truth.contents(number, bytes);
        if is_bare {
            bytes.clear();
        }
        let offset = if is_bad { truth.memory.len() - len + 1 } else { offset } as u64;
        if is_bare || random.once_in(2) {
            end.endpoint.post_write_copied(log, offset, bytes, options)?;
            counts.done += 1;
        } else {
            let slot = end.endpoint.post_write_with(0, log, offset, len as u32, options)?;
            end.locals[usize::from(slot)].clone_from(bytes);
            end.pending[usize::from(slot)] = Some(Pending::Write { number, may_be_refused: is_bad });
        }
        truth.posted(!is_bare && !is_bad, options.fence, notify);
        end.refused_since |= is_bad;
        end.was_refused |= is_bad;
        counts.fences += u64::from(options.fence);
        counts.writes += 1;
        counts.posted += 1;
        Ok(())
    }

    /// Looks at what has happened at one end; true when the other one has said goodbye.
    fn take_events(&mut self, who: usize, nodes: &mut [Node], counts: &mut Counts) -> bool {
        let mut left = false;
        while let Some(event) = self.ends[who].endpoint.event() {
            match event {
                Event::Completed { slot, result, .. } => {
                    let pending = self.ends[who].pending[usize::from(slot)].take().expect("ended twice");
                    *match &result {
                        Ok(_) => &mut counts.done,
                        Err(OpError::Refused(_)) => &mut counts.refused,
                        Err(OpError::Lost) => &mut counts.lost,
                        Err(OpError::Unknown) => &mut counts.unknown,
                    } += 1;
                    match result {
                        Ok(answer) => self.succeeded(who, slot, pending, &answer, nodes),
                        Err(error) => self.failed(who, pending, error, nodes),
                    }
                }
                Event::WriteRefused(status) => {
                    // On another rail it may come long after the flush that told.
                    assert_eq!(status, Status::OutOfBounds);
                    assert!(self.ends[who].was_refused);
                }
                Event::Called { request, method, mut body } => {
                    assert_eq!(method as usize, body.len());
                    body.reverse();
                    self.ends[who].endpoint.reply(request, Ok(body));
                }
                Event::Goodbye { status, reason } => {
                    assert_eq!((status, &reason[..]), (Status::Stopping, &b"enough"[..]));
                    left = true;
                }
            }
        }
        left
    }

    fn succeeded(&mut self, who: usize, slot: u16, pending: Pending, answer: &Answer, nodes: &mut [Node]) {
        let other = self.ends[1 - who].node;
        let (end, truth) = (&mut self.ends[who], &self.truths[who]);
        let local = &end.locals[usize::from(slot)];
        match (pending, answer) {
            // Sent before the refusal came: the flush will tell.
            (Pending::Write { .. }, Answer::Done) => {}
            (Pending::Read { cell, least }, Answer::Done) => truth.check_read(cell, least, local),
            (Pending::Load { cell, least }, Answer::Word(word)) => {
                truth.check_read(cell, least, &word.to_le_bytes());
            }
            (Pending::Atomic { word, atomic }, &Answer::Word(before)) => {
                nodes[other].answered(word, &atomic, before);
                if word >= ADDED {
                    let took = atomic.op == AtomicOp::Swap || before == atomic.compare;
                    end.seen = if took { atomic.operand } else { before };
                }
            }
            (Pending::Flush { next, must_fail }, Answer::Done) => {
                assert!(!must_fail, "a refusal was swallowed");
                truth.must_be_applied(next);
                (end.flushing, end.flush_failed) = (false, false);
            }
            (Pending::Call { bytes }, Answer::Reply(body)) => {
                assert!(body.iter().copied().eq((0..bytes as u8).rev()), "another answer");
            }
            (Pending::Import { what }, &Answer::Imported { handle, len, notifications, .. }) => match what {
                Segment::Log => {
                    assert_eq!((len as usize, notifications), (truth.memory.len(), NUMBERS));
                    end.log = Some(handle);
                }
                Segment::Words => end.words = Some(handle),
                Segment::Aside => end.theirs = Aside::Open(handle),
            },
            (Pending::Unimport, Answer::Done) => {
                let Aside::Closing(handle) = end.theirs else { panic!("nobody gave it back") };
                end.theirs = Aside::Given(handle);
            }
            (Pending::Aside { .. }, Answer::Done) => assert_eq!(*local, [ASIDE; 50]),
            other => panic!("{other:?}"),
        }
    }

    fn failed(&mut self, who: usize, pending: Pending, error: OpError, nodes: &mut [Node]) {
        let other = self.ends[1 - who].node;
        let revoked = self.ends[1 - who].revocations;
        let end = &mut self.ends[who];
        match (pending, error) {
            (Pending::Write { number, .. }, OpError::Lost) => self.truths[who].must_not_be_applied(number),
            (Pending::Write { may_be_refused, .. }, OpError::Refused(Status::OutOfBounds)) => {
                assert!(may_be_refused);
            }
            (Pending::Write { .. }, OpError::Unknown) => {}
            (Pending::Atomic { word, .. }, OpError::Unknown) => nodes[other].is_unknown(word),
            (Pending::Load { .. }, OpError::Unknown) | (_, OpError::Lost) => {}
            (Pending::Flush { next, .. }, OpError::Refused(Status::OutOfBounds)) => {
                // A later refusal may have overtaken the flush on another rail.
                assert!(end.refused_before || end.refused_since || end.flush_failed, "refused nothing");
                self.truths[who].must_be_applied(next);
                (end.flushing, end.flush_failed) = (false, true);
            }
            (Pending::Stale, OpError::Refused(Status::NoHandle)) => end.theirs = Aside::Closed,
            (Pending::Aside { revocations }, OpError::Refused(Status::NoHandle)) => {
                // Given back meanwhile, or taken away: since the read was posted, or before but after the import.
                let open = matches!(end.theirs, Aside::Open(_));
                assert!(!open || revoked > 0, "refused, but nobody took it away at {revocations}");
                if open {
                    end.theirs = Aside::Closed;
                }
            }
            other => panic!("{other:?}"),
        }
    }
}
