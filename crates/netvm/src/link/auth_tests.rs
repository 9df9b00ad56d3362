//! The start of a connection and encrypted records, against altered, recorded, cut and random bytes.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use netvm_core::limits::{HELLO_BYTES, RECORD_BYTES_MAX, REKEY_RECORDS};
use netvm_core::opening::{Encryption, Opening, SEALED_HELLO_BYTES, TAG_BYTES};
use netvm_core::sim::Random;
use netvm_core::wire::{Hello, Role};
use netvm_sys::net::Listener;

use super::auth::{self, Connecting, Keys, Unproven};
use super::greeting::{self, Greeted, Greeting, Transport};
use super::sealed::Sealed;
use super::{Caps, Incoming, Link, Loopback, Outgoing, Stream};
use crate::error::{Error, Result};
use crate::security::{Protection, Secret, Security};

fn secret() -> Secret {
    Secret::from_bytes([42; 32])
}

fn security(encryption: Encryption) -> Security {
    Security { secret: Some(secret()), encryption, insecure: false }
}

fn opening() -> Opening {
    Opening::new(Role::Borrower, Encryption::IfAsked)
}

fn start() -> (Connecting, [u8; HELLO_BYTES]) {
    Connecting::start(&secret(), opening()).unwrap()
}

fn answer(message: &[u8; HELLO_BYTES]) -> Result<(Keys, [u8; HELLO_BYTES]), Unproven> {
    auth::answer(&secret(), message, Opening::new(Role::Lender, Encryption::IfAsked))
}

fn keys() -> (Keys, Keys) {
    let (connecting, message) = start();
    let (there, message) = answer(&message).unwrap();
    (connecting.finish(&message).unwrap(), there)
}

/// The messages spelled out with a plain Noise library: what later versions must still understand.
#[test]
fn golden_keys() {
    use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
    let mut noise = snow::Builder::new("Noise_NNpsk0_25519_AESGCM_BLAKE2s".parse().unwrap())
        .psk(0, secret().as_bytes())
        .unwrap()
        .prologue(b"netvm handshake 1netvm\r\n\x1a\x01\0\x01\0\x01\0\x03\0")
        .unwrap()
        .fixed_ephemeral_key_for_testing_only(&[1; 32])
        .build_initiator()
        .unwrap();
    let mut message = [0; 48];
    noise.write_message(&[], &mut message).unwrap();
    let mut first = [0; HELLO_BYTES];
    first[..16].copy_from_slice(&Opening { version: 1, version_min: 1, ..opening() }.encode());
    first[16..].copy_from_slice(&message);
    let hex: String = first[16..].iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(
        hex,
        "a4e09292b651c278b9772c569f5fa9bb13d906b46ab68c9df9dc2b4409f8a209fc07349878d0213556264aec1d5a09e3"
    );
    let (mut there, reply) = answer(&first).unwrap();
    noise.read_message(&reply[16..], &mut [0; 48]).unwrap();
    let (one, _) = noise.dangerously_get_raw_split();
    // Record 0, by hand.
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &one).unwrap());
    let mut sealed = Hello::new(Role::Borrower).encode().to_vec();
    let nonce = Nonce::assume_unique_for_key([0; 12]);
    key.seal_in_place_append_tag(nonce, Aad::from(b"hello"), &mut sealed).unwrap();
    let hello = there.open_hello(sealed.try_into().unwrap()).unwrap();
    assert_eq!(hello, Hello::new(Role::Borrower).encode());
}

#[test]
fn both_sides_get_the_same_keys_and_no_two_connections_do() {
    let hello = Hello::new(Role::Borrower).encode();
    let mut seen = Vec::new();
    for _ in 0..20 {
        let (mut here, mut there) = keys();
        let sealed = here.seal_hello(&hello);
        assert_eq!(there.open_hello(sealed), Ok(hello));
        // The two directions have different keys, too.
        let back = there.seal_hello(&hello);
        assert_eq!(here.open_hello(back), Ok(hello));
        seen.extend([sealed, back]);
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 40);
}

#[test]
fn a_wrong_secret_is_found_at_the_first_message() {
    let (_, message) = start();
    for bit in [0, 100, 255] {
        let mut bytes = *secret().as_bytes();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let other = Secret::from_bytes(bytes);
        assert!(auth::answer(&other, &message, opening()).is_err());
        let (connecting, message) = Connecting::start(&other, opening()).unwrap();
        assert!(answer(&message).is_err());
        // Nor does an answerer without the secret get through.
        let (_, reply) = auth::answer(&other, &message, opening()).unwrap();
        assert!(start().0.finish(&reply).is_err());
        drop(connecting);
    }
}

