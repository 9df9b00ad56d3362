//! Reads that come as datagrams: what the kernel leaves of them, and what it is told so that it leaves fewer. docs/design/datagrams.md has the whole.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use netvm_core::slab::datagram::{Header, Kind, PAGE_BYTES, REQUEST_BYTES, Request, UNIT_BYTES};
use netvm_sys::net::{Datagrams, Origin, Outgoing, octets};

use super::*;
use crate::lender::memories::Unit;
use crate::lender::reader::{Flow, Reader, UnitKey};
use crate::shm::LinkChoice;

/// Datagrams that are answered before others have their turn.
const TURN: usize = 32;
/// For so long no unit is moved when the kernel had no memory for one.
const RELIEF: Duration = Duration::from_secs(10);
/// The program knows of units after so long, unless it does not run.
const KNOWN: Duration = Duration::from_millis(500);
/// Of each unit that there may be, so many leases at most, on average, know it: forks have those of their parents.
const KNOWN_PER_UNIT: usize = 8;

/// Who reads by datagrams.
#[derive(Default)]
pub(super) struct Readers {
    open: Option<Open>,
    /// It has been tried, and cannot be had.
    refused: bool,
}

struct Open {
    reader: Reader,
    sockets: Vec<Datagrams>,
    /// By its key.
    leases: BTreeMap<[u8; 16], Known>,
    /// What the program has been told of, by what, and when.
    units: BTreeMap<(LeaseId, Unit), (UnitKey, Instant)>,
    /// No unit is moved until then.
    relieved: Option<Instant>,
}

struct Known {
    lease: LeaseId,
    /// The borrower's host.
    host: [u8; 16],
    /// Where its datagrams go.
    to: Option<([u8; 16], u16)>,
}

/// A unit that the kernel could have read.
struct Wanted {
    lease: LeaseId,
    unit: Unit,
    key: UnitKey,
    interface: u32,
    is_v6: bool,
    /// Of the longest answer.
    bytes: u32,
}

impl Readers {
    /// The lease is over.
    pub(super) fn close(&mut self, lease: LeaseId) {
        let Some(open) = &mut self.open else { return };
        open.forget(|of, _| of == lease);
        open.leases.retain(|_, known| known.lease != lease);
    }

    /// The lease has given this slab back.
    pub(super) fn returned(&mut self, lease: LeaseId, slab: u32) {
        let Some(open) = &mut self.open else { return };
        open.forget(|of, unit| of == lease && unit.0 == slab);
    }

    /// The kernel has no pages for these units any more.
    pub(super) fn ended(&mut self, units: &[Unit]) {
        if let Some(open) = self.open.as_mut().filter(|_| !units.is_empty()) {
            open.forget(|_, unit| units.contains(&unit));
        }
    }

    /// Datagrams that the kernel has answered.
    pub(super) fn by_kernel(&self) -> u64 {
        self.open.as_ref().map_or(0, |open| open.reader.answered())
    }
}

impl Open {
    /// The program finds those units no more, soon.
    fn forget(&mut self, is_one: impl Fn(LeaseId, Unit) -> bool) {
        let Self { reader, units, .. } = self;
        units.retain(|&(lease, unit), &mut (key, _)| {
            let gone = is_one(lease, unit);
            if gone {
                reader.forget(key);
            }
            !gone
        });
    }
}

impl Lender {
    /// [`protocol::DATAGRAMS`]: a port, and the lease's key.
    pub(super) fn admit_reader(
        &mut self,
        served: &Served,
        lease: LeaseId,
    ) -> Result<(u16, [u8; 16]), Status> {
        let wants_socket = LinkChoice::from_environment() == LinkChoice::Socket;
        let has_none = !self.config.kernel_reads || !self.memories.may_have_units();
        if wants_socket || has_none || self.memories.has_file(lease) {
            return Err(Status::Unsupported);
        }
        let (local, peer) = served.session.link(0).stream().ends().ok_or(Status::Unsupported)?;
        if self.readers.open.is_none() && !self.readers.refused {
            match self.open_readers() {
                Ok(open) => self.readers.open = Some(open),
                Err(error) => {
                    self.readers.refused = true;
                    self.say(format_args!("reads are not answered by the kernel: {error}"));
                }
            }
        }
        let open = self.readers.open.as_mut().ok_or(Status::Unsupported)?;
        let port = open.port(local).ok_or(Status::Unsupported)?;
        let mut key = [0; 16];
        getrandom::fill(&mut key).map_err(|_| Status::Busy)?;
        // Whatever it was known by before.
        open.forget(|of, _| of == lease);
        open.leases.retain(|_, known| known.lease != lease);
        open.leases.insert(key, Known { lease, host: octets(peer.ip()), to: None });
        Ok((port, key))
    }

