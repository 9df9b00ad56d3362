//! The peer's operations.

use super::*;
use crate::atomic::Atomic;
use crate::limits::ATOMIC_BYTES;
use crate::wire::QUIET;

impl Endpoint {
    pub(super) fn accept(
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
        if header.sequence <= self.receive.applied() {
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
                let copied = exports
                    .check(handle, offset, bytes, Access::Read)
                    .and_then(|()| exports.snapshot(handle, offset, bytes).transpose());
                let reply = Header { token, payload_bytes: bytes, ..Header::new(Kind::ReadReply) };
                match copied {
                    Ok(None) => (reply, Payload::Segment { handle, offset, bytes }),
                    Ok(Some(copy)) => (reply, Payload::Body(copy)),
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
                if self.answers_from(header.handle) {
                    // Reads asked for before still want their bytes.
                    // Once: so there are at most as many as there are answers.
                    if !self.closing.contains(&header.handle) {
                        self.closing.push(header.handle);
                    }
                } else {
                    exports.unimport(header.handle);
                }
                (Header { token, ..Header::new(Kind::FlushAck) }, Payload::None)
            }
            Kind::Atomic => {
                let Header { handle, offset, .. } = *header;
                let done =
                    Atomic::decode(header, &body).and_then(|atomic| exports.atomic(handle, offset, &atomic));
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

    /// Whether an answer with bytes of this handle waits to be sent.
    fn answers_from(&self, handle: u32) -> bool {
        let is_from = |frame: &Frame| matches!(frame.payload, Payload::Segment { handle: other, .. } if other == handle);
        self.rails.iter().any(|rail| rail.queue.iter().any(is_from))
    }

    /// Closes the handles that the peer has given back and whose last answers have been sent. The driver calls it after sending.
    pub fn close_handles(&mut self, exports: &mut impl Exports) {
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
