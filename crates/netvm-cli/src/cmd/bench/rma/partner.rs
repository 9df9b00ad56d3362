//! The other process of `netvm bench rma`: it exports memory, answers puts and notifications when asked to, and is passive otherwise.

use std::error::Error;
use std::io::BufRead;
use std::num::ParseIntError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use netvm::copy::Copies;
use netvm::link::switch_looking_off;
use netvm::node::{ConnectOptions, LinkChoice, Mapping, Node, RemoteKey, Rights};
use netvm::notify::{Notifications, Notify};
use netvm::region::{Peer, Region};
use netvm::security::{Encryption, Secret, Security};
use netvm_sys::cpu::pin;

use super::super::sweeper::Sweeper;
use super::meet::There;
use super::{Link, raw, shm};

/// Bytes that each side exports.
pub const MEMORY_BYTES: usize = 9 << 20;
/// Where puts of a ping-pong go.
pub const PONG_OFFSET: usize = 8 << 20;
const NUMBERS: u32 = 8;
/// Notification number of pings and pongs.
pub const PONG: u16 = 1;
/// Notification number that a handler answers.
pub const HANDLED: u16 = 2;
/// Who waits for so long has lost something.
pub const TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Args, Debug)]
pub struct PartnerArgs {
    #[arg(long, value_enum)]
    link: Link,
    #[arg(long)]
    cpu: Option<usize>,
    /// The secret comes on standard input
    #[arg(long)]
    encrypt: bool,
}

/// One side: its node, and the memory that the other one reaches.
pub struct Side {
    link: Link,
    pub node: Node,
    pub memory: Arc<Mapping>,
    pub board: Notifications,
    /// Address and key, for the other side.
    pub ticket: String,
    rails: usize,
    /// Of the socket, which goes when the node has ended.
    _sweeper: Option<Sweeper>,
}

impl Side {
    /// A node that listens and exports.
    ///
    /// # Errors
    /// When there is no such kind of socket here.
    pub fn new(link: Link, secret: Option<Secret>, rails: usize) -> Result<Self, Box<dyn Error>> {
        let node = match secret {
            Some(secret) => Node::with_security(Security {
                secret: Some(secret),
                encryption: Encryption::Always,
                ..Security::default()
            })?,
            None => Node::new()?,
        };
        let mut sweeper = None;
        let address = match link {
            Link::Tcp | Link::Shm => node.listen("127.0.0.1:0")?,
            Link::Unix => {
                let path = std::env::temp_dir().join(format!("netvm-rma-{}", std::process::id()));
                // One that had this number before, and was killed.
                let _ = std::fs::remove_file(&path);
                sweeper = Some(Sweeper::start(&path)?);
                node.listen(&format!("unix:{}", path.display()))?
            }
        };
        let memory = Node::memory(MEMORY_BYTES)?;
        // No page fault of a first touch is measured.
        memory.shared().fill(1);
        let (key, board) = node.export_notified("rma", Arc::clone(&memory), Rights::ReadWrite, NUMBERS)?;
        let key: String = key.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { link, node, memory, board, ticket: format!("{address} {key}"), rails, _sweeper: sweeper })
    }

    /// Connects to the side with that ticket and opens its memory.
    ///
    /// # Errors
    /// When the ticket is none or nobody is there.
    pub fn connect(&self, ticket: &str) -> Result<Region, Box<dyn Error>> {
        let (address, _) = ticket.split_once(' ').ok_or("no key in the ticket")?;
        let options = ConnectOptions { rails: Some(self.rails), ..ConnectOptions::default() };
        self.open(&self.node.connect_with(address, &options)?, ticket)
    }

    /// Opens the memory of the side with that ticket, which has connected to this one.
    ///
    /// # Errors
    /// When the ticket is none or nobody comes.
    pub fn accept(&self, ticket: &str) -> Result<Region, Box<dyn Error>> {
        self.open(&self.node.accept(TIMEOUT).ok_or("the other side has not connected")?, ticket)
    }

    /// What is measured carries what is opened through the peer.
    pub fn choose(&self, peer: &Peer) {
        peer.choose(if self.link == Link::Shm { LinkChoice::Shm } else { LinkChoice::Socket });
    }

    fn open(&self, peer: &Peer, ticket: &str) -> Result<Region, Box<dyn Error>> {
        self.choose(peer);
        let (_, key) = ticket.split_once(' ').ok_or("no key in the ticket")?;
        let bytes: Result<Vec<u8>, ParseIntError> =
            (0..key.len() / 2).map(|index| u8::from_str_radix(&key[2 * index..2 * index + 2], 16)).collect();
        let key = RemoteKey::from_bytes(bytes?.try_into().map_err(|_| "a key of another length")?);
        Ok(peer.import("rma", &key)?)
    }

    /// Waits, without sleeping, until the last word of a put of `size` bytes has the number `round`.
    ///
    /// # Errors
    /// When it does not come.
    pub fn await_put(&self, size: usize, round: u64) -> Result<(), Box<dyn Error>> {
        if self.link == Link::Shm {
            return shm::await_word(self.memory.shared(), PONG_OFFSET + size - 8, round);
        }
        let memory = self.memory.shared();
        let at = PONG_OFFSET + size - 8;
        let start = Instant::now();
        loop {
            for _ in 0..8 {
                self.node.poll();
                if memory.with_u64(at, |word| word.load(Ordering::Acquire)) == Some(round) {
                    return Ok(());
                }
            }
            match start.elapsed() {
                late if late > TIMEOUT => return Err(format!("put {round} has not come").into()),
                // Whoever puts may need this CPU.
                long if long > Duration::from_micros(30) => std::thread::yield_now(),
                _ => {}
            }
        }
    }

    /// Waits for a signal of a number and takes it.
    ///
    /// # Errors
    /// When it does not come.
    pub fn await_signal(&self, number: u16, how: How) -> Result<(), Box<dyn Error>> {
        let came = match how {
            How::Spin => self.board.spin(number, Some(TIMEOUT)),
            How::Block => self.block(number)?,
        };
        if came && self.board.acknowledge(number) { Ok(()) } else { Err("a notification was lost".into()) }
    }

    /// Sleeps in poll(2) until a number is signalled.
    fn block(&self, number: u16) -> Result<bool, Box<dyn Error>> {
        let range = u32::from(number)..u32::from(number) + 1;
        let descriptor = self.board.descriptor()?;
        while self.board.rearm(range.clone()) {
            let mut fds = [netvm_sys::thread::readable(&descriptor)];
            if netvm_sys::thread::poll(&mut fds, Some(TIMEOUT))? == 0 {
                return Ok(self.board.test(number) > 0);
            }
        }
        Ok(true)
    }
}