#[test]
fn every_bit_of_the_handshake_counts() {
    for bit in 0..HELLO_BYTES * 8 {
        let (_, mut message) = start();
        message[bit / 8] ^= 1 << (bit % 8);
        // The top bit of a public key does not change the key, but it is hashed all the same.
        assert!(answer(&message).is_err(), "opening, bit {bit}");
    }
    // The answer's first 16 bytes are not believed, so they need no protection.
    for bit in 16 * 8..HELLO_BYTES * 8 {
        let (connecting, message) = start();
        let mut reply = answer(&message).unwrap().1;
        reply[bit / 8] ^= 1 << (bit % 8);
        assert!(connecting.finish(&reply).is_err(), "answer, bit {bit}");
    }
    for bit in 0..SEALED_HELLO_BYTES * 8 {
        let (mut here, mut there) = keys();
        let mut sealed = here.seal_hello(&[7; HELLO_BYTES]);
        sealed[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(there.open_hello(sealed), Err(Unproven), "hello, bit {bit}");
    }
}

#[test]
fn recorded_messages_prove_nothing() {
    let (connecting, message) = start();
    let (mut there, reply) = answer(&message).unwrap();
    let mut here = connecting.finish(&reply).unwrap();
    let hello = here.seal_hello(&[1; HELLO_BYTES]);
    there.open_hello(hello).unwrap();
    // The opening again: it is answered, but with new keys, so the recorded hello does not fit.
    let (mut again, other_reply) = answer(&message).unwrap();
    assert_ne!(reply, other_reply);
    assert_eq!(again.open_hello(hello), Err(Unproven));
    // An old answer does not fit a new opening.
    assert!(start().0.finish(&reply).is_err());
    // Sent back to whom they came from.
    let (connecting, message) = start();
    assert!(connecting.finish(&message).is_err());
    assert!(answer(&reply).is_err());
    assert_eq!(here.open_hello(hello), Err(Unproven));
}

#[test]
fn random_messages_are_refused_cheaply() {
    let mut random = Random::new(17);
    let mut message = [0; HELLO_BYTES];
    let good = start().1;
    for round in 0..50_000 {
        message.fill_with(|| random.draw() as u8);
        match round % 3 {
            // Nothing but noise behind a good beginning; a good public key; two good halves of different messages.
            0 => message[..16].copy_from_slice(&good[..16]),
            1 => message[..48].copy_from_slice(&good[..48]),
            _ => message[40..].copy_from_slice(&good[40..]),
        }
        assert!(answer(&message).is_err());
    }
    // The parser in front of it, with any bytes at all.
    for _ in 0..1_000_000 {
        for word in message.chunks_mut(8) {
            word.copy_from_slice(&random.draw().to_le_bytes());
        }
        if random.once_in(2) {
            message[..12].copy_from_slice(&good[..12]);
        }
        if let (Ok(Some(opening)), true) = (Opening::decode(&message), random.once_in(100)) {
            assert!(opening.version_min <= opening.version && answer(&message).is_err());
        }
        let _ = Hello::decode(&message);
    }
}

#[test]
fn a_refusal_costs_much_less_than_an_answer() {
    let (_, good) = start();
    let mut bad = good;
    bad[63] ^= 1;
    let time = |message: &[u8; HELLO_BYTES]| {
        let round = || {
            let start = Instant::now();
            let _ = answer(message);
            start.elapsed()
        };
        (0..200).map(|_| round()).min().unwrap()
    };
    let (refusal, full) = (time(&bad), time(&good));
    println!("refused in {refusal:?}, answered in {full:?}");
    assert!(refusal * 3 < full, "{refusal:?} {full:?}");
}

/// Keys are replaced on the way, on both sides at the same record.
#[test]
fn keys_are_replaced() {
    let (mut here, mut there) = keys();
    let (mut first, mut border) = (None, None);
    for number in 0..REKEY_RECORDS + 3 {
        let mut bytes = *b"sixteen bytes   plus a tag......";
        let tag = here.outgoing.seal(b"", &mut bytes[..16]).unwrap();
        bytes[16..].copy_from_slice(&tag);
        match number {
            0 => first = Some(bytes),
            REKEY_RECORDS => border = Some(bytes),
            _ => {}
        }
        assert_eq!(there.incoming.open(b"", &mut bytes), Ok(16));
        assert_eq!(&bytes[..16], b"sixteen bytes   ");
    }
    assert_ne!(first, border);
}

/// Both ends of a link in memory whose bytes are there to be looked at and changed.
#[derive(Clone, Default)]
struct Pipe(Arc<Mutex<VecDeque<u8>>>);

struct Ends {
    outgoing: Pipe,
    incoming: Pipe,
    fd: Loopback,
}

impl Link for Ends {
    fn caps(&self) -> Caps {
        Caps { name: "pipe", remote: false }
    }

    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        let mut bytes = vec![0; pieces.total_bytes()];
        pieces.gather(0, &mut bytes)?;
        self.outgoing.0.lock().unwrap().extend(&bytes);
        Ok(bytes.len())
    }

    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        let mut bytes = self.incoming.0.lock().unwrap();
        let count = pieces.scatter(0, bytes.make_contiguous())?;
        bytes.drain(..count);
        if count == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(count) }
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.fd.wait_fd()
    }
}

