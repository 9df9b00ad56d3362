//! Sockets of one host over which descriptors are passed. They never block, and a message is received whole or not at all.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Most descriptors in one message.
pub const FDS_MAX: usize = 4;

const CONTROL_BYTES: usize = 64;

/// The control part of a message; aligned as its header must be.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

const _: () = assert!(FDS_MAX * size_of::<i32>() + size_of::<libc::cmsghdr>() + 8 <= CONTROL_BYTES);

fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor that the kernel just gave us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The address of an abstract name: of no file system, and gone with the socket.
fn address(name: &[u8]) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: all zeros is a valid address.
    let mut address = unsafe { std::mem::zeroed::<libc::sockaddr_un>() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let places = address.sun_path.get_mut(1..=name.len()).ok_or(io::ErrorKind::InvalidInput)?;
    for (place, &byte) in places.iter_mut().zip(name) {
        *place = byte as libc::c_char;
    }
    let len = size_of::<libc::sa_family_t>() + 1 + name.len();
    Ok((address, len as libc::socklen_t))
}

/// Waits for connections at an abstract name.
#[derive(Debug)]
pub struct FdListener {
    fd: OwnedFd,
}

impl FdListener {
    /// Listens at `name`, of at most 107 bytes.
    ///
    /// # Errors
    /// EADDRINUSE; EMFILE, ENFILE; what a security module says.
    pub fn bind(name: &[u8]) -> io::Result<Self> {
        let fd = socket()?;
        let (address, len) = address(name)?;
        // SAFETY: the address outlives the call and `len` of its bytes are initialised.
        let bound = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) };
        // SAFETY: no pointers.
        if bound < 0 || unsafe { libc::listen(fd.as_raw_fd(), 16) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { fd })
    }

    /// Takes a connection; `None` when nobody is waiting.
    ///
    /// # Errors
    /// EMFILE, ENFILE.
    pub fn accept(&self) -> io::Result<Option<FdSocket>> {
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: null pointers say that the peer's address is not wanted.
        let fd =
            unsafe { libc::accept4(self.fd.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), flags) };
        if fd < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
        }
        // SAFETY: a descriptor that the kernel just gave us.
        Ok(Some(FdSocket { fd: unsafe { OwnedFd::from_raw_fd(fd) } }))
    }
}

/// A connection over which descriptors can be passed.
#[derive(Debug)]
pub struct FdSocket {
    fd: OwnedFd,
}

