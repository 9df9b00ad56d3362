//! Cases of channels, locks, semaphores, wait queues and barriers: their homes are at the partner, as are the other ends.

use std::collections::HashMap;
use std::error::Error;
use std::time::{Duration, Instant};

use netvm::channel::{ChannelError, Receiver, Sender, Shape};
use netvm::node::{LinkChoice, Node, RemoteKey};
use netvm::region::Peer;
use netvm::sync::{Group, Kind, Lock, Semaphore, WaitQueue};

use super::cases::latency_of;
use super::partner::TIMEOUT;
use super::timing::{Sample, latency};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const RING: Shape = Shape::Rings { senders: 1, bytes: 64 << 10 };
const HERE: &str = "rma-channel-here";
const THERE: &str = "rma-channel-there";
const LOCK: &str = "rma-lock";
const SEMAPHORE: &str = "rma-semaphore";
const QUEUE: &str = "rma-queue";
const GROUP: &str = "rma-group";
const STREAM: &str = "rma-channel-stream";
const SHARED: &str = "rma-channel-shared";
/// Of the channels whose messages are counted.
const RATE_BYTES: usize = 256 << 10;
/// Senders of the shared one, each with a connection of its own.
const SENDERS: usize = 4;
/// Instead of a message's number: the last of its sender.
const LAST: u64 = u64::MAX;

fn hex(key: &RemoteKey) -> String {
    key.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn key(text: Option<&str>) -> Result<RemoteKey> {
    let number = u128::from_str_radix(text.ok_or("a key is missing")?, 16)?;
    Ok(RemoteKey::from_bytes(number.to_be_bytes()))
}

/// The measuring side's ends.
pub struct Here {
    lock: Lock,
    semaphore: Semaphore,
    queue: WaitQueue,
    group: Group,
    sender: Sender,
    receiver: Receiver,
    stream: Vec<Sender>,
    shared: Vec<Sender>,
}

/// A channel to receive from, whose key goes into [`There::new`].
///
/// # Errors
/// As `Receiver::new`.
pub fn receiver(node: &Node) -> Result<(String, Receiver)> {
    let (key, receiver) = Receiver::new(node, HERE, RING)?;
    Ok((hex(&key), receiver))
}

impl Here {
    /// Opens what the partner has told.
    ///
    /// # Errors
    /// When something is not there.
    pub fn open(node: &Node, address: &str, peer: &Peer, told: &str, receiver: Receiver) -> Result<Self> {
        let mut keys = told.split(' ');
        let mut next = || key(keys.next());
        Ok(Self {
            lock: Lock::open(peer, LOCK, &next()?)?,
            semaphore: Semaphore::open(peer, SEMAPHORE, &next()?)?,
            queue: WaitQueue::open(peer, QUEUE, &next()?)?,
            group: Group::join(peer, GROUP, &next()?)?,
            sender: Sender::open(peer, THERE, &next()?)?,
            receiver,
            stream: senders(node, address, STREAM, &next()?, 1)?,
            shared: senders(node, address, SHARED, &next()?, SENDERS)?,
        })
    }

    /// Takes a free lock and gives it back, as programs do: without waiting for the answer to that.
    pub fn lock(&self, time: Duration) -> Result<Sample> {
        latency(time, 1, || Ok(self.lock.lock(Some(TIMEOUT)).map(drop)?))
    }

    /// Takes a unit and gives it back in the same way.
    pub fn semaphore(&self, time: Duration) -> Result<Sample> {
        latency(time, 1, || Ok(self.semaphore.acquire(1, Some(TIMEOUT)).map(drop)?))
    }

    /// Uses up a unit and makes one, as who counts the items of a queue does: two exchanges, or changes of a mapped word.
    pub fn items(&self, time: Duration) -> Result<Sample> {
        latency(time, 1, || {
            self.semaphore.consume(1, Some(TIMEOUT))?;
            Ok(self.semaphore.add(1).map(drop)?)
        })
    }

    /// When a free lock was taken, and when it was given back.
    pub fn take_lock(&self) -> Result<(Instant, Instant)> {
        let guard = self.lock.lock(Some(TIMEOUT))?;
        let taken = Instant::now();
        drop(guard);
        Ok((taken, Instant::now()))
    }

    /// The same of a unit.
    pub fn take_permit(&self) -> Result<(Instant, Instant)> {
        let permit = self.semaphore.acquire(1, Some(TIMEOUT))?;
        let taken = Instant::now();
        drop(permit);
        Ok((taken, Instant::now()))
    }

    /// Queues, and is woken by itself: two exchanges.
    pub fn queue(&self, time: Duration) -> Result<Sample> {
        latency(time, 1, || {
            let waiting = self.queue.enqueue()?;
            if !self.queue.wake()? {
                return Err("nobody was in the queue".into());
            }
            Ok(waiting.wait(Some(TIMEOUT))?)
        })
    }

    /// Meets the partner, which is there so often.
    pub fn barrier(&mut self, rounds: u64) -> Result<Sample> {
        let sample = latency_of(rounds, || Ok(self.group.barrier(Some(TIMEOUT))?))?;
        // A meeting is a whole exchange.
        Ok(Sample { median: sample.median * 2.0, p99: sample.p99.map(|value| value * 2.0), ..sample })
    }

    /// One way of a message of so many bytes.
    pub fn channel(&mut self, size: usize, rounds: u64) -> Result<Sample> {
        let mut bytes = vec![5; size];
        let mut round = 0u64;
        latency_of(rounds, || {
            round += 1;
            bytes[..8].copy_from_slice(&round.to_le_bytes());
            self.sender.send(&bytes, Some(TIMEOUT))?;
            let back = self.receiver.receive(Some(TIMEOUT))?;
            if back.to_vec() == bytes { Ok(()) } else { Err("another message came back".into()) }
        })
    }

    /// Has all senders of the one or the other channel send for so long; `received` waits for the partner's count.
    pub fn rate(
        &mut self,
        shared: bool,
        size: usize,
        time: Duration,
        received: impl FnOnce() -> Result<u64>,
    ) -> Result<Sample> {
        let senders = if shared { &mut self.shared } else { &mut self.stream };
        let start = Instant::now();
        let sent: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                senders.iter_mut().map(|sender| scope.spawn(move || stream(sender, size, time))).collect();
            threads.into_iter().map(|thread| thread.join()).collect()
        });
        let received = received()?;
        let elapsed = start.elapsed();
        let mut all = 0;
        for count in sent {
            all += count.map_err(|_| "a sender panicked")??;
        }
        match received == all {
            true => Ok(Sample::of_rate(all, size, elapsed).in_millions()),
            false => Err(format!("{all} messages were sent, {received} received").into()),
        }
    }
}

