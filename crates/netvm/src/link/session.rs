//! Drives an endpoint over links: bytes go straight between the links and the memory they belong to.

use std::io;

use netvm_core::endpoint::{Endpoint, Event, Exports, Paging, Payload, Place, Presence, Violation, Want};
use netvm_core::key::Access;
use netvm_core::limits::{BOUNCE_BYTES_MAX, HEADER_BYTES};
use netvm_core::wire::Status;
use netvm_sys::shared::SharedSlice;

use super::{Incoming, Link, Outgoing};

/// Replies that one receive may take with their headers.
const CHAIN_MAX: usize = 16;
/// Bytes received besides what is known to belong somewhere: many small frames, or several requests.
const BUFFER_BYTES: usize = 64 << 10;
/// After a payload of at least so many bytes only a header is received besides: the next one is probably as long, and goes
/// straight to its place. Below, a second copy costs less than a second call.
const DIRECT_BYTES_MIN: usize = 12 << 10;
/// Replies of so few bytes in all are received in one piece and copied: a list of places costs the kernel more, with each look in vain too.
const LONE_BYTES_MAX: u32 = 4 << 10;
/// A rail on which so many looks in a row found nothing is quiet, and looked at with one look in [`QUIET_EVERY`] only: while others are
/// busy, a look in vain costs a tenth of a message.
const QUIET_LOOKS: u32 = 64;
const QUIET_EVERY: u32 = 8;
/// Bytes offered to one receive; more would only be looked at again.
const BATCH_BYTES_MAX: usize = 1 << 20;
/// A send is given no further frame behind so many bytes: what the kernel copies would leave the cache before the peer takes it.
const SEND_BYTES: usize = 256 << 10;

/// Exported memory.
pub(crate) trait Memory: Exports {
    /// The memory of a handle, if the peer may still reach it.
    fn memory(&mut self, handle: u32, offset: u64, bytes: u32) -> Option<SharedSlice>;

    /// Writes to the memory of a handle, if the peer may. `None`: not now, as it is not there or belongs to a page of one of the jobs.
    fn write(
        &mut self,
        handle: u32,
        offset: u64,
        bytes: &[u8],
        _jobs: &Paging,
    ) -> Option<Result<(), Status>> {
        let written = self.check(handle, offset, bytes.len() as u32, Access::Write).and_then(|()| {
            let memory = self.memory(handle, offset, bytes.len() as u32).ok_or(Status::Fault)?;
            memory.write_from(0, bytes).ok_or(Status::Fault)
        });
        Some(written)
    }
}

/// For peers that may reach nothing here.
pub(crate) struct NoMemory;

impl Exports for NoMemory {
    fn check(&mut self, _: u32, _: u64, _: u32, _: Access) -> Result<(), Status> {
        Err(Status::NoHandle)
    }

    fn import(
        &mut self,
        _: &str,
        _: &netvm_core::key::RemoteKey,
    ) -> Result<(u32, u64, netvm_core::key::Rights), Status> {
        Err(Status::NoSegment)
    }

    fn unimport(&mut self, _: u32) {}
}

impl Memory for NoMemory {
    fn memory(&mut self, _: u32, _: u64, _: u32) -> Option<SharedSlice> {
        None
    }
}

/// Why a session cannot go on.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The link failed.
    Link(io::Error),
    /// The peer ended the stream.
    Ended,
    /// The peer broke the protocol.
    Violation(Violation),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Link(error) => error.fmt(f),
            Self::Ended => f.write_str("it closed the connection"),
            Self::Violation(violation) => violation.fmt(f),
        }
    }
}

impl From<Violation> for Failure {
    fn from(violation: Violation) -> Self {
        Self::Violation(violation)
    }
}

struct Rail<L> {
    link: L,
    headers: Box<[[u8; HEADER_BYTES]; CHAIN_MAX]>,
    buffer: Box<[u8]>,
    /// The last payload was long.
    direct: bool,
    received_bytes: u64,
    sent_bytes: u64,
    /// Looks since something came.
    misses: u32,
}

