//! Nodes, what they export, and their peers.

use std::ffi::c_int;
use std::fmt::Display;
use std::path::Path;
use std::time::Duration;

use netvm::lasting::Reconnect;
use netvm::memory::Memory;
use netvm::node::{KeepAlive, LinkChoice, Node, RemoteKey, Rights};
use netvm::security::{Encryption, Secret, Security};
use netvm_core::limits::{NAME_BYTES_MAX, RAILS_MAX};
use netvm_sys::thread::without_signals;

use crate::board::Board;
use crate::call::{call, timeout};
use crate::code::{Code, Failure, Result};
use crate::ffi::{In, Opaque, Options, Out, OutHandle, OutText, Own, Ref, Text};
use crate::lasting::{PeerHandle, RegionHandle};

impl Opaque for Node {
    const TAG: u32 = 0x6E76_4E01;
    const NAME: &'static str = "node";
}

/// `netvm_node_options`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct NodeOptions {
    size: usize,
    pub(crate) secret_file: Text,
    pub(crate) secret: In<[u8; 32]>,
    pub(crate) encryption: u32,
    pub(crate) insecure: u32,
}

impl Default for NodeOptions {
    fn default() -> Self {
        Self { size: 0, secret_file: Text::NULL, secret: In::NULL, encryption: 0, insecure: 0 }
    }
}

impl NodeOptions {
    fn security(&self) -> Result<Security> {
        let insecure = flag(self.insecure, "insecure")?;
        Ok(Security { insecure, ..security(self.secret_file, self.secret, self.encryption)? })
    }
}

/// What options say of secrets and encryption.
pub(crate) fn security(file: Text, secret: In<[u8; 32]>, encryption: u32) -> Result<Security> {
    let secret = match (file.optional("name of the secret file")?, secret.optional()?) {
        (Some(_), Some(_)) => return Err(Failure::argument("give a secret or a secret file, not both")),
        (Some(path), None) => {
            let secret = Secret::from_file(Path::new(path));
            Some(secret.map_err(|error| Failure::new(Code::Security, error.to_string()))?)
        }
        (None, secret) => secret.map(Secret::from_bytes),
    };
    let encryption = named(&ENCRYPTIONS, encryption, "kind of encryption")?;
    if encryption == Encryption::Always && secret.is_none() {
        return Err(Failure::argument("encryption needs a secret that both sides share"));
    }
    Ok(Security { secret, encryption, ..Security::default() })
}

/// Bytes of a key as text, with the zero byte.
pub(crate) const KEY_TEXT_BYTES: usize = 33;
pub(crate) const ENCRYPTIONS: [(&str, u32, Encryption); 3] = [
    ("NETVM_ENCRYPT_IF_ASKED", 0, Encryption::IfAsked),
    ("NETVM_ENCRYPT_ALWAYS", 1, Encryption::Always),
    ("NETVM_ENCRYPT_NEVER", 2, Encryption::Never),
];
pub(crate) const RIGHTS: [(&str, c_int, Rights); 2] =
    [("NETVM_READ", 1, Rights::Read), ("NETVM_READ_WRITE", 3, Rights::ReadWrite)];

pub(crate) const LINKS: [(&str, u32, LinkChoice); 4] = [
    ("NETVM_LINK_AUTO", 0, LinkChoice::Auto),
    ("NETVM_LINK_SHM", 1, LinkChoice::Shm),
    ("NETVM_LINK_SOCKET", 2, LinkChoice::Socket),
    ("NETVM_LINK_DATAGRAMS", 3, LinkChoice::Datagrams),
];

/// What a number stands for.
pub(crate) fn named<N: PartialEq + Display, T: Copy>(
    all: &[(&str, N, T)],
    number: N,
    what: &str,
) -> Result<T> {
    let found = all.iter().find(|(_, other, _)| *other == number);
    found.map(|(_, _, value)| *value).ok_or_else(|| Failure::argument(format!("{number} is no {what}")))
}

pub(crate) fn flag(value: u32, what: &str) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Failure::argument(format!("{what} is 0 or 1, not {other}"))),
    }
}

/// `netvm_connect_options`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct ConnectOptions {
    size: usize,
    pub(crate) rails: u32,
    pub(crate) link: u32,
    pub(crate) reconnect: u32,
    pub(crate) reserved: u32,
    pub(crate) first_pause_ns: i64,
    pub(crate) longest_pause_ns: i64,
    pub(crate) patience_ns: i64,
}

