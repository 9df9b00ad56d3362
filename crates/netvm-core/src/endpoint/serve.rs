//! The peer's operations.

use super::paging::Entry;
use super::*;
use crate::atomic::{Atomic, AtomicOp};
use crate::limits::{ATOMIC_BYTES, KEPT_BYTES_MAX};
use crate::wire::{FENCE, QUIET};

impl Endpoint {
    pub(super) fn accept(
        &mut self,
        rail: usize,
        header: Header,
        body: Vec<u8>,
        exports: &mut impl Exports,
    ) -> Result<(), Violation> {
        if header.kind == Kind::Flush && header.token == PULSE {
            // Whatever is queued is a sign of life, too.
            if self.rails[rail].queue.len() <= IDLE_FRAMES_MAX {
                let answer = Header { token: PULSE, ..Header::new(Kind::FlushAck) };
                self.queue(rail, answer, Payload::None, false);
            }
            return Ok(());
        }
        let calls = usize::from(header.kind == Kind::Call);
        if self.serving >= OPS_MAX || self.serving_calls + calls > CALLS_MAX {
            return Err(Violation::TooMany);
        }
        if !self.receive.may_wait_for(header.sequence) {
            return Err(Violation::Sequence);
        }
        let short = match header.kind {
            Kind::Import => body.len() < 16,
            Kind::Atomic => body.len() != ATOMIC_BYTES,
            _ => false,
        };
        if short {
            return Err(Violation::Body);
        }
        if header.kind == Kind::Read && header.bytes > PAYLOAD_BYTES_MAX {
            return Err(Violation::Length);
        }
        self.serving += 1;
        self.serving_calls += calls;
        if self.may_serve(&header) {
            self.serve(rail, &header, body, exports);
        } else {
            self.deferred.push(Deferred { rail, header, body });
        }
        Ok(())
    }

    /// Makes visible the notifications before which everything has been applied, in the order of their writes.
    #[inline]
    pub(super) fn deliver_notices(&mut self, exports: &mut impl Exports) {
        while let Some(first) = self.notices.first_entry() {
            if *first.key() >= self.receive.applied() {
                break;
            }
            let (handle, notify) = first.remove();
            exports.notify(handle, notify);
        }
    }

    #[inline]
    pub(super) fn serve_deferred(&mut self, exports: &mut impl Exports) {
        let mut index = 0;
        while index < self.deferred.len() {
            if !self.may_serve(&self.deferred[index].header) {
                index += 1;
                continue;
            }
            let Deferred { rail, header, body } = self.deferred.remove(index);
            self.serve(rail, &header, body, exports);
        }
    }

    fn serve(&mut self, rail: usize, header: &Header, body: Vec<u8>, exports: &mut impl Exports) {
        let token = header.token;
        let refuse = |status: Status| Header { status: status as u16, token, ..Header::new(Kind::Error) };
        let (answer, payload) = match header.kind {
            Kind::Read => {
                let Header { handle, offset, bytes, .. } = *header;
                let allowed = exports.check(handle, offset, bytes, Access::Read);
                if allowed.is_ok() && bytes > 0 && self.must_wait(header, exports) {
                    let address = exports.address(handle, offset);
                    return self.paging.add(rail, *header, address, bytes, Work::Read(bytes), false);
                }
                if allowed.is_ok() && self.kept_bytes >= KEPT_BYTES_MAX {
                    return self.throttled.push_back((rail, *header));
                }
                let copied = allowed.and_then(|()| exports.snapshot(handle, offset, bytes).transpose());
                let reply = Header { token, payload_bytes: bytes, ..Header::new(Kind::ReadReply) };
                match copied {
                    Ok(None) => (reply, Payload::Segment { handle, offset, bytes }),
                    Ok(Some(copy)) => {
                        self.kept_bytes += copy.len();
                        (reply, Payload::Body(copy))
                    }
                    Err(status) => (refuse(status), Payload::None),
                }
            }
            Kind::Import => {
                let (key, name) = body.split_at(16);
                let key = RemoteKey::from_bytes(core::array::from_fn(|index| key[index]));
                let found = match core::str::from_utf8(name) {
                    Ok(name) if name.len() <= NAME_BYTES_MAX => exports.import(name, &key),
                    _ => Err(Status::NoSegment),
                };
                let header = match found {
                    Ok((handle, len, rights)) => Header {
                        token,
                        handle,
                        offset: len,
                        bytes: if rights == Rights::ReadWrite { 3 } else { 1 },
                        sequence: u64::from(exports.notifications(handle)),
                        ..Header::new(Kind::ImportAck)
                    },
                    Err(status) => refuse(status),
                };
                (header, Payload::None)
            }
            Kind::Call => {
                let request = Request { rail: rail as u8, token };
                if let Some(answer) = exports.call(header.handle, &body) {
                    return self.reply(request, answer);
                }
                self.events.push_back(Event::Called { request, method: header.handle, body });
                return;
            }
            Kind::Unimport => {
                self.given_back(header.handle, exports);
                (Header { token, ..Header::new(Kind::FlushAck) }, Payload::None)
            }
            Kind::Atomic => {
                let Header { handle, offset, .. } = *header;
                let atomic = Atomic::decode(header, &body).and_then(|atomic| {
                    let access = if atomic.op == AtomicOp::Load { Access::Read } else { Access::Write };
                    exports.check(handle, offset, atomic.width as u32, access).map(|()| atomic)
                });
                if let Ok(atomic) = atomic
                    && (self.paging.has_atomics() || self.must_wait(header, exports))
                {
                    let address = exports.address(handle, offset);
                    let width = atomic.width as u32;
                    return self.paging.add(rail, *header, address, width, Work::Atomic(atomic), true);
                }
                let done = atomic.and_then(|atomic| exports.atomic(handle, offset, &atomic));
                let header = match done {
                    Ok(word) => Header { token, offset: word, ..Header::new(Kind::AtomicReply) },
                    Err(status) => refuse(status),
                };
                (header, Payload::None)
            }
            _ if header.flags & QUIET != 0 => {
                (Header { token, ..Header::new(Kind::FlushAck) }, Payload::None)
            }
            _ => {
                let status = self.refused_write.take().unwrap_or(Status::Ok) as u16;
                (Header { token, status, ..Header::new(Kind::FlushAck) }, Payload::None)
            }
        };
        self.queue(rail, answer, payload, true);
    }