/// What one receive was laid out for.
struct Plan {
    /// Bytes that continue the payload under way.
    sure: usize,
    /// Bytes of the next header that are missing.
    missing: usize,
    /// Slots and lengths of the replies laid out behind it.
    chain: [(u16, u32); CHAIN_MAX],
    links: usize,
}

/// An endpoint, its links and the local buffers of its operations.
pub(crate) struct Session<L> {
    pub(crate) endpoint: Endpoint,
    rails: Vec<Rail<L>>,
    /// Looks so far.
    looks: u32,
    locals: Vec<Vec<SharedSlice>>,
    /// With so many bytes in jobs nothing is received.
    pub(crate) bounce_max: usize,
}

impl<L: Link> Session<L> {
    pub(crate) fn new(links: Vec<L>, ops_max: u32, window: u32) -> Self {
        let endpoint = Endpoint::new(links.len(), ops_max, window);
        let rail = |link| Rail {
            link,
            headers: Box::new([[0; HEADER_BYTES]; CHAIN_MAX]),
            buffer: vec![0; BUFFER_BYTES].into(),
            direct: false,
            received_bytes: 0,
            sent_bytes: 0,
            misses: 0,
        };
        let (rails, bounce_max) = (links.into_iter().map(rail).collect(), BOUNCE_BYTES_MAX);
        Self { endpoint, rails, looks: 0, locals: Vec::new(), bounce_max }
    }

    pub(crate) fn link(&self, rail: usize) -> &L {
        &self.rails[rail].link
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn link_mut(&mut self, rail: usize) -> &mut L {
        &mut self.rails[rail].link
    }

    /// Closes the connections; only [`Session::event`] may be called afterwards.
    pub(crate) fn close_links(&mut self) {
        self.rails.clear();
    }

    pub(crate) fn into_links(self) -> impl Iterator<Item = L> {
        self.rails.into_iter().map(|rail| rail.link)
    }

    /// Remembers the buffers of the operation in `slot`; allocates only while the slot is new to so many pieces.
    pub(crate) fn set_locals(&mut self, slot: u16, pieces: &[SharedSlice]) {
        let slot = usize::from(slot);
        if self.locals.len() <= slot {
            self.locals.resize_with(slot + 1, Vec::new);
        }
        self.locals[slot].clear();
        self.locals[slot].extend_from_slice(pieces);
    }

    pub(crate) fn event(&mut self) -> Option<Event> {
        self.endpoint.event()
    }

    pub(crate) fn has_output(&self) -> bool {
        (0..self.rails.len()).any(|rail| self.has_output_on(rail))
    }

    pub(crate) fn has_output_on(&self, rail: usize) -> bool {
        self.endpoint.has_output(rail) || self.rails[rail].link.has_unsent()
    }

    /// Bytes received so far, over all rails.
    pub(crate) fn received_bytes(&self) -> u64 {
        self.rails.iter().map(|rail| rail.received_bytes).sum()
    }

    /// Bytes that the links have taken.
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.rails.iter().map(|rail| rail.sent_bytes).sum()
    }

    /// Bytes received and sent so far over one rail.
    pub(crate) fn traffic(&self, rail: usize) -> (u64, u64) {
        (self.rails[rail].received_bytes, self.rails[rail].sent_bytes)
    }

