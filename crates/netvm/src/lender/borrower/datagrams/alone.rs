//! Reads by datagrams that whoever wants the page waits for by itself, and needs no borrower for: docs/design/datagrams.md, "Threads that wait by themselves".

use std::time::{Duration, Instant};

use netvm_core::slab::datagram::{Alone, Begun, Ended, Report};
use netvm_sys::thread::{poll, readable};

use super::*;

/// A read that has been asked for.
#[derive(Debug)]
pub(crate) struct Asked {
    /// Nobody else reads from it meanwhile.
    socket: Arc<Datagrams>,
    alone: Alone,
    since: Instant,
}

impl Asked {
    /// What is to be remembered of it.
    pub(crate) fn begun(&self) -> Begun {
        self.alone.begun()
    }

    /// What is to be told of it.
    pub(crate) fn report(&self, ended: Ended) -> Report {
        self.alone.report(ended)
    }

    /// Waits for the bytes, which come to `room` from `at` on, with [`ANSWER_BYTES`] before that which may be used, too; how many nanoseconds it took since they were asked for.
    pub(crate) fn wait(&mut self, room: &mut [u8], at: usize) -> (Ended, u64) {
        let (look, patience) = (self.alone.look_ns, self.alone.patience_ns);
        // When the last look began: what was there then has come in time.
        let (mut waited, mut others) = (0, 0);
        loop {
            let has_time = waited < patience;
            match self.receive(room, at) {
                Ok(Some(ended)) => return (ended, self.now_ns()),
                Ok(None) if has_time || others < TURN => others += 1,
                Err(Nothing) if has_time && waited < look => std::thread::yield_now(),
                Err(Nothing) if has_time => {
                    let left = Duration::from_nanos(patience - waited);
                    if poll(&mut [readable(&*self.socket)], Some(left)).is_err() {
                        return (Ended::Refused, waited);
                    }
                }
                _ => return (Ended::Late, waited),
            }
            waited = self.now_ns();
        }
    }

    fn now_ns(&self) -> u64 {
        self.since.elapsed().as_nanos() as u64
    }

    /// Takes a datagram; how the read has ended, if it has.
    fn receive(&mut self, room: &mut [u8], at: usize) -> Result<Option<Ended>, Nothing> {
        let expected = self.alone.expected();
        let are_pages = expected.bytes == PAGE_BYTES;
        let (mut head, mut part) = ([0; ANSWER_BYTES], [0; PART_BYTES as usize]);
        let range = |place: Place| at + place.at as usize..at + (place.at + place.bytes) as usize;
        let there = if are_pages { room.get_mut(range(expected)) } else { Some(&mut part[..]) };
        let Some(there) = there else { return Ok(Some(Ended::Refused)) };
        let mut places = Incoming::new();
        let received = match at.checked_sub(ANSWER_BYTES) {
            // In one piece, which takes less time than two.
            Some(start) if are_pages && expected.at == 0 => {
                let place = &mut room[start..range(expected).end];
                let received = self.socket.receive_bytes(place);
                head.copy_from_slice(&place[..ANSWER_BYTES]);
                received
            }
            _ if places.bytes(&mut head) && places.bytes(there) => self.socket.receive(&mut places),
            _ => return Ok(Some(Ended::Refused)),
        };
        let count = match received {
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(Nothing),
            Err(_) => return Ok(Some(Ended::Refused)),
        };
        let Some(header) = Header::decode(&head[..count.min(ANSWER_BYTES)]) else { return Ok(None) };
        match self.alone.answer(&header, count) {
            Answer::Bytes(place) => {
                if !are_pages {
                    room[range(place)].copy_from_slice(&part[..place.bytes as usize]);
                } else if place != expected {
                    room.copy_within(range(expected), range(place).start);
                }
                Ok(self.alone.arrived(place, header.kind).then_some(Ended::Whole))
            }
            Answer::Refused => Ok(Some(Ended::Refused)),
            Answer::Nothing => Ok(None),
        }
    }
}

/// No datagram is there.
struct Nothing;

