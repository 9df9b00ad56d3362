//! Datagrams (UDP), without checksums: who uses them can tell what is wrong.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::{Incoming, Outgoing, retried};

// <linux/udp.h>
const UDP_NO_CHECK6_TX: i32 = 101;
const UDP_NO_CHECK6_RX: i32 = 102;
/// Of one control message with what tells the interface, of either family.
const CONTROL_BYTES: usize = 64;
/// Datagrams of a page each that come at once have room.
const BUFFER_BYTES: i32 = 1 << 20;

/// A socket for datagrams, which never blocks.
#[derive(Debug)]
pub struct Datagrams {
    socket: UdpSocket,
}

/// Where a datagram came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Its sender.
    pub from: SocketAddr,
    /// The address that it was sent to, from which it is to be answered; `None` when the kernel does not tell.
    pub to: Option<IpAddr>,
    /// The interface that it came in by; 0 when the kernel does not tell.
    pub interface: u32,
}

/// An address as IPv6 has it, also one of IPv4.
pub fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

impl Datagrams {
    /// Takes what is sent to this address; port 0 for any free one.
    ///
    /// # Errors
    /// EADDRINUSE, EADDRNOTAVAIL.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let this = Self { socket: UdpSocket::bind(address)? };
        this.tune()?;
        let (level, name) = match address {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_PKTINFO),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
        };
        this.option(level, name, 1)?;
        Ok(this)
    }

    /// Sends to this address, and takes what comes from there.
    ///
    /// # Errors
    /// ENETUNREACH, EMFILE.
    pub fn connect(address: SocketAddr) -> io::Result<Self> {
        let any: IpAddr = match address {
            SocketAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(address)?;
        let this = Self { socket };
        this.tune()?;
        Ok(this)
    }

    fn tune(&self) -> io::Result<()> {
        self.socket.set_nonblocking(true)?;
        self.option(libc::SOL_SOCKET, libc::SO_NO_CHECK, 1)?;
        // The kernel cuts these to its limit.
        self.option(libc::SOL_SOCKET, libc::SO_RCVBUF, BUFFER_BYTES)?;
        self.option(libc::SOL_SOCKET, libc::SO_SNDBUF, BUFFER_BYTES)?;
        if self.address()?.is_ipv6() {
            self.option(libc::IPPROTO_UDP, UDP_NO_CHECK6_TX, 1)?;
            self.option(libc::IPPROTO_UDP, UDP_NO_CHECK6_RX, 1)?;
        }
        Ok(())
    }

    fn option(&self, level: i32, name: i32, value: i32) -> io::Result<()> {
        let bytes = size_of::<i32>() as libc::socklen_t;
        // SAFETY: the kernel reads one int from the local.
        let result = unsafe {
            libc::setsockopt(self.socket.as_raw_fd(), level, name, (&raw const value).cast(), bytes)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Its own address, with the real port.
    ///
    /// # Errors
    /// None in practice.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Most bytes of a packet on the way to where it is connected to, headers included.
    ///
    /// # Errors
    /// ENOTCONN.
    pub fn packet_bytes_max(&self) -> io::Result<u32> {
        let (level, name) = match self.address()? {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU),
        };
        let (mut value, mut bytes) = (0i32, size_of::<i32>() as libc::socklen_t);
        // SAFETY: the kernel writes one int into the local.
        let result = unsafe {
            libc::getsockopt(self.socket.as_raw_fd(), level, name, (&raw mut value).cast(), &mut bytes)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(u32::try_from(value).unwrap_or(0)) }
    }

    /// Sends a datagram to where it is connected to.
    ///
    /// # Errors
    /// `WouldBlock`; ECONNREFUSED when an earlier one met nobody; EMSGSIZE.
    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.socket.send(bytes).map(drop)
    }

    /// Answers with a datagram of these pieces, from the address that was asked.
    ///
    /// # Errors
    /// `WouldBlock`; EMSGSIZE.
    pub fn answer(&self, pieces: &Outgoing<'_>, origin: &Origin) -> io::Result<()> {
        let place = super::Place::from(origin.from);
        let (address, len, _) = place.raw();
        let mut message = pieces.pieces.message();
        (message.msg_name, message.msg_namelen) = (address.cast_mut().cast(), len as libc::socklen_t);
        let mut control = Control::default();
        if let Some(asked) = origin.to {
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = control.from(asked, origin.from.is_ipv6()) as _;
        }
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: the pieces live as long as the list (borrowed bytes) or by SharedSlice's contract, the address as long as the call; the kernel only reads.
        retried(|| unsafe { libc::sendmsg(self.socket.as_raw_fd(), &message, flags) }).map(drop)
    }

    /// The first bytes of the next datagram, which stays where it is.
    ///
    /// # Errors
    /// `WouldBlock` when there is none; ECONNREFUSED when one that was sent met nobody.
    pub fn peek(&self, bytes: &mut [u8]) -> io::Result<usize> {
        self.socket.peek(bytes)
    }

    /// Takes the next datagram, as much of it as there are places for, and throws the rest of it away; how long it was.
    ///
    /// # Errors
    /// As [`Datagrams::peek`].
    pub fn receive(&self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        let mut message = pieces.pieces.message();
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        // SAFETY: the pieces are exclusively borrowed bytes or shared memory, which the kernel may write.
        retried(|| unsafe { libc::recvmsg(self.socket.as_raw_fd(), &mut message, flags) })
    }

    /// The same, into one place.
    ///
    /// # Errors
    /// As [`Datagrams::peek`].
    pub fn receive_bytes(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        // SAFETY: the kernel writes into the bytes, which are exclusively borrowed, as many as there are at most.
        retried(|| unsafe {
            libc::recv(self.socket.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), flags)
        })
    }

    /// Takes the next datagram, as much of it as `bytes` has room for; how long it was, and where it came from.
    ///
    /// # Errors
    /// `WouldBlock` when there is none.
    pub fn receive_from(&self, bytes: &mut [u8]) -> io::Result<(usize, Origin)> {
        let mut control = Control::default();
        let mut piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: all zeros is a valid address, and a valid message header; the latter is filled in below.
        let (mut place, mut message) =
            unsafe { (std::mem::zeroed::<libc::sockaddr_in6>(), std::mem::zeroed::<libc::msghdr>()) };
        (message.msg_name, message.msg_namelen) =
            ((&raw mut place).cast(), size_of::<libc::sockaddr_in6>() as libc::socklen_t);
        (message.msg_iov, message.msg_iovlen) = (&raw mut piece, 1);
        (message.msg_control, message.msg_controllen) = (control.0.as_mut_ptr().cast(), CONTROL_BYTES as _);
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        // SAFETY: the kernel writes into the bytes, which are exclusively borrowed, and into the locals, as many bytes as it is told of.
        let count = retried(|| unsafe { libc::recvmsg(self.socket.as_raw_fd(), &mut message, flags) })?;
        let from = match i32::from(place.sin6_family) {
            libc::AF_INET6 => std::net::SocketAddrV6::new(
                Ipv6Addr::from(place.sin6_addr.s6_addr),
                u16::from_be(place.sin6_port),
                place.sin6_flowinfo,
                place.sin6_scope_id,
            )
            .into(),
            _ => {
                // SAFETY: of the other family: that is smaller, has its port and address in its first bytes, and no padding there.
                let place = unsafe { &*(&raw const place).cast::<libc::sockaddr_in>() };
                SocketAddr::new(
                    IpAddr::from(place.sin_addr.s_addr.to_ne_bytes()),
                    u16::from_be(place.sin_port),
                )
            }
        };
        let (to, interface) = asked(&message);
        Ok((count, Origin { from, to, interface }))
    }
}

