//! The greeting from both sides: before the secret is proved, by whom it is not known to, and after, by whom it is.

use std::time::Duration;

use netvm_core::limits::HELLO_BYTES;
use netvm_core::opening::{Encryption, Opening};
use netvm_core::wire::{Hello, Role};

use super::Input;
use crate::link::auth::{self, Connecting, Keys};
use crate::link::greeting::{self, Greeted, Greeting, Transport};
use crate::link::sealed::Sealed;
use crate::link::together::alone;
use crate::link::{Incoming, Link, Outgoing, Stream};
use crate::security::{Secret, Security};

const ROLES: [Role; 4] = [Role::Borrower, Role::Observer, Role::Node, Role::Lender];
const WAYS: [Encryption; 3] = [Encryption::Never, Encryption::IfAsked, Encryption::Always];

fn secret() -> Secret {
    Secret::from_bytes([7; 32])
}

fn send(stream: &Stream, bytes: &[u8]) {
    let mut out = Outgoing::new();
    out.bytes(bytes);
    let _ = stream.send(&out);
}

fn receive<const N: usize>(stream: &Stream) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let mut into = Incoming::new();
    into.bytes(&mut bytes);
    let received = stream.receive(&mut into).ok()?;
    (received == N).then_some(bytes)
}

/// Takes what a session would get; returns it.
fn drain(link: &mut impl Link) -> Vec<u8> {
    let mut all = Vec::new();
    for _ in 0..64 {
        let mut bytes = vec![0; 5000];
        let mut into = Incoming::new();
        into.bytes(&mut bytes);
        match link.poll(&mut into) {
            Ok(received) if received > 0 => all.extend_from_slice(&bytes[..received]),
            _ => break,
        }
    }
    all
}

/// See the module.
///
/// # Panics
/// When something is wrong.
pub fn handshake(data: &[u8]) {
    let mut input = Input(data);
    let Ok((ours, theirs)) = Stream::pair() else { return };
    let (mode, encryption) = (input.below(5), WAYS[input.below(3)]);
    let known = Security { secret: Some(secret()), encryption, ..Security::default() };
    match mode {
        0 => serve(ours, &theirs, &Security::default(), input),
        1 => serve(ours, &theirs, &known, input),
        2 => serve_who_knows(ours, theirs, &known, input),
        3 | 4 => {
            // What a hostile lender says is there before we ask. Without time nobody waits.
            send(&theirs, input.bytes(1000));
            let security = if mode == 3 { Security::default() } else { known };
            let hello = Hello::new(Role::Borrower);
            let done = alone(async |wait| {
                greeting::greet(wait, ours, "fuzz", &hello, Duration::ZERO, &security).await
            });
            if let Ok((mut transport, _)) = done {
                assert!(mode == 3, "nobody has proved the secret");
                drain(&mut transport);
            }
        }
        _ => {}
    }
}

/// A peer that sends these bytes, in pieces.
fn serve(stream: Stream, peer: &Stream, security: &Security, mut input: Input<'_>) {
    let mut greeting = Greeting::new(stream, ROLES[input.below(4)]);
    while !input.is_empty() {
        let piece = 1 + input.below(200);
        send(peer, input.bytes(piece));
        match greeting.progress(security) {
            Greeted::Waiting(same) => greeting = same,
            Greeted::Hello(arrival) => {
                assert!(security.secret.is_none(), "it was never proved");
                if let Some(mut transport) = arrival.accept() {
                    send(peer, input.bytes(1000));
                    drain(&mut transport);
                }
                return;
            }
            Greeted::Gone(_) => return,
        }
    }
}

/// A peer that knows the secret and then says what it likes.
fn serve_who_knows(stream: Stream, peer: Stream, security: &Security, mut input: Input<'_>) {
    let role = ROLES[input.below(4)];
    let mut greeting = Greeting::new(stream, role);
    let opening = Opening {
        version: 2 + u16::from(input.byte()) % 2,
        version_min: u16::from(input.byte()) % 4,
        role: u16::from(input.byte()) % 6,
        encryption: WAYS[input.below(3)],
    };
    let Some((connecting, message)) = Connecting::start(&secret(), opening) else { return };
    send(&peer, &message);
    let Greeted::Waiting(waiting) = greeting.progress(security) else { return };
    greeting = waiting;
    let Some(answer) = receive::<HELLO_BYTES>(&peer) else { return };
    let Ok(mut keys) = connecting.finish(&answer) else { panic!("our own answer is wrong") };
    let hello = hello(&mut input);
    let mut sealed = keys.seal_hello(&hello);
    let at = input.below(255);
    if let Some(byte) = sealed.get_mut(at) {
        *byte ^= input.byte();
    }
    send(&peer, &sealed);
    match greeting.progress(security) {
        Greeted::Hello(arrival) => {
            let _ = arrival.hello;
            let Some(mut transport) = arrival.accept() else { return };
            let Some(sealed) = receive(&peer) else { return };
            assert!(keys.open_hello(sealed).is_ok(), "our own hello is wrong");
            records(&mut transport, peer, keys, input);
        }
        Greeted::Waiting(_) => panic!("the hello is all there"),
        Greeted::Gone(_) => client_hears(&hello, security),
    }
}

/// Bytes behind the greeting: sound records, or anything.
fn records(transport: &mut Transport, peer: Stream, keys: Keys, mut input: Input<'_>) {
    if let (Transport::Sealed(_), 0) = (&*transport, input.below(2)) {
        let mut sealed = Sealed::new(peer, keys);
        let piece = input.piece();
        let mut out = Outgoing::new();
        out.bytes(piece);
        let sent = if piece.is_empty() { 0 } else { sealed.post(&out).unwrap_or(0) };
        assert_eq!(drain(transport), piece[..sent], "changed on the way");
        send(sealed.link(), input.bytes(1000));
        assert_eq!(drain(transport), [], "nobody sealed that");
    } else {
        send(&peer, input.bytes(1000));
        drain(transport);
    }
}

/// The same hello as an answer, from a lender that knows the secret.
fn client_hears(hello: &[u8; HELLO_BYTES], security: &Security) {
    let opening = Opening::new(Role::Borrower, security.encryption);
    let Some((connecting, message)) = Connecting::start(&secret(), opening) else { return };
    let answered = auth::answer(&secret(), &message, Opening::new(Role::Lender, security.encryption));
    let Ok((mut theirs, answer)) = answered else { panic!("our own opening is wrong") };
    let Ok(mut ours) = connecting.finish(&answer) else { panic!("our own answer is wrong") };
    let opened = ours.open_hello(theirs.seal_hello(hello));
    assert_eq!(opened.ok().as_ref(), Some(hello));
    let _ = Hello::decode(hello);
}

/// A hello that is mostly sound, or anything.
fn hello(input: &mut Input<'_>) -> [u8; HELLO_BYTES] {
    if input.below(2) == 0 {
        return input.array();
    }
    let mut hello = Hello::new(ROLES[input.below(4)]).encode();
    for _ in 0..input.below(4) {
        hello[input.below(HELLO_BYTES)] = input.byte();
    }
    hello
}
