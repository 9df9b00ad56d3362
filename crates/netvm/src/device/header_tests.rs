//! The module's C headers say what Rust says: numbers, sizes, and places of fields.

use netvm_core::limits;
use netvm_core::pulse::KeepAlive;
use netvm_core::wire::{self, Header, Kind, Status};
use netvm_sys::device as sys;
use std::collections::BTreeMap;
use std::mem::offset_of;

const WIRE: &str = include_str!("../../../../kmod/mem_wire.h");
const USER: &str = include_str!("../../../../kmod/netvm_mem.h");

/// The `#define`s of a header that are numbers.
fn numbers(header: &str) -> BTreeMap<&str, u64> {
    let number = |text: &str| match text.trim() {
        "(~0ULL)" => Some(u64::MAX),
        "(~0ULL - 1)" => Some(u64::MAX - 1),
        text => text.parse().ok(),
    };
    let define = |line: &'static str| line.strip_prefix("#define ")?.split_once(' ');
    let lines = Box::leak(header.to_owned().into_boxed_str()).lines();
    lines.filter_map(define).filter_map(|(name, value)| Some((name, number(value)?))).collect()
}

/// Place and length of each field of a struct, as C has them, and the struct's length.
fn fields(header: &str, name: &str) -> (BTreeMap<String, (usize, usize)>, usize) {
    let start = header.find(&format!("struct {name} {{")).unwrap();
    let body = &header[start..][..header[start..].find("\n};").unwrap()];
    let mut fields = BTreeMap::new();
    let (mut end, mut widest) = (0_usize, 1);
    for line in body.lines().skip(1) {
        let line = line.trim();
        let Some(line) = line.strip_suffix(';') else { continue };
        let (kind, field) = line.split_once(' ').unwrap();
        let width = match kind {
            "__u8" | "char" => 1,
            "__le16" => 2,
            "__u32" | "__s32" | "__le32" => 4,
            "__u64" | "__le64" => 8,
            _ => panic!("what is a {kind}?"),
        };
        let (field, count) = match field.split_once('[') {
            Some((field, count)) => {
                let count = count.trim_end_matches(']');
                (field, count.parse().unwrap_or_else(|_| numbers(header)[count] as usize))
            }
            None => (field, 1),
        };
        end = end.next_multiple_of(width);
        fields.insert(field.to_owned(), (end, width * count));
        (end, widest) = (end + width * count, widest.max(width));
    }
    (fields, end.next_multiple_of(widest))
}