    /// Sends what the link takes.
    pub(crate) fn send(&mut self, rail: usize, memory: &mut impl Memory) -> Result<(), Failure> {
        match self.rails[rail].link.flush() {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(Failure::Link(error)),
        }
        while self.endpoint.has_output(rail) {
            let (offered, result) = self.send_once(rail, memory)?;
            match result {
                Ok(sent) => {
                    self.rails[rail].sent_bytes += sent as u64;
                    self.endpoint.sent(rail, sent);
                    self.endpoint.close_handles(memory);
                    if sent < offered {
                        // The link is full; asking again would only tell us so.
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(Failure::Link(error)),
            }
        }
        Ok(())
    }

    fn send_once(
        &mut self,
        rail: usize,
        memory: &mut impl Memory,
    ) -> Result<(usize, io::Result<usize>), Failure> {
        let mut out = Outgoing::new();
        let (mut skip, frames) = self.endpoint.frames(rail);
        'frames: for frame in frames {
            let header = &frame.header[skip.min(HEADER_BYTES)..];
            skip -= HEADER_BYTES - header.len();
            if !out.bytes(header) {
                break;
            }
            match &frame.payload {
                Payload::None => {}
                Payload::Body(body) => {
                    if !out.bytes(&body[skip..]) {
                        break;
                    }
                }
                Payload::Inline(inline) => {
                    if !out.bytes(&inline.as_slice()[skip..]) {
                        break;
                    }
                }
                Payload::Local { slot, .. } => {
                    for piece in &self.locals[usize::from(*slot)] {
                        let passed = skip.min(piece.len());
                        skip -= passed;
                        let Some(rest) = piece.sub(passed, piece.len() - passed) else { break };
                        if !out.shared(rest) {
                            break 'frames;
                        }
                    }
                }
                Payload::Segment { handle, offset, bytes } => {
                    let left = bytes - skip as u32;
                    let Some(slice) = memory.memory(*handle, offset + skip as u64, left) else {
                        return Err(Failure::Link(io::Error::from_raw_os_error(libc::EFAULT)));
                    };
                    if !out.shared(slice) {
                        break;
                    }
                }
            }
            skip = 0;
            if out.total_bytes() >= SEND_BYTES {
                break;
            }
        }
        Ok((out.total_bytes(), self.rails[rail].link.post(&out)))
    }

    /// Begins a look at the rails; whether those that are quiet are left out.
    pub(crate) fn skips_quiet(&mut self) -> bool {
        self.looks = self.looks.wrapping_add(1);
        !self.looks.is_multiple_of(QUIET_EVERY) && !self.rails.iter().all(Self::is_quiet)
    }

    fn is_quiet(rail: &Rail<L>) -> bool {
        rail.misses >= QUIET_LOOKS
    }

    /// Something has come on this rail, or there is room.
    pub(crate) fn stir(&mut self, rail: usize) {
        if let Some(rail) = self.rails.get_mut(rail) {
            rail.misses = 0;
        }
    }

    /// Whether nothing has come on this rail for long.
    pub(crate) fn is_quiet_on(&self, rail: usize) -> bool {
        Self::is_quiet(&self.rails[rail])
    }

    /// Receives what is there, at most once, and what the link has in store; true when there may be more.
    pub(crate) fn receive(&mut self, rail: usize, memory: &mut impl Memory) -> Result<bool, Failure> {
        loop {
            if self.is_stalled() {
                return Ok(false);
            }
            let (plan, offered, received) = self.receive_once(rail, memory);
            self.rails[rail].misses =
                if received.is_ok() { 0 } else { self.rails[rail].misses.saturating_add(1) };
            let received = match received {
                Ok(0) => return Err(Failure::Ended),
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                // The memory that the payload goes to is gone, perhaps for a while. No byte was taken: the next receive takes them.
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) && self.misses(rail, memory) => {
                    continue;
                }
                Err(error) => return Err(Failure::Link(error)),
            };
            self.rails[rail].received_bytes += received as u64;
            self.sort(rail, &plan, received, memory)?;
            // Nobody would wake us for what is in store.
            if !self.rails[rail].link.has_received() {
                return Ok(received == offered);
            }
        }
    }

    /// The payload under way cannot go to its memory: it becomes a job, or is thrown away. False when it does not go to a segment.
    fn misses(&mut self, rail: usize, memory: &mut impl Memory) -> bool {
        let Want::Payload { place: Place::Segment { handle, offset }, at, bytes } = self.endpoint.want(rail)
        else {
            return false;
        };
        match memory.presence(handle, offset + u64::from(at), bytes, Access::Write) {
            Presence::Away => self.endpoint.divert(rail),
            Presence::Here => self.endpoint.fault(rail),
        }
    }

