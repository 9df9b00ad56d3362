//! Reads that are asked for by datagrams, and fall back to the session: docs/design/datagrams.md.

use std::io::ErrorKind;
use std::net::SocketAddr;

use netvm_core::slab::Unsettled;
use netvm_core::slab::datagram::{
    ANSWER_BYTES, Answer, Counts, Header, PAGE_BYTES, PART_BYTES, Place, READS_MAX, Read, Reads,
};
use netvm_sys::net::{Datagrams, Incoming};

use super::*;
use std::sync::Arc;

mod alone;

pub(crate) use alone::Asked;

/// Datagrams that are looked at before others have their turn.
const TURN: usize = 2 * READS_MAX;
/// A slab that was given back, or of which some was discarded, is not read by datagrams for so long: until no kernel has its old pages any more.
const SHUNNED: Duration = Duration::from_secs(4);
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
    /// Where parts of pages arrive: they differ in length, and any may be the next.
    part: Box<[u8; PART_BYTES as usize]>,
    /// Where the lender answers,
    address: SocketAddr,
    /// and the sockets of those who wait for what they ask by themselves, by their numbers.
    others: Vec<Option<Arc<Datagrams>>>,
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
            part: Box::new([0; PART_BYTES as usize]),
            address,
            others: Vec::new(),
        })
    }

    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// All descriptors.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let others = self.others.iter().flatten().map(|socket| socket.as_fd());
        std::iter::once(self.as_fd()).chain(others)
    }

    /// Reads that have not ended.
    pub(super) fn pending(&self) -> usize {
        self.reads.len() + self.given_up.len()
    }

    /// Whether these bytes can be asked for now.
    fn may_ask(&mut self, now: u64, applied: u64, slab: u32, offset: u64, bytes: u32) -> bool {
        let end = offset.saturating_add(bytes.into());
        self.reads.can(now, offset, bytes)
            && self.unsettled.allows(applied, slab, offset..end)
            && !self.shunned.iter().any(|&(shunned, until)| shunned == slab && now < until)
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
        let now = self.now_ns();
        self.look_for_late(now);
        if !self.may_ask(now, applied, slab, offset, bytes) {
            return false;
        }
        for request in self.reads.ask(now, token, slab, offset as u32, bytes, locals) {
            if let Err(error) = self.socket.send(&request.encode()) {
                // Somebody may forbid it, or an earlier one has met nobody.
                self.reads.take_back(now, error.kind() != ErrorKind::WouldBlock);
                if error.kind() == ErrorKind::ConnectionRefused {
                    self.given_up.extend(self.reads.unheard(now));
                }
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
            // Whole pages come where they are expected: if it is another's, it goes there from here. Whoever waits for this place has not been told of it.
            let are_pages = expected.bytes == PAGE_BYTES;
            let has_room = places.bytes(&mut head)
                && if are_pages { places.shared(local) } else { places.bytes(&mut self.part[..]) };
            if !has_room {
                return;
            }
            let received = self.socket.receive(&mut places);
            let now = self.now_ns();
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
                    let to = self.local(place).filter(|_| !are_pages || place != expected);
                    let moved = to.map(|to| match are_pages {
                        true => to.copy_from(&local),
                        false => to.write_from(0, &self.part[..place.bytes as usize]),
                    });
                    if moved == Some(None) {
                        continue;
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

    /// Takes what has come too late from sockets that nobody waits at: that it was not lost.
    fn look_for_late(&mut self, now_ns: u64) {
        if !self.reads.has_doubtful() {
            return;
        }
        if self.reads.is_empty() {
            drain(&self.socket, &mut self.reads, now_ns);
        }
        // Whoever waits at one has it, too.
        let idle = self.others.iter().flatten().filter(|socket| Arc::strong_count(socket) == 1);
        idle.for_each(|socket| drain(socket, &mut self.reads, now_ns));
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

fn drain(socket: &Datagrams, reads: &mut Reads<[SharedSlice; 2]>, now_ns: u64) {
    for _ in 0..TURN {
        let mut head = [0; ANSWER_BYTES];
        let Ok(count) = socket.receive_bytes(&mut head) else { return };
        if let Some(header) = Header::decode(&head[..count.min(ANSWER_BYTES)]) {
            reads.answer(now_ns, &header, count);
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

    /// A slab has been given back, or some of it discarded: a kernel may have its old pages still.
    pub(super) fn shun(&mut self, slab: u32) {
        if let Some(asker) = &mut self.asker {
            let now = asker.now_ns();
            asker.shunned.retain(|&(other, until)| other != slab && now < until);
            asker.shunned.push((slab, now + SHUNNED.as_nanos() as u64));
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
        let patience = Duration::from_nanos(asker.reads.patience_ns(asker.now_ns())?);
        // What has been given up waits for the session.
        Some((asker.as_fd(), if asker.given_up.is_empty() { patience } else { patience.min(ROOM) }))
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

#[cfg(test)]
mod tests {
    use super::*;
    use netvm_core::sim::Random;
    use netvm_core::slab::datagram::{Kind, Request};
    use netvm_sys::mapping::Mapping;
    use std::net::UdpSocket;

    const PAGE: usize = PAGE_BYTES as usize;

    fn page(number: u32) -> Vec<u8> {
        (0..PAGE).map(|at| (number as usize * 31 + at / 8 + at) as u8).collect()
    }

    /// Reads of one and two pages at once, whose answers come in any order, twice, and among strangers'; whole, and in parts.
    #[test]
    fn each_answer_finds_its_place_in_whatever_order() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        server.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let mut random = Random::new(4);
        for round in 0..300 {
            let mut asker = Asker::new(server.local_addr().unwrap(), [3; 16]).unwrap();
            let packet_bytes_max = if round % 3 == 0 { 9000 } else { 1500 };
            asker.reads = Reads::new([3; 16], u64::MAX - 1, false, packet_bytes_max).unwrap();
            let memory = Mapping::anonymous(8 * PAGE).unwrap();
            let at = |index: usize, pages: usize| memory.shared().sub(index * PAGE, pages * PAGE).unwrap();
            // Two pages as one piece, and as two; one page.
            let all = [vec![at(0, 2)], vec![at(2, 1), at(3, 1)], vec![at(4, 1)], vec![at(5, 1)]];
            let mut answers = Vec::new();
            for (token, locals) in all.iter().enumerate() {
                let first = token as u64 * 2;
                assert!(asker.ask(0, token as u64, 9, first * PAGE as u64, locals));
                for _ in 0..locals.iter().map(SharedSlice::len).sum::<usize>() / PAGE {
                    let mut bytes = [0; 100];
                    let (count, from) = server.recv_from(&mut bytes).unwrap();
                    let Request { header, .. } = Request::decode(&bytes[..count]).unwrap();
                    let contents = page(header.offset / PAGE_BYTES);
                    for part in header.answers(Kind::ByKernel) {
                        let from_byte = (part.offset % PAGE_BYTES) as usize;
                        let bytes = &contents[from_byte..from_byte + part.bytes as usize];
                        answers.push(([&part.encode()[..], bytes].concat(), from));
                    }
                }
            }
            // In any order, some twice, and some of nothing.
            for index in (1..answers.len()).rev() {
                answers.swap(index, random.below(index as u64 + 1) as usize);
            }
            let mut ended = Vec::new();
            for (answer, from) in &answers {
                let mut stranger = answer.clone();
                stranger[20] ^= 9;
                for bytes in [&stranger, answer, answer].iter().take(1 + random.below(3) as usize).rev() {
                    server.send_to(bytes, from).unwrap();
                }
                if random.below(2) == 0 {
                    asker.receive(&mut ended);
                }
            }
            for (answer, from) in &answers {
                server.send_to(answer, from).unwrap();
            }
            let since = Instant::now();
            while !asker.reads.is_empty() && since.elapsed() < Duration::from_secs(5) {
                asker.receive(&mut ended);
            }
            let mut tokens: Vec<_> = ended.iter().map(|completion| completion.token).collect();
            tokens.sort_unstable();
            assert_eq!(tokens, [0, 1, 2, 3], "round {round}");
            assert!(ended.iter().all(|completion| completion.unsure && completion.result.is_ok()));
            let numbers = [0, 1, 2, 3, 4, 6];
            for (index, number) in numbers.into_iter().enumerate() {
                assert!(at(index, 1).to_vec() == page(number), "round {round}, page {number}");
            }
        }
    }

    #[test]
    fn what_cannot_be_sent_or_is_no_page_goes_over_the_session() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut asker = Asker::new(server.local_addr().unwrap(), [3; 16]).unwrap();
        let memory = Mapping::anonymous(4 * PAGE).unwrap();
        let part = |at: usize, bytes: usize| memory.shared().sub(at, bytes).unwrap();
        for locals in [
            vec![part(0, 2048), part(2048, 2048)],
            vec![part(0, PAGE), part(PAGE, 2048)],
            vec![part(0, 3 * PAGE)],
            vec![part(0, 100)],
            vec![part(0, PAGE); 3],
            vec![],
        ] {
            assert!(!asker.ask(0, 1, 9, 0, &locals), "{locals:?}");
        }
        assert!(!asker.ask(0, 1, 9, 100, &[part(0, PAGE)]) && asker.pending() == 0);
        // A write of these bytes may be on its way.
        asker.unsettled.written(0, 0, 9, 4096..8192);
        assert!(!asker.ask(0, 1, 9, 0, &[part(0, 2 * PAGE)]) && asker.ask(0, 1, 9, 0, &[part(0, PAGE)]));
        assert!(asker.ask(1, 2, 9, 0, &[part(0, 2 * PAGE)]));
        assert_eq!(asker.pending(), 2);
    }
}
