//! Buffers for requests' data, in a few sizes. The one that was used last is used next: it is in the cache.

use netvm_sys::mapping::Mapping;
use netvm_sys::shared::SharedSlice;

use super::proto::PAYLOAD_MAX;

/// Sizes go up by factors of four from this, to the longest payload.
const SMALLEST: usize = 4096;
const CLASSES: usize = 8;
/// Buffers of more bytes than this are not kept.
const KEPT_MAX: usize = 1 << 20;

const _: () = assert!(SMALLEST << (2 * (CLASSES - 1)) >= PAYLOAD_MAX as usize);

fn class_bytes(class: usize) -> usize {
    (SMALLEST << (2 * class)).min(PAYLOAD_MAX as usize)
}

/// Memory for one request.
#[derive(Debug)]
pub(super) struct Buffer {
    memory: Mapping,
    class: usize,
}

impl Buffer {
    /// Its first `bytes` bytes.
    pub(super) fn part(&self, bytes: usize) -> SharedSlice {
        let all = self.memory.shared();
        all.sub(0, bytes).unwrap_or(all)
    }

    pub(super) fn len(&self) -> usize {
        self.memory.shared().len()
    }
}

#[derive(Debug, Default)]
pub(super) struct Buffers {
    free: [Vec<Buffer>; CLASSES],
    /// Bytes of buffers that are in use.
    pub(super) used: usize,
}

impl Buffers {
    /// A buffer of at least `bytes` bytes, at most [`PAYLOAD_MAX`]; `None` when there is no memory.
    pub(super) fn take(&mut self, bytes: usize) -> Option<Buffer> {
        let class = (0..CLASSES).find(|&class| class_bytes(class) >= bytes)?;
        let buffer = match self.free[class].pop() {
            Some(buffer) => buffer,
            None => Buffer { memory: Mapping::anonymous(class_bytes(class)).ok()?, class },
        };
        self.used += buffer.len();
        Some(buffer)
    }

    pub(super) fn give_back(&mut self, buffer: Buffer) {
        self.used -= buffer.len();
        if buffer.len() <= KEPT_MAX {
            self.free[buffer.class].push(buffer);
        }
    }
}