/// Room for a control message that tells an address and an interface, of either family.
#[repr(align(8))]
struct Control([u8; CONTROL_BYTES]);

impl Default for Control {
    fn default() -> Self {
        Self([0; CONTROL_BYTES])
    }
}

impl Control {
    /// Has a datagram sent from this address; how many bytes there are of that.
    fn from(&mut self, address: IpAddr, is_v6: bool) -> usize {
        fn put<T>(bytes: &mut [u8], level: i32, kind: i32, data: &T) -> usize {
            // SAFETY: two computations on a number.
            let (len, space) =
                unsafe { (libc::CMSG_LEN(size_of::<T>() as u32), libc::CMSG_SPACE(size_of::<T>() as u32)) };
            assert!(bytes.len() >= space as usize);
            let header = bytes.as_mut_ptr().cast::<libc::cmsghdr>();
            // SAFETY: header and data have room there (asserted), aligned as they must be (`Control`); the data is plain.
            unsafe {
                (*header).cmsg_len = len as _;
                ((*header).cmsg_level, (*header).cmsg_type) = (level, kind);
                std::ptr::copy_nonoverlapping(data, libc::CMSG_DATA(header).cast(), 1);
            }
            space as usize
        }
        match address {
            IpAddr::V4(address) if !is_v6 => {
                let address = libc::in_addr { s_addr: u32::from_ne_bytes(address.octets()) };
                let none = libc::in_addr { s_addr: 0 };
                let info = libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: address, ipi_addr: none };
                put(&mut self.0, libc::IPPROTO_IP, libc::IP_PKTINFO, &info)
            }
            address => {
                let info = libc::in6_pktinfo {
                    ipi6_addr: libc::in6_addr { s6_addr: octets(address) },
                    ipi6_ifindex: 0,
                };
                put(&mut self.0, libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &info)
            }
        }
    }
}

