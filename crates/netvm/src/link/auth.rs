//! The proof that both sides know the same secret, and the keys that come out of it: Noise NNpsk0, without input or output.
//!
//! Why Noise and not TLS 1.3 with a pre-shared key: there are no certificates, names or resumption here to configure and get wrong,
//! and a wrong secret is found with two hashes and one block of AES, before any public-key work. What TLS would add – agility,
//! records of its own – would have to be switched off or copied around.

use netvm_core::limits::{HELLO_BYTES, REKEY_RECORDS};
use netvm_core::opening::{Opening, PROLOGUE_BYTES, PROOF_BYTES, SEALED_HELLO_BYTES, TAG_BYTES};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use snow::{Builder, HandshakeState};
use zeroize::Zeroizing;

use crate::security::Secret;

const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_BLAKE2s";
/// Before the opening's first bytes in the prologue.
const CONTEXT: &[u8] = b"netvm handshake 1";
const HELLO_CONTEXT: &[u8] = b"hello";

/// The peer has not proved that it knows the secret, or bytes were changed on the way: there is no telling which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unproven;

/// One direction's key and how often it was used. A number is used once: there is no way to set the count.
pub(crate) struct RecordKey {
    key: LessSafeKey,
    /// For whoever goes on with the session: the kernel.
    bytes: Zeroizing<[u8; 32]>,
    count: u64,
}

impl RecordKey {
    fn new(bytes: &[u8; 32]) -> Self {
        Self { key: key(bytes), bytes: Zeroizing::new(*bytes), count: 0 }
    }

    /// The key, and the number of the next record.
    pub(crate) fn state(&self) -> (&[u8; 32], u64) {
        (&self.bytes, self.count)
    }

    /// Encrypts `bytes` where they are. `None` when the numbers are used up, after 2^64 records.
    pub(crate) fn seal(&mut self, context: &[u8], bytes: &mut [u8]) -> Option<[u8; TAG_BYTES]> {
        let nonce = self.next_nonce()?;
        let tag = self.key.seal_in_place_separate_tag(nonce, Aad::from(context), bytes).ok()?;
        tag.as_ref().try_into().ok()
    }

    /// Decrypts `bytes`, with the tag at their end, where they are; returns the length without the tag.
    pub(crate) fn open(&mut self, context: &[u8], bytes: &mut [u8]) -> Result<usize, Unproven> {
        let nonce = self.next_nonce().ok_or(Unproven)?;
        let opened = self.key.open_in_place(nonce, Aad::from(context), bytes);
        opened.map(|opened| opened.len()).map_err(|_| Unproven)
    }

    fn next_nonce(&mut self) -> Option<Nonce> {
        // The last number is the one that makes new keys.
        if self.count == u64::MAX {
            return None;
        }
        if self.count > 0 && self.count.is_multiple_of(REKEY_RECORDS) {
            self.replace_key()?;
        }
        let nonce = nonce(self.count);
        self.count += 1;
        Some(nonce)
    }

    /// As Noise's `Rekey`: who learns the new key cannot read what the old one has protected.
    fn replace_key(&mut self) -> Option<()> {
        let mut bytes = Zeroizing::new([0; 32]);
        let _tag = self.key.seal_in_place_separate_tag(nonce(u64::MAX), Aad::empty(), &mut *bytes).ok()?;
        (self.key, self.bytes) = (key(&bytes), bytes);
        Some(())
    }
}

fn key(bytes: &[u8; 32]) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, bytes).expect("32 bytes"))
}