    fn open_readers(&mut self) -> std::io::Result<Open> {
        let reader = Reader::new()?;
        let mut sockets = Vec::new();
        for listener in &self.listeners {
            let Address::Tcp(text) = listener.address() else { continue };
            let Ok(address) = text.parse::<SocketAddr>() else { continue };
            // The same port, where nobody has it.
            let mut any = address;
            any.set_port(0);
            let socket = Datagrams::bind(address).or_else(|_| Datagrams::bind(any))?;
            let id = DATAGRAM_ID + sockets.len() as u64;
            self.epoll.add(socket.as_fd(), id, Interest { readable: true, writable: false })?;
            sockets.push(socket);
        }
        self.memories.allow_units();
        let (leases, units) = (BTreeMap::new(), BTreeMap::new());
        Ok(Open { reader, sockets, leases, units, relieved: None })
    }

    /// What has come to this socket.
    pub(super) fn answer_datagrams(&mut self, socket: usize) {
        let mut wanted = None;
        for _ in 0..TURN {
            // One more byte: too long ones are noticed.
            let mut bytes = [0; REQUEST_BYTES + 1];
            let from = self.readers.open.as_ref().and_then(|open| open.sockets.get(socket));
            let Some(Ok((count, origin))) = from.map(|from| from.receive_from(&mut bytes)) else { break };
            if let Some(request) = bytes.get(..count).and_then(Request::decode) {
                wanted = self.answer_datagram(socket, request, &origin).or(wanted);
            }
        }
        // It takes a while: one of them, after all have been answered.
        if let Some(wanted) = wanted.filter(|_| !self.is_short) {
            self.make_known(wanted);
        }
    }

    /// The unit that was read, if the kernel could read it.
    fn answer_datagram(&mut self, socket: usize, request: Request, origin: &Origin) -> Option<Wanted> {
        let Self { readers: Readers { open: Some(open), .. }, memories, past_ops, .. } = self else {
            return None;
        };
        let Request { header, key } = request;
        let known = open.leases.get_mut(&key)?;
        let local = open.sockets.get(socket)?;
        let to = (octets(origin.to?), local.address().ok()?.port());
        let flow = Flow { from: octets(origin.from.ip()), to };
        // It is this lease's from its host, to the address that is asked first.
        if flow.from != known.host || *known.to.get_or_insert(to) != to {
            return None;
        }
        let lease = known.lease;
        let end = u64::from(header.offset) + u64::from(PAGE_BYTES);
        let is_its = memories.slabs.holds(lease, header.slab) && end <= memories.slabs.slab_bytes();
        let send = |header: Header| {
            let (head, mut answer) = (header.encode(), Outgoing::new());
            answer.bytes(&head);
            if header.kind == Kind::ByProcess {
                let memory = memories.slab(header.slab, header.offset.into(), header.bytes);
                memory.map(|memory| answer.shared(memory));
            }
            // What is not taken is lost, as any datagram may be.
            let _ = local.answer(&answer, origin);
        };
        match is_its {
            true => header.answers(Kind::ByProcess).for_each(send),
            false => send(Header { kind: Kind::Refused, ..header }),
        }
        *past_ops += 1;
        let interface = origin.interface;
        match open.reader.attach(interface) {
            Some(Ok(name)) => self.say(format_args!("the kernel answers reads that come by {name}")),
            Some(Err(why)) => self.say(format_args!("reads are not answered by the kernel at {why}")),
            None => {}
        }
        let unit = (header.slab, (u64::from(header.offset) / UNIT_BYTES) as u32);
        let (key, is_v6) = (UnitKey::new(&key, &flow, unit.0, unit.1), origin.to?.is_ipv6());
        is_its.then_some(Wanted { lease, unit, key, interface, is_v6, bytes: header.bytes })
    }

