//! A session that receives frames: any bytes, or headers whose numbers often fit, in pieces, over one to three rails, while
//! operations of ours wait for answers.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netvm_core::atomic::{Atomic, AtomicOp, Width};
use netvm_core::endpoint::{Event, Exports, WriteOptions};
use netvm_core::key::{Access, RemoteKey, Rights};
use netvm_core::limits::{HEADER_BYTES, OPS_MAX, PAYLOAD_BYTES_MAX, WINDOW};
use netvm_core::notify::Notify;
use netvm_core::segment::{ExportTable, ImportTable};
use netvm_core::wire::{Header, Kind, Status};
use netvm_sys::epoll::EventFd;
use netvm_sys::mapping::Mapping;
use netvm_sys::shared::SharedSlice;

use super::Input;
use crate::link::session::{Memory, Session};
use crate::link::{Caps, Incoming, Link, Outgoing};

const KEY: RemoteKey = RemoteKey::from_bytes([9; 16]);
const EXPORTED_BYTES: usize = 8192;
const LOCAL_BYTES: usize = 64;
const NUMBERS: u32 = 40;

/// A link whose other end has said something already, in pieces.
struct Canned {
    pieces: VecDeque<Vec<u8>>,
    fd: EventFd,
}

impl Link for Canned {
    fn caps(&self) -> Caps {
        Caps { name: "canned", remote: false }
    }

    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        // As a socket would, it looks at every byte.
        let mut bytes = vec![0; pieces.total_bytes().min(100_000)];
        pieces.gather(0, &mut bytes)
    }

    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        let Some(mut piece) = self.pieces.pop_front() else { return Err(io::ErrorKind::WouldBlock.into()) };
        let taken = pieces.scatter(0, &piece)?;
        if taken < piece.len() {
            piece.drain(..taken);
            self.pieces.push_front(piece);
        }
        Ok(taken)
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

struct View {
    exports: ExportTable,
    imports: ImportTable,
    memory: Mapping,
    notified: u64,
}

impl Exports for View {
    fn check(&mut self, handle: u32, offset: u64, bytes: u32, access: Access) -> Result<(), Status> {
        self.imports.check(&self.exports, handle, offset, bytes, access).map(|_| ())
    }
    fn import(&mut self, name: &str, key: &RemoteKey) -> Result<(u32, u64, Rights), Status> {
        self.imports.import(&self.exports, name, key)
    }
    fn unimport(&mut self, handle: u32) {
        self.imports.unimport(handle);
    }
    fn atomic(&mut self, handle: u32, offset: u64, atomic: &Atomic) -> Result<u64, Status> {
        self.imports.check_atomic(&self.exports, handle, offset, atomic)?;
        crate::atomic::execute(&self.memory.shared(), offset as usize, atomic).ok_or(Status::Misaligned)
    }
    fn call(&mut self, method: u32, body: &[u8]) -> Option<Result<Vec<u8>, Status>> {
        (method == 1).then(|| Ok(body.to_vec()))
    }
    fn notifications(&mut self, handle: u32) -> u32 {
        self.imports.notifications(&self.exports, handle).map_or(0, |(_, numbers)| numbers)
    }
    fn notify(&mut self, handle: u32, notify: Notify) {
        if u32::from(notify.number()) < self.notifications(handle) {
            self.notified += 1;
        }
    }
}

impl Memory for View {
    fn memory(&mut self, handle: u32, offset: u64, bytes: u32) -> Option<SharedSlice> {
        self.imports.check(&self.exports, handle, offset, bytes, Access::Read).ok()?;
        self.memory.shared().sub(usize::try_from(offset).ok()?, bytes as usize)
    }
}

