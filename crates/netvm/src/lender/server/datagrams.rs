//! Reads that come as datagrams: what the kernel leaves of them, and what it is told so that it leaves fewer. docs/design/datagrams.md has the whole.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use netvm_core::slab::datagram::{HEADER_BYTES, Header, Kind, UNIT_BYTES};
use netvm_sys::net::{Datagrams, Origin, Outgoing};

use super::*;
use crate::lender::memories::Unit;
use crate::lender::reader::{Reader, UnitKey};
use crate::shm::LinkChoice;

/// Datagrams that are answered before others have their turn.
const TURN: usize = 32;
/// For so long no unit is moved when the kernel had no memory for one.
const RELIEF: Duration = Duration::from_secs(10);

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
    /// Units that the program has been told of.
    units: BTreeSet<(LeaseId, Unit)>,
    /// No unit is moved until then.
    relieved: Option<Instant>,
}

struct Known {
    lease: LeaseId,
    /// Where its datagrams come from.
    origin: Option<([u8; 16], u16)>,
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
        let Self { reader, leases, units, .. } = self;
        units.retain(|&(lease, unit)| {
            let gone = is_one(lease, unit);
            let known = leases.iter().find(|(_, known)| gone && known.lease == lease);
            if let Some((key, Known { origin: Some(origin), .. })) = known {
                reader.forget(UnitKey::new(key, *origin, unit.0, unit.1));
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
        let (local, _) = served.session.link(0).stream().ends().ok_or(Status::Unsupported)?;
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
        open.leases.retain(|_, known| known.lease != lease);
        let mut key = [0; 16];
        getrandom::fill(&mut key).map_err(|_| Status::Busy)?;
        open.leases.insert(key, Known { lease, origin: None });
        Ok((port, key))
    }

    fn open_readers(&self) -> std::io::Result<Open> {
        let reader = Reader::new()?;
        let mut sockets = Vec::new();
        for listener in &self.listeners {
            let Address::Tcp(text) = listener.address() else { continue };
            let Ok(address) = text.parse::<SocketAddr>() else { continue };
            // The same port, where nobody has it.
            let any = SocketAddr::new(address.ip(), 0);
            let socket = Datagrams::bind(address).or_else(|_| Datagrams::bind(any))?;
            let id = DATAGRAM_ID + sockets.len() as u64;
            self.epoll.add(socket.as_fd(), id, Interest { readable: true, writable: false })?;
            sockets.push(socket);
        }
        let (leases, units) = (BTreeMap::new(), BTreeSet::new());
        Ok(Open { reader, sockets, leases, units, relieved: None })
    }

    /// What has come to this socket.
    pub(super) fn answer_datagrams(&mut self, socket: usize) {
        for _ in 0..TURN {
            // One more byte: too long ones are noticed.
            let mut bytes = [0; HEADER_BYTES + 1];
            let Some(open) = &self.readers.open else { return };
            let Some(from) = open.sockets.get(socket) else { return };
            let Ok((count, origin)) = from.receive_from(&mut bytes) else { return };
            if count != HEADER_BYTES {
                continue;
            }
            if let Some(header) = Header::decode(&bytes).filter(Header::is_request) {
                self.answer_datagram(socket, header, origin);
            }
        }
    }

    fn answer_datagram(&mut self, socket: usize, header: Header, origin: Origin) {
        let Self { readers, memories, past_ops, .. } = self;
        let Some(open) = &mut readers.open else { return };
        let Some(known) = open.leases.get_mut(&header.key) else { return };
        // It is this lease's from wherever it is used first.
        if *known.origin.get_or_insert(origin.parts()) != origin.parts() {
            return;
        }
        let lease = known.lease;
        let end = u64::from(header.offset) + u64::from(header.bytes);
        let is_its = memories.slabs.holds(lease, header.slab) && end <= memories.slabs.slab_bytes();
        let memory = is_its.then(|| memories.slab(header.slab, header.offset.into(), header.bytes)).flatten();
        let kind = if memory.is_some() { Kind::ByProcess } else { Kind::Refused };
        let head = Header { kind, ..header }.encode();
        let mut answer = Outgoing::new();
        answer.bytes(&head);
        memory.map(|memory| answer.shared(memory));
        if let Some(socket) = open.sockets.get(socket) {
            // What is not taken is lost, as any datagram may be.
            let _ = socket.send_to(&answer, origin.from);
        }
        *past_ops += 1;
        match open.reader.attach(origin.interface) {
            Some(Ok(interface)) => {
                self.say(format_args!("the kernel answers reads that come by {interface}"))
            }
            Some(Err(why)) => self.say(format_args!("reads are not answered by the kernel at {why}")),
            None => {}
        }
        if is_its {
            self.make_known(lease, header, &origin);
        }
    }

    /// The next read from that unit is answered by the kernel, if it can be.
    fn make_known(&mut self, lease: LeaseId, header: Header, origin: &Origin) {
        let Self { readers: Readers { open: Some(open), .. }, memories, .. } = self else { return };
        let unit = (header.slab, (u64::from(header.offset) / UNIT_BYTES) as u32);
        let is_relieved = open.relieved.is_none_or(|until| Instant::now() >= until);
        if !open.reader.sees(origin.interface) || !is_relieved || open.units.contains(&(lease, unit)) {
            return;
        }
        match memories.unit(unit) {
            Ok(Some(pages)) => {
                open.relieved = None;
                open.units.insert((lease, unit));
                open.reader.tell(UnitKey::new(&header.key, origin.parts(), unit.0, unit.1), pages);
            }
            Ok(None) => {}
            Err(_) => open.relieved = Some(Instant::now() + RELIEF),
        }
    }
}

impl Open {
    /// Where who is connected to this address of ours sends its datagrams.
    fn port(&self, local: SocketAddr) -> Option<u16> {
        let addresses = self.sockets.iter().filter_map(|socket| socket.address().ok());
        // IPv4 addresses may be connected to a socket for both.
        let is_local = |address: &SocketAddr| {
            address.ip().to_canonical() == local.ip().to_canonical() || address.ip().is_unspecified()
        };
        addresses.filter(is_local).map(|address| address.port()).next()
    }
}
