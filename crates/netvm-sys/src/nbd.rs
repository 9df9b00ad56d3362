//! The kernel's network block device, /dev/nbdN, with a server in this process at the other end of a pair of unix sockets: what the
//! kernel sends it may take from its last reserves of memory, which it does not for sockets that it has not made a device of.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::shared::SharedSlice;

// <linux/nbd.h>
const NBD_SET_SOCK: libc::Ioctl = 0xab00;
const NBD_SET_BLKSIZE: libc::Ioctl = 0xab01;
const NBD_DO_IT: libc::Ioctl = 0xab03;
const NBD_CLEAR_SOCK: libc::Ioctl = 0xab04;
const NBD_SET_SIZE_BLOCKS: libc::Ioctl = 0xab07;
const NBD_DISCONNECT: libc::Ioctl = 0xab08;
const NBD_SET_TIMEOUT: libc::Ioctl = 0xab09;
const NBD_SET_FLAGS: libc::Ioctl = 0xab0a;

/// What the kernel counts the size in, and the least that it reads and writes.
pub const BLOCK_BYTES: u64 = 4096;
/// Devices that are looked at; the module makes 16 unless it is told otherwise.
const DEVICES_MAX: u32 = 256;
/// Room for requests, and for answers, in the kernel: what they take of its last reserves is less than others need of it.
static SEND_BYTES: i32 = 64 << 10;
/// Answers that are written in one call.
const ANSWERS_MAX: usize = 64;

/// A device of the kernel's.
#[derive(Debug)]
pub struct NbdDevice {
    file: File,
    number: u32,
    /// The kernel's end.
    _socket: OwnedFd,
}

/// The other end of its connection: requests to read, answers to write.
#[derive(Debug)]
pub struct NbdSocket {
    fd: OwnedFd,
}

impl NbdDevice {
    /// Takes a free device: of `size_bytes` bytes, a multiple of [`BLOCK_BYTES`], that can what `flags` say (as the protocol has them),
    /// with requests of at most `request_bytes`. It is there when [`NbdDevice::run`] runs.
    ///
    /// # Errors
    /// ENOENT without nbd in the kernel; EBUSY when no device is free; EACCES.
    pub fn take(size_bytes: u64, flags: u16, request_bytes: usize) -> io::Result<(Self, NbdSocket)> {
        let mut busy = io::Error::from_raw_os_error(libc::ENOENT);
        for number in 0..DEVICES_MAX {
            let device = disk(number);
            if !device.exists() {
                break;
            }
            busy = io::Error::from_raw_os_error(libc::EBUSY);
            let mut options = OpenOptions::new();
            options.read(true).write(true);
            // Exclusively: one that is mounted or swap still belongs to that, though its server is dead. Not for good: swapon wants it so.
            let is_free =
                served_by(number).is_none() && options.custom_flags(libc::O_EXCL).open(&device).is_ok();
            if !is_free {
                continue;
            }
            let file = options.custom_flags(0).open(&device)?;
            let (ours, theirs) = pair()?;
            match set_up(&file, &theirs, size_bytes, flags) {
                Ok(()) => {}
                // Somebody was faster.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => continue,
                Err(error) => return Err(error),
            }
            let most = format!("/sys/block/nbd{number}/queue/max_sectors_kb");
            fs::write(most, (request_bytes >> 10).to_string())?;
            return Ok((Self { file, number, _socket: theirs }, ours.into()));
        }
        Err(busy)
    }

    /// N in /dev/nbdN.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Runs the device, until [`NbdDevice::disconnect`] or the end of the connection. Afterwards its requests fail.
    ///
    /// # Errors
    /// As of ioctl(2), NBD_DO_IT.
    pub fn run(&self) -> io::Result<()> {
        let result = ioctl(&self.file, NBD_DO_IT, 0);
        let _ = ioctl(&self.file, NBD_CLEAR_SOCK, 0);
        result
    }

    /// Ends [`NbdDevice::run`] in another thread.
    pub fn disconnect(&self) {
        let _ = ioctl(&self.file, NBD_DISCONNECT, 0);
    }
}

/// The disk of a device.
pub fn disk(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/nbd{number}"))
}

/// Ends a device that runs in another process: its connection is closed.
///
/// # Errors
/// As of open(2) and ioctl(2).
pub fn disconnect(number: u32) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(disk(number))?;
    ioctl(&file, NBD_DISCONNECT, 0)
}

/// The thread that runs a device.
pub fn served_by(number: u32) -> Option<u32> {
    fs::read_to_string(format!("/sys/block/nbd{number}/pid")).ok()?.trim().parse().ok()
}