/// 0: as usual.
pub(crate) fn or_usual(time_ns: i64, usual: Duration) -> Result<Duration> {
    match u64::try_from(time_ns) {
        Ok(0) => Ok(usual),
        Ok(time_ns) => Ok(Duration::from_nanos(time_ns)),
        Err(_) => Err(Failure::argument("a time is negative")),
    }
}

/// Starts a node.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_node_create(options: Options<NodeOptions>, node: OutHandle<Node>) -> c_int {
    call(|| {
        node.fill(|| {
            let security = options.get()?.security()?;
            Ok(without_signals(|| Node::with_security(security))?)
        })
    })
}

/// Ends a node.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_node_destroy(node: Own<Node>) -> c_int {
    call(|| node.take().map(drop))
}

/// Listens.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_node_listen(node: Ref<Node>, address: Text, actual: OutText, room: usize) -> c_int {
    call(|| {
        let (node, address) = (node.get()?, address.get("address")?);
        actual.check(room)?;
        let bound = node.listen(address)?;
        if room > 0 { actual.set(&bound, room) } else { Ok(()) }
    })
}

/// Serves peers in this thread.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_node_poll(node: Ref<Node>) -> c_int {
    call(|| {
        node.get()?.poll();
        Ok(())
    })
}

/// How peers that have failed are found.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_node_keep_alive(node: Ref<Node>, interval_ns: i64, timeout_ns: i64) -> c_int {
    call(|| {
        let milliseconds = |ns: i64| u64::try_from(ns).map(|ns| ns.div_ceil(1_000_000));
        match (milliseconds(interval_ns), milliseconds(timeout_ns)) {
            (Ok(interval_ms), Ok(timeout_ms)) => {
                node.get()?.keep_alive(KeepAlive::new(interval_ms, timeout_ms));
                Ok(())
            }
            _ => Err(Failure::argument("a time is negative")),
        }
    })
}

/// For how long memory that is not there is waited for.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_node_page_limit(node: Ref<Node>, limit_ns: i64) -> c_int {
    call(|| {
        let limit = u64::try_from(limit_ns).map_err(|_| Failure::argument("a time is negative"))?;
        node.get()?.page_limit(Duration::from_nanos(limit));
        Ok(())
    })
}

/// Connects to a node.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_connect(
    node: Ref<Node>,
    address: Text,
    options: Options<ConnectOptions>,
    peer: OutHandle<PeerHandle>,
) -> c_int {
    call(|| {
        peer.fill(|| {
            let options = options.get()?;
            let link = named(&LINKS, options.link, "link")?;
            let rails = (options.rails > 0).then_some(options.rails as usize);
            if rails.is_some_and(|rails| rails > RAILS_MAX) {
                return Err(Failure::argument(format!("a peer has 1 to {RAILS_MAX} rails")));
            }
            let reconnect = flag(options.reconnect, "reconnect")?;
            if options.reserved != 0 {
                return Err(Failure::argument("a reserved member of the options is not 0"));
            }
            let usual = Reconnect::default();
            let reconnecting = Reconnect {
                options: netvm::node::ConnectOptions { link, rails },
                first: or_usual(options.first_pause_ns, usual.first)?,
                longest: or_usual(options.longest_pause_ns, usual.longest)?,
                patience: or_usual(options.patience_ns, usual.patience)?,
            };
            let (node, address) = (node.get()?, address.get("address")?);
            Ok(if reconnect {
                PeerHandle::Lasting(node.connect_lasting(address, reconnecting)?)
            } else {
                PeerHandle::Direct(node.connect_with(address, &reconnecting.options)?)
            })
        })
    })
}

/// The next peer that has connected.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_accept(node: Ref<Node>, timeout_ns: i64, peer: OutHandle<PeerHandle>) -> c_int {
    call(|| {
        peer.fill(|| {
            let accepted = node.get()?.accept(timeout(timeout_ns).unwrap_or(Duration::MAX));
            accepted
                .map(PeerHandle::Direct)
                .ok_or_else(|| Failure::new(Code::TimedOut, "nobody has connected in time"))
        })
    })
}

