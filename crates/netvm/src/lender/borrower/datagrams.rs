//! Reads that are asked for by datagrams, and fall back to the session: docs/design/datagrams.md.

use std::io::ErrorKind;
use std::net::SocketAddr;

use netvm_core::slab::Unsettled;
use netvm_core::slab::datagram::{
    ANSWER_BYTES, Answer, Counts, Header, PAGE_BYTES, Place, READS_MAX, Read, Reads,
};
use netvm_sys::net::{Datagrams, Incoming};

use super::*;

/// Datagrams that are looked at before others have their turn.
const TURN: usize = 2 * READS_MAX;
/// A slab that was given back is not read by datagrams for so long: until no kernel has its old pages any more.
const SHUNNED: Duration = Duration::from_secs(1);
/// Until the session has room for what has to be done there.
const ROOM: Duration = Duration::from_millis(1);

/// The socket, and what is on its way over it.
pub(super) struct Asker {
    socket: Datagrams,
    began: Instant,
    reads: Reads<[SharedSlice; 2]>,
    /// Writes of the session that are not known to have been applied.
    pub(super) unsettled: Unsettled,
    /// Reads whose answers do not come, for which the session had no room.
    given_up: Vec<Read<[SharedSlice; 2]>>,
    /// Slabs that were given back, and until when they are not read so.
    shunned: Vec<(u32, u64)>,
}

impl Asker {
    /// Asks at this address by the lease's key.
    fn new(address: SocketAddr, key: [u8; 16]) -> std::io::Result<Self> {
        let socket = Datagrams::connect(address)?;
        let packet_bytes_max = socket.packet_bytes_max()?;
        let mut sequence = [0; 8];
        getrandom::fill(&mut sequence).map_err(|error| std::io::Error::other(error.to_string()))?;
        let (first, is_v6) = (u64::from_le_bytes(sequence), address.is_ipv6());
        let reads = Reads::new(key, first, is_v6, packet_bytes_max).ok_or(std::io::ErrorKind::Unsupported)?;
        Ok(Self {
            socket,
            began: Instant::now(),
            reads,
            unsettled: Unsettled::new(),
            given_up: Vec::with_capacity(READS_MAX),
            shunned: Vec::new(),
        })
    }

    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Reads that have not ended.
    pub(super) fn pending(&self) -> usize {
        self.reads.len() + self.given_up.len()
    }

    /// Asks for these bytes, if they can be asked for now.
    fn ask(&mut self, applied: u64, token: u64, slab: u32, offset: u64, locals: &[SharedSlice]) -> bool {
        let Ok(bytes) = u32::try_from(locals.iter().map(SharedSlice::len).sum::<usize>()) else {
            return false;
        };
        let is_whole = |local: &SharedSlice| local.len().is_multiple_of(PAGE_BYTES as usize);
        let locals = match *locals {
            // All, of whatever is read.
            [all] => [all; 2],
            [one, two] if is_whole(&one) && one.len() == two.len() => [one, two],
            _ => return false,
        };
        let end = offset.saturating_add(bytes.into());
        let now = self.now_ns();
        if self.reads.has_doubtful() && self.reads.is_empty() {
            self.drain(now);
        }
        if !self.shunned.is_empty() {
            self.shunned.retain(|&(_, until)| now < until);
        }
        if !self.reads.can(now, offset, bytes)
            || !self.unsettled.allows(applied, slab, offset..end)
            || self.shunned.iter().any(|&(shunned, _)| shunned == slab)
        {
            return false;
        }
        for request in self.reads.ask(now, token, slab, offset as u32, bytes, locals) {
            if self.socket.send(&request.encode()).is_err() {
                self.reads.take_back();
                return false;
            }
        }
        true
    }

    /// Takes what has come; what has ended goes to `ended`, and what has to be done over the session to `given_up`.
    fn receive(&mut self, ended: &mut Vec<Completion>) {
        for _ in 0..TURN {
            let Some(expected) = self.reads.expected() else { return };
            let Some(local) = self.local(expected) else { return };
            let mut head = [0; ANSWER_BYTES];
            let mut places = Incoming::new();
            // If it is another's the bytes go there from here. Whoever waits for this place has not been told of it.
            if !places.bytes(&mut head) || !places.shared(local) {
                return;
            }
            let (received, now) = (self.socket.receive(&mut places), self.now_ns());
            let count = match received {
                Ok(count) => count,
                Err(error) => {
                    if error.kind() == ErrorKind::ConnectionRefused {
                        self.given_up.extend(self.reads.unheard(now));
                    }
                    return;
                }
            };
            let Some(header) = Header::decode(&head[..count.min(ANSWER_BYTES)]) else { continue };
            let read = match self.reads.answer(now, &header, count) {
                (_, Answer::Bytes(place)) => {
                    if place != expected {
                        let moved = self.local(place).and_then(|to| to.copy_from(&local));
                        if moved.is_none() {
                            continue;
                        }
                    }
                    self.reads.arrived(now, place, header.kind)
                }
                (read, Answer::Refused) => {
                    self.given_up.extend(self.reads.refused(now, read));
                    None
                }
                (_, Answer::Nothing) => None,
            };
            if let Some(Read { token, .. }) = read {
                ended.push(Completion { token, result: Ok(()), slab: None, unsure: true });
            }
        }
    }

    /// Takes what comes too late: that it was not lost.
    fn drain(&mut self, now_ns: u64) {
        for _ in 0..TURN {
            let mut head = [0; ANSWER_BYTES];
            let mut places = Incoming::new();
            if !places.bytes(&mut head) {
                return;
            }
            let Ok(count) = self.socket.receive(&mut places) else { return };
            if let Some(header) = Header::decode(&head[..count.min(ANSWER_BYTES)]) {
                self.reads.answer(now_ns, &header, count);
            }
        }
    }

