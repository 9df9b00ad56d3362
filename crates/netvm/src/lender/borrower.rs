//! A borrower's connection to one lender.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use netvm_core::endpoint::{Answer, Event, OpError, PostError};
use netvm_core::limits::{OPS_MAX, PIECES_MAX};
use netvm_core::slab::is_slab;
use netvm_core::wire::{BodyReader, BodyWriter, Hello, Role, Status};
use netvm_sys::shared::SharedSlice;

use super::nearby::{self, Nearby, Place, Tried};
use super::options::{BorrowOptions, Completion, ForkTicket};
use super::patience::{Debt, Delivery, HEARD};
use super::protocol::{self, BorrowAnswer, Class, LenderStatus, Recall};
use crate::error::{Error, Result};
use crate::link::Link;
use crate::link::greeting::{self, Transport};
use crate::link::session::{Failure, NoMemory, Session};
use crate::link::together::{Wait, alone, together};
use crate::security::{Protection, Security};

/// Number of the operations that blocking calls post: not for users.
const INTERNAL: u64 = u64::MAX;
/// Set in the number of a posted call for a slab.
const BORROW_BIT: u64 = 1 << 63;
/// Set in the number of a call to provide memory: not for users either.
const PROVIDE_BIT: u64 = 1 << 62;
/// Number of the flush that asks for a sign of life.
const PROBE: u64 = BORROW_BIT | PROVIDE_BIT;

mod calls;
mod connecting;
mod datagrams;
mod forks;

pub(crate) use datagrams::Asked;
use datagrams::Asker;

/// A connection without operations under way, for another thread or process.
pub struct BorrowerParts {
    /// Address of the lender.
    pub lender: String,
    /// Bytes of one slab.
    pub slab_bytes: u64,
    transport: Transport,
    security: Security,
    call_timeout: Duration,
    limits: (u32, u32),
    nearby: Option<Nearby>,
    asker: Option<Box<Asker>>,
    kind: Class,
    identity: Option<[u8; 16]>,
}

impl std::fmt::Debug for BorrowerParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BorrowerParts").field("lender", &self.lender).finish_non_exhaustive()
    }
}

/// A lease at one lender and the connection that it lives on.
///
/// Tokens are the caller's own numbers below 2^62. It belongs to one thread: whoever owns it posts operations, and drives them with [`Borrower::poll`]. The lease and all its
/// slabs end when the connection does, also when this process dies.
///
/// A read completes when its bytes are in place. A write completes when its buffer may be used again; every read and call posted after
/// it, and every lease forked after it, sees it. A write that is posted while a read of the same bytes is under way may be seen by
/// that read. If the lender refuses a write the connection has lost data and fails as a whole.
pub struct Borrower {
    session: Session<Transport>,
    lender: String,
    slab_bytes: u64,
    security: Security,
    call_timeout: Duration,
    limits: (u32, u32),
    /// Completions that came in while a blocking call waited.
    ready: Vec<Completion>,
    waiting_since: Option<Instant>,
    /// A sign of life has been asked for.
    probing: bool,
    delivery: Delivery,
    broken: Option<Error>,
    /// What the lender asks back, until somebody has looked.
    recall: Option<Recall>,
    /// What the lender had not lent when it was last asked for a slab.
    room_bytes: Option<u64>,
    /// The lender is on this host.
    pub(super) nearby: Option<Nearby>,
    /// The lender answers datagrams.
    asker: Option<Box<Asker>>,
    /// What it lends, as far as it has been asked.
    kind: Class,
    /// By which it is told from others, if it has been asked.
    identity: Option<[u8; 16]>,
    /// How often nothing has been received because everything had ended.
    unheard: u32,
}

/// Rounds of receiving in one poll.
const ROUNDS_MAX: usize = 8;
/// Polls that take all that the kernel keeps of a connection, so that its end is seen if there is one.
const POLLS_TO_END: usize = 128;
/// The connection is looked at once in so many polls, however much ends without it.
const UNHEARD_MAX: u32 = 32;

impl std::fmt::Debug for Borrower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Borrower").field("lender", &self.lender).field("pending", &self.pending()).finish()
    }
}

