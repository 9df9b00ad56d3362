//! One session: operations of both sides over one or more rails, as a state machine without input or output.
//!
//! The driver asks where the next bytes of a rail belong ([`Endpoint::want`]), puts them there, and says so; it takes the
//! frames to send ([`Endpoint::frames`]) and says how many bytes went. Memory is the driver's: the endpoint only says
//! "these bytes into segment 7 at 0x2000". Promises:
//!
//! * a read or call is served after all writes posted before it on the session have been applied, whatever rails they took;
//! * a flush is answered after all earlier writes were applied, and reports the first of them that was refused;
//! * a write posted after a read may overtake it: wait for the read if that matters;
//! * an operation that the peer refuses fails alone; a peer that breaks the protocol is a [`Violation`] and ends the session;
//! * whatever the peer sends, memory use stays below the bounds in [`crate::limits`].

mod ops;
#[cfg(test)]
mod tests;
mod types;
mod window;

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::key::{Access, RemoteKey, Rights};
use crate::limits::{
    ACKNOWLEDGE_EVERY, BODY_BYTES_MAX, CALLS_MAX, HEADER_BYTES, NAME_BYTES_MAX, OPS_MAX, PAYLOAD_BYTES_MAX,
};
use crate::wire::{Header, Kind, Status};
use ops::{OpKind, OpTable};
pub use types::*;
use window::{ReceiveWindow, SendWindow};

#[derive(Debug)]
struct Rail {
    partial: [u8; HEADER_BYTES],
    partial_bytes: usize,
    /// The frame whose payload is arriving, where it goes, and how much has arrived.
    arriving: Option<(Header, Place, u32)>,
    body: Vec<u8>,
    /// Slots whose answers come on this rail, oldest first: a hint for the driver.
    expected: VecDeque<u16>,
    queue: VecDeque<Frame>,
    /// Bytes of the first frame that are sent.
    sent: usize,
    queued_bytes: usize,
}

#[derive(Debug)]
struct Deferred {
    rail: usize,
    header: Header,
    body: Vec<u8>,
}

/// See the module.
#[derive(Debug)]
pub struct Endpoint {
    ops: OpTable,
    send: SendWindow,
    receive: ReceiveWindow,
    rails: Vec<Rail>,
    next_rail: usize,
    events: VecDeque<Event>,
    deferred: Vec<Deferred>,
    /// Requests of the peer's that are not answered yet, or whose answer is not sent.
    serving: usize,
    serving_calls: usize,
    /// The `applied` that the peer was last told.
    told: u64,
    refused_write: Option<Status>,
    closed: bool,
}

impl Endpoint {
    /// A session over `rails` connections whose hellos are done. `ops_max` and `window` are what the peer's hello allows.
    pub fn new(rails: usize, ops_max: u32, window: u32) -> Self {
        let rail = || Rail {
            partial: [0; HEADER_BYTES],
            partial_bytes: 0,
            arriving: None,
            body: Vec::new(),
            expected: VecDeque::with_capacity(OPS_MAX),
            queue: VecDeque::with_capacity(64),
            sent: 0,
            queued_bytes: 0,
        };
        Self {
            ops: OpTable::new(OPS_MAX.min(ops_max as usize)),
            send: SendWindow::new(u64::from(window)),
            receive: ReceiveWindow::new(),
            rails: (0..rails.max(1)).map(|_| rail()).collect(),
            next_rail: 0,
            events: VecDeque::with_capacity(64),
            deferred: Vec::new(),
            serving: 0,
            serving_calls: 0,
            told: 0,
            refused_write: None,
            closed: false,
        }
    }

    /// Our operations that have not ended.
    pub fn pending(&self) -> usize {
        self.ops.active()
    }

    /// How many connections it runs over.
    pub fn rails(&self) -> usize {
        self.rails.len()
    }

    /// The next thing to know.
    pub fn event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    // ---- our operations ----

