//! Requests of the kernel and their answers: <linux/fuse.h>, protocol 7.31. Numbers are of this machine's byte order.

/// Bytes before the data of a write: `fuse_in_header` and `fuse_write_in`. No other request that is understood here is longer.
pub(super) const HEAD_BYTES: usize = 80;
const IN_HEADER_BYTES: usize = 40;
/// The longest answer without data.
pub(super) const ANSWER_BYTES_MAX: usize = OUT_HEADER_BYTES + 104;
const OUT_HEADER_BYTES: usize = 16;

const MAJOR: u32 = 7;
const MINOR: u32 = 31;

/// Error numbers of answers.
pub(super) mod errno {
    pub(in super::super) const EINVAL: i32 = 22;
    pub(in super::super) const ENOSYS: i32 = 38;
    pub(in super::super) const EOPNOTSUPP: i32 = 95;
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// The first request; what the kernel can.
    Init {
        minor: u32,
        readahead: u32,
        flags: u32,
    },
    Attributes,
    Open,
    Read {
        offset: u64,
        bytes: u32,
    },
    Write {
        offset: u64,
        bytes: u32,
    },
    /// Punches a hole.
    Discard {
        offset: u64,
        bytes: u64,
    },
    Sync,
    Statistics,
    /// Nothing to do, but somebody waits for the answer.
    Nothing,
    /// Nobody waits for an answer.
    Silent,
    /// Answered with this error.
    Refuse(i32),
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) unique: u64,
    pub(super) ask: Ask,
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

impl Request {
    /// From the first [`HEAD_BYTES`] of `length` bytes; `None` when it is not even a request.
    pub(super) fn parse(head: &[u8; HEAD_BYTES], length: usize) -> Option<Self> {
        let bytes = head.get(..length.min(HEAD_BYTES))?;
        let (told, opcode, unique) = (u32_at(bytes, 0)?, u32_at(bytes, 4)?, u64_at(bytes, 8)?);
        let body = bytes.get(IN_HEADER_BYTES..)?;
        if told as usize != length {
            return None;
        }
        let ask = Self::ask(opcode, body, length).unwrap_or(Ask::Refuse(errno::EINVAL));
        Some(Self { unique, ask })
    }

    fn ask(opcode: u32, body: &[u8], length: usize) -> Option<Ask> {
        /// FALLOC_FL_KEEP_SIZE with PUNCH_HOLE, or with ZERO_RANGE.
        const READS_AS_ZEROS: [u32; 2] = [0x3, 0x11];
        let range = || Some((u64_at(body, 8)?, u32_at(body, 16)?));
        Some(match opcode {
            26 => {
                Ask::Init { minor: u32_at(body, 4)?, readahead: u32_at(body, 8)?, flags: u32_at(body, 12)? }
            }
            3 => Ask::Attributes,
            14 => Ask::Open,
            15 => range().map(|(offset, bytes)| Ask::Read { offset, bytes })?,
            16 => {
                let (offset, bytes) = range()?;
                if length != HEAD_BYTES + bytes as usize {
                    return None;
                }
                Ask::Write { offset, bytes }
            }
            43 => match READS_AS_ZEROS.contains(&u32_at(body, 24)?) {
                true => Ask::Discard { offset: u64_at(body, 8)?, bytes: u64_at(body, 16)? },
                false => Ask::Refuse(errno::EOPNOTSUPP),
            },
            20 => Ask::Sync,
            17 => Ask::Statistics,
            // RELEASE, FLUSH, DESTROY.
            18 | 25 | 38 => Ask::Nothing,
            // FORGET, INTERRUPT, BATCH_FORGET.
            2 | 36 | 42 => Ask::Silent,
            _ => Ask::Refuse(errno::ENOSYS),
        })
    }
}

/// An answer without its data.
pub(super) struct Answer {
    bytes: [u8; ANSWER_BYTES_MAX],
    length: usize,
}

impl Answer {
    /// One that says only that it was done.
    pub(super) fn done(unique: u64) -> Self {
        let mut answer = Self { bytes: [0; ANSWER_BYTES_MAX], length: OUT_HEADER_BYTES };
        answer.bytes[8..16].copy_from_slice(&unique.to_ne_bytes());
        answer
    }

    pub(super) fn error(unique: u64, error: i32) -> Self {
        let mut answer = Self::done(unique);
        answer.bytes[4..8].copy_from_slice(&(-error).to_ne_bytes());
        answer
    }

    /// What this file system can: requests of at most `bytes_max` bytes, `requests_max` of them at once that nobody waits for.
    pub(super) fn init(unique: u64, readahead: u32, flags: u32, bytes_max: u32, requests_max: u16) -> Self {
        /// ASYNC_READ, BIG_WRITES, ASYNC_DIO, MAX_PAGES.
        const WANTED: u32 = 1 | 1 << 5 | 1 << 15 | 1 << 22;
        let pages = bytes_max.div_ceil(4096).min(u16::MAX.into());
        let mut answer = Self::done(unique).u32(MAJOR).u32(MINOR).u32(readahead).u32(flags & WANTED);
        answer = answer.u16(requests_max).u16(requests_max).u32(bytes_max).u32(1).u16(pages as u16).u16(0);
        // flags2 and reserved.
        answer.zeros(32)
    }

