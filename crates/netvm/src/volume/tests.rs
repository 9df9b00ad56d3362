//! Lenders that come back as others, or answer nonsense.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::JoinHandle;

use netvm_core::limits::{HEADER_BYTES, HELLO_BYTES};
use netvm_core::wire::{Header, Hello, Kind as Frame, Role};

use super::*;
use crate::lender::{Lender, LenderConfig, LinkChoice, StopFlag};

const SLAB: u64 = 1 << 20;

/// A lender on a thread, until it is dropped.
struct Serving {
    address: String,
    stop: StopFlag,
    thread: Option<JoinHandle<()>>,
}

impl Serving {
    fn at(address: &str, slab_bytes: u64) -> Self {
        let config = LenderConfig { size_bytes: 4 * SLAB, slab_bytes, ..LenderConfig::default() };
        let mut lender = Lender::bind(LenderConfig { listen: vec![address.to_owned()], ..config }).unwrap();
        let address = lender.addresses().remove(0);
        let stop = StopFlag::new().unwrap();
        let flag = stop.clone();
        let thread = Some(std::thread::spawn(move || lender.run(&flag).unwrap()));
        Self { address, stop, thread }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // Whoever leaves is asked twice, or waits for its borrowers.
        self.stop.stop();
        self.stop.stop();
        self.thread.take().map(JoinHandle::join);
    }
}

fn open(addresses: &[&str], replicas: usize) -> Volume {
    let addresses: Vec<String> = addresses.iter().map(|&address| address.to_owned()).collect();
    let borrow = BorrowOptions { link: LinkChoice::Socket, ..BorrowOptions::default() };
    Volume::open(&addresses, SLAB, VolumeOptions { replicas, borrow, ..VolumeOptions::default() }).unwrap()
}

/// Drives it until something has happened; all that has.
fn until(volume: &mut Volume, is_it: impl Fn(&Event) -> bool) -> Vec<Event> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut events = Vec::new();
    while !events.iter().any(&is_it) {
        assert!(Instant::now() < deadline, "only {events:?} of {volume:?}");
        volume.poll(&mut Vec::new());
        events.extend(std::iter::from_fn(|| volume.event()));
        std::thread::sleep(Duration::from_millis(1));
    }
    events
}

#[test]
fn a_lender_that_is_back_with_smaller_slabs_is_told_and_looked_for_on() {
    let (one, two) = (Serving::at("127.0.0.1:0", SLAB), Serving::at("127.0.0.1:0", SLAB));
    let mut volume = open(&[&one.address, &two.address], 2);
    let address = two.address.clone();
    drop(two);
    until(&mut volume, |event| matches!(event, Event::LenderLost { .. }));
    let other = Serving::at(&address, SLAB / 2);
    let events = until(&mut volume, |event| matches!(event, Event::LenderUnfit { .. }));
    let said = events.last().unwrap().to_string();
    assert!(said.contains(&address) && said.contains("slabs of 512 KiB now"), "{said}");
    // Time for a few more tries.
    std::thread::sleep(Duration::from_millis(200));
    drop(other);
    let _two = Serving::at(&address, SLAB);
    let events = until(&mut volume, |event| matches!(event, Event::Mended { .. }));
    let is_told = |event: &Event| matches!(event, Event::LenderUnfit { .. });
    assert!(!events.iter().any(is_told), "once is enough: {events:?}");
    assert_eq!(volume.degraded(), (0, 0));
}

/// Who drives it has always something else to do, and never looks whether something has come.
#[test]
fn a_lender_that_nobody_listens_to_is_not_silent() {
    let lender = Serving::at("127.0.0.1:0", SLAB);
    let silence = Duration::from_millis(400);
    let borrow = BorrowOptions { link: LinkChoice::Socket, ..BorrowOptions::default() };
    let options = VolumeOptions { silence, borrow, ..VolumeOptions::default() };
    let mut volume = Volume::open(std::slice::from_ref(&lender.address), SLAB, options).unwrap();
    let memory = Mapping::anonymous(BLOCK_BYTES as usize).unwrap();
    let mut ended = Vec::new();
    volume.write(1, 0, memory.shared()).unwrap();
    volume.read(2, 0, memory.shared()).unwrap();
    let since = Instant::now();
    while since.elapsed() < 3 * silence {
        volume.advance(false, &mut ended);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(ended.len() == 2 && ended.iter().all(|ended| ended.result.is_ok()), "{ended:?}");
    assert!(volume.event().is_none());
}

/// As a lender, until it is asked for a slab.
fn babble(mut stream: TcpStream) -> std::io::Result<()> {
    stream.read_exact(&mut [0; HELLO_BYTES])?;
    stream.write_all(&Hello::new(Role::Lender).encode())?;
    // What its slabs are, and its memory.
    let answers = [SLAB.to_le_bytes().to_vec(), vec![0; 4]];
    for answer in answers.into_iter().chain(std::iter::repeat(vec![7; 3])) {
        let asked = loop {
            let mut asked = [0; HEADER_BYTES];
            stream.read_exact(&mut asked)?;
            let asked = Header::decode(&asked).unwrap();
            stream.read_exact(&mut vec![0; asked.payload_bytes as usize])?;
            if asked.kind == Frame::Call {
                break asked;
            }
        };
        let payload_bytes = answer.len() as u32;
        let head = Header { token: asked.token, payload_bytes, ..Header::new(Frame::CallReply) };
        stream.write_all(&[&head.encode()[..], &answer].concat())?;
    }
    Ok(())
}

#[test]
fn a_lender_whose_answer_makes_no_sense_is_lost() {
    let (one, two) = (Serving::at("127.0.0.1:0", SLAB), Serving::at("127.0.0.1:0", SLAB));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let strange = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || babble(listener.accept().unwrap().0));
    let mut volume = open(&[&one.address, &two.address, &strange], 2);
    // What it had is to be copied to the third one.
    drop(two);
    let events =
        until(&mut volume, |event| matches!(event, Event::LenderLost { lender, .. } if *lender == strange));
    let error = events.iter().find_map(|event| match event {
        Event::LenderLost { lender, error, .. } if *lender == strange => Some(error.to_string()),
        _ => None,
    });
    assert!(error.as_ref().is_some_and(|error| error.contains("makes no sense")), "{error:?}");
    assert!(!volume.core.is_mending());
}
