//! One session: operations of both sides over one or more rails, as a state machine without input or output.
//!
//! The driver asks where the next bytes of a rail belong ([`Endpoint::want`]), puts them there, and says so; it takes the
//! frames to send ([`Endpoint::frames`]) and says how many bytes went. Memory is the driver's: the endpoint only says
//! "these bytes into segment 7 at 0x2000". Promises:
//!
//! * a read or call is served after all writes posted before it on the session have been applied, whatever rails they took;
//! * an atomic likewise, and it is executed once;
//! * a notification is visible after its write and everything posted before it, on all rails, and in the order of posting;
//! * a fenced write is applied after all writes posted before it;
//! * a flush is answered after all earlier writes were applied, and reports the first of them that was refused;
//! * a write posted after a read may overtake it: wait for the read if that matters;
//! * an operation that the peer refuses fails alone; a peer that breaks the protocol is a [`Violation`] and ends the session;
//! * whatever the peer sends, memory use stays below the bounds in [`crate::limits`].

mod ops;
mod paging;
mod post;
mod serve;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_one_sided;
#[cfg(test)]
mod tests_paging;
mod types;
mod window;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use crate::key::{Access, RemoteKey, Rights};
use crate::limits::{
    ACKNOWLEDGE_EVERY, BATCH_BYTES_MAX, BODY_BYTES_MAX, CALLS_MAX, HEADER_BYTES, NAME_BYTES_MAX,
    NOTIFICATIONS_MAX, OPS_MAX, PAYLOAD_BYTES_MAX,
};
use crate::notify::Notify;
use crate::wire::{Header, Kind, PULSE, Status};
use ops::{OpKind, OpTable};
pub use paging::{Done, Job, JobId, Paging, Work};
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
    /// A sent batch, for the next one.
    spare: Vec<u8>,
    /// All of our writes on this rail have numbers below.
    written: u64,
    /// Signs of life that we have asked for and not received.
    asked_for_life: u32,
}

