//! A peer's segment: puts and gets.

use std::ffi::c_int;

use netvm::notify::Notify;
use netvm::region::{Region, WriteOptions};
use netvm_core::limits::{COPIED_BYTES_MAX, OPS_MAX, PAYLOAD_BYTES_MAX};
use netvm_sys::shared::SharedSlice;

use crate::board::Signal;
use crate::call::{call, timeout};
use crate::code::{Failure, Result};
use crate::ffi::{In, Out, Own, Ref, Source, Target};
use crate::lasting::{RegionHandle, inside};
use crate::node::RIGHTS;

/// `netvm_region_info`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RegionInfo {
    bytes: u64,
    pub(crate) rights: c_int,
    pub(crate) notifications: u32,
    pub(crate) link: [u8; LINK_BYTES],
}

/// Bytes of a link's name, with its zero byte.
pub(crate) const LINK_BYTES: usize = 16;

/// `netvm_iov`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Piece {
    pub(crate) offset: u64,
    pub(crate) buffer: Target,
    pub(crate) bytes: usize,
}

/// What moves in one operation.
pub(crate) const PART_BYTES: usize = PAYLOAD_BYTES_MAX as usize;
/// Operations under way at once.
const PARTS: usize = OPS_MAX / 4;
/// Flags of a put.
pub(crate) const FENCE: u32 = 1;
pub(crate) const QUEUE: u32 = 4;

/// `buffer` in parts, each with its offset, which has been checked.
fn parts(offset: u64, buffer: SharedSlice) -> impl Iterator<Item = (u64, SharedSlice)> {
    (0..buffer.len()).step_by(PART_BYTES).filter_map(move |at| {
        let part = buffer.sub(at, PART_BYTES.min(buffer.len() - at))?;
        Some((offset + at as u64, part))
    })
}

fn write_all(region: &Region, pieces: &mut Vec<(u64, SharedSlice)>) -> Result<()> {
    let result = region.write_vectored(pieces);
    pieces.clear();
    Ok(result?)
}

#[inline(always)]
fn put(
    region: &Ref<RegionHandle>,
    offset: u64,
    buffer: Source,
    bytes: usize,
    options: WriteOptions,
) -> Result<()> {
    let region = region.get()?.writing(offset, bytes)?;
    if bytes <= COPIED_BYTES_MAX {
        return Ok(region.write_with(offset, buffer.bytes(bytes)?, options)?);
    }
    put_parts(&region, offset, buffer.shared(bytes)?, options)
}

#[inline(never)]
fn put_parts(region: &Region, offset: u64, buffer: SharedSlice, options: WriteOptions) -> Result<()> {
    let mut under_way = Vec::new();
    let mut parts = parts(offset, buffer).peekable();
    while let Some(part) = parts.next() {
        let is_last = parts.peek().is_none();
        if options.fence || is_last {
            write_all(region, &mut under_way)?;
            let notify = options.notify.filter(|_| is_last);
            region.write_shared_with(part.0, &[part.1], WriteOptions { notify, ..options })?;
        } else {
            under_way.push(part);
            if under_way.len() == PARTS {
                write_all(region, &mut under_way)?;
            }
        }
    }
    Ok(())
}

fn get(region: &Ref<RegionHandle>, pieces: impl Iterator<Item = Result<(u64, SharedSlice)>>) -> Result<()> {
    let region = region.get()?.now()?;
    let mut under_way = Vec::new();
    for piece in pieces {
        let (offset, buffer) = piece?;
        for part in parts(offset, buffer) {
            under_way.push(part);
            if under_way.len() == PARTS {
                region.read_vectored(&under_way)?;
                under_way.clear();
            }
        }
    }
    Ok(region.read_vectored(&under_way)?)
}

/// Writes.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_put(region: Ref<RegionHandle>, offset: u64, buffer: Source, bytes: usize) -> c_int {
    call(|| put(&region, offset, buffer, bytes, WriteOptions::default()))
}

/// Writes and notifies.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_put_notify(
    region: Ref<RegionHandle>,
    offset: u64,
    buffer: Source,
    bytes: usize,
    number: u32,
    value: u32,
) -> c_int {
    call(|| {
        let notify = Some(Signal { number, value }.notify()?);
        put(&region, offset, buffer, bytes, WriteOptions { fence: false, notify })
    })
}

/// Of flags, besides `others`, and a signal.
pub(crate) fn write_options(flags: u32, others: u32, signal: &In<Signal>) -> Result<WriteOptions> {
    if flags & !(FENCE | QUEUE | others) != 0 {
        return Err(Failure::argument(format!("{flags:#x} has flags that do not exist")));
    }
    let notify = match signal.optional()? {
        Some(signal) if flags & QUEUE != 0 => {
            let (number, value) = signal.queue()?;
            Some(Notify::Queue { number, value })
        }
        Some(signal) => Some(signal.notify()?),
        None if flags & QUEUE != 0 => return Err(Failure::argument("NETVM_QUEUE needs a signal")),
        None => None,
    };
    Ok(WriteOptions { fence: flags & FENCE != 0, notify })
}