    /// Where the bytes of an answer go.
    fn local(&self, place: Place) -> Option<SharedSlice> {
        let read = self.reads.get(place.read)?;
        let [one, two] = read.locals;
        // Each has whole pages, and no place is in two.
        let (at, one_len) = (place.at as usize, one.len());
        if at < one_len {
            one.sub(at, place.bytes as usize)
        } else {
            two.sub(at - one_len, place.bytes as usize)
        }
    }
}

impl Borrower {
    /// Asks the lender whether it answers datagrams. If it does not, nothing changes.
    pub(super) async fn look_for_datagrams(&mut self, wait: &Wait) -> Result<()> {
        let answer = match self.ask(wait, protocol::DATAGRAMS, Vec::new(), "datagrams").await {
            Ok(answer) => answer,
            Err(_) if self.is_broken() => return self.check(),
            Err(_) => return Ok(()),
        };
        let mut answer = BodyReader(&answer);
        let (Some(port), Some(key)) = (answer.u32(), answer.key()) else { return Err(self.nonsense()) };
        let port = u16::try_from(port).map_err(|_| self.nonsense())?;
        if let Some((_, peer)) = self.session.link(0).stream().ends() {
            // With the scope of a link-local address.
            let mut address = peer;
            address.set_port(port);
            self.asker = Asker::new(address, key).ok().map(Box::new);
        }
        Ok(())
    }

    /// Asks for these bytes by datagrams if they can be asked for so now.
    #[inline]
    pub(super) fn ask_by_datagrams(
        &mut self,
        token: u64,
        slab: u32,
        offset: u64,
        locals: &[SharedSlice],
    ) -> bool {
        let applied = self.session.endpoint.applied_writes();
        let Some(asker) = &mut self.asker else { return false };
        if self.broken.is_some()
            || self.ready.len() >= OPS_MAX
            || !asker.ask(applied, token, slab, offset, locals)
        {
            return false;
        }
        if asker.reads.are_quick() {
            asker.receive(&mut self.ready);
        }
        true
    }

    /// Takes what has come by datagrams, and posts on the session what does not come.
    pub(super) fn poll_datagrams(&mut self) {
        let Some(asker) = self.asker.as_mut().filter(|asker| asker.pending() > 0) else { return };
        asker.receive(&mut self.ready);
        let now = asker.now_ns();
        while let Some(read) = asker.reads.overdue(now) {
            asker.given_up.push(read);
        }
        self.post_given_up();
    }

    /// Posts what has been given up on the session; false when that has no room for all of it now.
    fn post_given_up(&mut self) -> bool {
        let Some(asker) = &mut self.asker else { return true };
        while let Some(read) = asker.given_up.last() {
            let posted =
                self.session.endpoint.post_read(read.token, read.slab, read.offset.into(), read.bytes);
            let Ok(slot) = posted else { return false };
            let is_whole = read.locals[0].len() == read.bytes as usize;
            self.session.set_locals(slot, if is_whole { &read.locals[..1] } else { &read.locals });
            asker.given_up.pop();
            self.waiting_since.get_or_insert_with(Instant::now);
        }
        true
    }

    /// A slab is about to be given back: what is read of it has to be posted before that.
    pub(super) fn bring_back(&mut self, slab: u32) -> Result<(), PostError> {
        let Some(asker) = &mut self.asker else { return Ok(()) };
        asker.given_up.extend(asker.reads.take_of(slab));
        if !self.post_given_up() {
            return Err(PostError::Full);
        }
        Ok(())
    }

    /// A slab has been given back: if it comes again, a kernel may have its old pages still.
    pub(super) fn shun(&mut self, slab: u32) {
        if let Some(asker) = &mut self.asker {
            let until = asker.now_ns() + SHUNNED.as_nanos() as u64;
            asker.shunned.push((slab, until));
        }
    }

    /// What has come by datagrams is not what it must be: none are asked for for a while.
    pub(crate) fn distrust_datagrams(&mut self) {
        if let Some(asker) = &mut self.asker {
            asker.reads.distrust(asker.began.elapsed().as_nanos() as u64);
        }
    }

    /// Where datagrams come that somebody waits for, and how long at most before the next poll.
    pub(crate) fn awaited_datagrams(&self) -> Option<(BorrowedFd<'_>, Duration)> {
        let asker = self.asker.as_ref()?;
        let patience = asker.reads.patience_ns(asker.now_ns()).map(Duration::from_nanos);
        let patience = match patience {
            Some(patience) if !asker.given_up.is_empty() => patience.min(ROOM),
            None if !asker.given_up.is_empty() => ROOM,
            patience => patience?,
        };
        Some((asker.as_fd(), patience))
    }

    /// What has become of datagrams since this was last asked.
    pub fn take_datagram_counts(&mut self) -> Counts {
        self.asker.as_mut().map_or_else(Counts::default, |asker| asker.reads.take_counts())
    }

    /// Nothing comes any more.
    pub(super) fn end_datagrams(&mut self) {
        let Some(asker) = &mut self.asker else { return };
        asker.reads.end();
        let tokens: Vec<u64> = asker.reads.give_up().map(|read| read.token).collect();
        let tokens = tokens.into_iter().chain(asker.given_up.drain(..).map(|read| read.token));
        let Some(error) = &self.broken else { return };
        self.ready.extend(tokens.map(|token| Completion {
            token,
            result: Err(error.clone()),
            slab: None,
            unsure: false,
        }));
    }
}