fn senders(node: &Node, address: &str, name: &str, key: &RemoteKey, count: usize) -> Result<Vec<Sender>> {
    let open = || {
        let peer = node.connect(address)?;
        peer.choose(LinkChoice::Socket);
        Ok(Sender::open(&peer, name, key)?)
    };
    (0..count).map(|_| open()).collect()
}

/// Sends numbered messages until time is over, and one that says so; how many with that one.
fn stream(sender: &mut Sender, size: usize, time: Duration) -> std::result::Result<u64, ChannelError> {
    let mut bytes = vec![5; size];
    let (start, mut count) = (Instant::now(), 0u64);
    while start.elapsed() < time {
        for _ in 0..64 {
            bytes[..8].copy_from_slice(&count.to_le_bytes());
            sender.send(&bytes, Some(TIMEOUT))?;
            count += 1;
        }
    }
    bytes[..8].copy_from_slice(&LAST.to_le_bytes());
    sender.send(&bytes, Some(TIMEOUT))?;
    Ok(count + 1)
}

/// The partner's ends.
pub struct There {
    group: Group,
    sender: Sender,
    receiver: Receiver,
    stream: Receiver,
    shared: Receiver,
}

impl There {
    /// Offers everything; returns what [`Here::open`] wants to be told. `told` is the key of the other side's channel.
    ///
    /// # Errors
    /// When something cannot be had.
    pub fn new(node: &Node, peer: &Peer, told: &str) -> Result<(String, Self)> {
        let (channel, receiver) = Receiver::new(node, THERE, RING)?;
        let shape = Shape::Rings { senders: 1, bytes: RATE_BYTES };
        let (stream_key, stream) = Receiver::new(node, STREAM, shape)?;
        let (shared_key, shared) = Receiver::new(node, SHARED, Shape::Shared { bytes: RATE_BYTES })?;
        let group = node.export_sync(GROUP, Kind::Group { parties: 2 })?;
        let keys = [
            node.export_sync(LOCK, Kind::LOCK)?,
            node.export_sync(SEMAPHORE, Kind::Semaphore { permits: 4 })?,
            node.export_sync(QUEUE, Kind::WaitQueue)?,
            group,
            channel,
            stream_key,
            shared_key,
        ];
        let sender = Sender::open(peer, HERE, &key(Some(told))?)?;
        let group = Group::join(&node.connect_local(node)?, GROUP, &group)?;
        Ok((keys.map(|key| hex(&key)).join(" "), Self { group, sender, receiver, stream, shared }))
    }

    /// Answers so many messages.
    ///
    /// # Errors
    /// When one does not come.
    pub fn channel(&mut self, rounds: u64) -> Result<()> {
        for _ in 0..rounds {
            let message = self.receiver.receive(Some(TIMEOUT))?.to_vec();
            self.sender.send(&message, Some(TIMEOUT))?;
        }
        Ok(())
    }

    /// Receives until each sender of the one or the other channel has sent its last; how many messages they were.
    ///
    /// # Errors
    /// When one does not come, or out of turn.
    pub fn count(&mut self, shared: bool) -> Result<u64> {
        let (receiver, senders) = if shared { (&mut self.shared, SENDERS) } else { (&mut self.stream, 1) };
        let mut next: HashMap<u32, u64> = HashMap::new();
        let (mut count, mut ended) = (0, 0);
        while ended < senders {
            let message = receiver.receive(Some(TIMEOUT))?;
            let mut number = [0; 8];
            message.read(0, &mut number).ok_or("a message is too short")?;
            let expected = next.entry(message.sender()).or_default();
            match u64::from_le_bytes(number) {
                LAST => ended += 1,
                number if number == *expected => *expected += 1,
                number => return Err(format!("message {number} came instead of {expected}").into()),
            }
            count += 1;
        }
        Ok(count)
    }

    /// Is at so many meetings.
    ///
    /// # Errors
    /// When the other one is not.
    pub fn barrier(&mut self, rounds: u64) -> Result<()> {
        (0..rounds).try_for_each(|_| Ok(self.group.barrier(Some(TIMEOUT))?))
    }
}
