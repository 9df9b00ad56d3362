//! The server: one thread, one epoll set, one volume.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use netvm_sys::epoll::{Epoll, Interest, Ready};
use netvm_sys::net::{Address, Listener};
use netvm_sys::pipe::Pages;

use super::buffers::{Buffer, Buffers};
use super::client::{self, Arrived, Client, Parting};
use super::negotiation::{Export, Tls};
use super::proto::{self, Head, PAYLOAD_MAX, Request, command, errno, flag, transmission};
use super::tls::TlsFiles;
use crate::error::{Error, Result};
use crate::lender::StopFlag;
use crate::link::spin::Spin;
use crate::security::Security;
use crate::volume::{BLOCK_BYTES, Ended, Event, Volume};

/// Most clients at once.
const CLIENTS_MAX: usize = 64;
/// Buffers of all clients.
const USED_MAX: usize = 512 << 20;
/// Without a descriptor for who connects, nobody is accepted for so long.
const PAUSE: Duration = Duration::from_millis(400);
const NEGOTIATION_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 10_000 });
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// Shorter reads are copied: that takes less than handing pages over.
const SPLICE_BYTES_MIN: u32 = 32 << 10;
/// Descriptors of one answer about allocation.
const DESCRIPTORS_MAX: usize = 4096;

const STOP_ID: u64 = u64::MAX;
const VOLUME_ID: u64 = u64::MAX - 1;
const LISTENER_ID: u64 = 1 << 32;

/// How to serve.
#[derive(Clone, Debug, Default)]
pub struct NbdConfig {
    /// Where to listen: `HOST:PORT` (port 0 for any free one) or `unix:/path`.
    pub listen: Vec<String>,
    /// Name of the export; clients that name none get it, too.
    pub export: String,
    /// What `nbdinfo` shows besides.
    pub description: String,
    /// Nothing can be written.
    pub read_only: bool,
    /// Clients must start TLS.
    pub tls: Option<TlsFiles>,
    /// Listen on a network although nothing tells who the clients are.
    pub insecure: bool,
    /// Microseconds to look for the next request before sleeping, while they come in quick succession: 0 never, `None` 50 where there
    /// are several CPUs.
    pub spin_us: Option<u32>,
}

/// Whether a client may use more buffers: one that has none always may, whatever the others have.
fn has_room(buffers: &Buffers, client: &Client) -> bool {
    buffers.used < USED_MAX || client.has_payload() || client.used == 0
}

impl NbdConfig {
    fn check_listener(&self, address: &Address) -> Result<()> {
        let knows_clients = self.tls.as_ref().is_some_and(TlsFiles::checks_clients);
        if knows_clients || self.insecure || Security::default().check_listener(address).is_ok() {
            return Ok(());
        }
        Err(Error::Listen {
            address: address.to_string(),
            reason: "whoever reaches this address could read and write the device; give --tls DIR with a ca-cert.pem that clients' \
                     certificates are checked against, or --insecure if you trust everybody on the network"
                .to_owned(),
        })
    }
}

/// Something that whoever runs the server should know.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Notice {
    /// Of the volume.
    Volume(Event),
    /// A client was closed because of what it did.
    BadClient(String),
}

/// A request that the volume works on.
struct Running {
    client: usize,
    /// The client with this number may be another one by now.
    generation: u64,
    request: Request,
    buffer: Option<Buffer>,
    /// The write is done; its flush is under way.
    flushing: bool,
}

struct Place {
    client: Option<Client>,
    generation: u64,
}

/// A volume on the network.
pub struct NbdServer {
    volume: Volume,
    export: Export,
    tls: Option<TlsFiles>,
    spin: Spin,
    listeners: Vec<Listener>,
    epoll: Epoll,
    clients: Vec<Place>,
    running: Vec<Option<Running>>,
    free: Vec<usize>,
    buffers: Buffers,
    /// What the kernel sends is on its way through this; none when the last one could not be emptied.
    pages: Option<Pages>,
    /// Clients that had more to say than their turn allowed.
    eager: Vec<usize>,
    accepting: bool,
    /// Since when nobody is accepted because there was no descriptor.
    paused: Option<Instant>,
    stopping: bool,
}

impl std::fmt::Debug for NbdServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NbdServer").field("volume", &self.volume).finish_non_exhaustive()
    }
}