/// A sealed link each way, and the bytes on their way from the first to the second.
fn pipe() -> (Sealed<Ends>, Sealed<Ends>, Pipe) {
    let (there, back) = (Pipe::default(), Pipe::default());
    let fds = Loopback::pair().unwrap();
    let one = Ends { outgoing: there.clone(), incoming: back.clone(), fd: fds.0 };
    let two = Ends { outgoing: back, incoming: there.clone(), fd: fds.1 };
    let (here, other) = keys();
    (Sealed::new(one, here), Sealed::new(two, other), there)
}

fn post(link: &mut impl Link, bytes: &[u8]) {
    let mut out = Outgoing::new();
    out.bytes(bytes);
    assert_eq!(link.post(&out).unwrap(), bytes.len());
}

/// All that comes, until there is no more or something is wrong.
fn drain(link: &mut impl Link) -> (Vec<u8>, io::ErrorKind) {
    let mut all = Vec::new();
    loop {
        let mut bytes = [0; 5000];
        let mut into = Incoming::new();
        into.bytes(&mut bytes);
        match link.poll(&mut into) {
            Ok(0) => return (all, io::ErrorKind::UnexpectedEof),
            Ok(count) => all.extend_from_slice(&bytes[..count]),
            Err(error) => return (all, error.kind()),
        }
    }
}

#[test]
fn bytes_on_the_way_tell_nothing_and_lengths_are_bounded() {
    let (mut one, mut two, there) = pipe();
    let mut random = Random::new(3);
    for len in [1, 15, 16, 17, RECORD_BYTES_MAX - 1, RECORD_BYTES_MAX, RECORD_BYTES_MAX + 1, 300_000] {
        let bytes: Vec<u8> = (0..len).map(|_| random.draw() as u8).collect();
        post(&mut one, &bytes);
        let sealed: Vec<u8> = there.0.lock().unwrap().iter().copied().collect();
        let records = len.div_ceil(RECORD_BYTES_MAX);
        assert_eq!(sealed.len(), len + records * (2 + TAG_BYTES));
        if len > 16 {
            assert!(!sealed.windows(16).any(|window| window == &bytes[..16]));
        }
        assert!(drain(&mut two) == (bytes, io::ErrorKind::WouldBlock));
    }
}

#[test]
fn every_bit_of_a_record_counts() {
    let text = b"a page, say, and behind it another";
    let total = text.len() + 2 + TAG_BYTES;
    for bit in 0..total * 8 {
        let (mut one, mut two, there) = pipe();
        post(&mut one, text);
        there.0.lock().unwrap()[bit / 8] ^= 1 << (bit % 8);
        // Behind it there is more: a length that was made larger must not wait for ever.
        for _ in 0..4 {
            post(&mut one, &[9; RECORD_BYTES_MAX]);
        }
        assert_eq!(drain(&mut two), (Vec::new(), io::ErrorKind::InvalidData), "bit {bit}");
        assert_eq!(drain(&mut two).1, io::ErrorKind::InvalidData, "it stays so");
        assert!(two.has_received(), "the error is there to be taken");
    }
}

#[test]
fn records_cannot_be_repeated_exchanged_left_out_or_sent_back() {
    let record = |link: &mut Sealed<Ends>, wire: &Pipe, byte| {
        post(link, &[byte; 100]);
        wire.0.lock().unwrap().drain(..).collect::<Vec<u8>>()
    };
    for order in [&[0, 0][..], &[1], &[1, 0], &[0, 2], &[0, 1, 1]] {
        let (mut one, mut two, there) = pipe();
        let records: Vec<_> = (0..3).map(|byte| record(&mut one, &there, byte)).collect();
        for &index in order {
            there.0.lock().unwrap().extend(&records[index]);
        }
        let (bytes, end) = drain(&mut two);
        let good = order.iter().enumerate().take_while(|(place, index)| place == *index).count();
        assert_eq!((bytes.len(), end), (good * 100, io::ErrorKind::InvalidData), "{order:?}");
    }
    let (mut one, mut two, there) = pipe();
    let bytes = record(&mut one, &there, 7);
    two.link().outgoing.0.lock().unwrap().extend(&bytes);
    assert_eq!(drain(&mut one), (Vec::new(), io::ErrorKind::InvalidData));
    assert_eq!(drain(&mut two).1, io::ErrorKind::WouldBlock);
}

