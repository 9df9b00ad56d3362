//! From an exporter's addresses to (segment, offset) and back, for peers who have the segment open, and so hold its key.
//!
//! A call: `0, handle (4)` is answered with the address of the segment's first byte (8), `1, address (8)` with every place of that byte
//! among the open segments: offset (8), length of the name (1), name.

use netvm_core::limits::BODY_BYTES_MAX;
use netvm_core::segment::ImportTable;
use netvm_core::wire::Status;

use super::exports::Exports;

/// Method of the call.
pub(crate) const LOCATE_METHOD: u32 = 0x4C4F_4341;
const ADDRESS_OF: u8 = 0;
const FIND: u8 = 1;

/// A place in a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// Name of the segment.
    pub name: String,
    /// Offset of the byte.
    pub offset: u64,
}

pub(crate) fn ask_address(handle: u32) -> Vec<u8> {
    [&[ADDRESS_OF][..], &handle.to_le_bytes()].concat()
}

pub(crate) fn ask_find(address: u64) -> Vec<u8> {
    [&[FIND][..], &address.to_le_bytes()].concat()
}

pub(super) fn answer(exports: &Exports, imports: &ImportTable, body: &[u8]) -> Result<Vec<u8>, Status> {
    match body {
        [ADDRESS_OF, handle @ ..] => {
            let handle = handle.try_into().map(u32::from_le_bytes).map_err(|_| Status::BadRequest)?;
            let (id, _) = imports.notifications(&exports.table, handle).ok_or(Status::NoHandle)?;
            let segment = exports.segment(id).filter(|segment| segment.sync.is_none());
            let memory = &segment.ok_or(Status::Unsupported)?.memory;
            Ok((memory.shared().as_ptr().addr() as u64).to_le_bytes().to_vec())
        }
        [FIND, address @ ..] => {
            let address = address.try_into().map(u64::from_le_bytes).map_err(|_| Status::BadRequest)?;
            let mut found = Vec::new();
            let mut seen = Vec::new();
            for (_, id) in imports.handles() {
                let Some(name) = exports.table.name(id) else { continue };
                let segment = exports.segment(id).filter(|segment| segment.sync.is_none());
                let Some(offset) = segment.and_then(|segment| segment.memory.find(address)) else { continue };
                // Opened twice, it is still one.
                if !seen.contains(&id) && found.len() + 9 + name.len() <= BODY_BYTES_MAX {
                    seen.push(id);
                    found.extend_from_slice(&offset.to_le_bytes());
                    found.push(name.len() as u8);
                    found.extend_from_slice(name.as_bytes());
                }
            }
            Ok(found)
        }
        _ => Err(Status::BadRequest),
    }
}

/// What a peer found; `None` when its answer makes no sense.
pub(crate) fn decode(mut body: &[u8]) -> Option<Vec<Location>> {
    let mut found = Vec::new();
    while !body.is_empty() {
        let (offset, rest) = body.split_first_chunk()?;
        let (&len, rest) = rest.split_first()?;
        let (name, rest) = rest.split_at_checked(usize::from(len))?;
        let name = String::from_utf8(name.to_vec()).ok()?;
        found.push(Location { name, offset: u64::from_le_bytes(*offset) });
        body = rest;
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_a_peer_are_checked() {
        let place = |name: &str, offset| Location { name: name.to_owned(), offset };
        let bytes = [&7u64.to_le_bytes()[..], b"\x02ab", &9u64.to_le_bytes(), b"\0"].concat();
        assert_eq!(decode(&bytes), Some(vec![place("ab", 7), place("", 9)]));
        for end in [1, 8, 9, 10, 12, bytes.len() - 1] {
            assert_eq!(decode(&bytes[..end]), None, "{end}");
        }
        assert_eq!(decode(b"\0\0\0\0\0\0\0\0\x01\xFF"), None, "no text");
        let exports = Exports::default();
        for body in [&b""[..], b"\x02", b"\0", b"\0\0\0\0\0\0", b"\x01\0"] {
            assert_eq!(answer(&exports, &ImportTable::default(), body), Err(Status::BadRequest));
        }
        assert_eq!(answer(&exports, &ImportTable::default(), &ask_address(3)), Err(Status::NoHandle));
    }
}