    /// Reads `bytes` at `offset` of `handle`; the driver keeps the buffer under the slot until the read completes.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_read(&mut self, token: u64, handle: u32, offset: u64, bytes: u32) -> Result<u16, PostError> {
        if bytes > PAYLOAD_BYTES_MAX {
            return Err(PostError::TooLong);
        }
        let header = Header { handle, offset, bytes, ..Header::new(Kind::Read) };
        self.request(OpKind::Read, token, header, Payload::None)
    }

    /// Writes the slot's buffer of `bytes` at `offset` of `handle`. It completes when the buffer has been sent.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_write(&mut self, token: u64, handle: u32, offset: u64, bytes: u32) -> Result<u16, PostError> {
        if bytes > PAYLOAD_BYTES_MAX {
            return Err(PostError::TooLong);
        }
        if self.closed {
            return Err(PostError::Closed);
        }
        if !self.ops.has_room() {
            return Err(PostError::Full);
        }
        let sequence = self.send.take().ok_or(PostError::Full)?;
        let rail = self.choose_rail();
        let slot = self.ops.take(OpKind::Write, token, bytes, rail).ok_or(PostError::Full)?;
        let header = Header {
            handle,
            offset,
            sequence,
            payload_bytes: bytes,
            token: self.ops.wire_token(slot),
            ..Header::new(Kind::Write)
        };
        self.queue(rail, header, Payload::Local { slot, bytes }, false);
        Ok(slot)
    }

    /// Completes when all writes posted before have been applied; fails when one of them was refused.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_flush(&mut self, token: u64) -> Result<u16, PostError> {
        self.request(OpKind::Flush, token, Header::new(Kind::Flush), Payload::None)
    }

    /// Opens the segment `name`.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_import(&mut self, token: u64, name: &str, key: &RemoteKey) -> Result<u16, PostError> {
        if name.len() > NAME_BYTES_MAX {
            return Err(PostError::TooLong);
        }
        let mut body = Vec::with_capacity(16 + name.len());
        body.extend_from_slice(&key.to_bytes());
        body.extend_from_slice(name.as_bytes());
        self.request(OpKind::Import, token, Header::new(Kind::Import), Payload::Body(body))
    }

    /// Gives a handle back.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_unimport(&mut self, token: u64, handle: u32) -> Result<u16, PostError> {
        let header = Header { handle, ..Header::new(Kind::Unimport) };
        self.request(OpKind::Flush, token, header, Payload::None)
    }

    /// Calls `method` of the peer.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_call(&mut self, token: u64, method: u32, body: Vec<u8>) -> Result<u16, PostError> {
        if body.len() > BODY_BYTES_MAX {
            return Err(PostError::TooLong);
        }
        let header = Header { handle: method, ..Header::new(Kind::Call) };
        self.request(OpKind::Call, token, header, Payload::Body(body))
    }

    /// Says goodbye: nothing can be posted any more. The driver closes the rails when all is sent.
    pub fn goodbye(&mut self, status: Status, reason: &str) {
        if !self.closed {
            self.closed = true;
            let header = Header { status: status as u16, ..Header::new(Kind::Goodbye) };
            self.queue(0, header, Payload::Body(reason.as_bytes().to_vec()), false);
        }
    }

    /// The session has ended: everything under way completes as [`OpError::Lost`], and nothing more is sent.
    pub fn fail(&mut self) {
        self.closed = true;
        for rail in &mut self.rails {
            rail.queue.clear();
            rail.expected.clear();
            (rail.sent, rail.queued_bytes, rail.arriving) = (0, 0, None);
        }
        let slots: Vec<u16> = self.ops.active_slots().collect();
        for slot in slots {
            let token = self.ops.release(slot).token;
            self.events.push_back(Event::Completed { slot, token, result: Err(OpError::Lost) });
        }
    }

    fn request(
        &mut self,
        kind: OpKind,
        token: u64,
        header: Header,
        payload: Payload,
    ) -> Result<u16, PostError> {
        if self.closed {
            return Err(PostError::Closed);
        }
        if matches!(kind, OpKind::Call | OpKind::Import) && self.ops.calls() >= CALLS_MAX {
            return Err(PostError::Full);
        }
        let rail = self.choose_rail();
        let slot = self.ops.take(kind, token, header.bytes, rail).ok_or(PostError::Full)?;
        let header = Header {
            sequence: self.send.next(),
            token: self.ops.wire_token(slot),
            payload_bytes: payload.bytes() as u32,
            ..header
        };
        self.rails[rail].expected.push_back(slot);
        self.queue(rail, header, payload, false);
        Ok(slot)
    }

    /// The rail with the least to send; rails that are equal take turns.
    fn choose_rail(&mut self) -> usize {
        let count = self.rails.len();
        if count == 1 {
            return 0;
        }
        self.next_rail = (self.next_rail + 1) % count;
        let turns = (0..count).map(|step| (self.next_rail + step) % count);
        turns.min_by_key(|&rail| self.rails[rail].queued_bytes).unwrap_or(0)
    }

    fn queue(&mut self, rail: usize, header: Header, payload: Payload, answers: bool) {
        self.told = self.receive.applied();
        let header = Header { applied: self.told, ..header }.encode();
        let rail = &mut self.rails[rail];
        rail.queued_bytes += HEADER_BYTES + payload.bytes();
        rail.queue.push_back(Frame { header, payload, answers });
    }

    // ---- sending ----

    /// Whether there is something to send on this rail.
    pub fn has_output(&self, rail: usize) -> bool {
        !self.rails[rail].queue.is_empty()
    }

    /// The frames to send, in order, and how many bytes of the first are sent already.
    pub fn frames(&self, rail: usize) -> (usize, impl Iterator<Item = &Frame>) {
        (self.rails[rail].sent, self.rails[rail].queue.iter())
    }

    /// This many more bytes were sent on this rail.
    pub fn sent(&mut self, rail: usize, bytes: usize) {
        let mut bytes = self.rails[rail].sent + bytes;
        while let Some(frame) = self.rails[rail].queue.front() {
            let len = HEADER_BYTES + frame.payload.bytes();
            if bytes < len {
                break;
            }
            bytes -= len;
            let Some(frame) = self.rails[rail].queue.pop_front() else { break };
            self.rails[rail].queued_bytes -= len;
            self.serving -= usize::from(frame.answers);
            if let Payload::Local { slot, .. } = frame.payload {
                let op = self.ops.release(slot);
                let result = op.failed.map_or(Ok(Answer::Done), |status| Err(OpError::Refused(status)));
                self.events.push_back(Event::Completed { slot, token: op.token, result });
            }
        }
        assert!(bytes == 0 || self.has_output(rail), "more sent than there was");
        self.rails[rail].sent = bytes;
    }

    // ---- receiving ----

    /// What the next bytes of this rail are.
    pub fn want(&self, rail: usize) -> Want {
        let rail = &self.rails[rail];
        match &rail.arriving {
            Some((header, place, at)) => {
                Want::Payload { place: *place, at: *at, bytes: header.payload_bytes - at }
            }
            None => Want::Header(HEADER_BYTES - rail.partial_bytes),
        }
    }

    /// The reads whose replies probably come next on this rail, with their lengths; ends at the first answer of another kind.
    ///
    /// Only a hint: the peer may send something else first, an error for example.
    pub fn expected(&self, rail: usize) -> impl Iterator<Item = (u16, u32)> + '_ {
        let next = |&slot: &u16| {
            let op = self.ops.get(slot);
            (op.kind == OpKind::Read && !op.receiving).then_some((slot, op.bytes))
        };
        let queue = &self.rails[rail].expected;
        // The reply that is arriving now has been taken out of the queue.
        queue.iter().map_while(next)
    }

    /// Takes bytes of a header, at most as many as [`Want::Header`] says.
    ///
    /// # Errors
    /// The session must end.
    ///
    /// # Panics
    /// When called out of turn or with too many bytes: the driver's mistake, not the peer's.
    pub fn header(&mut self, rail: usize, bytes: &[u8], exports: &mut impl Exports) -> Result<(), Violation> {
        let state = &mut self.rails[rail];
        assert!(state.arriving.is_none(), "a payload is arriving");
        state.partial[state.partial_bytes..][..bytes.len()].copy_from_slice(bytes);
        state.partial_bytes += bytes.len();
        if state.partial_bytes < HEADER_BYTES {
            return Ok(());
        }
        state.partial_bytes = 0;
        let header = Header::decode(&state.partial).map_err(Violation::Wire)?;
        if !self.send.acknowledge(header.applied) {
            return Err(Violation::Sequence);
        }
        let place = match header.kind {
            Kind::Write => self.start_write(rail, &header, exports)?,
            Kind::ReadReply => self.start_read_reply(rail, &header)?,
            _ => Place::Body,
        };
        let state = &mut self.rails[rail];
        if place == Place::Body {
            // Bounded by the decoder; grows as bytes really arrive.
            state.body.clear();
        }
        state.arriving = Some((header, place, 0));
        if header.payload_bytes == 0 { self.finish(rail, exports) } else { Ok(()) }
    }

    /// Tells that `bytes` of payload are where [`Want::Payload`] said.
    ///
    /// # Errors
    /// The session must end.
    ///
    /// # Panics
    /// When called out of turn or with too many bytes: the driver's mistake, not the peer's.
    pub fn landed(&mut self, rail: usize, bytes: u32, exports: &mut impl Exports) -> Result<(), Violation> {
        let Some((header, _, at)) = &mut self.rails[rail].arriving else { panic!("no payload is arriving") };
        assert!(bytes <= header.payload_bytes - *at, "more bytes than the payload has");
        *at += bytes;
        if *at == header.payload_bytes { self.finish(rail, exports) } else { Ok(()) }
    }

    /// Takes payload that belongs to the endpoint ([`Place::Body`]); tell [`Endpoint::landed`] afterwards.
    pub fn body(&mut self, rail: usize, bytes: &[u8]) {
        self.rails[rail].body.extend_from_slice(bytes);
    }

    /// The memory behind the segment under way on this rail could not be touched: the rest is thrown away and the peer is told.
    pub fn fault(&mut self, rail: usize) {
        let Some((header, place, _)) = &mut self.rails[rail].arriving else { return };
        if *place != Place::Discard {
            *place = Place::Discard;
            let token = header.token;
            self.refuse_write(rail, token, Status::Fault);
        }
    }

    fn start_write(
        &mut self,
        rail: usize,
        header: &Header,
        exports: &mut impl Exports,
    ) -> Result<Place, Violation> {
        if !self.receive.accepts(header.sequence) {
            return Err(Violation::Sequence);
        }
        let Header { handle, offset, payload_bytes, .. } = *header;
        match exports.check(handle, offset, payload_bytes, Access::Write) {
            Ok(()) => Ok(Place::Segment { handle, offset }),
            Err(status) => {
                self.refuse_write(rail, header.token, status);
                Ok(Place::Discard)
            }
        }
    }

    fn refuse_write(&mut self, rail: usize, token: u64, status: Status) {
        // One error until the next flush: a peer that writes nonsense without end cannot fill our queue.
        if self.refused_write.is_none() {
            self.refused_write = Some(status);
            let header = Header { status: status as u16, token, ..Header::new(Kind::Error) };
            self.queue(rail, header, Payload::None, false);
        }
    }

    fn start_read_reply(&mut self, rail: usize, header: &Header) -> Result<Place, Violation> {
        let Some((slot, op)) = self.ops.find(header.token) else {
            return Err(Violation::Unasked(header.kind));
        };
        if op.kind != OpKind::Read || op.receiving || usize::from(op.rail) != rail {
            return Err(Violation::Unasked(header.kind));
        }
        if op.bytes != header.payload_bytes {
            return Err(Violation::Length);
        }
        op.receiving = true;
        self.unexpect(rail, slot);
        Ok(Place::Local { slot })
    }

    fn unexpect(&mut self, rail: usize, slot: u16) {
        let expected = &mut self.rails[rail].expected;
        if expected.front() == Some(&slot) {
            expected.pop_front();
        } else if let Some(index) = expected.iter().position(|&other| other == slot) {
            expected.remove(index);
        }
    }

    /// A whole frame is here.
    fn finish(&mut self, rail: usize, exports: &mut impl Exports) -> Result<(), Violation> {
        let Some((header, place, _)) = self.rails[rail].arriving.take() else { return Ok(()) };
        match header.kind {
            Kind::Write => {
                if !self.receive.apply(header.sequence) {
                    return Err(Violation::Sequence);
                }
                self.serve_deferred(exports);
                if self.receive.applied() - self.told >= ACKNOWLEDGE_EVERY {
                    // An honest peer has at most two windows' acknowledgements and OPS_MAX answers to take.
                    if self.rails[rail].queue.len() > 2 * OPS_MAX {
                        return Err(Violation::TooMany);
                    }
                    self.queue(rail, Header::new(Kind::Acknowledge), Payload::None, false);
                }
            }
            Kind::ReadReply => {
                if let Place::Local { slot } = place {
                    self.complete(slot, Ok(Answer::Done));
                }
            }
            Kind::Read | Kind::Flush | Kind::Import | Kind::Unimport | Kind::Call => {
                let body = core::mem::take(&mut self.rails[rail].body);
                self.accept(rail, header, body, exports)?;
            }
            Kind::FlushAck => {
                let slot = self.answered(rail, &header, &[OpKind::Flush])?;
                let refused = header.status != 0;
                let error = OpError::Refused(Status::from_number(header.status));
                self.complete(slot, if refused { Err(error) } else { Ok(Answer::Done) });
            }
            Kind::ImportAck => {
                let slot = self.answered(rail, &header, &[OpKind::Import])?;
                let rights = if header.bytes == 3 { Rights::ReadWrite } else { Rights::Read };
                let answer = Answer::Imported { handle: header.handle, len: header.offset, rights };
                self.complete(slot, Ok(answer));
            }
            Kind::CallReply => {
                let slot = self.answered(rail, &header, &[OpKind::Call])?;
                let body = core::mem::take(&mut self.rails[rail].body);
                self.complete(slot, Ok(Answer::Reply(body)));
            }
            Kind::Error => self.refused(rail, &header)?,
            Kind::Goodbye => {
                let reason = core::mem::take(&mut self.rails[rail].body);
                self.closed = true;
                self.events.push_back(Event::Goodbye { status: Status::from_number(header.status), reason });
            }
            Kind::Acknowledge => {}
        }
        Ok(())
    }

    fn complete(&mut self, slot: u16, result: Result<Answer, OpError>) {
        let token = self.ops.release(slot).token;
        self.events.push_back(Event::Completed { slot, token, result });
    }

    /// The slot that this answer is for.
    fn answered(&mut self, rail: usize, header: &Header, kinds: &[OpKind]) -> Result<u16, Violation> {
        let unasked = Violation::Unasked(header.kind);
        let (slot, op) = self.ops.find(header.token).ok_or(unasked)?;
        if !kinds.contains(&op.kind) || op.receiving || usize::from(op.rail) != rail {
            return Err(unasked);
        }
        self.unexpect(rail, slot);
        Ok(slot)
    }

    fn refused(&mut self, rail: usize, header: &Header) -> Result<(), Violation> {
        let status = Status::from_number(header.status);
        match self.ops.find(header.token) {
            Some((_, op)) if op.kind == OpKind::Write => op.failed = Some(status),
            // A write completes when it is sent, so its slot may be in use again.
            None => self.events.push_back(Event::WriteRefused(status)),
            Some(_) => {
                let kinds = [OpKind::Read, OpKind::Flush, OpKind::Import, OpKind::Call];
                let slot = self.answered(rail, header, &kinds)?;
                self.complete(slot, Err(OpError::Refused(status)));
            }
        }
        Ok(())
    }

    // ---- the peer's operations ----

    fn accept(
        &mut self,
        rail: usize,
        header: Header,
        body: Vec<u8>,
        exports: &mut impl Exports,
    ) -> Result<(), Violation> {
        let calls = usize::from(header.kind == Kind::Call);
        if self.serving >= OPS_MAX || self.serving_calls + calls > CALLS_MAX {
            return Err(Violation::TooMany);
        }
        if !self.receive.may_wait_for(header.sequence) {
            return Err(Violation::Sequence);
        }
        if header.kind == Kind::Import && body.len() < 16 {
            return Err(Violation::Body);
        }
        if header.kind == Kind::Read && header.bytes > PAYLOAD_BYTES_MAX {
            return Err(Violation::Length);
        }
        self.serving += 1;
        self.serving_calls += calls;
        if header.sequence <= self.receive.applied() {
            self.serve(rail, &header, body, exports);
        } else {
            self.deferred.push(Deferred { rail, header, body });
        }
        Ok(())
    }

    fn serve_deferred(&mut self, exports: &mut impl Exports) {
        let mut index = 0;
        while index < self.deferred.len() {
            if self.deferred[index].header.sequence > self.receive.applied() {
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
                match exports.check(handle, offset, bytes, Access::Read) {
                    Ok(()) => (
                        Header { token, payload_bytes: bytes, ..Header::new(Kind::ReadReply) },
                        Payload::Segment { handle, offset, bytes },
                    ),
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
                        ..Header::new(Kind::ImportAck)
                    },
                    Err(status) => refuse(status),
                };
                (header, Payload::None)
            }
            Kind::Call => {
                let request = Request { rail: rail as u8, token };
                self.events.push_back(Event::Called { request, method: header.handle, body });
                return;
            }
            Kind::Unimport => {
                exports.unimport(header.handle);
                (Header { token, ..Header::new(Kind::FlushAck) }, Payload::None)
            }
            _ => {
                let status = self.refused_write.take().unwrap_or(Status::Ok) as u16;
                (Header { token, status, ..Header::new(Kind::FlushAck) }, Payload::None)
            }
        };
        self.queue(rail, answer, payload, true);
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
        for (index, rail) in self.rails.iter_mut().enumerate() {
            if let Some((header, place, _)) = &mut rail.arriving
                && matches!(*place, Place::Segment { handle: other, .. } if other == handle)
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
}