impl Borrower {
    /// Whether the lender is on this host and its memory is shared: reads and writes end when they are posted, most of them.
    pub fn is_nearby(&self) -> bool {
        self.nearby.is_some()
    }

    /// Where its memory is. Of a fork's lease it is not known how the lender keeps it.
    pub fn class(&self) -> Class {
        if self.nearby.is_some() { Class::Nearby } else { self.kind }
    }

    /// Whether both leases are at one lender, by whatever addresses. Of lenders that do not say which one they are it is not known.
    pub fn is_at_lender_of(&self, other: &Borrower) -> bool {
        self.identity.is_some() && self.identity == other.identity
    }

    /// Whether something has ended that the next [`Borrower::poll`] tells, without anything having to arrive.
    pub fn has_ended(&self) -> bool {
        !self.ready.is_empty()
    }

    /// All descriptors that it uses.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let asker = self.asker.iter().flat_map(|asker| asker.descriptors());
        std::iter::once(self.as_fd()).chain(self.nearby.iter().flat_map(Nearby::files)).chain(asker)
    }

    /// It stays in this process: children have no memory that it shares with its lender.
    pub(crate) fn keep_from_children(&self) {
        if let Some(nearby) = &self.nearby {
            nearby.keep_from_children();
        }
    }

    /// What a fork's lease has inherited it reads over the session from now on: its process can have nothing any more of what its parent writes later,
    /// nor can its children.
    pub(crate) fn forget_inherited(&mut self) {
        if let Some(nearby) = &mut self.nearby {
            nearby.forget_inherited();
        }
        // Also without: its forks might have some.
        // Lenders that do not know this call give nothing of others to anybody. What else is wrong is found out by who polls.
        let post = |borrower: &mut Self| {
            borrower.session.endpoint.post_call(INTERNAL, protocol::RENOUNCE, Vec::new())
        };
        match post(self) {
            Ok(_) => {
                self.waits();
                let _ = self.push();
            }
            Err(_) => drop(self.blocking(post, self.call_timeout, "end of what was inherited")),
        }
    }

    /// From now on blocking calls wait so long for the lender's answer.
    pub fn set_call_timeout(&mut self, timeout: Duration) {
        self.call_timeout = timeout;
    }

    /// What protects the connection.
    pub fn protection(&self) -> Protection {
        self.session.link(0).protection()
    }

    /// Bytes of one slab.
    pub fn slab_bytes(&self) -> u64 {
        self.slab_bytes
    }

    /// Address of the lender, as it was given.
    pub fn lender(&self) -> &str {
        &self.lender
    }

    /// Operations that have not completed; a [`Borrower::probe`] is none.
    pub fn pending(&self) -> usize {
        let by_datagrams = self.asker.as_ref().map_or(0, |asker| asker.pending());
        self.session.endpoint.pending() - usize::from(self.probing) + self.ready.len() + by_datagrams
    }

    /// Asks the lender for a sign of life, if it does not owe one: what is on this host is read and written without it, and writes end when they
    /// are sent, so that nobody would see that it stands still. [`Borrower::oldest_pending`] tells for how long it has been silent.
    pub fn probe(&mut self) {
        if !self.probing && self.session.endpoint.post_flush(PROBE).is_ok() {
            self.probing = true;
            self.delivery.ask(self.acknowledged_bytes());
            self.waits();
        }
    }

    /// Whether all that the lender owes is a sign of life.
    pub fn is_only_probed(&self) -> bool {
        self.probing && self.session.endpoint.pending() == 1
    }

    /// Since when there has been something to wait for without the lender sending anything; `None` when nothing is under way.
    pub fn oldest_pending(&self) -> Option<Instant> {
        self.waiting_since
    }

    pub(crate) fn received_bytes(&self) -> u64 {
        self.session.received_bytes()
    }

    /// Of all that was sent.
    fn acknowledged_bytes(&self) -> u64 {
        let unacknowledged_bytes = self.session.link(0).stream().unacknowledged_bytes().unwrap_or(0);
        self.session.sent_bytes().saturating_sub(unacknowledged_bytes)
    }

    /// What is to be known of its silence.
    pub(crate) fn debt(&mut self, now: Instant) -> Debt {
        if self.waiting_since.is_some_and(|since| now.saturating_duration_since(since) >= HEARD)
            && self.delivery.gets_on(self.acknowledged_bytes())
        {
            self.waiting_since = Some(now);
        }
        let received_bytes = self.session.received_bytes();
        Debt { received_bytes, since: self.waiting_since, is_probed: self.is_only_probed() }
    }

    /// Whether something is queued that has not been sent.
    pub fn wants_write(&self) -> bool {
        self.session.has_output()
    }

    /// The connection, to wait on: for reading, and for writing while [`Borrower::wants_write`].
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.session.link(0).wait_fd()
    }

    /// Reads the bytes at `offset` of `slab` into `local`.
    ///
    /// # Errors
    /// [`PostError::Full`] is backpressure: poll, then post again.
    pub fn post_read(
        &mut self,
        token: u64,
        slab: u32,
        offset: u64,
        local: SharedSlice,
    ) -> Result<(), PostError> {
        self.post_read_pages(token, slab, offset, &[local])
    }

    /// Writes the bytes of `local` to `offset` of `slab`.
    ///
    /// # Errors
    /// [`PostError::Full`] is backpressure: poll, then post again.
    pub fn post_write(
        &mut self,
        token: u64,
        slab: u32,
        offset: u64,
        local: SharedSlice,
    ) -> Result<(), PostError> {
        self.post_write_pages(token, slab, offset, &[local])
    }

    /// Reads neighbouring bytes from `offset` of `slab` on into all of `locals`, in order: at most 256 pieces and 1 MiB.
    ///
    /// # Errors
    /// [`PostError::Full`] is backpressure: poll, then post again.
    pub fn post_read_pages(
        &mut self,
        token: u64,
        slab: u32,
        offset: u64,
        locals: &[SharedSlice],
    ) -> Result<(), PostError> {
        self.post_read_by(token, slab, offset, locals, true)
    }

    /// As [`Borrower::post_read_pages`], and not by datagrams: the bytes are what the lender has.
    ///
    /// # Errors
    /// [`PostError::Full`] is backpressure: poll, then post again.
    pub(crate) fn post_sure_read(
        &mut self,
        token: u64,
        slab: u32,
        offset: u64,
        locals: &[SharedSlice],
    ) -> Result<(), PostError> {
        self.post_read_by(token, slab, offset, locals, false)
    }

    fn post_read_by(
        &mut self,
        token: u64,
        slab: u32,
        offset: u64,
        locals: &[SharedSlice],
        by_datagrams: bool,
    ) -> Result<(), PostError> {
        let bytes = total(locals)?;
        let applied = self.session.endpoint.applied_writes();
        if let Some(nearby) = self.take_turn()? {
            let tried = nearby.read(applied, slab, offset, bytes, locals);
            if tried != Tried::Session {
                return self.ended_directly(token, tried);
            }
        }
        if by_datagrams && self.asker.is_some() && self.ask_by_datagrams(token, slab, offset, locals) {
            return Ok(());
        }
        let slot = self.session.endpoint.post_read(token, slab, offset, bytes)?;
        self.posted(slot, locals);
        Ok(())
    }

    /// Where in the file of a lender on this host these bytes are, if they can be read there now. After the next call of this borrower they may
    /// be elsewhere.
    pub(crate) fn file_of(&mut self, slab: u32, offset: u64, bytes: u64) -> Option<Place<'_>> {
        if self.broken.is_some() {
            return None;
        }
        let applied = self.session.endpoint.applied_writes();
        self.nearby.as_mut()?.place(applied, slab, offset, bytes)
    }

    /// Writes all of `locals`, in order, to neighbouring bytes from `offset` of `slab` on: at most 256 pieces and 1 MiB.
    ///
    /// # Errors
    /// [`PostError::Full`] is backpressure: poll, then post again.
    pub fn post_write_pages(
        &mut self,
        token: u64,
        slab: u32,
        offset: u64,
        locals: &[SharedSlice],
    ) -> Result<(), PostError> {
        let bytes = total(locals)?;
        let applied = self.session.endpoint.applied_writes();
        if let Some(nearby) = self.take_turn()? {
            let tried = nearby.write(applied, slab, offset, bytes, locals);
            if tried != Tried::Session {
                return self.ended_directly(token, tried);
            }
        }
        let sequence = self.session.endpoint.posted_writes();
        let slot = self.session.endpoint.post_write(token, slab, offset, bytes)?;
        self.posted(slot, locals);
        if let Some(asker) = &mut self.asker {
            asker.unsettled.written(applied, sequence, slab, offset..offset.saturating_add(bytes.into()));
            if asker.unsettled.wants_word(applied) {
                self.probe();
            }
        }
        let Self { session, slab_bytes, nearby: Some(nearby), .. } = self else { return Ok(()) };
        nearby.direct.written(applied, sequence, slab, offset, bytes.into(), |unit, asking| {
            let (token, body) = (PROVIDE_BIT | u64::from(asking), nearby::provision(unit, *slab_bytes));
            session.endpoint.post_call(token, protocol::PROVIDE, body).is_ok()
        });
        if nearby.direct.wants_word(applied) {
            self.probe();
        }
        Ok(())
    }

    /// The memory of a lender on this host, if it can be used now.
    #[inline]
    fn take_turn(&mut self) -> Result<Option<&mut Nearby>, PostError> {
        if self.broken.is_some() {
            return Ok(None);
        }
        // What ends at once fills no queue of the connection's.
        if self.nearby.is_some() && self.ready.len() >= OPS_MAX {
            return Err(PostError::Full);
        }
        Ok(self.nearby.as_mut())
    }

    /// A transfer that needs no answer, or for which it is too late.
    #[inline]
    fn ended_directly(&mut self, token: u64, tried: Tried) -> Result<(), PostError> {
        if tried == Tried::Over {
            let reason = "what it had lent was taken back".to_owned();
            self.break_off(Error::LenderLost { lender: self.lender.clone(), reason });
            return Err(PostError::Closed);
        }
        self.ready.push(Completion { token, result: Ok(()), slab: None, unsure: false });
        Ok(())
    }

    fn posted(&mut self, slot: u16, locals: &[SharedSlice]) {
        self.session.set_locals(slot, locals);
        self.waits();
    }

    fn waits(&mut self) {
        if self.waiting_since.is_none() {
            self.waiting_since = Some(Instant::now());
        }
    }

    /// Asks the lender to apply all writes posted so far; it has when this completes.
    ///
    /// # Errors
    /// [`PostError::Full`] is backpressure: poll, then post again.
    pub fn post_flush(&mut self, token: u64) -> Result<(), PostError> {
        self.session.endpoint.post_flush(token)?;
        self.waits();
        Ok(())
    }

    /// Borrows one more slab: [`Completion::slab`] is `None` when the lender has none left.
    ///
    /// # Errors
    /// [`PostError::Full`] is backpressure: poll, then post again.
    pub fn post_borrow(&mut self, token: u64) -> Result<(), PostError> {
        self.post_call(token | BORROW_BIT, protocol::BORROW, BodyWriter::default())
    }

    /// The same for who has found no slab anywhere else, as [`Borrower::press_for_slab`].
    ///
    /// # Errors
    /// [`PostError::Full`] is backpressure: poll, then post again.
    pub fn post_press(&mut self, token: u64) -> Result<(), PostError> {
        let mut body = BodyWriter::default();
        body.u32(1);
        self.post_call(token | BORROW_BIT, protocol::BORROW, body)
    }

    /// Gives a slab back. Writes to it that are posted before this has ended may be executed first, or refused.
    ///
    /// # Errors
    /// [`PostError::Full`] is backpressure: poll, then post again.
    pub fn post_return(&mut self, token: u64, slab: u32) -> Result<(), PostError> {
        self.bring_back(slab)?;
        let mut body = BodyWriter::default();
        body.u32(slab);
        self.post_call(token, protocol::RETURN, body)?;
        self.forget(slab);
        Ok(())
    }

    /// Tells the lender that it need not keep `bytes` bytes from `offset` of `slab` on, both multiples of 4096. They read as zeros
    /// afterwards, if the lender knows how; if it does not, the operation fails and nothing happens. Writes that are posted before this has
    /// ended may be executed first, and are discarded then.
    ///
    /// # Errors
    /// [`PostError::Full`] is backpressure: poll, then post again.
    pub fn post_discard(&mut self, token: u64, slab: u32, offset: u64, bytes: u64) -> Result<(), PostError> {
        let mut body = BodyWriter::default();
        body.u32(slab).u64(offset).u64(bytes);
        self.post_call(token, protocol::DISCARD, body)?;
        if let Some(nearby) = &mut self.nearby {
            nearby.direct.discarded(slab, offset, bytes);
        }
        self.shun(slab);
        Ok(())
    }

    /// What the lender has asked back since this was last asked; of several times the last counts. What was not asked for is lent on.
    pub fn take_recall(&mut self) -> Option<Recall> {
        self.recall.take()
    }

    /// What the lender had not lent yet when it answered a wish for a slab last, if it was asked for one on this connection.
    pub fn room_bytes(&self) -> Option<u64> {
        self.room_bytes
    }

    /// Tells the lender that nobody else can have what it asks back. Nothing tells when it knows.
    pub fn post_cannot(&mut self) {
        if self.session.endpoint.post_call(INTERNAL, protocol::CANNOT, Vec::new()).is_ok() {
            self.waits();
        }
    }

    fn forget(&mut self, slab: u32) {
        self.shun(slab);
        if let Some(nearby) = &mut self.nearby {
            nearby.direct.returned(slab);
        }
    }

    fn post_call(&mut self, token: u64, method: u32, body: BodyWriter) -> Result<(), PostError> {
        self.session.endpoint.post_call(token, method, body.0)?;
        self.waits();
        Ok(())
    }

    /// Sends what is queued, without receiving; never blocks.
    ///
    /// # Errors
    /// [`Error::LenderLost`]: all operations under way have failed, the next poll returns them.
    pub fn push(&mut self) -> Result<()> {
        self.check()?;
        let sent = self.session.send(0, &mut NoMemory);
        sent.map_err(|failure| self.fail(&failure))
    }

    /// Sends what is queued and receives what is there; never blocks. What has ended is appended to `completions`.
    ///
    /// # Errors
    /// [`Error::LenderLost`] or [`Error::Protocol`], now and ever after; all operations under way are in `completions` as failed.
    pub fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<()> {
        self.poll_datagrams();
        // Nothing is expected of the connection; whether it has ended is looked at now and then.
        let is_idle = self.session.endpoint.pending() == 0 && !self.session.has_output();
        if is_idle && self.has_ended() && self.unheard < UNHEARD_MAX && self.broken.is_none() {
            self.unheard += 1;
            completions.append(&mut self.ready);
            return Ok(());
        }
        self.unheard = 0;
        let result = self.progress(None, true);
        completions.append(&mut self.ready);
        result.map(|_| ())
    }

    /// As [`Borrower::poll`], and receives nothing.
    ///
    /// # Errors
    /// As [`Borrower::poll`].
    pub(crate) fn poll_sent(&mut self, completions: &mut Vec<Completion>) -> Result<()> {
        let result = self.progress(None, false);
        completions.append(&mut self.ready);
        result.map(|_| ())
    }

    /// As [`Borrower::poll`], and certainly looks whether the connection has ended.
    ///
    /// # Errors
    /// As [`Borrower::poll`].
    pub(crate) fn poll_all(&mut self, completions: &mut Vec<Completion>) -> Result<()> {
        for _ in 0..POLLS_TO_END {
            let received_bytes = self.session.received_bytes();
            self.unheard = UNHEARD_MAX;
            self.poll(completions)?;
            if self.session.received_bytes() == received_bytes {
                break;
            }
        }
        Ok(())
    }

    /// One round of sending and, if it `receives`, receiving. Returns the answer to `awaited` when it is there; puts all else into `ready`.
    fn progress(&mut self, awaited: Option<u16>, receives: bool) -> Result<Option<Result<Answer, OpError>>> {
        self.check()?;
        let mut failure = self.session.send(0, &mut NoMemory).err();
        let (mut answer, received_bytes) = (None, self.session.received_bytes());
        if self.probing && !self.session.has_output() {
            self.delivery.sent(self.session.sent_bytes());
        }
        if !receives && failure.is_none() {
            // Writes have ended that were sent.
            self.collect(awaited, &mut answer)?;
            if self.session.endpoint.pending() == 0 {
                self.waiting_since = None;
            }
            return Ok(answer);
        }
        // A lender that floods us does not keep us: what is left is still there to be polled for, and the descriptor is readable.
        for _ in 0..ROUNDS_MAX {
            if failure.is_some() {
                break;
            }
            match self.session.receive(0, &mut NoMemory) {
                Ok(more) => {
                    self.collect(awaited, &mut answer)?;
                    if !more {
                        break;
                    }
                }
                Err(error) => failure = Some(error),
            }
        }
        if let Some(failure) = failure {
            // What arrived before the end counts, a goodbye above all.
            self.collect(awaited, &mut answer)?;
            return Err(self.fail(&failure));
        }
        if self.session.endpoint.pending() == 0 {
            self.waiting_since = None;
        } else if self.session.received_bytes() != received_bytes {
            // Not that writes have ended: they do when they are sent, though nobody receives.
            self.waiting_since = Some(Instant::now());
        }
        Ok(answer)
    }

    fn collect(&mut self, awaited: Option<u16>, answer: &mut Option<Result<Answer, OpError>>) -> Result<()> {
        while let Some(event) = self.session.event() {
            match event {
                // By its token, too: a write sent before may have had the same slot, and its completion still be here.
                Event::Completed { token: INTERNAL, slot, result }
                    if Some(slot) == awaited && answer.is_none() =>
                {
                    *answer = Some(result);
                }
                Event::Completed { token: INTERNAL, .. } => {}
                Event::Completed { token: PROBE, .. } => {
                    self.probing = false;
                    self.delivery.answered();
                }
                Event::Completed { token, result, .. }
                    if token & (BORROW_BIT | PROVIDE_BIT) == PROVIDE_BIT =>
                {
                    if let Some(nearby) = &mut self.nearby {
                        nearby.direct.provided(token as u32, result.is_ok());
                    }
                }
                Event::Completed { token, result, .. } => {
                    let mut slab = None;
                    let result = match result {
                        Ok(Answer::Reply(body)) if token & BORROW_BIT != 0 => {
                            let Some(answer) = BorrowAnswer::decode(&body) else {
                                let error = self.nonsense();
                                let token = token & !BORROW_BIT;
                                self.ready.push(Completion {
                                    token,
                                    result: Err(error.clone()),
                                    slab,
                                    unsure: false,
                                });
                                self.break_off(error.clone());
                                return Err(error);
                            };
                            slab = answer.slab;
                            self.room_bytes = Some(answer.room_bytes());
                            if let (Some(nearby), Some(slab)) = (&mut self.nearby, slab) {
                                nearby.borrowed(slab);
                            }
                            Ok(())
                        }
                        Ok(_) => Ok(()),
                        Err(OpError::Refused(code)) => {
                            Err(Error::Op { lender: self.lender.clone(), what: "read or write", code })
                        }
                        Err(OpError::Lost | OpError::Unknown) => {
                            Err(self.broken.clone().unwrap_or_else(|| self.nonsense()))
                        }
                    };
                    self.ready.push(Completion { token: token & !BORROW_BIT, result, slab, unsure: false });
                }
                Event::WriteRefused(status) => {
                    let reason = format!("it refused a write ({status}), so data is missing");
                    let error = Error::Protocol { lender: self.lender.clone(), reason };
                    self.break_off(error.clone());
                    return Err(error);
                }
                Event::Goodbye { reason, .. } => {
                    let reason = String::from_utf8_lossy(&reason).chars().take(200).collect();
                    let error = Error::LenderLost { lender: self.lender.clone(), reason };
                    self.break_off(error.clone());
                    return Err(error);
                }
                Event::Called { request, method, body } => {
                    let answer = match method {
                        protocol::RECALL => match Recall::decode(&body) {
                            Some(recall) => {
                                self.recall = Some(recall);
                                Ok(Vec::new())
                            }
                            None => Err(Status::BadRequest),
                        },
                        protocol::PING => Ok(Vec::new()),
                        _ => Err(Status::NoMethod),
                    };
                    self.session.endpoint.reply(request, answer);
                }
            }
        }
        Ok(())
    }

    /// Ends the connection: the next [`Borrower::poll`] returns everything under way as failed.
    pub fn abandon(&mut self, reason: &str) {
        self.break_off(Error::LenderLost { lender: self.lender.clone(), reason: reason.to_owned() });
    }

    pub(super) fn check(&self) -> Result<()> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    fn nonsense(&self) -> Error {
        Error::Protocol { lender: self.lender.clone(), reason: "an answer that makes no sense".to_owned() }
    }

    fn fail(&mut self, failure: &Failure) -> Error {
        let (lender, reason) = (self.lender.clone(), failure.to_string());
        let error = match failure {
            Failure::Violation(_) => Error::Protocol { lender, reason },
            Failure::Link(_) | Failure::Ended => Error::LenderLost { lender, reason },
        };
        self.break_off(error.clone());
        error
    }

    /// Nothing goes any more: all that is under way fails with `error`.
    fn break_off(&mut self, error: Error) {
        if self.broken.is_some() {
            return;
        }
        self.broken = Some(error.clone());
        self.end_datagrams();
        (self.waiting_since, self.probing) = (None, false);
        self.session.endpoint.fail();
        while let Some(event) = self.session.event() {
            if let Event::Completed { token, .. } = event
                && !matches!(token, INTERNAL | PROBE)
                && token & (BORROW_BIT | PROVIDE_BIT) != PROVIDE_BIT
            {
                let token = token & !BORROW_BIT;
                self.ready.push(Completion { token, result: Err(error.clone()), slab: None, unsure: false });
            }
        }
    }
}