impl Asker {
    /// Asks for pages that whoever has this number waits for by itself, if they can be asked for now.
    fn ask_alone(
        &mut self,
        applied: u64,
        number: usize,
        slab: u32,
        offset: u64,
        bytes: u32,
        patience_max: Option<Duration>,
    ) -> Option<Asked> {
        let now = self.now_ns();
        self.look_for_late(now);
        if !self.may_ask(now, applied, slab, offset, bytes) {
            return None;
        }
        if number >= self.others.len() {
            self.others.resize(number + 1, None);
        }
        let socket = match &mut self.others[number] {
            Some(socket) => Arc::clone(socket),
            none => Arc::clone(none.insert(Arc::new(Datagrams::connect(self.address).ok()?))),
        };
        let mut alone = self.reads.ask_alone(now, slab, offset as u32, bytes)?;
        if let Some(limit) = patience_max {
            alone.patience_ns = alone.patience_ns.min(limit.as_nanos() as u64);
        }
        for request in alone.requests() {
            if let Err(error) = socket.send(&request.encode()) {
                if error.kind() != ErrorKind::WouldBlock {
                    self.reads.ended_alone(alone.begun(), 0, alone.report(Ended::Refused));
                }
                return None;
            }
        }
        let since = self.began + Duration::from_nanos(now);
        Some(Asked { socket, alone, since })
    }
}

impl Borrower {
    /// Whether the lender is asked by datagrams now.
    pub(crate) fn asks(&self) -> bool {
        self.asker.as_ref().is_some_and(|asker| asker.reads.are_on(|| asker.now_ns()))
    }

    /// Asks for whole pages by datagrams that whoever has this number waits for by itself, for so long at most, if they can be asked for so now. [`Borrower::ended_alone`] is to be told of its end.
    pub(crate) fn ask_alone(
        &mut self,
        number: usize,
        slab: u32,
        offset: u64,
        bytes: u32,
        patience_max: Option<Duration>,
    ) -> Option<Asked> {
        let applied = self.session.endpoint.applied_writes();
        let asker = self.asker.as_mut().filter(|_| self.broken.is_none())?;
        asker.ask_alone(applied, number, slab, offset, bytes, patience_max)
    }

