//! Our operations: posting them, and what becomes of them when the session ends.

use super::*;
use crate::atomic::Atomic;
use crate::limits::{BATCH_BYTES_MAX, BODY_BYTES_MAX, COPIED_BYTES_MAX, QUEUE_BYTES_MAX};
use crate::wire::{NO_SLOT, QUIET};

/// A rail's turn ends when it has got so much.
pub(super) const TURN_BYTES: usize = 256 << 10;

impl Endpoint {
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
        self.post_write_with(token, handle, offset, bytes, WriteOptions::default())
    }

    /// As [`Endpoint::post_write`], with a fence or a notification.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_write_with(
        &mut self,
        token: u64,
        handle: u32,
        offset: u64,
        bytes: u32,
        options: WriteOptions,
    ) -> Result<u16, PostError> {
        if bytes > PAYLOAD_BYTES_MAX {
            return Err(PostError::TooLong);
        }
        let rail = self.admit(options.fence, 1, bytes as usize)?;
        let slot = self.ops.take(OpKind::Write, token, bytes, rail.unwrap_or(0)).ok_or(PostError::Full)?;
        let header = Header {
            handle,
            offset,
            token: self.ops.wire_token(slot),
            ..Header::write(options.fence, options.notify)
        };
        self.submit(rail, header, Payload::Local { slot, bytes })?;
        Ok(slot)
    }

    /// Writes a copy of at most [`COPIED_BYTES_MAX`] bytes, perhaps none. It has no slot and is
    /// complete when this returns; a refusal is told by [`Event::WriteRefused`] and the next flush.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_write_copied(
        &mut self,
        handle: u32,
        offset: u64,
        bytes: &[u8],
        options: WriteOptions,
    ) -> Result<(), PostError> {
        if bytes.len() > COPIED_BYTES_MAX {
            return Err(PostError::TooLong);
        }
        let rail = self.admit(options.fence, 0, bytes.len())?;
        if self.rails[rail.unwrap_or(0)].queued_bytes > QUEUE_BYTES_MAX {
            return Err(PostError::Full);
        }
        let header =
            Header { handle, offset, token: NO_SLOT, ..Header::write(options.fence, options.notify) };
        let Some(rail) = rail else {
            // Held back: it needs a place of its own.
            return self.submit(None, header, Payload::Body(bytes.to_vec()));
        };
        let sequence = self.number(bytes.len())?;
        self.rails[rail].written = self.rails[rail].written.max(sequence + 1);
        self.queue_copied(rail, Header { sequence, payload_bytes: bytes.len() as u32, ..header }, bytes);
        Ok(())
    }

    /// Whether a write may be posted that needs so many slots; the rail it takes, none when it must be held back.
    fn admit(&mut self, fence: bool, slots: usize, bytes: usize) -> Result<Option<usize>, PostError> {
        if self.closed {
            return Err(PostError::Closed);
        }
        let rail = if fence { self.fenced_rail(bytes) } else { Some(self.choose_rail(bytes)) };
        let probe = usize::from(rail.is_none() && self.probe.is_none());
        if self.ops.free() < slots + probe || !self.send.has_room() {
            return Err(PostError::Full);
        }
        Ok(rail)
    }

    /// The rail on which a fenced write comes after all earlier ones by itself.
    fn fenced_rail(&mut self, bytes: usize) -> Option<usize> {
        if !self.held.is_empty() {
            return None;
        }
        if self.send.applied() == self.send.next() {
            Some(self.choose_rail(bytes))
        } else {
            self.only_busy_rail()
        }
    }

    /// The number of a write of so many bytes.
    fn number(&mut self, bytes: usize) -> Result<u64, PostError> {
        let sequence = self.send.take().ok_or(PostError::Full)?;
        if bytes > 0 {
            self.filled = sequence + 1;
        }
        Ok(sequence)
    }

    /// Numbers a write and queues it, or holds it back.
    fn submit(&mut self, rail: Option<usize>, header: Header, payload: Payload) -> Result<(), PostError> {
        let sequence = self.number(payload.bytes())?;
        let header = Header { sequence, payload_bytes: payload.bytes() as u32, ..header };
        match rail {
            Some(rail) => self.queue_write(rail, header, payload),
            None => {
                self.held.push_back((header, payload));
                self.release_held();
            }
        }
        Ok(())
    }

    fn queue_write(&mut self, rail: usize, header: Header, payload: Payload) {
        self.rails[rail].written = self.rails[rail].written.max(header.sequence + 1);
        self.queue(rail, header, payload, false);
    }

    /// Queues the fenced writes before which everything has been applied (or will be, on the same rail), and asks for news for
    /// the others.
    pub(super) fn release_held(&mut self) {
        while let Some((header, payload)) = self.held.pop_front() {
            let rail = if self.send.applied() >= header.sequence {
                Some(self.choose_rail(payload.bytes()))
            } else {
                self.only_busy_rail()
            };
            let Some(rail) = rail else {
                let sequence = header.sequence;
                self.held.push_front((header, payload));
                self.ask_until(sequence);
                return;
            };
            self.queue_write(rail, header, payload);
        }
    }

    /// The rail that alone has writes which may not have been applied: what is queued there comes behind them.
    fn only_busy_rail(&self) -> Option<usize> {
        let applied = self.send.applied();
        let mut busy = (0..self.rails.len()).filter(|&rail| self.rails[rail].written > applied);
        let rail = busy.next()?;
        if busy.next().is_none() { Some(rail) } else { None }
    }

    /// Asks for a sign of life on this rail: an answer at once, whatever waits, and even if no operation could be posted.
    pub fn ask_for_life(&mut self, rail: usize) {
        if !self.closed {
            self.rails[rail].asked_for_life += 1;
            let header = Header { flags: QUIET, token: PULSE, ..Header::new(Kind::Flush) };
            self.queue(rail, header, Payload::None, false);
        }
    }

    /// Gives a sign of life on this rail, unless there is something to send anyway.
    pub fn show_life(&mut self, rail: usize) {
        if !self.closed && !self.has_output(rail) {
            self.queue(rail, Header::new(Kind::Acknowledge), Payload::None, false);
        }
    }

    /// Asks for an answer when all writes below `sequence` have been applied.
    fn ask_until(&mut self, sequence: u64) {
        if self.probe.is_some() {
            return;
        }
        let rail = self.choose_rail(0);
        // `admit` has left a slot, and the answer to one probe frees it for the next.
        let Some(slot) = self.ops.take(OpKind::Probe, 0, 0, rail) else { return };
        self.probe = Some(slot);
        let token = self.ops.wire_token(slot);
        let header = Header { flags: QUIET, sequence, token, ..Header::new(Kind::Flush) };
        self.rails[rail].expected.push_back(slot);
        self.queue(rail, header, Payload::None, false);
    }

    /// Changes the word at `offset` of `handle` in one step, after all writes posted before; completes with what it was.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_atomic(
        &mut self,
        token: u64,
        handle: u32,
        offset: u64,
        atomic: &Atomic,
    ) -> Result<u16, PostError> {
        let inline = Inline::new(&atomic.body()).ok_or(PostError::TooLong)?;
        let header = Header { handle, offset, ..atomic.header() };
        self.request(OpKind::Atomic, token, header, Payload::Inline(inline))
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

    /// Says goodbye, on each rail: the peer may see the end of any of them first. Nothing can be posted any more. The driver closes the
    /// rails when all is sent.
    pub fn goodbye(&mut self, status: Status, reason: &str) {
        if !self.closed {
            self.closed = true;
            let reason = reason.as_bytes();
            let reason = reason[..reason.len().min(BODY_BYTES_MAX)].to_vec();
            let payload_bytes = reason.len() as u32;
            let header = Header { status: status as u16, payload_bytes, ..Header::new(Kind::Goodbye) };
            for rail in 0..self.rails.len() {
                self.queue(rail, header, Payload::Body(reason.clone()), false);
            }
        }
    }

    /// The session has ended: everything under way completes as [`OpError::Lost`] or [`OpError::Unknown`], and nothing more is sent.
    pub fn fail(&mut self) {
        self.closed = true;
        self.mark_what_never_left();
        self.probe = None;
        self.held.clear();
        self.notices.clear();
        self.closing.clear();
        self.paging.clear();
        self.throttled.clear();
        self.kept_bytes = 0;
        self.deferred.clear();
        for rail in &mut self.rails {
            rail.queue.clear();
            rail.expected.clear();
            (rail.sent, rail.queued_bytes, rail.arriving) = (0, 0, None);
        }
        let slots: Vec<u16> = self.ops.active_slots().collect();
        for slot in slots {
            let op = self.ops.release(slot);
            let may_act = matches!(op.kind, OpKind::Write | OpKind::Atomic) && !op.never_left;
            let error = if may_act { OpError::Unknown } else { OpError::Lost };
            if op.kind != OpKind::Probe {
                self.events.push_back(Event::Completed { slot, token: op.token, result: Err(error) });
            }
        }
    }

    /// Marks the writes and atomics that the peer cannot have seen: an atomic acts when it is there to its last byte, a write
    /// from its first.
    fn mark_what_never_left(&mut self) {
        for (header, _) in &self.held {
            if let Some((_, op)) = self.ops.find(header.token) {
                op.never_left = true;
            }
        }
        for rail in &self.rails {
            for (position, frame) in rail.queue.iter().enumerate() {
                let Ok(header) = Header::decode(&frame.header) else { continue };
                let begun = position == 0 && rail.sent > 0;
                let acts = match header.kind {
                    Kind::Write => begun,
                    Kind::Atomic => false,
                    _ => continue,
                };
                if let Some((_, op)) = self.ops.find(header.token) {
                    op.never_left = !acts;
                }
            }
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
        // A read's answer comes back on its rail.
        let rail = self.choose_rail(payload.bytes().max(header.bytes as usize));
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

    /// From now on small frames take turns over all rails, too: for tests of order.
    #[doc(hidden)]
    pub fn spread(&mut self) {
        self.spreads = true;
    }

    /// The rail for a frame that moves so many bytes. Small ones share the first while it keeps up: a send for each rail, and a look at each
    /// by the peer, would cost more than several rails bring. Others fill the rail whose turn it is; then it is that of the one with the
    /// least to send. Who changed rails more often would have each send and receive less at a time.
    fn choose_rail(&mut self, bytes: usize) -> usize {
        let count = self.rails.len();
        let is_small = bytes <= COPIED_BYTES_MAX && !self.spreads;
        if count == 1 || is_small && self.rails[0].queued_bytes <= BATCH_BYTES_MAX {
            return 0;
        }
        let is_over = self.turn_bytes >= TURN_BYTES || self.spreads;
        if is_over || self.rails[self.turn_rail].queued_bytes > QUEUE_BYTES_MAX {
            let turns = (1..=count).map(|step| (self.turn_rail + step) % count);
            self.turn_rail = turns.min_by_key(|&rail| self.rails[rail].queued_bytes).unwrap_or(0);
            self.turn_bytes = 0;
        }
        self.turn_bytes += bytes;
        self.turn_rail
    }
}