impl FdSocket {
    /// A socket that is connected already.
    pub(crate) fn adopt(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Connects to an abstract name.
    ///
    /// # Errors
    /// ECONNREFUSED when nobody listens there, EAGAIN when too many wait.
    pub fn connect(name: &[u8]) -> io::Result<Self> {
        let fd = socket()?;
        let (address, len) = address(name)?;
        // SAFETY: the address outlives the call and `len` of its bytes are initialised.
        if unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), len) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { fd })
    }

    /// The number of the process that has connected: the kernel's word. 0 for one that this process cannot name.
    ///
    /// # Errors
    /// None in practice.
    pub fn peer_id(&self) -> io::Result<i32> {
        let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
        // SAFETY: the kernel writes into the local, no more than `len` bytes.
        let got = unsafe {
            libc::getsockopt(self.fd.as_raw_fd(), level, name, (&raw mut credentials).cast(), &raw mut len)
        };
        if got < 0 { Err(io::Error::last_os_error()) } else { Ok(credentials.pid) }
    }

    /// Sends a message with copies of `fds`.
    ///
    /// # Errors
    /// `WouldBlock` when too much is on its way; EPIPE when the peer has gone; `InvalidInput` for more than [`FDS_MAX`] descriptors.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        if fds.len() > FDS_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut piece = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let mut control = Control([0; CONTROL_BYTES]);
        // SAFETY: all zeros is a valid message header.
        let mut message = unsafe { std::mem::zeroed::<libc::msghdr>() };
        message.msg_iov = &raw mut piece;
        message.msg_iovlen = 1;
        if !fds.is_empty() {
            let payload = size_of_val(fds) as u32;
            message.msg_control = (&raw mut control).cast();
            // SAFETY: CMSG_SPACE and CMSG_LEN only compute.
            message.msg_controllen = unsafe { libc::CMSG_SPACE(payload) } as _;
            // SAFETY: the control part is aligned and has room for a header and FDS_MAX descriptors (asserted above).
            unsafe {
                let header = libc::CMSG_FIRSTHDR(&message);
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = libc::CMSG_LEN(payload) as _;
                let data = libc::CMSG_DATA(header).cast::<i32>();
                for (index, fd) in fds.iter().enumerate() {
                    data.add(index).write_unaligned(fd.as_raw_fd());
                }
            }
        }
        // SAFETY: the message's parts are locals and `bytes`, which the kernel only reads.
        let sent =
            unsafe { libc::sendmsg(self.fd.as_raw_fd(), &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Receives a message: how many bytes, 0 at the end, and its descriptors.
    ///
    /// # Errors
    /// `WouldBlock` when there is none; `InvalidData` when it is longer than `bytes` or has more than [`FDS_MAX`] descriptors, which
    /// are closed.
    pub fn receive(&self, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        self.receive_with(bytes, libc::MSG_TRUNC | libc::MSG_CTRUNC)
    }

    /// The same, with as many descriptors as this process can have, from the first on.
    ///
    /// # Errors
    /// As [`FdSocket::receive`].
    pub fn receive_some(&self, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        self.receive_with(bytes, libc::MSG_TRUNC)
    }

    fn receive_with(&self, bytes: &mut [u8], refused: i32) -> io::Result<(usize, Vec<OwnedFd>)> {
        let mut piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let mut control = MaybeUninit::<Control>::zeroed();
        // SAFETY: all zeros is a valid message header.
        let mut message = unsafe { std::mem::zeroed::<libc::msghdr>() };
        message.msg_iov = &raw mut piece;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_BYTES as _;
        // SAFETY: the kernel writes into `bytes` and the local control part, no more than their lengths.
        let received = unsafe {
            libc::recvmsg(self.fd.as_raw_fd(), &mut message, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC)
        };
        if received < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut fds = Vec::new();
        // SAFETY: the kernel has filled in the headers, and CMSG_NXTHDR stays within msg_controllen; descriptors of an SCM_RIGHTS
        // message are new and ours.
        unsafe {
            let mut header = libc::CMSG_FIRSTHDR(&message);
            while !header.is_null() {
                if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                    let payload = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                    let data = libc::CMSG_DATA(header).cast::<i32>();
                    for index in 0..payload / size_of::<i32>() {
                        fds.push(OwnedFd::from_raw_fd(data.add(index).read_unaligned()));
                    }
                }
                header = libc::CMSG_NXTHDR(&message, header);
            }
        }
        if message.msg_flags & refused != 0 || fds.len() > FDS_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok((received as usize, fds))
    }

    /// Whether the peer has closed its end, as its kernel does when it dies. What it sent before can still be received.
    pub fn has_ended(&self) -> bool {
        let mut fd = libc::pollfd { fd: self.fd.as_raw_fd(), events: 0, revents: 0 };
        // SAFETY: one entry, a local.
        unsafe { libc::poll(&mut fd, 1, 0) > 0 && fd.revents & (libc::POLLHUP | libc::POLLERR) != 0 }
    }
}

impl AsRawFd for FdSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd::Memfd;
    use std::os::fd::AsFd;

    fn pair(name: &[u8]) -> (FdSocket, FdSocket) {
        let listener = FdListener::bind(name).unwrap();
        assert!(listener.accept().unwrap().is_none());
        let here = FdSocket::connect(name).unwrap();
        (here, listener.accept().unwrap().unwrap())
    }

    #[test]
    fn descriptors_arrive_with_their_message() {
        let name = format!("netvm-test-{}", std::process::id());
        let (here, there) = pair(name.as_bytes());
        assert_eq!(FdSocket::connect(name.as_bytes()).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let mut bytes = [0; 16];
        assert_eq!(there.receive(&mut bytes).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let file = Memfd::sealed(c"test", 8192).unwrap();
        here.send(b"one", &[file.as_fd(), file.as_fd()]).unwrap();
        here.send(b"two", &[]).unwrap();
        let (len, fds) = there.receive(&mut bytes).unwrap();
        assert_eq!((&bytes[..len], fds.len()), (&b"one"[..], 2));
        for fd in fds {
            assert_eq!(Memfd::adopt(fd, 8192).unwrap().len(), 8192);
        }
        assert!(
            matches!(there.receive(&mut bytes[..2]), Err(error) if error.kind() == io::ErrorKind::InvalidData)
        );
        assert!(!there.has_ended());
        assert_eq!(there.peer_id().unwrap(), std::process::id() as i32);
        here.send(b"last", &[]).unwrap();
        drop(here);
        assert!(there.has_ended());
        assert_eq!(there.receive(&mut bytes).unwrap().0, 4);
        assert_eq!(there.receive(&mut bytes).unwrap().0, 0);
        assert!(there.send(b"x", &[]).is_err());
    }
}