#[test]
fn random_records_end_the_session() {
    let mut random = Random::new(23);
    for _ in 0..20_000 {
        let (mut one, mut two, there) = if random.once_in(50) { pipe() } else { continue };
        post(&mut one, b"good");
        let len = random.below(70_000) as usize;
        there.0.lock().unwrap().extend((0..len + 2 * RECORD_BYTES_MAX).map(|_| random.draw() as u8));
        assert_eq!(drain(&mut two), (b"good".to_vec(), io::ErrorKind::InvalidData));
    }
}

/// A server that answers one connection, as lenders and nodes do; what it gets there, and why not.
fn serve(listener: Listener, security: Security) -> std::thread::JoinHandle<Result<Transport, &'static str>> {
    std::thread::spawn(move || {
        let deadline = Instant::now() + Duration::from_secs(5);
        let mut waiting = None;
        while Instant::now() < deadline {
            if waiting.is_none() {
                waiting = listener.accept().unwrap().map(|stream| Greeting::new(stream, Role::Lender));
            }
            match waiting.take().map(|greeting| greeting.progress(&security)) {
                Some(Greeted::Waiting(greeting)) => waiting = Some(greeting),
                Some(Greeted::Hello(arrival)) => return arrival.accept().ok_or("no agreement"),
                Some(Greeted::Gone(why)) => return Err(why),
                None => {}
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Err("too late")
    })
}

/// Connects with `ours` to a server with `theirs`: what each gets.
fn meet(ours: &Security, theirs: &Security) -> (Result<Protection>, Result<Protection, &'static str>) {
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.address().to_string();
    let server = serve(listener, theirs.clone());
    let timeout = Duration::from_secs(4);
    let here = greeting::connect(&address, &Hello::new(Role::Borrower), timeout, ours);
    let here = here.map(|(transport, _)| transport.protection());
    (here, server.join().unwrap().map(|transport| transport.protection()))
}

#[test]
fn both_sides_agree_or_say_why_not() {
    use Encryption::{Always, IfAsked, Never};
    let open = Security::default();
    let insecure = Security { insecure: true, ..Security::default() };
    assert_eq!(meet(&open, &insecure), (Ok(Protection::None), Ok(Protection::None)));
    for (ours, theirs, protection) in [
        (Never, Never, Protection::Authenticated),
        (IfAsked, IfAsked, Protection::Authenticated),
        (IfAsked, Never, Protection::Authenticated),
        (Always, IfAsked, Protection::Encrypted),
        (IfAsked, Always, Protection::Encrypted),
        (Always, Always, Protection::Encrypted),
    ] {
        assert_eq!(meet(&security(ours), &security(theirs)), (Ok(protection), Ok(protection)));
    }
    for (ours, theirs) in [(Never, Always), (Always, Never)] {
        let (here, there) = meet(&security(ours), &security(theirs));
        assert!(matches!(here, Err(Error::NoEncryption { .. })) && there == Err("no agreement"));
    }
    let other = Security { secret: Some(Secret::from_bytes([43; 32])), ..Security::default() };
    let (here, there) = meet(&other, &security(IfAsked));
    assert!(matches!(here, Err(Error::WrongSecret { .. })) && there == Err("its secret is not ours"));
    let (here, there) = meet(&open, &security(IfAsked));
    assert!(matches!(here, Err(Error::NeedsSecret { .. })) && there == Err("it has proved no secret"));
    let (here, there) = meet(&security(IfAsked), &open);
    assert!(matches!(here, Err(Error::NoSecret { .. })), "{here:?}");
    assert_eq!(there, Err("it wants a secret proved, and we have none"));
}

/// Somebody in the middle: hands on what both say, changed by `change(number of the message, bytes)`.
fn man_in_the_middle(
    address: String,
    mut change: impl FnMut(usize, &mut Vec<u8>) + Send + 'static,
) -> (String, std::thread::JoinHandle<()>) {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = listener.local_addr().unwrap().to_string();
    let thread = std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut server = std::net::TcpStream::connect(address).unwrap();
        for (number, bytes) in
            [HELLO_BYTES, HELLO_BYTES, SEALED_HELLO_BYTES, SEALED_HELLO_BYTES].iter().enumerate()
        {
            let (from, to) =
                if number % 2 == 0 { (&mut client, &mut server) } else { (&mut server, &mut client) };
            let mut message = vec![0; *bytes];
            if from.read_exact(&mut message).is_err() {
                return;
            }
            change(number, &mut message);
            if to.write_all(&message).is_err() {
                return;
            }
        }
        // Until both have seen what they got.
        let _ = client.read(&mut [0]);
    });
    (ours, thread)
}