impl NbdServer {
    /// Listens.
    ///
    /// # Errors
    /// [`Error::Address`], [`Error::Listen`], [`Error::System`].
    pub fn bind(volume: Volume, config: NbdConfig) -> Result<Self> {
        use transmission as can;
        let epoll = Epoll::new().map_err(|error| Error::system("make an epoll set", &error))?;
        let mut listeners = Vec::new();
        for text in &config.listen {
            let address: Address = text.parse().map_err(|reason: &str| Error::Address {
                address: text.clone(),
                reason: reason.to_owned(),
            })?;
            let listener = Listener::bind(&address).map_err(|error| Error::listen(text.clone(), &error))?;
            // Nobody is accepted before this.
            config.check_listener(listener.address())?;
            listeners.push(listener);
        }
        let writes = match config.read_only {
            true => can::READ_ONLY,
            false => can::SEND_FUA | can::SEND_TRIM | can::SEND_WRITE_ZEROES | can::SEND_FAST_ZERO,
        };
        let flags = can::HAS_FLAGS | can::SEND_FLUSH | can::SEND_DF | can::CAN_MULTI_CONN | can::SEND_CACHE;
        let export = Export {
            name: config.export,
            description: config.description,
            size_bytes: volume.size_bytes(),
            flags: flags | writes,
        };
        let spin = Spin::server(config.spin_us);
        Ok(Self {
            volume,
            export,
            tls: config.tls,
            spin,
            listeners,
            epoll,
            clients: Vec::new(),
            running: Vec::new(),
            free: Vec::new(),
            buffers: Buffers::default(),
            pages: None,
            eager: Vec::new(),
            accepting: false,
            paused: None,
            stopping: false,
        })
    }

    /// Where it listens, with the real ports.
    pub fn addresses(&self) -> Vec<String> {
        self.listeners.iter().map(|listener| listener.address().to_string()).collect()
    }

    /// Clients that are connected.
    pub fn clients(&self) -> usize {
        self.clients.iter().filter(|place| place.client.is_some()).count()
    }