#[test]
fn numbers_on_the_wire() {
    let mut c = numbers(WIRE);
    let mut same = |name: &str, rust: u64| assert_eq!(c.remove(name), Some(rust), "{name}");
    for (name, kind) in [
        ("WRITE", Kind::Write),
        ("READ", Kind::Read),
        ("READ_REPLY", Kind::ReadReply),
        ("FLUSH", Kind::Flush),
        ("FLUSH_ACK", Kind::FlushAck),
        ("ACKNOWLEDGE", Kind::Acknowledge),
        ("IMPORT", Kind::Import),
        ("IMPORT_ACK", Kind::ImportAck),
        ("UNIMPORT", Kind::Unimport),
        ("CALL", Kind::Call),
        ("CALL_REPLY", Kind::CallReply),
        ("ERROR", Kind::Error),
        ("GOODBYE", Kind::Goodbye),
        ("ATOMIC", Kind::Atomic),
        ("ATOMIC_REPLY", Kind::AtomicReply),
    ] {
        same(&format!("NETVM_{name}"), kind as u64);
    }
    for (name, status) in [
        ("OK", Status::Ok),
        ("NO_HANDLE", Status::NoHandle),
        ("OUT_OF_BOUNDS", Status::OutOfBounds),
        ("NO_RIGHTS", Status::NoRights),
        ("NO_SEGMENT", Status::NoSegment),
        ("FULL", Status::Full),
        ("NO_METHOD", Status::NoMethod),
        ("BAD_REQUEST", Status::BadRequest),
        ("BUSY", Status::Busy),
        ("STOPPING", Status::Stopping),
        ("FAULT", Status::Fault),
        ("MISALIGNED", Status::Misaligned),
        ("UNSUPPORTED", Status::Unsupported),
        ("AWAY", Status::Away),
    ] {
        same(&format!("NETVM_{name}"), status as u64);
    }
    let keep_alive = KeepAlive::default();
    for (name, rust) in [
        ("FENCE", wire::FENCE.into()),
        ("COUNT", wire::COUNT.into()),
        ("POST", wire::POST.into()),
        ("QUEUE", wire::QUEUE.into()),
        ("QUIET", wire::QUIET.into()),
        ("NO_SLOT", wire::NO_SLOT),
        ("PULSE", wire::PULSE),
        ("VERSION", limits::VERSION.into()),
        ("HEADER_BYTES", limits::HEADER_BYTES as u64),
        ("HELLO_BYTES", limits::HELLO_BYTES as u64),
        ("PAYLOAD_BYTES_MAX", limits::PAYLOAD_BYTES_MAX.into()),
        ("BODY_BYTES_MAX", limits::BODY_BYTES_MAX as u64),
        ("ATOMIC_BYTES", limits::ATOMIC_BYTES as u64),
        ("NAME_BYTES_MAX", limits::NAME_BYTES_MAX as u64),
        ("OPS_MAX", limits::OPS_MAX as u64),
        ("WINDOW", limits::WINDOW),
        ("ACKNOWLEDGE_EVERY", limits::ACKNOWLEDGE_EVERY),
        ("SLABS_MAX", limits::SLABS_MAX),
        ("SLAB_BYTES_MAX", limits::SLAB_BYTES_MAX),
        ("RECORD_BYTES_MAX", limits::RECORD_BYTES_MAX as u64),
        ("TAG_BYTES", netvm_core::opening::TAG_BYTES as u64),
        ("REKEY_RECORDS", limits::REKEY_RECORDS),
        ("KEEP_ALIVE_INTERVAL_MS", keep_alive.interval_ms),
        ("KEEP_ALIVE_TIMEOUT_MS", keep_alive.timeout_ms),
        ("METHOD_ATTACH", crate::lender::METHODS.0.into()),
        ("METHOD_BORROW", crate::lender::METHODS.1.into()),
        ("BORROW_ANSWER_BYTES", crate::lender::BORROW_ANSWER_BYTES as u64),
    ] {
        same(&format!("NETVM_{name}"), rust);
    }
    assert_eq!(c, BTreeMap::new(), "these are compared with nothing");
    // Every kind is there.
    let unknown = [0, 16].map(|kind| {
        let mut bytes = Header::new(Kind::Read).encode();
        bytes[0] = kind;
        Header::decode(&bytes).is_err()
    });
    assert_eq!(unknown, [true, true]);
}

#[test]
fn fields_on_the_wire() {
    let (fields, bytes) = fields(WIRE, "netvm_header");
    assert_eq!((fields.len(), bytes), (10, limits::HEADER_BYTES));
    // Each field of Rust's, with all bits set and the others zero, is where C has it.
    let zero = Header { kind: Kind::Write, ..Header::new(Kind::Write) };
    let changed = [
        ("flags", Header { flags: u8::MAX, ..zero }),
        ("status", Header { status: u16::MAX, ..zero }),
        ("payload_bytes", Header { payload_bytes: u32::MAX, ..zero }),
        ("sequence", Header { sequence: u64::MAX, ..zero }),
        ("applied", Header { applied: u64::MAX, ..zero }),
        ("token", Header { token: u64::MAX, ..zero }),
        ("handle", Header { handle: u32::MAX, ..zero }),
        ("bytes", Header { bytes: u32::MAX, ..zero }),
        ("offset", Header { offset: u64::MAX, ..zero }),
    ];
    for (name, header) in changed {
        let bytes = header.encode();
        let first = bytes.iter().position(|&byte| byte == u8::MAX).unwrap();
        let len = bytes.iter().filter(|&&byte| byte == u8::MAX).count();
        assert_eq!(fields[name], (first, len), "{name}");
    }
    assert_eq!((fields["kind"], zero.encode()[0]), ((0, 1), Kind::Write as u8));
    assert_eq!(Header { status: 0x0102, ..zero }.encode()[2..4], [2, 1], "little-endian, as __le16 says");
}