    /// Whether nothing is received: jobs hold as many bytes as they may.
    pub(crate) fn is_stalled(&self) -> bool {
        self.endpoint.paging().bytes() >= self.bounce_max
    }

    fn receive_once(&mut self, rail: usize, memory: &mut impl Memory) -> (Plan, usize, io::Result<usize>) {
        let mut plan = Plan { sure: 0, missing: HEADER_BYTES, chain: [(0, 0); CHAIN_MAX], links: 0 };
        let mut into = Incoming::new();
        let mut chained = true;
        match self.endpoint.want(rail) {
            Want::Header(missing) => plan.missing = missing,
            Want::Payload { place: Place::Segment { handle, offset }, at, bytes } => {
                match memory.memory(handle, offset + u64::from(at), bytes) {
                    Some(slice) => {
                        into.shared(slice);
                        plan.sure = bytes as usize;
                    }
                    None => {
                        let _ = self.endpoint.fault(rail);
                        chained = false;
                    }
                }
            }
            Want::Payload { place: Place::Local { slot }, at, bytes } => {
                let mut skip = at as usize;
                for piece in &self.locals[usize::from(slot)] {
                    let passed = skip.min(piece.len());
                    skip -= passed;
                    if let Some(rest) = piece.sub(passed, piece.len() - passed) {
                        into.shared(rest);
                    }
                }
                plan.sure = bytes as usize;
                debug_assert_eq!(into.total_bytes(), plan.sure);
            }
            Want::Payload { .. } => chained = false,
        }
        let Rail { link, headers, buffer, direct, .. } = &mut self.rails[rail];
        let expected = self.endpoint.expected(rail).take(CHAIN_MAX).map(|(_, bytes)| bytes);
        let expected = expected.fold(0, u32::saturating_add);
        let lone = plan.sure == 0 && (1..=LONE_BYTES_MAX).contains(&expected);
        if chained && !lone {
            let mut headers = headers.iter_mut();
            for (slot, bytes) in self.endpoint.expected(rail).take(CHAIN_MAX) {
                let locals = &self.locals[usize::from(slot)];
                let fits = into.room() >= locals.len() + 2 && into.total_bytes() < BATCH_BYTES_MAX;
                let Some(header) = headers.next().filter(|_| fits && bytes > 0) else { break };
                let from = if plan.links == 0 { HEADER_BYTES - plan.missing } else { 0 };
                into.bytes(&mut header[from..]);
                for piece in locals {
                    into.shared(*piece);
                }
                plan.chain[plan.links] = (slot, bytes);
                plan.links += 1;
            }
        }
        let besides = if *direct && chained && !lone { HEADER_BYTES } else { buffer.len() };
        into.bytes(&mut buffer[..besides]);
        let offered = into.total_bytes();
        (plan, offered, link.poll(&mut into))
    }

    /// Tells the endpoint about `left` received bytes, and moves those that lie in the wrong place.
    fn sort(
        &mut self,
        rail: usize,
        plan: &Plan,
        mut left: usize,
        memory: &mut impl Memory,
    ) -> Result<(), Failure> {
        let take = left.min(plan.sure);
        if take > 0 {
            self.endpoint.landed(rail, take as u32, memory)?;
            left -= take;
        }
        for index in 0..plan.links {
            if left == 0 {
                return Ok(());
            }
            let (slot, bytes) = plan.chain[index];
            let from = if index == 0 { HEADER_BYTES - plan.missing } else { 0 };
            let take = left.min(HEADER_BYTES - from);
            left -= take;
            self.endpoint.header(rail, &self.rails[rail].headers[index][from..from + take], memory)?;
            if left == 0 {
                return Ok(());
            }
            let expected = Want::Payload { place: Place::Local { slot }, at: 0, bytes };
            if self.endpoint.want(rail) != expected {
                let stray = self.collect(rail, plan, index, left);
                return self.feed(rail, &stray, memory);
            }
            let take = left.min(bytes as usize);
            self.endpoint.landed(rail, take as u32, memory)?;
            left -= take;
        }
        let buffer = std::mem::take(&mut self.rails[rail].buffer);
        let result = self.feed(rail, &buffer[..left], memory);
        self.rails[rail].buffer = buffer;
        result
    }