/// Writes with options.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_put_with(
    region: Ref<RegionHandle>,
    offset: u64,
    buffer: Source,
    bytes: usize,
    flags: u32,
    signal: In<Signal>,
) -> c_int {
    call(|| put(&region, offset, buffer, bytes, write_options(flags, 0, &signal)?))
}

/// Notifies.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_notify(region: Ref<RegionHandle>, number: u32, value: u32) -> c_int {
    call(|| {
        let notify = Some(Signal { number, value }.notify()?);
        put(&region, 0, Source::NULL, 0, WriteOptions { fence: false, notify })
    })
}

/// Puts a notification into the queue.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_enqueue(
    region: Ref<RegionHandle>,
    number: u32,
    value: u32,
    timeout_ns: i64,
) -> c_int {
    call(|| {
        let (number, value) = Signal { number, value }.queue()?;
        let region = region.get()?.writing(0, 0)?;
        Ok(region.enqueue(number, value, timeout(timeout_ns))?)
    })
}

/// Writes and flushes.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_put_flush(
    region: Ref<RegionHandle>,
    offset: u64,
    buffer: Source,
    bytes: usize,
) -> c_int {
    call(|| {
        let handle = region.get()?;
        // The flush of a lasting one has more to tell.
        if let (true, RegionHandle::Direct(direct)) = (bytes <= COPIED_BYTES_MAX, handle) {
            handle.writing(offset, bytes)?;
            return Ok(direct.write_flush(offset, buffer.bytes(bytes)?)?);
        }
        put(&region, offset, buffer, bytes, WriteOptions::default())?;
        handle.flush()
    })
}

/// Reads.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_get(region: Ref<RegionHandle>, offset: u64, buffer: Target, bytes: usize) -> c_int {
    call(|| {
        let now = region.get()?.now()?;
        inside(&now, offset, bytes)?;
        let buffer = buffer.shared(bytes)?;
        if bytes <= PART_BYTES {
            return Ok(now.read_shared(offset, &[buffer])?);
        }
        get(&region, std::iter::once(Ok((offset, buffer))))
    })
}

/// Checks all pieces before the first is moved.
pub(crate) fn pieces<'a>(region: &Region, pieces: &'a In<Piece>, count: usize) -> Result<&'a [Piece]> {
    let pieces = pieces.array(count)?;
    for piece in pieces {
        inside(region, piece.offset, piece.bytes)?;
        piece.buffer.shared(piece.bytes)?;
    }
    Ok(pieces)
}

/// Writes pieces.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_putv(region: Ref<RegionHandle>, iov: In<Piece>, count: usize) -> c_int {
    call(|| {
        let handle = region.get()?;
        let pieces = pieces(&*handle.now()?, &iov, count)?;
        let region = &*handle.writing(0, 0)?;
        let mut under_way = Vec::new();
        for piece in pieces {
            if piece.bytes <= COPIED_BYTES_MAX {
                region.write(piece.offset, piece.buffer.source().bytes(piece.bytes)?)?;
                continue;
            }
            for part in parts(piece.offset, piece.buffer.shared(piece.bytes)?) {
                under_way.push(part);
                if under_way.len() == PARTS {
                    write_all(region, &mut under_way)?;
                }
            }
        }
        write_all(region, &mut under_way)
    })
}

/// Reads pieces.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_getv(region: Ref<RegionHandle>, iov: In<Piece>, count: usize) -> c_int {
    call(|| {
        let pieces = pieces(&*region.get()?.now()?, &iov, count)?;
        get(&region, pieces.iter().map(|piece| Ok((piece.offset, piece.buffer.shared(piece.bytes)?))))
    })
}

/// Waits until the peer has everything.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_flush(region: Ref<RegionHandle>) -> c_int {
    call(|| region.get()?.flush())
}

/// What a region is.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_region_query(region: Ref<RegionHandle>, info: Out<RegionInfo>) -> c_int {
    call(|| {
        let region = region.get()?.now()?;
        let rights = RIGHTS.iter().find(|(_, _, rights)| *rights == region.rights());
        let rights = rights.map_or(0, |(_, number, _)| *number);
        let mut link = [0; LINK_BYTES];
        // The last byte stays 0.
        for (place, byte) in link.iter_mut().take(LINK_BYTES - 1).zip(region.link().bytes()) {
            *place = byte;
        }
        info.set(RegionInfo { bytes: region.len(), rights, notifications: region.notifications(), link })
    })
}

/// Closes a region.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_region_close(region: Own<RegionHandle>) -> c_int {
    call(|| region.take().map(drop))
}