macro_rules! same_fields {
    ($c:literal, $rust:ty, $($field:ident),+) => {{
        let (mut fields, bytes) = fields(USER, $c);
        assert_eq!(bytes, size_of::<$rust>(), $c);
        $(
            let (at, _) = fields.remove(stringify!($field)).expect(stringify!($field));
            assert_eq!(at, offset_of!($rust, $field), stringify!($field));
        )+
        assert_eq!(fields, BTreeMap::new(), $c);
    }};
}

#[test]
fn what_ioctls_take() {
    same_fields!(
        "netvm_mem_attach",
        sys::Attach,
        struct_bytes,
        kind,
        flags,
        socket,
        ops_max,
        window,
        bytes,
        key,
        board_key,
        name,
        peer,
        send_key,
        receive_key,
        send_record,
        receive_record,
        pid,
        device
    );
    same_fields!("netvm_mem_detach", sys::Detach, device, flags);
    same_fields!(
        "netvm_mem_page",
        sys::Page,
        address,
        entries,
        physical,
        page_bytes,
        offset,
        levels,
        leaf,
        flags,
        reserved
    );
    let c = numbers(USER);
    assert_eq!(c["NETVM_MEM_LENDER"], sys::LENDER.into());
    assert_eq!(c["NETVM_MEM_SEGMENT"], sys::SEGMENT.into());
    assert_eq!(c["NETVM_MEM_READ_ONLY"], sys::READ_ONLY.into());
    assert_eq!(c["NETVM_MEM_ENCRYPTED"], sys::ENCRYPTED.into());
    assert_eq!(c["NETVM_MEM_BOUND"], sys::BOUND.into());
    assert_eq!(c["NETVM_MEM_FORCE"], sys::FORCE.into());
    assert_eq!(c["NETVM_MEM_PAGE_PRESENT"], sys::PRESENT.into());
    assert_eq!(c["NETVM_MEM_PAGE_WRITABLE"], sys::WRITABLE.into());
    assert_eq!(c["NETVM_MEM_PAGE_DIRTY"], sys::DIRTY.into());
    assert_eq!(c["NETVM_MEM_PAGE_ACCESSED"], sys::ACCESSED.into());
    assert_eq!(c["NETVM_MEM_LEVELS"], sys::LEVELS as u64);
    // _IOWR and _IOW of the header.
    let code = |define: &str| {
        let line = USER.lines().find(|line| line.starts_with(&format!("#define {define} "))).unwrap();
        let (how, rest) = line.split_once(" _IO").unwrap().1.split_once('(').unwrap();
        let parts: Vec<&str> = rest.trim_end_matches(')').split(", ").collect();
        let direction = u32::from(how.contains('W')) | u32::from(how.contains('R')) << 1;
        let bytes = fields(USER, parts[2].strip_prefix("struct ").unwrap()).1 as u32;
        assert_eq!(parts[0], "0xd7");
        u64::from(direction << 30 | bytes << 16 | 0xd7 << 8 | parts[1].parse::<u32>().unwrap())
    };
    assert_eq!(code("NETVM_MEM_ATTACH"), sys::ATTACH);
    assert_eq!(code("NETVM_MEM_DETACH"), sys::DETACH);
    assert_eq!(code("NETVM_MEM_PAGE"), sys::PAGE);
}