/// A rail's queue takes no frames that nobody waits for behind so many: an honest peer has at most two windows' acknowledgements and
/// OPS_MAX answers to take.
const IDLE_FRAMES_MAX: usize = 2 * OPS_MAX;

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
    /// Whose turn it is to take what is long, and how much it has got.
    turn_rail: usize,
    turn_bytes: usize,
    /// Small frames do not share a rail.
    spreads: bool,
    events: VecDeque<Event>,
    /// Fenced writes of ours that must not be sent yet, and the flush that will tell when.
    held: VecDeque<(Header, Payload)>,
    probe: Option<u16>,
    deferred: Vec<Deferred>,
    /// Notifications of writes that were applied before earlier ones, by the write's number: at most a window of them.
    notices: BTreeMap<u64, (u32, Notify)>,
    /// Handles that the peer has given back while answers with their bytes wait to be sent.
    closing: Vec<u32>,
    /// Operations of the peer's on memory that is not there.
    paging: Paging,
    /// Copied answers that wait to be sent, and reads that wait until they are fewer.
    kept_bytes: usize,
    throttled: VecDeque<(usize, Header)>,
    /// Requests of the peer's that are not answered yet, or whose answer is not sent.
    serving: usize,
    serving_calls: usize,
    /// The `applied` that the peer was last told.
    told: u64,
    refused_write: Option<Status>,
    /// Our writes up to the last one that has bytes.
    filled: u64,
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
            spare: Vec::new(),
            written: 0,
            asked_for_life: 0,
        };
        Self {
            ops: OpTable::new(OPS_MAX.min(ops_max as usize)),
            send: SendWindow::new(u64::from(window)),
            receive: ReceiveWindow::new(),
            rails: (0..rails.max(1)).map(|_| rail()).collect(),
            turn_rail: 0,
            turn_bytes: post::TURN_BYTES,
            spreads: false,
            events: VecDeque::with_capacity(64),
            held: VecDeque::new(),
            probe: None,
            deferred: Vec::new(),
            notices: BTreeMap::new(),
            closing: Vec::new(),
            paging: Paging::default(),
            kept_bytes: 0,
            throttled: VecDeque::new(),
            serving: 0,
            serving_calls: 0,
            told: 0,
            refused_write: None,
            filled: 0,
            closed: false,
        }
    }

    /// Our operations that have not ended.
    pub fn pending(&self) -> usize {
        self.ops.active()
    }

    /// Whether another operation that is answered, or has a buffer, could be posted.
    pub fn has_slots(&self) -> bool {
        self.ops.free() > 0
    }

    /// Writes that we have posted, ever.
    pub fn posted_writes(&self) -> u64 {
        self.send.next()
    }

    /// Of these, how many there were with the last one that has bytes: those behind it only tell something.
    pub fn filled_writes(&self) -> u64 {
        self.filled
    }

    /// Of these, how many are known to have been applied: all below this number.
    pub fn applied_writes(&self) -> u64 {
        self.send.applied()
    }

    /// How many connections it runs over.
    pub fn rails(&self) -> usize {
        self.rails.len()
    }

    /// The next thing to know.
    pub fn event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn queue(&mut self, rail: usize, header: Header, payload: Payload, answers: bool) {
        self.told = self.receive.applied();
        let header = Header { applied: self.told, ..header }.encode();
        let rail = &mut self.rails[rail];
        rail.queued_bytes += HEADER_BYTES + payload.bytes();
        rail.queue.push_back(Frame { header, payload, answers, batch: false });
    }

    /// Queues a write with a copy of its bytes: behind the copied writes at the end of the queue, so that they are sent as one piece.
    fn queue_copied(&mut self, rail: usize, header: Header, bytes: &[u8]) {
        self.told = self.receive.applied();
        let header = Header { applied: self.told, ..header }.encode();
        let rail = &mut self.rails[rail];
        let len = HEADER_BYTES + bytes.len();
        rail.queued_bytes += len;
        if let Some(Frame { payload: Payload::Body(batch), batch: true, .. }) = rail.queue.back_mut()
            && batch.len() + len <= BATCH_BYTES_MAX
        {
            batch.extend_from_slice(&header);
            batch.extend_from_slice(bytes);
            return;
        }
        let mut batch = core::mem::take(&mut rail.spare);
        batch.clear();
        batch.extend_from_slice(bytes);
        rail.queue.push_back(Frame { header, payload: Payload::Body(batch), answers: false, batch: true });
    }

    // ---- sending ----

    /// Whether there is something to send on this rail.
    pub fn has_output(&self, rail: usize) -> bool {
        !self.rails[rail].queue.is_empty()
    }

    /// Bytes that wait to be sent on this rail.
    pub fn queued_bytes(&self, rail: usize) -> usize {
        self.rails[rail].queued_bytes - self.rails[rail].sent
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
            if let (Payload::Body(body), true) = (&frame.payload, frame.header[0] == Kind::ReadReply as u8) {
                self.kept_bytes -= body.len();
            }
            if let Frame { payload: Payload::Body(batch), batch: true, .. } = frame {
                self.rails[rail].spare = batch;
            } else if let Payload::Local { slot, .. } = frame.payload {
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

    /// The header of the write that `bytes` begin with, if the rail is between frames, all of the write is there, and it asks for
    /// nothing but to be written: then the driver may apply it in one step and tell [`Endpoint::wrote`]. Otherwise nothing has
    /// happened, and the bytes go the usual way.
    pub fn whole_write(&self, rail: usize, bytes: &[u8]) -> Option<Header> {
        let state = &self.rails[rail];
        if state.arriving.is_some() || state.partial_bytes > 0 || bytes.first() != Some(&(Kind::Write as u8))
        {
            return None;
        }
        let header = Header::decode(bytes.first_chunk()?).ok()?;
        let is_whole = bytes.len() - HEADER_BYTES >= header.payload_bytes as usize;
        (is_whole && header.flags == 0 && self.receive.accepts(header.sequence)).then_some(header)
    }

    /// Tells that the write of [`Endpoint::whole_write`] is in place, or why not.
    ///
    /// # Errors
    /// The session must end.
    pub fn wrote(
        &mut self,
        rail: usize,
        header: &Header,
        result: Result<(), Status>,
        exports: &mut impl Exports,
    ) -> Result<(), Violation> {
        if !self.send.acknowledge(header.applied) || !self.receive.apply(header.sequence) {
            return Err(Violation::Sequence);
        }
        if !self.held.is_empty() {
            self.release_held();
        }
        if let Err(status) = result {
            self.refuse_write(rail, header.token, status);
        }
        self.after_write(rail, exports)
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
        let whole = if state.partial_bytes == 0 { bytes.first_chunk() } else { None };
        let header = if let Some(header) = whole {
            assert!(bytes.len() == HEADER_BYTES, "more than a header");
            Header::decode(header)
        } else {
            state.partial[state.partial_bytes..][..bytes.len()].copy_from_slice(bytes);
            state.partial_bytes += bytes.len();
            if state.partial_bytes < HEADER_BYTES {
                return Ok(());
            }
            state.partial_bytes = 0;
            Header::decode(&state.partial)
        };
        let header = header.map_err(Violation::Wire)?;
        if !self.send.acknowledge(header.applied) {
            return Err(Violation::Sequence);
        }
        if !self.held.is_empty() {
            self.release_held();
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
    /// False when nothing is on its way to a segment there.
    pub fn fault(&mut self, rail: usize) -> bool {
        let Some((header, place @ Place::Segment { .. }, _)) = &mut self.rails[rail].arriving else {
            return false;
        };
        *place = Place::Discard;
        let token = header.token;
        self.refuse_write(rail, token, Status::Fault);
        true
    }

    /// The memory behind the segment under way on this rail has gone away for a while: the rest is collected and becomes a job. False
    /// when nothing is on its way to a segment there.
    pub fn divert(&mut self, rail: usize) -> bool {
        let rail = &mut self.rails[rail];
        let Some((header, place @ Place::Segment { .. }, at)) = &mut rail.arriving else { return false };
        header.offset += u64::from(*at);
        header.payload_bytes -= *at;
        (*place, *at) = (Place::Body, 0);
        rail.body.clear();
        true
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
        let notify = header.notify().ok_or(Violation::Body)?;
        let allowed =
            exports.check(handle, offset, payload_bytes, Access::Write).and_then(|()| match notify {
                Some(notify) if u32::from(notify.number()) >= exports.notifications(handle) => {
                    Err(Status::OutOfBounds)
                }
                _ => Ok(()),
            });
        match allowed {
            Ok(()) if payload_bytes > 0 && self.must_wait(header, exports) => Ok(Place::Body),
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
            Kind::Write if place == Place::Body => self.defer_write(rail, header, exports),
            Kind::Write => {
                if !self.receive.apply(header.sequence) {
                    return Err(Violation::Sequence);
                }
                // A write that was refused or faulted has become a Discard and tells nobody.
                if let (Place::Segment { handle, .. }, Some(Some(notify))) = (place, header.notify()) {
                    self.notices.insert(header.sequence, (handle, notify));
                }
                self.after_write(rail, exports)?;
            }
            Kind::ReadReply => {
                if let Place::Local { slot } = place {
                    self.complete(slot, Ok(Answer::Done));
                }
            }
            Kind::Read | Kind::Flush | Kind::Import | Kind::Unimport | Kind::Call | Kind::Atomic => {
                let body = core::mem::take(&mut self.rails[rail].body);
                self.accept(rail, header, body, exports)?;
            }
            Kind::AtomicReply => {
                let slot = self.answered(rail, &header, &[OpKind::Atomic])?;
                self.complete(slot, Ok(Answer::Word(header.offset)));
            }
            Kind::FlushAck if header.token == PULSE => {
                let asked = &mut self.rails[rail].asked_for_life;
                *asked = asked.checked_sub(1).ok_or(Violation::Unasked(header.kind))?;
            }
            Kind::FlushAck if self.probe.is_some_and(|slot| self.ops.wire_token(slot) == header.token) => {
                let slot = self.answered(rail, &header, &[OpKind::Probe])?;
                self.ops.release(slot);
                self.probe = None;
                self.release_held();
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
                let notifications = u32::try_from(header.sequence).unwrap_or(u32::MAX).min(NOTIFICATIONS_MAX);
                let answer =
                    Answer::Imported { handle: header.handle, len: header.offset, rights, notifications };
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

    /// A write has been applied: what waited for it, and an acknowledgement when it is time.
    fn after_write(&mut self, rail: usize, exports: &mut impl Exports) -> Result<(), Violation> {
        self.deliver_notices(exports);
        self.serve_deferred(exports);
        if self.receive.applied() - self.told >= ACKNOWLEDGE_EVERY {
            if self.rails[rail].queue.len() > IDLE_FRAMES_MAX {
                return Err(Violation::TooMany);
            }
            self.queue(rail, Header::new(Kind::Acknowledge), Payload::None, false);
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
                let kinds = [OpKind::Read, OpKind::Flush, OpKind::Import, OpKind::Call, OpKind::Atomic];
                let slot = self.answered(rail, header, &kinds)?;
                self.complete(slot, Err(OpError::Refused(status)));
            }
        }
        Ok(())
    }
}