/// How a side waits for a notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    Spin,
    Block,
}

/// An application that calls nobody, until it is told to stop. On the CPU of the node's thread, if this process is pinned.
fn compute(goes_on: &Arc<AtomicBool>) {
    let goes_on = Arc::clone(goes_on);
    std::thread::spawn(move || {
        let mut value = 1u64;
        while goes_on.load(Ordering::Relaxed) {
            for _ in 0..10_000 {
                value = std::hint::black_box(value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
            }
        }
    });
}

/// Serves one bench; ends when its input does.
///
/// # Errors
/// When the floors or the node cannot be had, or a ping was lost.
pub fn run(args: &PartnerArgs) -> Result<(), Box<dyn Error>> {
    if let Some(cpu) = args.cpu {
        pin(cpu)?;
    }
    let mut lines = std::io::stdin().lock().lines();
    let secret = match args.encrypt {
        true => Some(Secret::from_content(lines.next().transpose()?.unwrap_or_default().as_bytes())?),
        false => None,
    };
    let floors = raw::serve(args.link)?;
    out!("{}", floors.address);
    let side = Arc::new(Side::new(args.link, secret, 1)?);
    // The third node of a copy.
    side.node.allow_copies(Copies::Anywhere);
    out!("{}", side.ticket);
    let Some(ticket) = lines.next().transpose()? else { return Ok(()) };
    let region = Arc::new(side.accept(&ticket)?);
    out!("ready");
    let answering = Arc::clone(&region);
    side.board.arm(HANDLED, move |_| {
        let _ = answering.notify(Notify::Count { number: PONG });
    })?;
    let mut meet = None;
    let computing = Arc::new(AtomicBool::new(false));
    for line in lines {
        let line = line?;
        if let Some(key) = line.strip_prefix("meet ") {
            let peer = side.node.accept(TIMEOUT).ok_or("the other side has not connected")?;
            side.choose(&peer);
            let (told, there) = There::new(&side.node, &peer, key)?;
            out!("{told}");
            meet = Some((there, peer));
            continue;
        }
        let mut words = line.split(' ');
        let what = words.next().unwrap_or_default();
        let mut number =
            || words.next().and_then(|word| word.parse::<u64>().ok()).ok_or("a number is missing");
        match what {
            "put" => {
                let (size, first, last) = (number()? as usize, number()?, number()?);
                let mut bytes = vec![3; size];
                for round in first..last {
                    side.await_put(size, round)?;
                    bytes[size - 8..].copy_from_slice(&round.to_ne_bytes());
                    region.write(PONG_OFFSET as u64, &bytes)?;
                }
            }
            "put-block" => {
                let (size, rounds) = (number()? as usize, number()?);
                let bytes = vec![3; size];
                for _ in 0..rounds {
                    side.await_signal(PONG, How::Block)?;
                    region.write_notify(PONG_OFFSET as u64, &bytes, Notify::Count { number: PONG })?;
                }
            }
            "look" => switch_looking_off(number()? == 0),
            "spin" | "block" => {
                let how = if what == "spin" { How::Spin } else { How::Block };
                for _ in 0..number()? {
                    side.await_signal(PONG, how)?;
                    region.notify(Notify::Count { number: PONG })?;
                }
            }
            "channel" | "barrier" => {
                let rounds = number()?;
                let (there, _) = meet.as_mut().ok_or("nobody has met")?;
                if what == "channel" { there.channel(rounds)? } else { there.barrier(rounds)? }
            }
            "channel-rate" | "shared-rate" => {
                let (there, _) = meet.as_mut().ok_or("nobody has met")?;
                out!("count {}", there.count(what == "shared-rate")?);
            }
            "compute" => {
                let on = number()? == 1;
                if computing.swap(on, Ordering::AcqRel) != on && on {
                    compute(&computing);
                }
            }
            _ => return Err(format!("unknown command {line}").into()),
        }
        out!("done");
    }
    Ok(())
}