/// See the module.
///
/// # Panics
/// When something is wrong.
pub fn frames(data: &[u8]) {
    let mut input = Input(data);
    let rails = 1 + input.below(3);
    let mut view = View {
        exports: ExportTable::default(),
        imports: ImportTable::default(),
        memory: Mapping::anonymous(EXPORTED_BYTES).expect("two pages"),
        notified: 0,
    };
    let len = EXPORTED_BYTES as u64;
    view.exports.export("memory", KEY, Rights::ReadWrite, len, NUMBERS).expect("the first");
    view.exports.export("fixed", KEY, Rights::Read, len, 0).expect("the second");
    for name in ["memory", "fixed"] {
        view.imports.import(&view.exports, name, &KEY).expect("exported");
    }
    let links = (0..rails)
        .map(|_| Canned { pieces: VecDeque::new(), fd: EventFd::new().expect("a descriptor") })
        .collect();
    let mut session = Session::new(links, OPS_MAX as u32, WINDOW as u32);
    let locals = Mapping::anonymous(OPS_MAX * LOCAL_BYTES).expect("some pages");
    let mut sequence = 0;
    let mut tokens = vec![0];
    while !input.is_empty() {
        let rail = input.below(rails);
        match input.below(16) {
            0 => post(&mut session, &locals, &mut input),
            1 => {
                // Our requests leave, and the peer may answer them.
                for rail in 0..rails {
                    let (_, frames) = session.endpoint.frames(rail);
                    let headers = frames.filter_map(|frame| Header::decode(&frame.header).ok());
                    tokens.extend(headers.map(|header| header.token));
                    if session.send(rail, &mut view).is_err() {
                        return;
                    }
                }
                tokens.drain(..tokens.len().saturating_sub(100));
            }
            2 => {
                let bytes = input.piece().to_vec();
                session.link_mut(rail).pieces.push_back(bytes);
            }
            // The owner takes a segment away.
            3 if input.byte() == 7 => session.endpoint.revoke(0, |_, bytes| vec![0; bytes as usize]),
            _ => {
                let bytes = frame(&mut input, &mut sequence, &tokens);
                let cut = input.below(256).min(bytes.len());
                let (head, tail) = bytes.split_at(if cut > 100 { bytes.len() } else { cut });
                let pieces = &mut session.link_mut(rail).pieces;
                pieces.extend([head, tail].into_iter().filter(|piece| !piece.is_empty()).map(<[u8]>::to_vec));
            }
        }
        while !session.link(rail).pieces.is_empty() {
            if session.receive(rail, &mut view).is_err() {
                return end(&mut session);
            }
            while let Some(event) = session.event() {
                match event {
                    Event::Called { request, body, .. } => session.endpoint.reply(request, Ok(body)),
                    Event::Goodbye { .. } => return end(&mut session),
                    Event::Completed { .. } | Event::WriteRefused(_) => {}
                }
            }
        }
        // Answers with bytes of segments hold no memory; those with bodies are bounded by the calls.
        let queued: usize = (0..rails).map(|rail| session.endpoint.queued_bytes(rail)).sum();
        assert!(queued <= OPS_MAX * 4 * PAYLOAD_BYTES_MAX as usize, "{queued} bytes wait to be sent");
    }
    end(&mut session);
}

/// Whatever has happened, each operation of ours ends once.
fn end(session: &mut Session<Canned>) {
    session.endpoint.fail();
    while session.event().is_some() {}
    assert_eq!(session.endpoint.pending(), 0);
}

fn post(session: &mut Session<Canned>, locals: &Mapping, input: &mut Input<'_>) {
    let endpoint = &mut session.endpoint;
    let bytes = input.below(LOCAL_BYTES + 1) as u32;
    let options = WriteOptions { fence: input.below(2) == 0, notify: None };
    let slot = match input.below(7) {
        0 => endpoint.post_write_copied(0, 0, &[1; 20], options).map(|()| None),
        1 => endpoint.post_write_with(1, 0, 0, bytes, options).map(Some),
        2 => endpoint.post_flush(2).map(Some),
        3 => endpoint.post_call(3, 1, vec![2; 9]).map(Some),
        4 => endpoint.post_atomic(4, 0, 0, &Atomic::new(AtomicOp::Add, Width::Eight, 1)).map(Some),
        5 => endpoint.post_import(5, "memory", &KEY).map(Some),
        _ => endpoint.post_read(6, 0, 0, bytes).map(Some),
    };
    if let Ok(Some(slot)) = slot {
        let local = locals.shared().sub(usize::from(slot) * LOCAL_BYTES, bytes as usize);
        session.set_locals(slot, &[local.expect("inside")]);
    }
}

/// A frame whose fields are chosen from what may be sound.
fn frame(input: &mut Input<'_>, sequence: &mut u64, tokens: &[u64]) -> Vec<u8> {
    let mut header = [0; HEADER_BYTES];
    header[0] = 1 + input.byte() % 16;
    header[1] = input.byte() % 9;
    let Ok(mut header) = Header::decode(&header) else { return vec![0xFF; HEADER_BYTES] };
    let many = [0, 1, 8, 48, 4096, 8191, 8192, 1 << 20, u64::from(u32::MAX), u64::MAX];
    header.status = u16::from(input.byte());
    header.sequence = match input.below(8) {
        0 => many[input.below(10)],
        1 => sequence.wrapping_add(u64::from(input.byte())),
        _ => *sequence,
    };
    if header.kind == Kind::Write {
        *sequence = sequence.wrapping_add(1);
    }
    header.applied = if input.below(16) == 0 { u64::from(input.byte()) } else { 0 };
    header.token = tokens[tokens.len() - 1 - input.below(tokens.len().min(256))];
    header.handle = u32::from(input.byte()) % 4;
    header.bytes = many[input.below(10)] as u32;
    header.offset = many[input.below(10)];
    let wanted = match (header.kind, input.below(4)) {
        (Kind::Atomic, 0..3) => 16,
        (Kind::Atomic, _) | (Kind::Write | Kind::ReadReply | Kind::Call | Kind::CallReply, _) => {
            input.below(LOCAL_BYTES + 1)
        }
        (Kind::Import | Kind::Goodbye, _) => 22,
        _ => 0,
    };
    let mut payload = match header.kind {
        Kind::Import => [&KEY.to_bytes()[..], b"memory"].concat(),
        _ => input.bytes(wanted).to_vec(),
    };
    payload.resize(wanted.min(header.kind.payload_bytes_max() as usize), 0);
    header.payload_bytes = payload.len() as u32;
    if input.below(32) == 0 {
        header.payload_bytes = many[input.below(10)] as u32;
    }
    [&header.encode()[..], &payload].concat()
}