/// Connects to a node of this process.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_connect_local(
    node: Ref<Node>,
    other: Ref<Node>,
    peer: OutHandle<PeerHandle>,
) -> c_int {
    call(|| peer.fill(|| Ok(PeerHandle::Direct(node.get()?.connect_local(other.get()?)?))))
}

/// Ends the use of a peer.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_peer_close(peer: Own<PeerHandle>) -> c_int {
    call(|| peer.take().map(drop))
}

pub(crate) fn segment_name(name: &Text) -> Result<&str> {
    let name = name.get("name")?;
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return Err(Failure::argument(format!("a name has 1 to {NAME_BYTES_MAX} bytes, not {}", name.len())));
    }
    Ok(name)
}

/// Exports memory.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_export(
    node: Ref<Node>,
    name: Text,
    memory: Ref<Memory>,
    rights: c_int,
    key: Out<[u8; 16]>,
) -> c_int {
    call(|| {
        key.check()?;
        let rights = named(&RIGHTS, rights, "combination of rights")?;
        let exported = node.get()?.export(segment_name(&name)?, memory.get()?, rights)?;
        key.set(exported.to_bytes())
    })
}

/// Exports memory with notification numbers.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_export_notified(
    node: Ref<Node>,
    name: Text,
    memory: Ref<Memory>,
    rights: c_int,
    numbers: u32,
    key: Out<[u8; 16]>,
    board: OutHandle<Board>,
) -> c_int {
    call(|| {
        board.fill(|| {
            key.check()?;
            let rights = named(&RIGHTS, rights, "combination of rights")?;
            let (node, memory) = (node.get()?, memory.get()?);
            let (exported, board) = node.export_notified(segment_name(&name)?, memory, rights, numbers)?;
            key.set(exported.to_bytes())?;
            Ok(Board(board))
        })
    })
}

/// Exports memory with the caller's key.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_export_keyed(
    node: Ref<Node>,
    name: Text,
    memory: Ref<Memory>,
    rights: c_int,
    numbers: u32,
    key: In<[u8; 16]>,
    board: OutHandle<Board>,
) -> c_int {
    call(|| {
        let export = || {
            let key = RemoteKey::from_bytes(key.get()?);
            let rights = named(&RIGHTS, rights, "combination of rights")?;
            let (node, memory) = (node.get()?, memory.get()?);
            Ok(Board(node.export_keyed(segment_name(&name)?, memory, rights, numbers, key)?))
        };
        match board.wanted()? {
            Some(board) => board.fill(export),
            None => export().map(drop),
        }
    })
}

/// Ends an export.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_unexport(node: Ref<Node>, name: Text) -> c_int {
    call(|| {
        let name = segment_name(&name)?;
        if node.get()?.unexport(name)? {
            return Ok(());
        }
        Err(Failure::new(Code::NoSegment, format!("nothing named {name:?} is exported")))
    })
}

/// Opens a peer's segment.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_import(
    peer: Ref<PeerHandle>,
    name: Text,
    key: In<[u8; 16]>,
    region: OutHandle<RegionHandle>,
) -> c_int {
    call(|| region.fill(|| peer.get()?.import(segment_name(&name)?, &RemoteKey::from_bytes(key.get()?))))
}

/// A key as 32 hexadecimal digits.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_key_to_text(key: In<[u8; 16]>, text: OutText) -> c_int {
    call(|| {
        let digits: String = key.get()?.iter().map(|byte| format!("{byte:02x}")).collect();
        text.set(&digits, KEY_TEXT_BYTES)
    })
}

/// Back.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_key_from_text(text: Text, key: Out<[u8; 16]>) -> c_int {
    call(|| {
        let digits = text.get("key")?.as_bytes();
        let mut bytes = [0; 16];
        let is_key = digits.len() == 32
            && bytes.iter_mut().zip(digits.chunks(2)).all(|(byte, pair)| {
                let digit = |digit: u8| char::from(digit).to_digit(16);
                let (high, low) = (digit(pair[0]), digit(pair[1]));
                *byte = (high.unwrap_or(0) * 16 + low.unwrap_or(0)) as u8;
                high.is_some() && low.is_some()
            });
        if !is_key {
            return Err(Failure::argument("a key is 32 hexadecimal digits"));
        }
        key.set(bytes)
    })
}
