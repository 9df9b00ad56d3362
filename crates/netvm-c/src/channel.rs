//! Channels: messages from other processes.

use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use netvm::channel::{ChannelError, Kept, Message, Receiver, Sender, Shape};
use netvm::node::{Node, RemoteKey};

use crate::call::{call, call_for, timeout};
use crate::code::{Code, Failure, Result};
use crate::ffi::{In, Opaque, Out, OutHandle, Own, Ref, Source, Text};
use crate::lasting::PeerHandle;
use crate::node::segment_name;

/// `netvm_receiver`: one thread at a time. The message received last stays in its place until the next.
pub struct ReceiverHandle(Mutex<(Receiver, Option<Kept>)>);

/// `netvm_sender`: one thread at a time.
pub struct SenderHandle(Mutex<Sender>);

impl Opaque for ReceiverHandle {
    const TAG: u32 = 0x6E76_5230;
    const NAME: &'static str = "receiver";
}

impl Opaque for SenderHandle {
    const TAG: u32 = 0x6E76_5331;
    const NAME: &'static str = "sender";
}

fn alone<T>(mutex: &Mutex<T>) -> Result<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Ok(guard),
        Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => {
            Err(Failure::new(Code::Busy, "another thread uses this end of the channel"))
        }
    }
}

/// `netvm_message`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Received {
    pub(crate) bytes: *mut c_void,
    pub(crate) length: usize,
    pub(crate) sender: u32,
    pub(crate) reserved: u32,
}

/// `netvm_buffer`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Buffer {
    pub(crate) bytes: Source,
    pub(crate) length: usize,
}

/// Receives messages under a name.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_receiver_create(
    node: Ref<Node>,
    name: Text,
    senders: u32,
    bytes: usize,
    key: Out<[u8; 16]>,
    receiver: OutHandle<ReceiverHandle>,
) -> c_int {
    call(|| {
        receiver.fill(|| {
            key.check()?;
            let shape = if senders == 0 { Shape::Shared { bytes } } else { Shape::Rings { senders, bytes } };
            let (exported, receiver) = Receiver::new(node.get()?, segment_name(&name)?, shape)?;
            key.set(exported.to_bytes())?;
            Ok(ReceiverHandle(Mutex::new((receiver, None))))
        })
    })
}

/// The next message, or news of a sender.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_receive(
    receiver: Ref<ReceiverHandle>,
    timeout_ns: i64,
    message: Out<Received>,
) -> c_int {
    call_for(|| {
        message.check()?;
        let mut receiver = alone(&receiver.get()?.0)?;
        let (receiver, last) = &mut *receiver;
        if let Some(last) = last.take() {
            receiver.free(last);
        }
        let received = match timeout_ns {
            0 => receiver.try_receive(),
            _ => receiver.receive(timeout(timeout_ns)),
        };
        let news = |sender| Received { bytes: std::ptr::null_mut(), length: 0, sender, reserved: 0 };
        let (code, told) = match received.map(Message::keep) {
            Ok(kept) => {
                let bytes = kept.bytes();
                let told =
                    Received { bytes: bytes.as_ptr().cast(), length: bytes.len(), ..news(kept.sender()) };
                *last = Some(kept);
                (Code::Ok, told)
            }
            Err(ChannelError::Left { sender }) => (Code::Left, news(sender)),
            Err(ChannelError::Lost { sender }) => (Code::Lost, news(sender)),
            Err(ChannelError::WouldBlock) => return Err(ChannelError::TimedOut.into()),
            Err(error) => return Err(error.into()),
        };
        message.set(told)?;
        Ok(code)
    })
}

/// Frees the place of the message received last.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_receiver_free(receiver: Ref<ReceiverHandle>) -> c_int {
    call(|| {
        let mut receiver = alone(&receiver.get()?.0)?;
        let (receiver, last) = &mut *receiver;
        if let Some(last) = last.take() {
            receiver.free(last);
        }
        Ok(())
    })
}

/// The descriptor.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_receiver_descriptor(receiver: Ref<ReceiverHandle>, descriptor: Out<c_int>) -> c_int {
    call(|| {
        descriptor.check()?;
        descriptor.set(alone(&receiver.get()?.0)?.0.descriptor()?.as_raw_fd())
    })
}

/// Makes the descriptor unreadable.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_receiver_rearm(receiver: Ref<ReceiverHandle>) -> c_int {
    call_for(|| {
        let armed = alone(&receiver.get()?.0)?.0.rearm();
        Ok(if armed { Code::Ok } else { Code::Pending })
    })
}

/// Ends it, and tells the senders.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_receiver_close(receiver: Own<ReceiverHandle>) -> c_int {
    call(|| receiver.take().map(drop))
}

/// Becomes a sender.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_sender_open(
    peer: Ref<PeerHandle>,
    name: Text,
    key: In<[u8; 16]>,
    sender: OutHandle<SenderHandle>,
) -> c_int {
    call(|| {
        sender.fill(|| {
            let key = RemoteKey::from_bytes(key.get()?);
            let sender = Sender::open(&*peer.get()?.now()?, segment_name(&name)?, &key)?;
            Ok(SenderHandle(Mutex::new(sender)))
        })
    })
}

/// The longest message.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_sender_query(sender: Ref<SenderHandle>, message_bytes_max: Out<usize>) -> c_int {
    call(|| message_bytes_max.set(alone(&sender.get()?.0)?.message_bytes_max()))
}

/// Sends.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_send(
    sender: Ref<SenderHandle>,
    buffer: Source,
    bytes: usize,
    timeout_ns: i64,
) -> c_int {
    call(|| {
        let mut sender = alone(&sender.get()?.0)?;
        let bytes = buffer.bytes(bytes)?;
        let sent = match timeout_ns {
            0 => sender.try_send(bytes),
            _ => sender.send(bytes, timeout(timeout_ns)),
        };
        Ok(sent?)
    })
}

/// Sends several.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_send_many(
    sender: Ref<SenderHandle>,
    messages: In<Buffer>,
    count: usize,
    timeout_ns: i64,
) -> c_int {
    call(|| {
        let mut sender = alone(&sender.get()?.0)?;
        let messages = messages.array(count)?;
        let messages: Result<Vec<&[u8]>> =
            messages.iter().map(|message| message.bytes.bytes(message.length)).collect();
        Ok(sender.send_many(&messages?, timeout(timeout_ns))?)
    })
}

/// Ends it, when the receiver has everything.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_sender_close(sender: Own<SenderHandle>) -> c_int {
    call(|| match sender.take()? {
        Some(sender) => Ok(sender.0.into_inner().unwrap_or_else(PoisonError::into_inner).close()?),
        None => Ok(()),
    })
}
