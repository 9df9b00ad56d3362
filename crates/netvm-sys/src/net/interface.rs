//! What the kernel tells of an interface.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// An interface of the network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// As users call it.
    pub name: String,
    /// Bytes of the link's own header, if that is known for its kind.
    pub link_bytes: Option<i16>,
    /// Most bytes of a packet without that.
    pub packet_bytes_max: u32,
}

// <linux/if_arp.h>
const ETHERNET: u16 = 1;
const LOOPBACK: u16 = 772;
const NO_HEADER: u16 = 65534;

impl Interface {
    /// By its number.
    ///
    /// # Errors
    /// ENXIO, ENODEV when there is none.
    pub fn by_index(index: u32) -> io::Result<Self> {
        // SAFETY: all zeros is a valid request.
        let mut request = unsafe { std::mem::zeroed::<libc::ifreq>() };
        // SAFETY: the kernel's name has room there, with its end.
        if unsafe { libc::if_indextoname(index, request.ifr_name.as_mut_ptr()) }.is_null() {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call has written a string with its end.
        let name = unsafe { CStr::from_ptr(request.ifr_name.as_ptr()) }.to_string_lossy().into_owned();
        // SAFETY: no pointers.
        let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that the kernel has just made for us.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        let mut ask = |what| {
            // SAFETY: both questions take a request with a name, and write their answer into it.
            let result = unsafe { libc::ioctl(socket.as_raw_fd(), what, &raw mut request) };
            if result < 0 { Err(io::Error::last_os_error()) } else { Ok(request) }
        };
        // SAFETY: what the kernel has answered to this question is an address, of which any bits are one.
        let kind = unsafe { ask(libc::SIOCGIFHWADDR)?.ifr_ifru.ifru_hwaddr.sa_family };
        // SAFETY: and to this one a number.
        let bytes = unsafe { ask(libc::SIOCGIFMTU)?.ifr_ifru.ifru_mtu };
        let link_bytes = match kind {
            ETHERNET | LOOPBACK => Some(14),
            NO_HEADER => Some(0),
            _ => None,
        };
        Ok(Self { name, link_bytes, packet_bytes_max: u32::try_from(bytes).unwrap_or(0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_known_and_others_are_not() {
        // SAFETY: a string with its end.
        let index = unsafe { libc::if_nametoindex(c"lo".as_ptr()) };
        let loopback = Interface::by_index(index).unwrap();
        assert_eq!((loopback.name.as_str(), loopback.link_bytes), ("lo", Some(14)));
        assert!(loopback.packet_bytes_max >= 1500);
        assert!(Interface::by_index(0).is_err() && Interface::by_index(u32::MAX / 2).is_err());
    }
}