    /// The peer has given a handle back: it is closed when what was asked for before has been answered, at once if nothing was.
    pub fn given_back(&mut self, handle: u32, exports: &mut impl Exports) {
        if !self.answers_from(handle) {
            exports.unimport(handle);
        } else if !self.closing.contains(&handle) {
            // Once: so there are at most as many as there are answers.
            self.closing.push(handle);
        }
    }

    /// Whether an answer with bytes of this handle waits to be sent.
    fn answers_from(&self, handle: u32) -> bool {
        let is_from = |frame: &Frame| matches!(frame.payload, Payload::Segment { handle: other, .. } if other == handle);
        self.paging.uses(handle)
            || self.throttled.iter().any(|(_, header)| header.handle == handle)
            || self.rails.iter().any(|rail| rail.queue.iter().any(is_from))
    }

    /// Closes the handles that the peer has given back and whose last answers have been sent, and serves reads that waited until answers
    /// were sent. The driver calls it after sending.
    pub fn close_handles(&mut self, exports: &mut impl Exports) {
        while self.kept_bytes < KEPT_BYTES_MAX
            && let Some((rail, header)) = self.throttled.pop_front()
        {
            self.serve(rail, &header, Vec::new(), exports);
        }
        if self.closing.is_empty() {
            return;
        }
        let mut closing = core::mem::take(&mut self.closing);
        closing.retain(|&handle| {
            let answers = self.answers_from(handle);
            if !answers {
                exports.unimport(handle);
            }
            answers
        });
        self.closing = closing;
    }

    /// Answers a call: with a body, or with the reason for a refusal.
    ///
    /// # Panics
    /// When the body is longer than [`BODY_BYTES_MAX`].
    pub fn reply(&mut self, request: Request, answer: Result<Vec<u8>, Status>) {
        self.serving_calls -= 1;
        let Request { rail, token } = request;
        let (header, payload) = match answer {
            Ok(body) => {
                assert!(body.len() <= BODY_BYTES_MAX, "an answer of {} bytes", body.len());
                (
                    Header { payload_bytes: body.len() as u32, ..Header::new(Kind::CallReply) },
                    Payload::Body(body),
                )
            }
            Err(status) => (Header { status: status as u16, ..Header::new(Kind::Error) }, Payload::None),
        };
        self.queue(usize::from(rail), Header { token, ..header }, payload, true);
    }

    /// Takes a handle of the peer's away, at once: no byte of its memory is touched after this returns.
    ///
    /// Answers under way keep the bytes as they are now (`copy` takes them), answers not yet begun become refusals, and
    /// the rest of writes under way is thrown away.
    pub fn revoke(&mut self, handle: u32, mut copy: impl FnMut(u64, u32) -> Vec<u8>) {
        let mut refused = None;
        self.paging.revoke(handle);
        for (index, rail) in self.rails.iter_mut().enumerate() {
            if let Some((header, place, _)) = &mut rail.arriving
                && header.kind == Kind::Write
                && header.handle == handle
                && *place != Place::Discard
            {
                *place = Place::Discard;
                refused = Some((index, header.token));
            }
            for (position, frame) in rail.queue.iter_mut().enumerate() {
                let Payload::Segment { handle: other, offset, bytes } = frame.payload else { continue };
                if other != handle {
                    continue;
                }
                if position == 0 && rail.sent > 0 {
                    let body = copy(offset, bytes);
                    assert_eq!(body.len(), bytes as usize, "the frame's length is on its way already");
                    self.kept_bytes += body.len();
                    frame.payload = Payload::Body(body);
                } else if let Ok(header) = Header::decode(&frame.header) {
                    let status = Status::NoHandle as u16;
                    frame.header = Header { kind: Kind::Error, status, payload_bytes: 0, ..header }.encode();
                    frame.payload = Payload::None;
                    rail.queued_bytes -= bytes as usize;
                }
            }
        }
        if let Some((rail, token)) = refused {
            self.refuse_write(rail, token, Status::NoHandle);
        }
    }