    /// What began then has ended so many nanoseconds later.
    pub(crate) fn ended_alone(&mut self, begun: Begun, ns: u64, report: Report) {
        if let Some(asker) = &mut self.asker {
            asker.reads.ended_alone(begun, ns, report);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netvm_core::sim::Random;
    use netvm_core::slab::datagram::{Kind, Request};
    use std::net::UdpSocket;

    const PAGE: usize = PAGE_BYTES as usize;
    const HEAD: usize = 64;

    fn page(number: u32) -> Vec<u8> {
        (0..PAGE).map(|at| (number as usize * 31 + at / 8 + at) as u8).collect()
    }

    /// Asks for pages from 16 KiB on; what is to be sent back, each with where to.
    fn ask(
        asker: &mut Asker,
        server: &UdpSocket,
        number: usize,
        pages: u32,
    ) -> (Asked, Vec<(Vec<u8>, SocketAddr)>) {
        let asked = asker.ask_alone(0, number, 9, 16384, pages * PAGE_BYTES, None).unwrap();
        let mut answers = Vec::new();
        for _ in 0..pages {
            let mut bytes = [0; 100];
            let (count, from) = server.recv_from(&mut bytes).unwrap();
            let Request { header, .. } = Request::decode(&bytes[..count]).unwrap();
            for part in header.answers(Kind::ByKernel) {
                let at = (part.offset % PAGE_BYTES) as usize;
                let bytes = &page(header.offset / PAGE_BYTES)[at..at + part.bytes as usize];
                answers.push(([&part.encode()[..], bytes].concat(), from));
            }
        }
        (asked, answers)
    }

    fn send(server: &UdpSocket, answers: &[(Vec<u8>, SocketAddr)]) {
        for (answer, from) in answers {
            server.send_to(answer, from).unwrap();
        }
    }

    fn setting(packet_bytes_max: u32) -> (UdpSocket, Asker) {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        server.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let mut asker = Asker::new(server.local_addr().unwrap(), [3; 16]).unwrap();
        asker.reads = Reads::new([3; 16], u64::MAX - 1, false, packet_bytes_max).unwrap();
        (server, asker)
    }

    /// Ends a read that was asked for, and tells of it.
    fn end(asker: &mut Asker, mut asked: Asked, pages: u32) -> Ended {
        let mut room = vec![0; HEAD + pages as usize * PAGE];
        let (ended, ns) = asked.wait(&mut room, HEAD);
        if ended == Ended::Whole {
            let expected: Vec<u8> = (4..4 + pages).flat_map(page).collect();
            assert!(room[HEAD..] == expected);
        }
        // As if this thread never had to wait for a CPU: who is that slow is not asked so any more.
        asker.reads.ended_alone(asked.begun(), ns.min(100_000), asked.report(ended));
        ended
    }

    #[test]
    fn pages_come_whole_in_whatever_order_among_others() {
        let mut random = Random::new(5);
        for round in 0..200 {
            let (server, mut asker) = setting(if round % 2 == 0 { 9000 } else { 1500 });
            let pages = 1 + round / 2 % 2;
            let (asked, mut answers) = ask(&mut asker, &server, 3, pages);
            for index in (1..answers.len()).rev() {
                answers.swap(index, random.below(index as u64 + 1) as usize);
            }
            for (answer, from) in &answers {
                let (mut stranger, short) = (answer.clone(), &answer[..answer.len() - 1]);
                stranger[20] ^= 9;
                for bytes in [&stranger[..], short, &answer[..10], answer, answer] {
                    server.send_to(bytes, from).unwrap();
                }
            }
            assert_eq!(end(&mut asker, asked, pages), Ended::Whole);
            // What is left of those is nothing to the next, which has the same socket.
            let (asked, answers) = ask(&mut asker, &server, 3, pages);
            send(&server, &answers);
            assert_eq!(end(&mut asker, asked, pages), Ended::Whole);
            assert_eq!((asker.descriptors().count(), asker.reads.take_counts().given_up), (2, 0));
        }
    }

    #[test]
    fn who_waits_for_long_sleeps_and_gives_up_in_time() {
        let (server, mut asker) = setting(1500);
        std::thread::scope(|scope| {
            let (mut asked, answers) = ask(&mut asker, &server, 0, 1);
            // The other thread may have to wait for a CPU.
            asked.alone.patience_ns = 10_000_000_000;
            let server = &server;
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(2));
                send(server, &answers);
            });
            assert_eq!(end(&mut asker, asked, 1), Ended::Whole);
        });
        let (server, mut asker) = setting(1500);
        let began = Instant::now();
        let (asked, mut answers) = ask(&mut asker, &server, 0, 1);
        // All but one.
        answers.pop();
        send(&server, &answers);
        assert_eq!(end(&mut asker, asked, 1), Ended::Late);
        assert!(began.elapsed() >= Duration::from_millis(1));
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    }

    /// Whoever has lost its CPU meanwhile finds all that has come, behind others'.
    #[test]
    fn what_is_there_when_somebody_looks_has_come_in_time() {
        for packet_bytes_max in [1500, 9000] {
            let (server, mut asker) = setting(packet_bytes_max);
            let (asked, answers) = ask(&mut asker, &server, 0, 2);
            for _ in 0..5 {
                server.send_to(&answers[0].0[..20], answers[0].1).unwrap();
            }
            send(&server, &answers);
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(end(&mut asker, asked, 2), Ended::Whole);
        }
    }

    /// Answers to what has been given up are late, not lost, whoever asks next.
    #[test]
    fn late_answers_are_looked_for_in_all_sockets() {
        let (server, mut asker) = setting(9000);
        let quick = |asker: &mut Asker, number: usize| {
            let (asked, answers) = ask(asker, &server, number, 1);
            send(&server, &answers);
            assert_eq!(end(asker, asked, 1), Ended::Whole);
        };
        quick(&mut asker, 0);
        for _ in 0..20 {
            let (mut asked, answers) = ask(&mut asker, &server, 5, 1);
            asked.alone.patience_ns = 1000;
            assert_eq!(end(&mut asker, asked, 1), Ended::Late);
            send(&server, &answers);
            quick(&mut asker, 0);
            assert!(!asker.reads.has_doubtful());
        }
        std::thread::sleep(Duration::from_millis(120));
        quick(&mut asker, 0);
        assert_eq!(asker.reads.take_counts().given_up, 20);
    }

    #[test]
    fn refusals_and_closed_ports_end_it_at_once() {
        let (server, mut asker) = setting(1500);
        let (asked, answers) = ask(&mut asker, &server, 0, 1);
        let (answer, from) = &answers[0];
        let refused = Header { kind: Kind::Refused, ..Header::decode(answer).unwrap() };
        server.send_to(&refused.encode(), from).unwrap();
        assert_eq!(end(&mut asker, asked, 1), Ended::Refused);
        drop(server);
        // Told by the first answer of the host, where it tells anything.
        for _ in 0..3 {
            let Some(asked) = asker.ask_alone(0, 0, 9, 0, PAGE_BYTES, None) else { continue };
            assert_eq!(end(&mut asker, asked, 1), Ended::Refused);
        }
    }
}