    /// The `left` bytes that lie from the payload of reply `index` on: the peer sent something else than expected. Rare.
    fn collect(&self, rail: usize, plan: &Plan, index: usize, left: usize) -> Vec<u8> {
        let Rail { headers, buffer, .. } = &self.rails[rail];
        let mut stray = Vec::with_capacity(left);
        for (position, &(slot, _)) in plan.chain[..plan.links].iter().enumerate().skip(index) {
            if position > index {
                stray.extend_from_slice(&headers[position]);
            }
            for piece in &self.locals[usize::from(slot)] {
                let start = stray.len();
                stray.resize(start + piece.len(), 0);
                let _ = piece.read_into(0, &mut stray[start..]);
                if stray.len() >= left {
                    break;
                }
            }
        }
        if stray.len() < left {
            stray.extend_from_slice(&buffer[..left - stray.len()]);
        }
        stray.truncate(left);
        stray
    }

    /// Takes bytes from a buffer of ours.
    fn feed(&mut self, rail: usize, mut bytes: &[u8], memory: &mut impl Memory) -> Result<(), Failure> {
        while !bytes.is_empty() {
            if let Some(header) = self.endpoint.whole_write(rail, bytes)
                && let (frame, tail) = bytes.split_at(HEADER_BYTES + header.payload_bytes as usize)
                && let payload = &frame[HEADER_BYTES..]
                && let Some(written) =
                    memory.write(header.handle, header.offset, payload, self.endpoint.paging())
            {
                bytes = tail;
                self.rails[rail].direct = header.payload_bytes as usize >= DIRECT_BYTES_MIN;
                self.endpoint.wrote(rail, &header, written, memory)?;
                continue;
            }
            match self.endpoint.want(rail) {
                Want::Header(missing) => {
                    let (head, tail) = bytes.split_at(missing.min(bytes.len()));
                    bytes = tail;
                    self.endpoint.header(rail, head, memory)?;
                    self.rails[rail].direct = matches!(self.endpoint.want(rail),
                        Want::Payload { bytes, .. } if bytes as usize >= DIRECT_BYTES_MIN);
                }
                Want::Payload { place, at, bytes: missing } => {
                    let (head, tail) = bytes.split_at(bytes.len().min(missing as usize));
                    bytes = tail;
                    match place {
                        Place::Segment { handle, offset } => {
                            let len = head.len() as u32;
                            match memory.memory(handle, offset + u64::from(at), len) {
                                Some(slice) if slice.write_from(0, head).is_some() => {}
                                _ => drop(self.endpoint.fault(rail)),
                            }
                        }
                        Place::Local { slot } => self.put(slot, at as usize, head),
                        Place::Body => self.endpoint.body(rail, head),
                        Place::Discard => {}
                    }
                    self.endpoint.landed(rail, head.len() as u32, memory)?;
                }
            }
        }
        Ok(())
    }

    fn put(&mut self, slot: u16, mut skip: usize, mut bytes: &[u8]) {
        for piece in &self.locals[usize::from(slot)] {
            if skip >= piece.len() {
                skip -= piece.len();
                continue;
            }
            let (head, tail) = bytes.split_at(bytes.len().min(piece.len() - skip));
            let _ = piece.write_from(skip, head);
            (skip, bytes) = (0, tail);
            if bytes.is_empty() {
                return;
            }
        }
    }
}