    /// The next read from that unit is answered by the kernel, if it can be.
    fn make_known(&mut self, wanted: Wanted) {
        let Wanted { lease, unit, key, interface, is_v6, bytes } = wanted;
        let Self { readers: Readers { open: Some(open), .. }, memories, .. } = self else { return };
        if !open.reader.sees(interface) {
            return;
        }
        let now = Instant::now();
        let failed = open.reader.take_failed();
        if !failed.is_empty() {
            open.units.retain(|_, (key, _)| !failed.contains(key));
            open.relieved = Some(now + RELIEF);
        }
        if let Some((_, told)) = open.units.get(&(lease, unit)) {
            if told.elapsed() > KNOWN && open.reader.has_missed(interface, is_v6, bytes) {
                self.say(format_args!(
                    "reads are not answered by the kernel at interface {interface}: they come past its program"
                ));
            }
            return;
        }
        let is_full = open.units.len() >= KNOWN_PER_UNIT * memories.units_max();
        if open.relieved.is_some_and(|until| now < until) || is_full || !open.reader.has_room() {
            return;
        }
        match memories.unit(unit) {
            Ok(Some(pages)) => {
                open.relieved = None;
                open.units.insert((lease, unit), (key, now));
                open.reader.tell(key, pages);
            }
            Ok(None) => {}
            Err(_) => open.relieved = Some(now + RELIEF),
        }
    }
}

