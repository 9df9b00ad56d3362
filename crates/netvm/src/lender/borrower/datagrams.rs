//! Reads that are asked for by datagrams, and fall back to the session: docs/design/datagrams.md.

use std::net::SocketAddr;

use netvm_core::slab::Unsettled;
use netvm_core::slab::datagram::{Answer, Counts, HEADER_BYTES, Header, Place, Read, Reads};
use netvm_sys::net::{Datagrams, Incoming};

use super::*;

/// The socket, and what is on its way over it.
pub(super) struct Asker {
    socket: Datagrams,
    began: Instant,
    reads: Reads<[SharedSlice; 2]>,
    /// Writes of the session that are not known to have been applied.
    pub(super) unsettled: Unsettled,
    /// Reads whose answers do not come, for which the session had no room.
    given_up: Vec<Read<[SharedSlice; 2]>>,
}

impl Asker {
    /// Asks at this address by the lease's key.
    fn new(address: SocketAddr, key: [u8; 16]) -> std::io::Result<Self> {
        let socket = Datagrams::connect(address)?;
        let packet_bytes_max = socket.packet_bytes_max()?;
        let mut sequence = [0; 8];
        getrandom::fill(&mut sequence).map_err(|error| std::io::Error::other(error.to_string()))?;
        let reads = Reads::new(key, u64::from_le_bytes(sequence), packet_bytes_max);
        let (unsettled, given_up) = (Unsettled::new(), Vec::new());
        Ok(Self { socket, began: Instant::now(), reads, unsettled, given_up })
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
        let bytes = locals.iter().map(SharedSlice::len).sum::<usize>() as u32;
        let end = offset.saturating_add(bytes.into());
        let now = self.now_ns();
        if !self.reads.can(now, offset, bytes) || !self.unsettled.allows(applied, slab, offset..end) {
            return false;
        }
        let locals = match *locals {
            // Both halves, of whatever is read.
            [all] => [all; 2],
            [one, two] if one.len() == two.len() => [one, two],
            _ => return false,
        };
        for header in self.reads.ask(now, token, slab, offset as u32, bytes, locals) {
            if self.socket.send(&header.encode()).is_err() {
                self.reads.take_back();
                return false;
            }
        }
        true
    }

    /// Takes what has come; what has ended goes to `ended`, and what has to be done over the session to `given_up`.
    fn receive(&mut self, ended: &mut Vec<Completion>) {
        while let Some(expected) = self.reads.expected() {
            let Some(local) = self.local(expected) else { return };
            let mut head = [0; HEADER_BYTES];
            let mut places = Incoming::new();
            // If it is another's the bytes go there from here. Whoever waits for this place has not been told of it.
            if !places.bytes(&mut head) || !places.shared(local) {
                return;
            }
            let Ok(count) = self.socket.receive(&mut places) else { return };
            let Some(header) = Header::decode(&head[..count.min(HEADER_BYTES)]) else { continue };
            let now = self.now_ns();
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
                ended.push(Completion { token, result: Ok(()), slab: None });
            }
        }
    }

    /// Where the bytes of an answer go.
    fn local(&self, place: Place) -> Option<SharedSlice> {
        let read = self.reads.get(place.read)?;
        let [one, two] = read.locals;
        let (at, one_len) = (place.at as usize, one.len());
        if one_len == read.bytes as usize || at < one_len {
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
            self.asker = Asker::new(SocketAddr::new(peer.ip(), port), key).ok().map(Box::new);
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
        while let Some(read) = asker.given_up.last() {
            let posted =
                self.session.endpoint.post_read(read.token, read.slab, read.offset.into(), read.bytes);
            // No room: with the next poll.
            let Ok(slot) = posted else { return };
            let is_whole = read.locals[0].len() == read.bytes as usize;
            self.session.set_locals(slot, if is_whole { &read.locals[..1] } else { &read.locals });
            asker.given_up.pop();
            self.waiting_since.get_or_insert_with(Instant::now);
        }
    }

    /// What has come by datagrams was not what it must be, perhaps: none are asked for any more. False when there was nothing that could have come so.
    pub(crate) fn distrust_datagrams(&mut self) -> bool {
        self.asker.as_mut().is_some_and(|asker| asker.reads.distrust())
    }

    /// Where datagrams come that somebody waits for, and how long at most before the next poll.
    pub(crate) fn awaited_datagrams(&self) -> Option<(BorrowedFd<'_>, Duration)> {
        let asker = self.asker.as_ref()?;
        let patience = asker.reads.patience_ns(asker.now_ns());
        let patience = if asker.given_up.is_empty() { patience? } else { 0 };
        Some((asker.as_fd(), Duration::from_nanos(patience)))
    }

    /// What has become of datagrams since this was last asked.
    pub fn take_datagram_counts(&mut self) -> Counts {
        self.asker.as_mut().map_or_else(Counts::default, |asker| asker.reads.take_counts())
    }

    /// Nothing comes any more.
    pub(super) fn end_datagrams(&mut self) {
        let Some(asker) = &mut self.asker else { return };
        asker.reads.distrust();
        let tokens: Vec<u64> = asker.reads.give_up().map(|read| read.token).collect();
        let tokens = tokens.into_iter().chain(asker.given_up.drain(..).map(|read| read.token));
        let Some(error) = &self.broken else { return };
        self.ready.extend(tokens.map(|token| Completion { token, result: Err(error.clone()), slab: None }));
    }
}