fn meet_with(
    ours: &Security,
    theirs: &Security,
    change: impl FnMut(usize, &mut Vec<u8>) + Send + 'static,
) -> (Result<Protection>, bool) {
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let (address, middle) = man_in_the_middle(listener.address().to_string(), change);
    let server = serve(listener, theirs.clone());
    let timeout = Duration::from_millis(500);
    let here = greeting::connect(&address, &Hello::new(Role::Borrower), timeout, ours);
    let here = here.map(|(transport, _)| transport.protection());
    let there = server.join().unwrap().is_ok();
    middle.join().unwrap();
    (here, there)
}

#[test]
fn downgrades_fail() {
    let (ours, theirs) = (security(Encryption::Always), security(Encryption::IfAsked));
    assert_eq!(meet_with(&ours, &theirs, |_, _| {}), (Ok(Protection::Encrypted), true));
    // The wish to encrypt, the version, the role.
    for (byte, value) in [(14, 1), (14, 3), (8, 9), (12, 3)] {
        let (here, there) = meet_with(&ours, &theirs, move |number, bytes| {
            if number == 0 {
                bytes[byte] = value;
            }
        });
        assert!(matches!(here, Err(Error::WrongSecret { .. })) && !there, "{here:?}");
    }
    // What the answer says in clear makes no difference.
    let changed = |number, bytes: &mut Vec<u8>| {
        if number == 1 {
            bytes[14] = 1;
            bytes[12] = 9;
        }
    };
    assert_eq!(meet_with(&ours, &theirs, changed), (Ok(Protection::Encrypted), true));
    // "We need no proof": a hello in place of the answer.
    let (here, there) = meet_with(&ours, &theirs, |number, bytes| {
        if number == 1 {
            bytes.copy_from_slice(&Hello::new(Role::Lender).encode());
        }
    });
    assert!(matches!(here, Err(Error::NoSecret { .. })) && !there, "{here:?}");
    // A hello to the server in place of the proof.
    let (here, there) = meet_with(&ours, &theirs, |number, bytes| {
        if number == 0 {
            bytes.copy_from_slice(&Hello::new(Role::Borrower).encode());
        }
    });
    assert!(here.is_err() && !there, "{here:?}");
    // Sealed hellos with one bit changed.
    for sealed in [2, 3] {
        let (here, there) = meet_with(&ours, &theirs, move |number, bytes| {
            if number == sealed {
                bytes[30] ^= 4;
            }
        });
        assert!(here.is_err() && there == (sealed == 3), "{here:?}");
    }
}

#[test]
fn a_greeting_cut_at_any_byte_opens_nothing() {
    let theirs = security(Encryption::IfAsked);
    for cut in 0..HELLO_BYTES + SEALED_HELLO_BYTES {
        let (client, server) = Stream::pair().unwrap();
        let mut greeting = Some(Greeting::new(server, Role::Lender));
        let step = |greeting: &mut Option<Greeting>| match greeting.take().unwrap().progress(&theirs) {
            Greeted::Waiting(waiting) => {
                *greeting = Some(waiting);
                None
            }
            Greeted::Hello(_) => Some("hello"),
            Greeted::Gone(why) => Some(why),
        };
        let (connecting, message) = start();
        let send = |bytes: &[u8]| {
            let mut out = Outgoing::new();
            out.bytes(bytes);
            let _ = client.send(&out);
        };
        send(&message[..cut.min(HELLO_BYTES)]);
        assert_eq!(step(&mut greeting), None);
        if cut > HELLO_BYTES {
            let mut reply = [0; HELLO_BYTES];
            let mut into = Incoming::new();
            into.bytes(&mut reply);
            assert_eq!(client.receive(&mut into).unwrap(), HELLO_BYTES);
            let sealed = connecting.finish(&reply).unwrap().seal_hello(&Hello::new(Role::Borrower).encode());
            send(&sealed[..cut - HELLO_BYTES]);
            assert_eq!(step(&mut greeting), None);
        }
        drop(client);
        assert_eq!(step(&mut greeting), Some("it closed the connection"), "cut after {cut} bytes");
    }
}