    /// The volume behind it.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Serves until it is stopped.
    ///
    /// # Errors
    /// [`Error::System`] when the kernel does not let it wait; nothing that a client does.
    pub fn run(&mut self, stop: &StopFlag, mut notice: impl FnMut(Notice)) -> Result<()> {
        let add = |fd, id| {
            let interest = Interest { readable: true, writable: false };
            let added = self.epoll.add(fd, id, interest);
            added.map_err(|error| Error::system("watch a descriptor", &error))
        };
        add(stop.as_fd(), STOP_ID)?;
        add(self.volume.as_fd(), VOLUME_ID)?;
        self.accept_more(true);
        let mut stopping: Option<Instant> = None;
        let (mut ready, mut ended, mut arrived) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            self.wait(&mut ready)?;
            let mut turns = std::mem::take(&mut self.eager);
            let mut heard = ready.is_empty();
            for Ready { id, interest } in ready.drain(..) {
                match id {
                    STOP_ID => {
                        if stop.take() > 1 || stopping.is_some() {
                            return Ok(());
                        }
                        (stopping, self.stopping) = (Some(Instant::now()), true);
                        self.accept_more(false);
                        self.clients.iter_mut().flat_map(|place| &mut place.client).for_each(Client::close);
                    }
                    VOLUME_ID => heard = true,
                    LISTENER_ID.. => self.accept((id - LISTENER_ID) as usize),
                    _ if self.has_hung_up(id as usize, interest) => self.part(id as usize),
                    _ => turns.push(id as usize),
                }
            }
            for index in turns {
                self.hear(index, &mut arrived, &mut notice);
            }
            let is_over = self.paused.is_some_and(|since| since.elapsed() >= PAUSE);
            if !self.accepting && !self.stopping && (is_over || self.late().is_some()) {
                // Whoever waits may have a place.
                self.accept_more(true);
            }
            // What was begun may have ended, with nothing to be read.
            self.volume.advance(heard, &mut ended);
            for Ended { token, result } in ended.drain(..) {
                self.ended(token as usize, result.is_ok());
            }
            self.send();
            while let Some(event) = self.volume.event() {
                notice(Notice::Volume(event));
            }
            self.volume.push();
            if let Some(since) = stopping
                && (self.clients() == 0 || since.elapsed() > DRAIN_TIMEOUT)
            {
                return Ok(());
            }
        }
    }

    fn wait(&mut self, ready: &mut Vec<Ready>) -> Result<()> {
        let patience = self.volume.patience().min(Duration::from_millis(500));
        let patience = if self.eager.is_empty() { patience } else { Duration::ZERO };
        let waited = self.spin.wait_for(&self.epoll, ready, patience);
        waited.map_err(|error| Error::system("wait for clients", &error))
    }

    fn accept_more(&mut self, accepting: bool) {
        if self.accepting == accepting {
            return;
        }
        (self.accepting, self.paused) = (accepting, None);
        for (index, listener) in self.listeners.iter().enumerate() {
            let interest = Interest { readable: true, writable: false };
            let _ = match accepting {
                true => self.epoll.add(listener.as_fd(), LISTENER_ID + index as u64, interest),
                false => self.epoll.remove(listener.as_fd()),
            };
        }
    }

    fn accept(&mut self, listener: usize) {
        while self.clients() < CLIENTS_MAX || self.late().is_some() {
            let stream = match self.listeners.get(listener).map(Listener::accept) {
                Some(Ok(Some(stream))) => stream,
                Some(Err(_)) => {
                    // Out of descriptors: who waits is accepted later, and until then does not keep us awake.
                    self.accept_more(false);
                    self.paused = Some(Instant::now());
                    return;
                }
                Some(Ok(None)) | None => return,
            };
            if self.clients() == CLIENTS_MAX
                && let Some(index) = self.late()
            {
                self.part(index);
            }
            let index = match self.clients.iter().position(|place| place.client.is_none()) {
                Some(index) => index,
                None => {
                    self.clients.push(Place { client: None, generation: 0 });
                    self.clients.len() - 1
                }
            };
            let tls = if self.tls.is_some() { Tls::Wanted } else { Tls::Off };
            let client = Client::new(stream, tls);
            let interest = Interest { readable: true, writable: false };
            if self.epoll.add(client.fd(), index as u64, interest).is_ok() {
                let place = &mut self.clients[index];
                (place.client, place.generation) = (Some(client), place.generation + 1);
            }
        }
        // Those who wait are accepted when somebody leaves.
        self.accept_more(false);
    }

    /// A client that has not said what it wants for too long, if others wait.
    fn late(&self) -> Option<usize> {
        let is_late =
            |client: &Client| client.negotiation.is_some() && client.since.elapsed() > NEGOTIATION_TIMEOUT;
        self.clients.iter().position(|place| place.client.as_ref().is_some_and(is_late))
    }

    fn part(&mut self, index: usize) {
        if let Some(client) = self.clients[index].client.take() {
            let _ = self.epoll.remove(client.fd());
            client.end(&mut self.buffers);
            self.accept_more(!self.stopping);
        }
    }

    /// Something is to be read of one that we do not want to hear now: its connection has ended.
    fn has_hung_up(&self, index: usize, seen: Interest) -> bool {
        let client = self.clients.get(index).and_then(|place| place.client.as_ref());
        client.is_some_and(|client| seen.readable && !client.interest.0)
    }

    /// Receives requests and begins with them.
    fn hear(&mut self, index: usize, arrived: &mut Vec<Arrived>, notice: &mut impl FnMut(Notice)) {
        let Some(Place { client: Some(client), generation }) = self.clients.get_mut(index) else { return };
        let generation = *generation;
        if client.wants_read() && has_room(&self.buffers, client) {
            let received = client.receive(&self.export, self.tls.as_ref(), &mut self.buffers, arrived);
            match received {
                Ok(true) => self.eager.push(index),
                Ok(false) => {}
                Err(parting) => {
                    if let Parting::Violation(what) = parting {
                        notice(Notice::BadClient(what));
                    }
                    // What had arrived before counts, but nobody wants the answers.
                    self.part(index);
                }
            }
        } else {
            client.put_off = true;
        }
        for Arrived { request, buffer } in arrived.drain(..) {
            self.begin(Running { client: index, generation, request, buffer, flushing: false });
        }
    }

    fn client(&mut self, running: &Running) -> Option<&mut Client> {
        let place = self.clients.get_mut(running.client)?;
        (place.generation == running.generation).then_some(place.client.as_mut()).flatten()
    }

    fn begin(&mut self, mut running: Running) {
        let request = running.request;
        let Request { flags, command, offset, bytes, .. } = request;
        let end = offset.checked_add(bytes.into());
        let inside = end.is_some_and(|end| end <= self.volume.size_bytes());
        let is_change = matches!(command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
        let refusal = match command {
            _ if is_change && self.export.flags & transmission::READ_ONLY != 0 => errno::EPERM,
            command::WRITE | command::READ if bytes > PAYLOAD_MAX => errno::EINVAL,
            command::WRITE | command::WRITE_ZEROES if !inside => errno::ENOSPC,
            command::READ | command::TRIM | command::CACHE | command::BLOCK_STATUS if !inside => {
                errno::EINVAL
            }
            command::WRITE if running.buffer.is_none() => errno::ENOSPC,
            command::BLOCK_STATUS if bytes == 0 => errno::EINVAL,
            command::FLUSH if offset != 0 || bytes != 0 => errno::EINVAL,
            _ => 0,
        };
        if refusal != 0 {
            return self.answer(running, refusal);
        }
        match command {
            command::READ => self.read(running),
            command::WRITE => {
                let local = running.buffer.as_ref().map(|buffer| buffer.part(bytes as usize));
                let token = self.keep(running);
                let begun = local.is_some_and(|local| self.volume.write(token, offset, local).is_ok());
                self.check(token, begun);
            }
            command::TRIM | command::WRITE_ZEROES => {
                let token = self.keep(running);
                let begun = self.volume.discard(token, offset, bytes.into()).is_ok();
                self.check(token, begun);
            }
            command::FLUSH => {
                running.flushing = true;
                let token = self.keep(running);
                self.volume.flush(token);
            }
            command::CACHE => self.answer(running, 0),
            command::BLOCK_STATUS => self.block_status(&running, flags & flag::REQ_ONE != 0),
            _ => self.answer(running, errno::EINVAL),
        }
    }

    fn keep(&mut self, running: Running) -> u64 {
        match self.free.pop() {
            Some(index) => {
                self.running[index] = Some(running);
                index as u64
            }
            None => {
                self.running.push(Some(running));
                self.running.len() as u64 - 1
            }
        }
    }

    /// The volume refused: ranges have been checked, so this is not a client's fault.
    fn check(&mut self, token: u64, begun: bool) {
        if !begun {
            self.ended(token as usize, false);
        }
    }

    fn read(&mut self, running: Running) {
        let Request { offset, bytes, cookie, .. } = running.request;
        let blocks = offset / BLOCK_BYTES..(offset + u64::from(bytes)).div_ceil(BLOCK_BYTES);
        let (end, present) = self.volume.presence().run(blocks.start, blocks.end);
        if !present
            && end == blocks.end
            && bytes > 0
            && self.client(&running).is_some_and(|client| client.structured)
        {
            return self.finish(running, Head::hole(cookie, offset, bytes), false);
        }
        let Some(local) = running.buffer.as_ref().map(|buffer| buffer.part(bytes as usize)) else {
            return self.answer(running, errno::EIO);
        };
        let Some(running) = self.read_directly(running) else { return };
        let token = self.keep(running);
        let begun = self.volume.read(token, offset, local).is_ok();
        self.check(token, begun);
    }

    /// Has the kernel send what a lender on this host has, without copying it here; gives the request back when it cannot.
    fn read_directly(&mut self, mut running: Running) -> Option<Running> {
        let Request { offset, bytes, cookie, .. } = running.request;
        let place = self.clients.get_mut(running.client);
        let client = place.filter(|place| place.generation == running.generation);
        let client = client.and_then(|place| place.client.as_mut()).filter(|client| client.takes_files());
        let (Some(client), SPLICE_BYTES_MIN..) = (client, bytes) else { return Some(running) };
        let Some(place) = self.volume.file_of(offset, bytes.into()) else { return Some(running) };
        // Before anything is said: what has been taken back is read elsewhere, or refused.
        let pages = self.pages.take().filter(|pages| pages.held() == 0).or_else(|| Pages::new().ok());
        let Some(mut pages) = pages.filter(|_| running.buffer.is_some()) else { return Some(running) };
        if !client::take(&mut pages, &place, 0, bytes as usize) {
            return Some(running);
        }
        let Some(buffer) = running.buffer.take() else { return Some(running) };
        let head =
            if client.structured { Head::data(cookie, offset, bytes) } else { Head::simple(cookie, 0) };
        let buffer = (buffer, bytes as usize);
        if client.answer_from(head, (&place, &mut pages), buffer, &mut self.buffers).is_err() {
            self.part(running.client);
        }
        self.pages = Some(pages);
        None
    }

    fn block_status(&mut self, running: &Running, one: bool) {
        let Request { offset, bytes, cookie, .. } = running.request;
        let end = offset + u64::from(bytes);
        let (mut at, mut told, mut count) = (offset, Vec::new(), 0);
        while at < end && count < if one { 1 } else { DESCRIPTORS_MAX } {
            let (block, present) = self.volume.presence().run(at / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
            let to = (block * BLOCK_BYTES).min(end);
            told.extend(((to - at) as u32).to_be_bytes());
            told.extend(if present { 0 } else { proto::HOLE_ZERO }.to_be_bytes());
            (at, count) = (to, count + 1);
        }
        let (place, generation) = (&mut self.clients[running.client], running.generation);
        let Some(client) = place.client.as_mut().filter(|_| place.generation == generation) else { return };
        if client.allocation {
            client.answer_text(Head::block_status(cookie, count as u32), &told, &mut self.buffers);
        } else {
            client.answer(Head::simple(cookie, errno::EINVAL), None);
        }
    }

    /// A volume op has ended.
    fn ended(&mut self, index: usize, good: bool) {
        let Some(mut running) = self.running.get_mut(index).and_then(Option::take) else { return };
        if good && !running.flushing && running.request.flags & flag::FUA != 0 {
            running.flushing = true;
            self.running[index] = Some(running);
            return self.volume.flush(index as u64);
        }
        self.free.push(index);
        self.answer(running, if good { 0 } else { errno::EIO });
    }

    fn answer(&mut self, running: Running, error: u32) {
        let Request { command, cookie, offset, bytes, .. } = running.request;
        let is_read = command == command::READ;
        let is_structured = is_read && self.client(&running).is_some_and(|client| client.structured);
        let head = match (is_structured, error) {
            (true, 0) if bytes > 0 => Head::data(cookie, offset, bytes),
            (true, 0) => Head::none(cookie),
            (true, error) => Head::error(cookie, error),
            (false, error) => Head::simple(cookie, error),
        };
        self.finish(running, head, is_read && error == 0);
    }

    /// Answers, with the buffer's data or without.
    fn finish(&mut self, mut running: Running, head: Head, with_data: bool) {
        let buffer = running.buffer.take();
        let place = self.clients.get_mut(running.client);
        let place = place.filter(|place| place.generation == running.generation);
        let Some(client) = place.and_then(|place| place.client.as_mut()) else {
            return buffer.into_iter().for_each(|buffer| self.buffers.give_back(buffer));
        };
        match buffer {
            Some(buffer) if with_data => client.answer(head, Some((buffer, running.request.bytes as usize))),
            buffer => {
                if let Some(buffer) = buffer {
                    client.used -= buffer.len();
                    self.buffers.give_back(buffer);
                }
                client.answer(head, None);
            }
        }
    }

    /// Sends answers, closes clients that are done, and says what to watch for.
    fn send(&mut self) {
        for index in 0..self.clients.len() {
            let Some(client) = &mut self.clients[index].client else { continue };
            let sent = match client.wants_write() {
                true => client.send_answers(&mut self.buffers),
                false => Ok(()),
            };
            if sent.is_err() || client.is_over() {
                self.part(index);
                continue;
            }
            let reads = client.wants_read() && has_room(&self.buffers, client);
            if reads && std::mem::take(&mut client.put_off) {
                // It may have sent all that it wants, and wait for us.
                self.eager.push(index);
            }
            let interest = (reads, client.wants_write());
            if interest != client.interest {
                client.interest = interest;
                let interest = Interest { readable: interest.0, writable: interest.1 };
                let _ = self.epoll.change(client.fd(), index as u64, interest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lender::{BorrowOptions, Lender, LenderConfig, LinkChoice, status};
    use crate::volume::VolumeOptions;
    use netvm_sys::mapping::Mapping;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::path::PathBuf;
    use std::thread::JoinHandle;

    const BYTES: u32 = 64 << 10;

    /// One turn at its only client, before it looks whether the lender is still there.
    fn serve(server: &mut NbdServer) {
        server.hear(0, &mut Vec::new(), &mut |_| ());
        let mut ended = Vec::new();
        server.volume.advance(true, &mut ended);
        ended.drain(..).for_each(|Ended { token, result }| server.ended(token as usize, result.is_ok()));
        server.send();
    }

    /// A read of the first bytes: the error that it was answered with.
    fn read(server: &mut NbdServer, client: &mut UnixStream) -> u32 {
        let magic = 0x2560_9513_u32.to_be_bytes();
        client.write_all(&[&magic[..], &[0; 20], &BYTES.to_be_bytes()].concat()).unwrap();
        serve(server);
        let mut answer = [0; 16];
        client.read_exact(&mut answer).unwrap();
        u32::from_be_bytes([answer[4], answer[5], answer[6], answer[7]])
    }

    /// The lender has ended the lease while nobody looked, and what it has punched out reads as zeros.
    #[test]
    fn pages_that_were_taken_back_are_not_sent() {
        let lease_timeout = Some(Duration::from_millis(400));
        let config = LenderConfig { size_bytes: 1 << 20, slab_bytes: 1 << 20, ..LenderConfig::default() };
        let mut lender = Lender::bind(LenderConfig { lease_timeout, ..config }).unwrap();
        let address = lender.addresses().remove(0);
        let stop = StopFlag::new().unwrap();
        let flag = stop.clone();
        let thread = std::thread::spawn(move || lender.run(&flag).unwrap());

        let borrow = BorrowOptions { link: LinkChoice::Shm, ..BorrowOptions::default() };
        let options = VolumeOptions { borrow, ..VolumeOptions::default() };
        let mut volume = Volume::open(std::slice::from_ref(&address), 1 << 20, options).unwrap();
        let memory = Mapping::anonymous(1 << 20).unwrap();
        memory.shared().fill(7);
        volume.write(1, 0, memory.shared()).unwrap();
        volume.flush(2);
        let mut ended = Vec::new();
        while ended.len() < 2 {
            volume.poll(&mut ended);
        }
        let path = std::env::temp_dir().join(format!("netvm-nbd-{}", std::process::id()));
        let listen = vec![format!("unix:{}", path.display())];
        let mut server = NbdServer::bind(volume, NbdConfig { listen, ..NbdConfig::default() }).unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        server.accept(0);
        client.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0").unwrap();
        serve(&mut server);
        client.read_exact(&mut [0; 18 + 20 + 12 + 20]).unwrap();

        assert_eq!(read(&mut server, &mut client), 0);
        let mut bytes = vec![0; BYTES as usize];
        client.read_exact(&mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 7));
        assert!(server.pages.is_some(), "it was copied");
        let deadline = Instant::now() + Duration::from_secs(10);
        while status(&address).unwrap().used_bytes > 0 {
            assert!(Instant::now() < deadline, "it waits for ever");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(read(&mut server, &mut client), errno::EIO);
        let why = server.volume.lenders().remove(0).lost.unwrap().to_string();
        assert!(why.contains("taken back"), "{why}");
        stop.stop();
        stop.stop();
        thread.join().unwrap();
    }

    /// A server on a thread, with a volume that nothing is written to, and its lender.
    struct Serving {
        path: PathBuf,
        stops: [StopFlag; 2],
        threads: Vec<JoinHandle<()>>,
    }

    impl Serving {
        fn start(name: &str) -> Self {
            let stops = [StopFlag::new().unwrap(), StopFlag::new().unwrap()];
            let config =
                LenderConfig { size_bytes: 64 << 20, slab_bytes: 64 << 20, ..LenderConfig::default() };
            let mut lender = Lender::bind(config).unwrap();
            let address = lender.addresses().remove(0);
            let stop = stops[1].clone();
            let mut threads = vec![std::thread::spawn(move || lender.run(&stop).unwrap())];
            let volume = Volume::open(&[address], 64 << 20, VolumeOptions::default()).unwrap();
            let path = std::env::temp_dir().join(format!("netvm-nbd-{name}-{}", std::process::id()));
            let listen = vec![format!("unix:{}", path.display())];
            let mut server = NbdServer::bind(volume, NbdConfig { listen, ..NbdConfig::default() }).unwrap();
            let stop = stops[0].clone();
            threads.insert(0, std::thread::spawn(move || server.run(&stop, |_| ()).unwrap()));
            Self { path, stops, threads }
        }

        /// A client that has been greeted.
        fn connect(&self) -> UnixStream {
            let mut client = UnixStream::connect(&self.path).unwrap();
            client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            client.read_exact(&mut [0; 18]).expect("it is not greeted");
            client.write_all(&3_u32.to_be_bytes()).unwrap();
            client
        }

        /// One that has agreed on structured replies, and may send requests.
        fn begin(&self) -> UnixStream {
            let mut client = self.connect();
            let (structured, go) = (8_u32.to_be_bytes(), 7_u32.to_be_bytes());
            let parts = [&b"IHAVEOPT"[..], &structured, &[0; 4], b"IHAVEOPT", &go, &[0, 0, 0, 6], &[0; 6]];
            client.write_all(&parts.concat()).unwrap();
            client.read_exact(&mut [0; 20 + 20 + 12 + 20]).unwrap();
            client
        }
    }

    impl Drop for Serving {
        fn drop(&mut self) {
            for (stop, thread) in self.stops.iter().zip(self.threads.drain(..)) {
                stop.stop();
                stop.stop();
                let _ = thread.join();
            }
            let _ = std::fs::remove_file(&self.path);
        }
    }

    fn request(command: u16, bytes: u32) -> Vec<u8> {
        let head = [&[0x25, 0x60, 0x95, 0x13, 0, 0][..], &command.to_be_bytes(), &[0; 16]];
        [&head.concat()[..], &bytes.to_be_bytes()].concat()
    }

    /// Sends the same again and again until the server does not listen any more; how often it was sent.
    fn flood(client: &mut UnixStream, one: &[u8]) -> usize {
        let many = one.repeat(8192);
        // Sockets may have room for some MiB.
        let most = 64 * many.len();
        client.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
        let mut sent = 0;
        while let Ok(count) = client.write(&many[sent % many.len()..]) {
            sent += count;
            assert!(sent < most, "{sent} bytes, and it still listens");
        }
        // The last one may be there in part.
        let rest = &one[sent % one.len()..];
        if rest.len() < one.len() {
            let mut sending = client.try_clone().unwrap();
            let rest = rest.to_vec();
            client.set_write_timeout(None).unwrap();
            std::thread::spawn(move || sending.write_all(&rest));
        }
        sent.div_ceil(one.len())
    }

    #[test]
    fn a_client_that_reads_nothing_is_not_heard_for_ever() {
        let serving = Serving::start("flood");
        // An option that is not known, and its answer.
        let mut client = serving.connect();
        let count = flood(&mut client, b"IHAVEOPT\0\0\0\x4d\0\0\0\0");
        let mut answer = [0; 20 + 36];
        for number in 0..count {
            client.read_exact(&mut answer).unwrap_or_else(|error| panic!("{number} of {count}: {error}"));
            assert!(answer.ends_with(b"not know the option"), "{number} of {count}");
        }
        // Requests that are answered at once: about the cache, and reads of what is not there.
        for (command, answer_bytes) in [(command::CACHE, 16), (command::READ, 20 + 12)] {
            let mut client = serving.begin();
            let count = flood(&mut client, &request(command, 4096));
            let mut answer = vec![0; answer_bytes];
            for number in 0..count {
                client.read_exact(&mut answer).unwrap_or_else(|error| panic!("{number} of {count}: {error}"));
            }
        }
    }

    /// They have arrived with the others, and nothing more comes that would wake the server.
    #[test]
    fn requests_beyond_the_limit_are_answered_when_the_others_have_been() {
        let serving = Serving::start("limit");
        let mut client = serving.begin();
        client.write_all(&request(command::READ, PAYLOAD_MAX).repeat(5)).unwrap();
        for number in 0..5 {
            let mut answer = [0; 20 + 12];
            client.read_exact(&mut answer).unwrap_or_else(|error| panic!("answer {number}: {error}"));
            assert_eq!(answer[28..], PAYLOAD_MAX.to_be_bytes(), "a hole");
        }
    }

    #[test]
    fn clients_that_say_nothing_make_room_for_one_that_waits() {
        let serving = Serving::start("room");
        let mut idle: Vec<UnixStream> = (0..CLIENTS_MAX).map(|_| serving.connect()).collect();
        serving.connect();
        let is_closed = |client: &mut UnixStream| {
            client.set_nonblocking(true).unwrap();
            matches!(client.read(&mut [0]), Ok(0))
        };
        assert_eq!(idle.iter_mut().filter_map(|client| is_closed(client).then_some(())).count(), 1);
    }
}