    /// The attributes of a file of `size_bytes` bytes that do not change.
    pub(super) fn attributes(unique: u64, size_bytes: u64) -> Self {
        const REGULAR_0600: u32 = 0o100_600;
        let answer =
            Self::done(unique).u64(3600).u64(0).u64(1).u64(size_bytes).u64(size_bytes / 512).zeros(36);
        answer.u32(REGULAR_0600).u32(1).zeros(12).u32(4096).u32(0)
    }

    /// An open file that bypasses the page cache, with writes beside each other.
    pub(super) fn open(unique: u64) -> Self {
        const DIRECT_IO_PARALLEL_WRITES: u32 = 1 | 1 << 6;
        Self::done(unique).u64(0).u32(DIRECT_IO_PARALLEL_WRITES).u32(0)
    }

    pub(super) fn written(unique: u64, bytes: u32) -> Self {
        Self::done(unique).u32(bytes).u32(0)
    }

    pub(super) fn statistics(unique: u64, size_bytes: u64) -> Self {
        let answer = Self::done(unique).u64(size_bytes / 4096).zeros(16).u64(1).u64(0);
        answer.u32(4096).u32(255).u32(4096).zeros(28)
    }

    fn u16(self, value: u16) -> Self {
        self.put(&value.to_ne_bytes())
    }

    fn u32(self, value: u32) -> Self {
        self.put(&value.to_ne_bytes())
    }

    fn u64(self, value: u64) -> Self {
        self.put(&value.to_ne_bytes())
    }

    fn zeros(mut self, count: usize) -> Self {
        self.length += count;
        self
    }

    fn put(mut self, bytes: &[u8]) -> Self {
        self.bytes[self.length..self.length + bytes.len()].copy_from_slice(bytes);
        self.length += bytes.len();
        self
    }

    /// Its bytes, when `data` more follow.
    pub(super) fn bytes(&mut self, data: usize) -> &[u8] {
        let all = (self.length + data) as u32;
        self.bytes[..4].copy_from_slice(&all.to_ne_bytes());
        &self.bytes[..self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(length: u32, opcode: u32, body: &[u64]) -> [u8; HEAD_BYTES] {
        let mut head = [0; HEAD_BYTES];
        head[..4].copy_from_slice(&length.to_ne_bytes());
        head[4..8].copy_from_slice(&opcode.to_ne_bytes());
        head[8..16].copy_from_slice(&7u64.to_ne_bytes());
        for (index, word) in body.iter().enumerate() {
            head[40 + 8 * index..48 + 8 * index].copy_from_slice(&word.to_ne_bytes());
        }
        head
    }

    fn ask(length: u32, opcode: u32, body: &[u64]) -> Option<Ask> {
        let request = Request::parse(&head(length, opcode, body), length as usize)?;
        assert_eq!(request.unique, 7);
        Some(request.ask)
    }

    #[test]
    fn requests() {
        assert_eq!(ask(80, 15, &[1, 4096, 512]), Some(Ask::Read { offset: 4096, bytes: 512 }));
        assert_eq!(ask(80 + 512, 16, &[1, 8192, 512]), Some(Ask::Write { offset: 8192, bytes: 512 }));
        assert_eq!(ask(72, 43, &[1, 4096, 1 << 40, 3]), Some(Ask::Discard { offset: 4096, bytes: 1 << 40 }));
        assert_eq!(ask(72, 43, &[1, 4096, 1 << 40, 0]), Some(Ask::Refuse(errno::EOPNOTSUPP)));
        assert_eq!(ask(48, 2, &[1]), Some(Ask::Silent));
        assert_eq!(ask(47, 1, &[]), Some(Ask::Refuse(errno::ENOSYS)));
    }

    #[test]
    fn what_is_too_short_or_lies_about_its_length() {
        // The data of a write is not there.
        assert_eq!(ask(80 + 511, 16, &[1, 0, 512]), Some(Ask::Refuse(errno::EINVAL)));
        assert_eq!(ask(56, 15, &[1, 0]), Some(Ask::Refuse(errno::EINVAL)));
        assert_eq!(Request::parse(&head(80, 15, &[]), 79), None);
        for length in 0..40 {
            assert_eq!(ask(length, 3, &[]), None);
        }
    }

    #[test]
    fn answers_have_the_kernels_sizes() {
        let lengths = [
            (Answer::done(1), 16),
            (Answer::error(1, errno::EINVAL), 16),
            (Answer::init(1, 0, u32::MAX, 1 << 17, 64), 16 + 64),
            (Answer::attributes(1, 1 << 20), 16 + 104),
            (Answer::open(1), 16 + 16),
            (Answer::written(1, 4096), 16 + 8),
            (Answer::statistics(1, 1 << 20), 16 + 80),
        ];
        for (mut answer, length) in lengths {
            assert_eq!(answer.bytes(0).len(), length);
            assert_eq!(u32_at(answer.bytes(100), 0), Some(length as u32 + 100));
        }
    }
}