/// As in Noise with AESGCM: four zeros and the number, big-endian.
fn nonce(number: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&number.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// The keys of a connection. Each connection, so each rail of a session, has its own.
pub(crate) struct Keys {
    pub(crate) outgoing: RecordKey,
    pub(crate) incoming: RecordKey,
}

impl Keys {
    fn of(mut noise: HandshakeState, connecting: bool) -> Self {
        // Zeroizing a copy: the originals are in the state that is dropped here.
        let (one, two) = noise.dangerously_get_raw_split();
        let (one, two) = (Zeroizing::new(one), Zeroizing::new(two));
        let (outgoing, incoming) = if connecting { (&one, &two) } else { (&two, &one) };
        Self { outgoing: RecordKey::new(outgoing), incoming: RecordKey::new(incoming) }
    }

    /// Seals a hello: the first thing that each key is used for.
    pub(crate) fn seal_hello(&mut self, hello: &[u8; HELLO_BYTES]) -> [u8; SEALED_HELLO_BYTES] {
        let mut sealed = [0; SEALED_HELLO_BYTES];
        let (bytes, tag) = sealed.split_at_mut(HELLO_BYTES);
        bytes.copy_from_slice(hello);
        tag.copy_from_slice(&self.outgoing.seal(HELLO_CONTEXT, bytes).expect("a fresh key"));
        sealed
    }

    /// Opens the peer's hello.
    pub(crate) fn open_hello(
        &mut self,
        mut sealed: [u8; SEALED_HELLO_BYTES],
    ) -> Result<[u8; HELLO_BYTES], Unproven> {
        self.incoming.open(HELLO_CONTEXT, &mut sealed)?;
        sealed[..HELLO_BYTES].try_into().map_err(|_| Unproven)
    }
}

fn builder<'a>(secret: &'a Secret, prologue: &'a [u8]) -> Builder<'a> {
    let pattern = PATTERN.parse().expect("a pattern that this crate has");
    let builder = Builder::new(pattern).psk(0, secret.as_bytes()).and_then(|with| with.prologue(prologue));
    builder.expect("set once each")
}

fn prologue(opening: &[u8; HELLO_BYTES]) -> Vec<u8> {
    [CONTEXT, &opening[..PROLOGUE_BYTES]].concat()
}

/// The connecting side.
pub(crate) struct Connecting(Box<HandshakeState>);

impl Connecting {
    /// Makes the first message; `None` when the system has no random numbers.
    pub(crate) fn start(secret: &Secret, opening: Opening) -> Option<(Self, [u8; HELLO_BYTES])> {
        let mut message = [0; HELLO_BYTES];
        message[..PROLOGUE_BYTES].copy_from_slice(&opening.encode());
        let prologue = prologue(&message);
        let mut noise = builder(secret, &prologue).build_initiator().ok()?;
        let written = noise.write_message(&[], &mut message[PROLOGUE_BYTES..]).ok()?;
        debug_assert_eq!(written, PROOF_BYTES);
        Some((Self(Box::new(noise)), message))
    }

    /// Takes the answer: the peer knows the secret.
    pub(crate) fn finish(mut self, answer: &[u8; HELLO_BYTES]) -> Result<Keys, Unproven> {
        self.0.read_message(&answer[PROLOGUE_BYTES..], &mut [0; PROOF_BYTES]).map_err(|_| Unproven)?;
        Ok(Keys::of(*self.0, true))
    }
}

/// The side that is connected to: checks an opening and answers it. A wrong one costs a few hashes.
///
/// What it returns does not prove yet that the peer is there now: an opening may be a recorded one. The peer's sealed hello does.
pub(crate) fn answer(
    secret: &Secret,
    opening: &[u8; HELLO_BYTES],
    ours: Opening,
) -> Result<(Keys, [u8; HELLO_BYTES]), Unproven> {
    let prologue = prologue(opening);
    let mut noise = builder(secret, &prologue).build_responder().map_err(|_| Unproven)?;
    noise.read_message(&opening[PROLOGUE_BYTES..], &mut [0; PROOF_BYTES]).map_err(|_| Unproven)?;
    let mut message = [0; HELLO_BYTES];
    message[..PROLOGUE_BYTES].copy_from_slice(&ours.encode());
    noise.write_message(&[], &mut message[PROLOGUE_BYTES..]).map_err(|_| Unproven)?;
    Ok((Keys::of(noise, false), message))
}
