//! A borrower's reads by datagrams, with answers of any content, in any order, at any time.

use std::collections::BTreeMap;

use netvm_core::slab::datagram::{
    ANSWER_BYTES, Answer, Header, Kind, PAGE_BYTES, READ_BYTES_MAX, Read, Reads, Request,
};

use super::Input;

/// Places are compared in pieces of so many bytes, of which all answers are multiples.
const PIECE_BYTES: u32 = 8;

/// `| key and packets 10 | operation 1 | its bytes |` and so on. Answers are often those of what was asked, changed in a bit or not.
///
/// # Panics
/// When something is wrong.
pub fn datagrams(data: &[u8]) {
    let mut input = Input(data);
    let packet_bytes_max = [1420, 1500, 9000][input.below(3)];
    let sequence = u64::from_le_bytes(input.array());
    let Some(mut reads) = Reads::new([7; 16], sequence, input.below(2) == 1, packet_bytes_max) else {
        return;
    };
    let (mut now, mut next, mut sent) = (0u64, 0, Vec::new());
    // What is missing of each read.
    let mut open: BTreeMap<u64, Vec<bool>> = BTreeMap::new();
    let ended = |open: &mut BTreeMap<u64, Vec<bool>>, read: Read<()>, whole: bool| {
        let pieces = open.remove(&read.token).expect("a read that has ended before");
        assert!(!whole || pieces.iter().all(|&there| there), "a part is missing");
    };
    while !input.is_empty() {
        match input.below(8) {
            0 | 1 => {
                let (slab, page) = (input.below(3) as u32, input.byte());
                let bytes = [PAGE_BYTES, READ_BYTES_MAX, 0, 100][input.below(4)];
                let offset = u32::from(page) * PAGE_BYTES;
                if !reads.can(now, offset.into(), bytes) {
                    continue;
                }
                for request in reads.ask(now, next, slab, offset, bytes, ()) {
                    assert_eq!(Request::decode(&request.encode()), Some(request));
                    sent.extend(request.header.answers(Kind::ByKernel));
                }
                open.insert(next, vec![false; (bytes / PIECE_BYTES) as usize]);
                next += 1;
            }
            2 | 3 => {
                let mut bytes = match sent.is_empty() || input.below(8) == 0 {
                    true => input.array::<ANSWER_BYTES>(),
                    false => sent[input.below(sent.len())].encode(),
                };
                if input.below(4) == 0 {
                    bytes[input.below(ANSWER_BYTES)] ^= 1 << input.below(8);
                }
                let Some(header) = Header::decode(&bytes) else { continue };
                let count = ANSWER_BYTES + header.bytes as usize - input.below(2).min(header.bytes as usize);
                match reads.answer(now, &header, count) {
                    (read, Answer::Bytes(place)) => {
                        assert_eq!(read, place.read);
                        let token = reads.get(read).expect("an answer to nothing").token;
                        let pieces = open.get_mut(&token).expect("an answer to what has ended");
                        let at = (place.at / PIECE_BYTES) as usize;
                        for piece in &mut pieces[at..][..(place.bytes / PIECE_BYTES) as usize] {
                            assert!(!std::mem::replace(piece, true), "twice");
                        }
                        reads
                            .arrived(now, place, header.kind)
                            .into_iter()
                            .for_each(|read| ended(&mut open, read, true));
                    }
                    (read, Answer::Refused) => {
                        reads.refused(now, read).into_iter().for_each(|read| ended(&mut open, read, false));
                    }
                    (_, Answer::Nothing) => {}
                }
            }
            4 => now += u64::from(u32::from_le_bytes(input.array())),
            5 => {
                while let Some(read) = reads.overdue(now) {
                    ended(&mut open, read, false);
                }
            }
            6 => reads.take_of(input.below(3) as u32).for_each(|read| ended(&mut open, read, false)),
            _ => match input.below(8) {
                0 => reads.unheard(now).for_each(|read| ended(&mut open, read, false)),
                1 => reads.distrust(now),
                _ => now += u64::from(input.byte()) * 100,
            },
        }
        assert_eq!(reads.len(), open.len());
        assert_eq!(reads.patience_ns(now).is_some(), !open.is_empty());
        // The oldest is asked for, and something of it is missing.
        let expected = reads.expected().map(|place| (reads.get(place.read).map(|read| read.token), place));
        if let Some((Some(token), place)) = expected {
            assert!(!open[&token][(place.at / PIECE_BYTES) as usize], "expected again");
        }
    }
    reads.give_up().for_each(|read| ended(&mut open, read, false));
    assert!(open.is_empty());
}