    // ---- memory that is not there ----

    /// Whether a request may be served: writes before it have been applied, or (a read) have arrived and wait for other memory, which
    /// [`Endpoint::must_wait`] makes sure of.
    fn may_serve(&self, header: &Header) -> bool {
        let applied = self.receive.applied();
        if header.sequence <= applied {
            return true;
        }
        if header.kind != Kind::Read || self.paging.is_empty() {
            return false;
        }
        // On one rail everything that was posted before it came before it.
        let arrived =
            || self.receive.applied_below(header.sequence) + self.paging.writes_below(header.sequence);
        self.rails.len() == 1 || arrived() >= header.sequence
    }

    /// Whether an operation that was checked must become a job: what it touches is not there, or belongs to an earlier job's page.
    pub(super) fn must_wait(&mut self, header: &Header, exports: &mut impl Exports) -> bool {
        let Header { handle, offset, .. } = *header;
        let bytes = if header.kind == Kind::Write { header.payload_bytes } else { header.bytes };
        let is_fenced = header.kind == Kind::Write && header.flags & FENCE != 0;
        if !self.paging.is_empty()
            && (is_fenced || self.paging.is_before(exports.address(handle, offset), bytes))
        {
            return true;
        }
        let access = if header.kind == Kind::Read { Access::Read } else { Access::Write };
        exports.presence(handle, offset, bytes, access) == Presence::Away
    }

    /// The bytes of a write whose memory is not there have been collected.
    pub(super) fn defer_write(&mut self, rail: usize, header: Header, exports: &mut impl Exports) {
        let body = core::mem::take(&mut self.rails[rail].body);
        let address = exports.address(header.handle, header.offset);
        let barrier = header.flags & FENCE != 0;
        self.paging.add(rail, header, address, body.len() as u32, Work::Write(body), barrier);
        // Reads that waited for its arrival.
        self.serve_deferred(exports);
    }

    /// The jobs of this session.
    #[inline]
    pub fn paging(&self) -> &Paging {
        &self.paging
    }

    /// The jobs that have waited for so long and that nobody executes yet: refuse them with [`Endpoint::paged`]. Times are those of the
    /// driver's looks, of which the first after a job's arrival counts as that.
    pub fn overdue(&mut self, now_ms: u64, limit_ms: u64) -> Vec<JobId> {
        self.paging.overdue(now_ms, limit_ms)
    }

    /// A job to execute, by somebody who may wait for memory.
    pub fn job(&mut self) -> Option<Job> {
        self.paging.start()
    }

    /// Tells how a job ended, or that it will not be executed: what waited for it goes on, and the peer is answered.
    ///
    /// # Errors
    /// The session must end.
    pub fn paged(
        &mut self,
        id: JobId,
        result: Result<Done, Status>,
        exports: &mut impl Exports,
    ) -> Result<(), Violation> {
        // The session may have ended meanwhile.
        let Some(Entry { rail, header, revoked, .. }) = self.paging.finish(id) else { return Ok(()) };
        let Header { handle, offset, token, bytes, .. } = header;
        let result = if revoked { Err(Status::NoHandle) } else { result };
        if header.kind == Kind::Write {
            if !self.receive.apply(header.sequence) {
                return Err(Violation::Sequence);
            }
            match (result, header.notify()) {
                (Ok(_), Some(Some(notify))) => drop(self.notices.insert(header.sequence, (handle, notify))),
                (Ok(_), _) => {}
                (Err(status), _) => self.refuse_write(rail, token, status),
            }
            return self.after_write(rail, exports);
        }
        let (answer, payload) = match result {
            Ok(Done::Read(_)) if self.kept_bytes >= KEPT_BYTES_MAX => {
                self.throttled.push_back((rail, header));
                return Ok(());
            }
            Ok(Done::Read(copy)) => {
                debug_assert_eq!(copy.len(), bytes as usize, "as many as were asked for, at {offset}");
                self.kept_bytes += copy.len();
                let header = Header { token, payload_bytes: bytes, ..Header::new(Kind::ReadReply) };
                (header, Payload::Body(copy))
            }
            Ok(Done::Word(word)) => {
                (Header { token, offset: word, ..Header::new(Kind::AtomicReply) }, Payload::None)
            }
            Ok(Done::Written) => (Header { token, ..Header::new(Kind::FlushAck) }, Payload::None),
            Err(status) => {
                (Header { token, status: status as u16, ..Header::new(Kind::Error) }, Payload::None)
            }
        };
        self.queue(rail, answer, payload, true);
        Ok(())
    }
}
