//! Stream sockets, TCP and Unix, with scatter and gather over shared memory.

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

mod datagram;
mod interface;
mod pieces;

pub use datagram::{Datagrams, Origin, octets};
pub use interface::Interface;
use pieces::GATHERED_BYTES_MAX;
pub use pieces::{Incoming, Outgoing, PIECES_MAX};

/// Where to listen or connect: `HOST:PORT`, `[V6]:PORT` or `unix:/path`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A TCP host and port.
    Tcp(String),
    /// A Unix socket.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path.len() {
                0 => Err("the path after unix: is empty"),
                1..=107 => Ok(Self::Unix(path.into())),
                _ => Err("a Unix socket's path has at most 107 bytes"),
            };
        }
        let Some((host, port)) = text.rsplit_once(':') else {
            return Err("it has no port");
        };
        if host.contains('/') {
            return Err("there is a slash in the host");
        }
        if host.contains(',') {
            return Err("it has a comma: give each address by itself");
        }
        if host.is_empty() {
            return Err("the host before the colon is missing");
        }
        if port.parse::<u16>().is_err() {
            return Err("the port must be a number up to 65535");
        }
        Ok(Self::Tcp(text.to_owned()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(host) => f.write_str(host),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A connected socket that never blocks.
#[derive(Debug)]
pub struct Stream {
    fd: OwnedFd,
    tcp: bool,
}

impl Stream {
    /// The address that was reached, with numbers only: a name may have several, and who connects by it once more may come to another one.
    /// None for Unix sockets, and when the peer is gone.
    pub fn reached(&self) -> Option<String> {
        let fd = self.tcp.then(|| self.fd.try_clone().ok()).flatten()?;
        TcpStream::from(fd).peer_addr().ok().map(|address| address.to_string())
    }

    /// Its own address and its peer's. None for Unix sockets, and when the peer is gone.
    pub fn ends(&self) -> Option<(SocketAddr, SocketAddr)> {
        let fd = self.tcp.then(|| self.fd.try_clone().ok()).flatten()?;
        let stream = TcpStream::from(fd);
        Some((stream.local_addr().ok()?, stream.peer_addr().ok()?))
    }

    /// A pair of sockets connected to each other.
    ///
    /// # Errors
    /// EMFILE, ENFILE.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (one, two) = UnixStream::pair()?;
        Ok((Self::tune(one.into(), false)?, Self::tune(two.into(), false)?))
    }

    /// Adopts a connected socket, TCP or Unix.
    ///
    /// # Errors
    /// ENOTSOCK, EBADF.
    pub fn adopt(fd: OwnedFd) -> io::Result<Self> {
        let mut domain = 0i32;
        let mut len = size_of::<i32>() as libc::socklen_t;
        // SAFETY: the kernel writes one int into the local.
        let result = unsafe {
            libc::getsockopt(
                fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_DOMAIN,
                (&raw mut domain).cast(),
                &mut len,
            )
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Self::tune(fd, domain != libc::AF_UNIX)
    }

    fn tune(fd: OwnedFd, tcp: bool) -> io::Result<Self> {
        let stream = Self { fd, tcp };
        if tcp {
            stream.option(libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
            // A machine that vanished is noticed within five seconds, idle or not.
            stream.option(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
            stream.option(libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 2)?;
            stream.option(libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 1)?;
            stream.option(libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3)?;
            stream.option(libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 5000)?;
        } else {
            // Unix sockets do not tune themselves; the kernel cuts this to its limit.
            stream.option(libc::SOL_SOCKET, libc::SO_SNDBUF, 1 << 20)?;
        }
        // SAFETY: flags of our own descriptor.
        let result = unsafe { libc::fcntl(stream.fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(stream) }
    }

    /// Leaves it to the caller to notice that bytes are not taken: a peer that lives may have reasons to take none for a while, which the
    /// time-out of the kernel does not tell from a cut cable.
    ///
    /// # Errors
    /// None in practice.
    pub fn without_user_timeout(&self) -> io::Result<()> {
        if self.tcp { self.option(libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 0) } else { Ok(()) }
    }

    /// From now on it counts as readable when so many bytes are there, when the peer has ended the stream, or when no more fit into its buffer.
    /// A unix socket stays readable from the first byte on.
    ///
    /// # Errors
    /// None in practice.
    pub fn wake_at(&self, bytes: usize) -> io::Result<()> {
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        if self.tcp { self.option(libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes) } else { Ok(()) }
    }

    fn option(&self, level: i32, name: i32, value: i32) -> io::Result<()> {
        // SAFETY: the kernel reads one int from the local.
        let result = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                level,
                name,
                (&raw const value).cast(),
                size_of::<i32>() as libc::socklen_t,
            )
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Sends what the socket takes now; returns how many bytes.
    ///
    /// # Errors
    /// `WouldBlock` when it takes nothing; EPIPE, ECONNRESET, ETIMEDOUT; EFAULT when a piece is not mapped.
    pub fn send(&self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        self.send_with(pieces, 0)
    }

    /// As [`Stream::send`]; more follows at once, so TCP does not send a packet for this alone.
    ///
    /// # Errors
    /// As [`Stream::send`].
    pub fn send_before_more(&self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        self.send_with(pieces, libc::MSG_MORE)
    }

    fn send_with(&self, pieces: &Outgoing<'_>, flag: libc::c_int) -> io::Result<usize> {
        let (fd, flags) = (self.fd.as_raw_fd(), flag | libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
        if pieces.pieces.is_short() {
            let mut gathered = [const { MaybeUninit::<u8>::uninit() }; GATHERED_BYTES_MAX];
            let bytes = pieces.pieces.gather_into(&mut gathered);
            // SAFETY: the kernel reads the bytes that have just been written.
            return retried(|| unsafe {
                libc::syscall(
                    libc::SYS_sendto,
                    fd,
                    bytes.as_ptr(),
                    bytes.len(),
                    flags,
                    std::ptr::null::<libc::sockaddr>(),
                    0usize,
                ) as isize
            });
        }
        let message = pieces.pieces.message();
        // SAFETY: the pieces live as long as the list (borrowed bytes) or by SharedSlice's contract; the kernel only reads.
        retried(|| unsafe { libc::sendmsg(fd, &message, flags) })
    }

    /// Receives what is there into the pieces, in order; returns how many bytes, 0 at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock` when there is nothing; ECONNRESET, ETIMEDOUT; EFAULT when a piece is not mapped.
    pub fn receive(&self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        let (fd, flags) = (self.fd.as_raw_fd(), libc::MSG_DONTWAIT);
        if let Some(piece) = pieces.pieces.single() {
            // SAFETY: the piece is exclusively borrowed bytes or shared memory, which the kernel may write.
            return retried(|| unsafe {
                libc::syscall(
                    libc::SYS_recvfrom,
                    fd,
                    piece.iov_base,
                    piece.iov_len,
                    flags,
                    std::ptr::null_mut::<libc::sockaddr>(),
                    std::ptr::null_mut::<libc::socklen_t>(),
                ) as isize
            });
        }
        let mut message = pieces.pieces.message();
        // SAFETY: as above.
        retried(|| unsafe { libc::recvmsg(fd, &mut message, flags) })
    }

    /// Waits until the socket is readable (or, when asked, writable); false when `timeout` passed first.
    ///
    /// # Errors
    /// None in practice.
    pub fn wait(&self, writable: bool, timeout: Duration) -> io::Result<bool> {
        let events = libc::POLLIN | if writable { libc::POLLOUT } else { 0 };
        let mut fds = [libc::pollfd { fd: self.fd.as_raw_fd(), events, revents: 0 }];
        Ok(crate::thread::poll(&mut fds, Some(timeout))? > 0)
    }

    /// Bytes that were sent and that the other side's kernel has not acknowledged; over a Unix socket, that the other side has not received.
    ///
    /// # Errors
    /// None in practice.
    pub fn unacknowledged_bytes(&self) -> io::Result<u64> {
        let mut bytes: i32 = 0;
        // SAFETY: the kernel writes one int to the local.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(bytes.max(0) as u64) }
    }

    /// Whether it is a TCP socket, and not a Unix one.
    pub fn is_tcp(&self) -> bool {
        self.tcp
    }

    /// Gives the descriptor away.
    pub fn into_raw_fd(self) -> RawFd {
        self.fd.into_raw_fd()
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// An address as the kernel takes it.
enum Place {
    V4(libc::sockaddr_in),
    V6(libc::sockaddr_in6),
    Path(libc::sockaddr_un),
}

impl From<SocketAddr> for Place {
    fn from(address: SocketAddr) -> Self {
        match address {
            SocketAddr::V4(address) => Self::V4(libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
                sin_zero: [0; 8],
            }),
            SocketAddr::V6(address) => Self::V6(libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: address.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            }),
        }
    }
}

impl Place {
    fn path(path: &Path) -> io::Result<Self> {
        let mut place =
            libc::sockaddr_un { sun_family: libc::AF_UNIX as libc::sa_family_t, sun_path: [0; 108] };
        let bytes = path.as_os_str().as_bytes();
        // The last byte stays 0.
        if bytes.len() >= place.sun_path.len() || bytes.contains(&0) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (to, &byte) in place.sun_path.iter_mut().zip(bytes) {
            *to = byte as libc::c_char;
        }
        Ok(Self::Path(place))
    }

    fn raw(&self) -> (*const libc::sockaddr, usize, libc::c_int) {
        match self {
            Self::V4(place) => (std::ptr::from_ref(place).cast(), size_of_val(place), libc::AF_INET),
            Self::V6(place) => (std::ptr::from_ref(place).cast(), size_of_val(place), libc::AF_INET6),
            Self::Path(place) => (std::ptr::from_ref(place).cast(), size_of_val(place), libc::AF_UNIX),
        }
    }

    /// A socket that is connected or will be.
    fn dial(&self) -> io::Result<OwnedFd> {
        let (address, len, family) = self.raw();
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no pointers.
        let fd = unsafe { libc::socket(family, kind, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that the kernel just gave us.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: the address outlives the call and has `len` bytes.
        if unsafe { libc::connect(fd.as_raw_fd(), address, len as libc::socklen_t) } == 0 {
            return Ok(fd);
        }
        let error = io::Error::last_os_error();
        // Interrupted: it goes on without us.
        let is_under_way = matches!(error.raw_os_error(), Some(libc::EINPROGRESS | libc::EINTR));
        if is_under_way { Ok(fd) } else { Err(error) }
    }
}

/// A connection that is being made, without anybody waiting: [`Dialing::progress`] again and again until there is one or an error.
pub struct Dialing {
    /// Of those that the name has, the ones that have not been tried.
    places: std::vec::IntoIter<Place>,
    /// Is to be tried again: more wait there than are let in.
    again: Option<Place>,
    under_way: Option<OwnedFd>,
    tcp: bool,
    last: io::Error,
}

/// When a Unix socket is asked again whose queue is full.
const AGAIN: Duration = Duration::from_millis(2);

impl Dialing {
    /// Resolves the name, which may take its time.
    ///
    /// # Errors
    /// Those of name resolution.
    pub fn start(address: &Address) -> io::Result<Self> {
        let (places, tcp) = match address {
            Address::Unix(path) => (vec![Place::path(path)?], false),
            Address::Tcp(host) => (host.to_socket_addrs()?.map(Place::from).collect(), true),
        };
        let (places, last) = (places.into_iter(), io::ErrorKind::AddrNotAvailable.into());
        Ok(Self { places, again: None, under_way: None, tcp, last })
    }

    /// Goes on as far as it can: the connection, if it is there.
    ///
    /// # Errors
    /// What was wrong with the last of the addresses.
    pub fn progress(&mut self) -> io::Result<Option<Stream>> {
        loop {
            if let Some(fd) = self.under_way.take() {
                match is_connected(&fd) {
                    Ok(true) => return Stream::tune(fd, self.tcp).map(Some),
                    Ok(false) => {
                        self.under_way = Some(fd);
                        return Ok(None);
                    }
                    Err(error) => self.last = error,
                }
            }
            let Some(place) = self.again.take().or_else(|| self.places.next()) else {
                return Err(std::mem::replace(&mut self.last, io::ErrorKind::NotConnected.into()));
            };
            match place.dial() {
                Ok(fd) => self.under_way = Some(fd),
                Err(error) if !self.tcp && error.kind() == io::ErrorKind::WouldBlock => {
                    self.again = Some(place);
                    return Ok(None);
                }
                Err(error) => self.last = error,
            }
        }
    }

    /// Writable when there is something to do; `None` when only time helps.
    pub fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.under_way.as_ref().map(AsFd::as_fd)
    }

    /// How long to wait at most.
    pub fn patience(&self) -> Duration {
        if self.under_way.is_some() { Duration::MAX } else { AGAIN }
    }
}

fn is_connected(fd: &OwnedFd) -> io::Result<bool> {
    let mut fds = [libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 }];
    if crate::thread::poll(&mut fds, Some(Duration::ZERO))? == 0 {
        return Ok(false);
    }
    let (mut error, mut len) = (0i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: the kernel writes one int into the local.
    let result = unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ERROR, (&raw mut error).cast(), &mut len)
    };
    match (result, error) {
        (0, 0) => Ok(true),
        (0, error) => Err(io::Error::from_raw_os_error(error)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The result of a call that counts bytes, made again after signals.
fn retried(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        let count = call();
        if count >= 0 {
            return Ok(count as usize);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINTR) {
            return Err(error);
        }
    }
}

/// Takes over a descriptor given as a number, for example across fork(2).
///
/// # Errors
/// EBADF when nothing is open under that number.
///
/// # Panics
/// Never. The caller vouches that nobody else closes the descriptor; the worst that a mistake does is an error on a later call.
pub fn own_raw_fd(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: no pointers; it tells whether the number is open.
    if fd < 0 || unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: the number is open (checked above), and the caller hands it over.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Reads and throws away what a readable descriptor has; true when it has reached its end (or failed).
pub fn at_end(fd: BorrowedFd<'_>) -> bool {
    let mut bytes = [0u8; 256];
    // SAFETY: the kernel writes at most 256 bytes into the local.
    unsafe { libc::read(fd.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len()) <= 0 }
}

/// A listening socket that never blocks.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    address: Address,
    tcp: bool,
}

impl Listener {
    /// Listens at `address`; port 0 means any free one. A Unix socket that nobody listens on any more is replaced; other files stay.
    ///
    /// # Errors
    /// Those of bind(2), EADDRINUSE first of all; EEXIST where a file is that is no socket.
    pub fn bind(address: &Address) -> io::Result<Self> {
        match address {
            Address::Tcp(host) => {
                let listener = TcpListener::bind(host.as_str())?;
                listener.set_nonblocking(true)?;
                let address = Address::Tcp(listener.local_addr()?.to_string());
                Ok(Self { fd: listener.into(), address, tcp: true })
            }
            Address::Unix(path) => {
                let listener = match UnixListener::bind(path) {
                    Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                        // Nobody listens at other files either.
                        if !is_socket(path) {
                            return Err(io::Error::from_raw_os_error(libc::EEXIST));
                        }
                        let refused = matches!(UnixStream::connect(path),
                            Err(gone) if gone.kind() == io::ErrorKind::ConnectionRefused);
                        if !refused {
                            return Err(error);
                        }
                        std::fs::remove_file(path)?;
                        UnixListener::bind(path)?
                    }
                    other => other?,
                };
                listener.set_nonblocking(true)?;
                Ok(Self { fd: listener.into(), address: address.clone(), tcp: false })
            }
        }
    }

    /// Where it listens; with the real port.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Takes the next connection; `None` when nobody is waiting.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM: the connection waits on.
    pub fn accept(&self) -> io::Result<Option<Stream>> {
        loop {
            // SAFETY: no address is asked for.
            let fd = unsafe {
                libc::accept4(
                    self.fd.as_raw_fd(),
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                    libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
                )
            };
            if fd >= 0 {
                // SAFETY: a descriptor that the kernel just gave us.
                let fd = unsafe { OwnedFd::from_raw_fd(fd) };
                // The peer may be gone already: then there is nothing to tune.
                match Stream::tune(fd, self.tcp) {
                    Ok(stream) => return Ok(Some(stream)),
                    Err(_) => continue,
                }
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EAGAIN) => return Ok(None),
                Some(libc::EINTR | libc::ECONNABORTED | libc::EPROTO) => continue,
                _ => return Err(error),
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        remove_socket(&self.address);
    }
}

/// Removes the file of a Unix socket at which this process listens, as far as it is one: also for who ends without dropping its [`Listener`].
pub fn remove_socket(address: &Address) {
    if let Address::Unix(path) = address
        && is_socket(path)
    {
        let _ = std::fs::remove_file(path);
    }
}

/// Whether a socket itself is there, and no link to one.
fn is_socket(path: &std::path::Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    path.symlink_metadata().is_ok_and(|there| there.file_type().is_socket())
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!("unix:/tmp/x".parse(), Ok(Address::Unix("/tmp/x".into())));
        assert_eq!("[::1]:7".parse(), Ok(Address::Tcp("[::1]:7".into())));
        for wrong in ["unix:", "host", ":7", "host:", "host:70000", "host:x", "tcp://host:7", "/tmp/x:7"] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_socket_that_wakes_at_many_bytes_does_not_at_fewer() {
        use std::io::Write;
        let peer = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = peer.local_addr().unwrap().to_string().parse().unwrap();
        let mut dialing = Dialing::start(&address).unwrap();
        let stream = std::iter::repeat_with(|| dialing.progress().unwrap()).flatten().next().unwrap();
        let mut sender = peer.accept().unwrap().0;
        let (soon, long) = (Duration::from_millis(100), Duration::from_secs(10));
        stream.wake_at(10_000).unwrap();
        sender.write_all(&[1; 9_999]).unwrap();
        assert!(!stream.wait(false, soon).unwrap());
        sender.write_all(&[1]).unwrap();
        assert!(stream.wait(false, long).unwrap());
        stream.wake_at(20_000).unwrap();
        assert!(!stream.wait(false, soon).unwrap());
        stream.wake_at(1).unwrap();
        assert!(stream.wait(false, long).unwrap());
        stream.wake_at(20_000).unwrap();
        drop(sender);
        assert!(stream.wait(false, long).unwrap(), "the end of the stream");
    }

    #[test]
    fn only_sockets_that_nobody_listens_at_are_replaced() {
        let path = std::env::temp_dir().join(format!("netvm-net-place-{}", std::process::id()));
        let address: Address = format!("unix:{}", path.display()).parse().unwrap();
        let refused = |errno| assert_eq!(Listener::bind(&address).unwrap_err().raw_os_error(), Some(errno));
        std::fs::write(&path, "precious").unwrap();
        refused(libc::EEXIST);
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        std::fs::remove_file(&path).unwrap();
        let gone = path.with_extension("gone");
        drop(UnixListener::bind(&gone).unwrap());
        std::os::unix::fs::symlink(&gone, &path).unwrap();
        refused(libc::EEXIST);
        assert!(path.symlink_metadata().is_ok_and(|there| there.is_symlink()));
        // Nobody listens any more.
        std::fs::rename(&gone, &path).unwrap();
        let listener = Listener::bind(&address).unwrap();
        refused(libc::EADDRINUSE);
        // Something else has taken its place.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        drop(listener);
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn scatter_and_gather_over_shared_memory() {
        let memory = crate::mapping::Mapping::anonymous(8192).unwrap();
        let shared = memory.shared();
        shared.write_from(100, b"shared").unwrap();
        for address in ["127.0.0.1:0".to_owned(), format!("unix:/tmp/netvm-net-{}", std::process::id())] {
            let listener = Listener::bind(&address.parse().unwrap()).unwrap();
            let mut dialing = Dialing::start(listener.address()).unwrap();
            let one = std::iter::repeat_with(|| dialing.progress().unwrap()).flatten().next().unwrap();
            let two = loop {
                if let Some(stream) = listener.accept().unwrap() {
                    break stream;
                }
            };
            let mut none = Incoming::new();
            let mut buffer = [0; 4];
            none.bytes(&mut buffer);
            assert_eq!(two.receive(&mut none).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            let mut pieces = Outgoing::new();
            assert!(pieces.bytes(b"ours ") && pieces.shared(shared.sub(100, 6).unwrap()));
            assert_eq!(one.send(&pieces).unwrap(), 11);
            assert!(two.wait(false, Duration::from_secs(1)).unwrap());
            let mut head = [0; 5];
            let mut places = Incoming::new();
            places.bytes(&mut head);
            places.shared(shared.sub(5000, 3000).unwrap());
            assert_eq!(two.receive(&mut places).unwrap(), 11);
            assert_eq!(&head, b"ours ");
            assert_eq!(shared.sub(5000, 6).unwrap().to_vec(), b"shared");
            drop(one);
            let mut places = Incoming::new();
            places.shared(shared);
            assert!(two.wait(false, Duration::from_secs(1)).unwrap());
            assert_eq!(two.receive(&mut places).unwrap(), 0);
        }
    }
}