/// Whether a thread is one of a process.
pub fn is_thread_of(thread: u32, process: u32) -> bool {
    Path::new(&format!("/proc/{process}/task/{thread}")).exists()
}

fn ioctl(file: &File, what: libc::Ioctl, value: libc::c_ulong) -> io::Result<()> {
    // SAFETY: these take a number, which is no address.
    if unsafe { libc::ioctl(file.as_raw_fd(), what, value) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn set_up(file: &File, socket: &OwnedFd, size_bytes: u64, flags: u16) -> io::Result<()> {
    ioctl(file, NBD_SET_BLKSIZE, BLOCK_BYTES as libc::c_ulong)?;
    ioctl(file, NBD_SET_SIZE_BLOCKS, (size_bytes / BLOCK_BYTES) as libc::c_ulong)?;
    ioctl(file, NBD_SET_FLAGS, flags.into())?;
    // Lenders that are silent are this process's matter.
    ioctl(file, NBD_SET_TIMEOUT, 0)?;
    ioctl(file, NBD_SET_SOCK, socket.as_raw_fd() as libc::c_ulong)
}

fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    // SAFETY: room for two descriptors.
    let made = unsafe {
        libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0, fds.as_mut_ptr())
    };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    for fd in fds {
        // SAFETY: an integer, a local. With less room than asked for it works, too.
        unsafe {
            libc::setsockopt(
                fd,
                libc::SOL_SOCKET,
                libc::SO_SNDBUF,
                (&raw const SEND_BYTES).cast(),
                size_of::<i32>() as libc::socklen_t,
            )
        };
    }
    // SAFETY: descriptors that the kernel just gave us.
    Ok(unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) })
}

impl NbdSocket {
    /// Receives into `first`, then `next`, what is there; `waits` for something otherwise. Less than they have room for: there was no more.
    ///
    /// # Errors
    /// `WouldBlock` when there is nothing; `UnexpectedEof` at the end of the connection.
    pub fn receive(&self, first: SharedSlice, next: &mut [u8], waits: bool) -> io::Result<usize> {
        let mut pieces = [
            libc::iovec { iov_base: first.as_ptr().cast(), iov_len: first.len() },
            libc::iovec { iov_base: next.as_mut_ptr().cast(), iov_len: next.len() },
        ];
        // SAFETY: integers and pointers; zeros are what unused fields must be.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = pieces.as_mut_ptr();
        message.msg_iovlen = 2;
        let flags = if waits { 0 } else { libc::MSG_DONTWAIT };
        loop {
            // SAFETY: the kernel writes at most what the pieces name: shared memory, which may change at any time, and bytes that are borrowed
            // exclusively.
            let got = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut message, flags) };
            match got {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                1.. => return Ok(got as usize),
                _ => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
    }

    /// Receives until `into` is full, in one call, whatever pieces it comes in.
    ///
    /// # Errors
    /// `UnexpectedEof` at the end of the connection.
    pub fn receive_all(&self, into: SharedSlice) -> io::Result<()> {
        let mut got = 0;
        while let Some(rest) = into.sub(got, into.len() - got).filter(|rest| !rest.is_empty()) {
            // SAFETY: the kernel writes at most as many bytes as the shared memory has, which may change at any time.
            let count = unsafe {
                libc::recv(self.fd.as_raw_fd(), rest.as_ptr().cast(), rest.len(), libc::MSG_WAITALL)
            };
            match count {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                1.. => got += count as usize,
                _ => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Ends the connection, for both sides.
    pub fn end(&self) {
        // SAFETY: no memory.
        unsafe { libc::shutdown(self.fd.as_raw_fd(), libc::SHUT_RDWR) };
    }

    /// Writes answers, of each a head, then data. Waits for the kernel, which takes answers whatever this process does.
    ///
    /// # Errors
    /// EPIPE at the end of the connection.
    pub fn write<'a>(&self, answers: impl IntoIterator<Item = (&'a [u8], SharedSlice)>) -> io::Result<()> {
        let mut answers = answers.into_iter();
        loop {
            let mut pieces = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2 * ANSWERS_MAX];
            let mut count = 0;
            for (head, data) in answers.by_ref().take(ANSWERS_MAX) {
                pieces[count] =
                    libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() };
                pieces[count + 1] = libc::iovec { iov_base: data.as_ptr().cast(), iov_len: data.len() };
                count += 2;
            }
            if count == 0 {
                return Ok(());
            }
            let mut left = &mut pieces[..count];
            while !left.is_empty() {
                // SAFETY: integers and pointers; zeros are what unused fields must be.
                let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
                message.msg_iov = left.as_mut_ptr();
                message.msg_iovlen = left.len() as _;
                // SAFETY: the kernel only reads what the pieces name: what is left of heads, which are borrowed, and of shared memory.
                let put =
                    unsafe { libc::sendmsg(self.fd.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
                if put < 0 {
                    let error = io::Error::last_os_error();
                    if error.kind() == io::ErrorKind::Interrupted {
                        continue;
                    }
                    return Err(error);
                }
                left = pass(left, put as usize);
            }
        }
    }
}

/// What is left of pieces behind so many bytes.
fn pass(mut pieces: &mut [libc::iovec], mut bytes: usize) -> &mut [libc::iovec] {
    while let Some(piece) = pieces.first_mut() {
        if piece.iov_len > bytes {
            piece.iov_base = piece.iov_base.wrapping_byte_add(bytes);
            piece.iov_len -= bytes;
            break;
        }
        bytes -= piece.iov_len;
        pieces = &mut pieces[1..];
    }
    pieces
}

/// One end of a pair of unix sockets that block.
impl From<OwnedFd> for NbdSocket {
    fn from(fd: OwnedFd) -> Self {
        Self { fd }
    }
}

impl AsFd for NbdSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sockets() -> (NbdSocket, NbdSocket) {
        let (ours, theirs) = pair().unwrap();
        (ours.into(), theirs.into())
    }