/// What [`protocol::BORROW`] is told.
fn wish(press: bool) -> Vec<u8> {
    if press { 1_u32.to_le_bytes().to_vec() } else { Vec::new() }
}

fn total(locals: &[SharedSlice]) -> Result<u32, PostError> {
    if locals.len() > PIECES_MAX {
        return Err(PostError::TooLong);
    }
    let bytes = locals.iter().try_fold(0usize, |sum, local| sum.checked_add(local.len()));
    bytes.and_then(|bytes| u32::try_from(bytes).ok()).ok_or(PostError::TooLong)
}

/// Asks the lender at `address` how it is doing, without a secret.
///
/// # Errors
/// As [`Borrower::connect`].
pub fn status(address: &str) -> Result<LenderStatus> {
    status_with(address, &BorrowOptions::default())
}

/// Asks the lender at `address` how it is doing; the status tells what protects the connection, too.
///
/// # Errors
/// As [`Borrower::connect`].
pub fn status_with(address: &str, options: &BorrowOptions) -> Result<LenderStatus> {
    let mut observer =
        alone(async |wait| Borrower::open(wait, address, address, Role::Observer, options).await)?;
    let answer = observer.call(protocol::STATUS, Vec::new(), "status")?;
    let status = LenderStatus::decode(&answer).ok_or_else(|| observer.nonsense())?;
    Ok(LenderStatus { protection: observer.protection(), ..status })
}

impl Borrower {
    /// Bytes of a slab, as the lender says.
    fn slab_size(&self, answer: &[u8]) -> Result<u64> {
        let bytes = BodyReader(answer).u64().ok_or_else(|| self.nonsense())?;
        if is_slab(bytes) {
            return Ok(bytes);
        }
        let reason = format!("it lends slabs of {bytes} bytes, which are no multiple of 4096 up to 1 GiB");
        Err(Error::Protocol { lender: self.lender.clone(), reason })
    }
}