impl Open {
    /// Where who is connected to this address of ours sends its datagrams.
    fn port(&self, local: SocketAddr) -> Option<u16> {
        let addresses = || self.sockets.iter().filter_map(|socket| socket.address().ok());
        let its_own = |address: &SocketAddr| address.ip().to_canonical() == local.ip().to_canonical();
        let any = |address: &SocketAddr| address.ip().is_unspecified();
        let of_its_family = |address: &SocketAddr| any(address) && address.is_ipv4() == local.is_ipv4();
        // What is bound to all addresses of IPv6 has those of IPv4, too, mostly.
        let found = addresses().find(its_own).or_else(|| addresses().find(of_its_family));
        found.or_else(|| addresses().find(any)).map(|address| address.port())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lender::memories::Memories;
    use std::sync::Arc;

    /// A lender's leases and what it has told its program, with requests from one address.
    struct Setting {
        memories: Memories,
        readers: Readers,
        keys: Vec<UnitKey>,
    }

    impl Setting {
        fn new() -> Option<Self> {
            let reader = match Reader::new() {
                Ok(reader) => reader,
                Err(error) => {
                    println!("skipped (no eBPF for this user: {error})");
                    return None;
                }
            };
            let mut memories = Memories::new(4, 2 * UNIT_BYTES, false, None).unwrap();
            memories.allow_units();
            let (leases, units) = (BTreeMap::new(), BTreeMap::new());
            let open = Open { reader, sockets: Vec::new(), leases, units, relieved: None };
            Some(Self { memories, readers: Readers { open: Some(open), refused: false }, keys: Vec::new() })
        }

        fn open(&mut self) -> &mut Open {
            self.readers.open.as_mut().unwrap()
        }

        /// As if the lease had read from the unit by this key.
        fn tell(&mut self, lease: LeaseId, key: u8, unit: Unit) {
            let flow = Flow { from: [key; 16], to: ([2; 16], 3) };
            let key = UnitKey::new(&[key; 16], &flow, unit.0, unit.1);
            let pages = self.memories.unit(unit).unwrap().unwrap();
            self.open().units.insert((lease, unit), (key, Instant::now()));
            self.open().reader.tell(key, pages);
            self.keys.push(key);
        }

        /// Which of all that it was ever told the program knows, when it has heard all.
        fn known(&mut self, expected: &[bool]) {
            let since = Instant::now();
            loop {
                let keys = self.keys.clone();
                let known: Vec<_> = keys.iter().map(|key| self.open().reader.knows(key)).collect();
                if known == expected {
                    return;
                }
                assert!(since.elapsed() < Duration::from_secs(5), "{known:?}, not {expected:?}");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    #[test]
    fn the_program_knows_what_leases_have_and_no_more() {
        let Some(mut setting) = Setting::new() else { return };
        let parent = setting.memories.slabs.open().unwrap();
        let (one, two) = (setting.memories.borrow(parent, false), setting.memories.borrow(parent, false));
        let (one, two) = (one.unwrap(), two.unwrap());
        let child = setting.memories.fork(parent).unwrap();
        setting.tell(parent, 1, (one, 0));
        setting.tell(parent, 1, (one, 1));
        setting.tell(parent, 1, (two, 1));
        setting.tell(child, 2, (one, 1));
        setting.known(&[true; 4]);
        assert_eq!(setting.memories.resident_bytes(), 3 * UNIT_BYTES);
        // Another key of the same lease, as if it had asked for one.
        setting.open().forget(|of, _| of == parent);
        setting.known(&[false, false, false, true]);
        setting.tell(parent, 3, (one, 0));
        setting.known(&[false, false, false, true, true]);
        setting.readers.returned(parent, one);
        setting.known(&[false, false, false, true, false]);
        let ended = setting.memories.discard(one, 0, 2 * UNIT_BYTES);
        assert_eq!(ended, [(one, 0), (one, 1)]);
        setting.readers.ended(&ended);
        setting.known(&[false; 5]);
        assert_eq!(setting.memories.resident_bytes(), UNIT_BYTES);
        setting.tell(child, 2, (one, 0));
        setting.readers.close(child);
        setting.memories.close(child);
        setting.readers.close(parent);
        setting.memories.close(parent);
        setting.known(&[false; 6]);
        while setting.memories.slabs.uncleared().is_some() {
            setting.memories.clear_some(UNIT_BYTES / 2);
        }
        assert_eq!(setting.memories.resident_bytes(), 0);
        assert!(setting.open().units.is_empty());
    }

    #[test]
    fn units_keep_their_bytes_and_discarded_parts_read_zero() {
        let Some(mut setting) = Setting::new() else { return };
        let memories = &mut setting.memories;
        let lease = memories.slabs.open().unwrap();
        let slab = memories.borrow(lease, false).unwrap();
        let at = |memories: &Memories, offset: u64| memories.slab(slab, offset, 4096).unwrap();
        at(memories, UNIT_BYTES - 4096).fill(1);
        at(memories, UNIT_BYTES).fill(2);
        let resident = memories.resident_bytes();
        assert!(memories.unit((slab, 2)).unwrap().is_none(), "beyond the end");
        let pages = memories.unit((slab, 0)).unwrap().unwrap();
        assert!(Arc::ptr_eq(&pages, &memories.unit((slab, 0)).unwrap().unwrap()));
        assert_eq!(memories.resident_bytes(), resident - 4096 + UNIT_BYTES);
        let bytes = |memories: &Memories| {
            [UNIT_BYTES - 4096, UNIT_BYTES].map(|offset| at(memories, offset).to_vec()[7])
        };
        assert_eq!(bytes(memories), [1, 2]);
        at(memories, 0).fill(3);
        // A part of it, and a part of what has not been moved.
        assert!(memories.discard(slab, UNIT_BYTES - 4096, 8192).is_empty());
        assert_eq!((bytes(memories), at(memories, 0).to_vec()[0]), ([0, 0], 3));
        assert_eq!(memories.discard(slab, 0, UNIT_BYTES), [(slab, 0)]);
        // What has been read of the file is there.
        assert_eq!((memories.resident_bytes(), at(memories, 0).to_vec()[0]), (4096, 0));
        at(memories, 0).fill(4);
        assert_eq!(memories.resident_bytes(), 8192, "in the file again");
    }
}