    fn receive_all(socket: &NbdSocket, bytes: usize) -> Vec<u8> {
        let (mut got, mut have) = (vec![0; bytes], 0);
        while have < bytes {
            have += socket.receive(SharedSlice::EMPTY, &mut got[have..], true).unwrap();
        }
        got
    }

    fn shared(bytes: &mut [u8]) -> SharedSlice {
        // SAFETY: the tests' bytes live until their end, and are not looked at meanwhile.
        unsafe { SharedSlice::from_raw(bytes.as_mut_ptr(), bytes.len()) }
    }

    #[test]
    fn an_answer_larger_than_the_room_for_it_arrives() {
        let (ours, theirs) = sockets();
        let nothing = theirs.receive(SharedSlice::EMPTY, &mut [0; 4], false);
        assert_eq!(nothing.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let mut sent: Vec<u8> = (0..9_000_000_u32).map(|at| (at / 7) as u8).collect();
        let data = shared(&mut sent);
        let got = std::thread::scope(|scope| {
            scope.spawn(|| ours.write([(&b"head"[..], data)]).unwrap());
            receive_all(&theirs, 4 + data.len())
        });
        assert!(got[..4] == *b"head" && got[4..] == sent);
        drop(ours);
        let ended = theirs.receive(SharedSlice::EMPTY, &mut [0; 4], false);
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn answers_arrive_in_order_however_many_they_are() {
        const COUNT: usize = 2 * ANSWERS_MAX + 3;
        let (ours, theirs) = sockets();
        let mut data = vec![0; COUNT * 3000];
        data.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 11) as u8);
        let heads: Vec<[u8; 2]> = (0..COUNT as u16).map(u16::to_be_bytes).collect();
        let all = shared(&mut data);
        // Every third has no data.
        let bytes = |at: usize| if at.is_multiple_of(3) { 0 } else { 3000 };
        let answers =
            heads.iter().enumerate().map(|(at, head)| (&head[..], all.sub(at * 3000, bytes(at)).unwrap()));
        let wanted: Vec<u8> = heads
            .iter()
            .enumerate()
            .flat_map(|(at, head)| [&head[..], &data[at * 3000..][..bytes(at)]].concat())
            .collect();
        let got = std::thread::scope(|scope| {
            scope.spawn(|| ours.write(answers).unwrap());
            receive_all(&theirs, wanted.len())
        });
        assert!(got == wanted);
    }

    #[test]
    fn what_does_not_fit_the_first_place_is_in_the_next() {
        let (ours, theirs) = sockets();
        ours.write([(&b"abcdefgh"[..], SharedSlice::EMPTY)]).unwrap();
        let (mut first, mut next) = ([0; 3], [0; 3]);
        assert_eq!(theirs.receive(shared(&mut first), &mut next, false).unwrap(), 6);
        assert_eq!((&first, &next), (b"abc", b"def"));
        assert_eq!(theirs.receive(shared(&mut first), &mut next, true).unwrap(), 2);
        assert_eq!((&first, &next), (b"ghc", b"def"));
    }
}