/// The address that a datagram was sent to and the interface that it came in by, as a control message says.
fn asked(message: &libc::msghdr) -> (Option<IpAddr>, u32) {
    // SAFETY: a header that the kernel has filled in, whose control bytes are still there.
    let mut control = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !control.is_null() {
        // SAFETY: the macro returns whole headers within the control bytes only, whose data is as long as they say.
        unsafe {
            let (header, data) = (&*control, libc::CMSG_DATA(control));
            match (header.cmsg_level, header.cmsg_type) {
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    let info = data.cast::<libc::in_pktinfo>().read_unaligned();
                    return (Some(info.ipi_addr.s_addr.to_ne_bytes().into()), info.ipi_ifindex as u32);
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                    let info = data.cast::<libc::in6_pktinfo>().read_unaligned();
                    return (Some(info.ipi6_addr.s6_addr.into()), info.ipi6_ifindex);
                }
                _ => control = libc::CMSG_NXTHDR(message, control),
            }
        }
    }
    (None, 0)
}

impl AsFd for Datagrams {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl From<OwnedFd> for Datagrams {
    fn from(fd: OwnedFd) -> Self {
        Self { socket: fd.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::SharedSlice;

    #[test]
    fn datagrams_come_whole_with_their_origin_or_not_at_all() {
        for host in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(server) = Datagrams::bind(host.parse().unwrap()) else {
                println!("skipped (no {host} here)");
                continue;
            };
            let client = Datagrams::connect(server.address().unwrap()).unwrap();
            assert!(client.packet_bytes_max().unwrap() > 1000);
            let mut bytes = [0; 8];
            assert_eq!(server.receive_from(&mut bytes).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            client.send(b"one too long for it").unwrap();
            client.send(b"two").unwrap();
            let (count, origin) = server.receive_from(&mut bytes).unwrap();
            assert_eq!((count, &bytes), (19, b"one too "));
            assert!(origin.interface > 0 && origin.from.port() == client.address().unwrap().port());
            assert_eq!(server.receive_from(&mut bytes).unwrap().0, 3);
            let memory = crate::mapping::Mapping::anonymous(4096).unwrap();
            let shared: SharedSlice = memory.shared();
            shared.fill(7);
            let mut answer = Outgoing::new();
            assert!(answer.bytes(b"head") && answer.shared(shared));
            assert_eq!(origin.to, Some(server.address().unwrap().ip()));
            server.answer(&answer, &origin).unwrap();
            assert_eq!(client.peek(&mut bytes).unwrap(), 8);
            let (mut head, to) = ([0; 4], memory.shared().sub(0, 4000).unwrap());
            to.fill(0);
            let mut places = Incoming::new();
            assert!(places.bytes(&mut head) && places.shared(to));
            assert_eq!(client.receive(&mut places).unwrap(), 4100);
            assert_eq!((&head, to.to_vec()), (b"head", vec![7; 4000]));
            server.answer(&answer, &origin).unwrap();
            assert_eq!((client.receive_bytes(&mut bytes).unwrap(), &bytes), (4100, b"head\x07\x07\x07\x07"));
            assert_eq!(client.receive_bytes(&mut bytes).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            drop(server);
            let _ = client.send(b"nobody");
            let refused = client.send(b"nobody").err().or_else(|| client.peek(&mut bytes).err());
            // Told where the kernel tells it.
            let told = [io::ErrorKind::ConnectionRefused, io::ErrorKind::WouldBlock];
            assert!(refused.is_some_and(|error| told.contains(&error.kind())));
        }
    }
}
