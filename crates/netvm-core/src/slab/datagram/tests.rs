use super::*;
use alloc::vec;

const KEY: [u8; 16] = [7; 16];
const BIG: u32 = 65536;

fn reads(packet_bytes_max: u32) -> Reads<char> {
    Reads::new(KEY, u64::MAX - 2, packet_bytes_max)
}

fn ask(reads: &mut Reads<char>, now_ns: u64, token: u64, offset: u32, bytes: u32) -> Vec<Header> {
    assert!(reads.can(now_ns, offset.into(), bytes));
    reads.ask(now_ns, token, 3, offset, bytes, 'x').collect()
}

fn answer(header: Header, kind: Kind) -> Header {
    Header { kind, ..header }
}

#[test]
fn headers_survive_the_wire_and_nonsense_does_not() {
    let header = Header { kind: Kind::Read, slab: 1, offset: 4096, bytes: 4096, key: KEY, sequence: 1 << 40 };
    let bytes = header.encode();
    assert_eq!(Header::decode(&bytes), Some(header));
    assert_eq!(Header::decode(&[&bytes[..], &[1; 9]].concat()), Some(header));
    for len in 0..HEADER_BYTES {
        assert_eq!(Header::decode(&bytes[..len]), None);
    }
    assert_eq!(Header::decode(&[0; HEADER_BYTES]), None);
    assert!(header.is_request());
    for (offset, bytes) in [(4095, 4096), (1024, 4096), (512, 1024), (0, 0), (0, 2048), (0, 8192)] {
        assert!(!Header { offset, bytes, ..header }.is_request());
    }
    assert!(Header { offset: 3072, bytes: 1024, ..header }.is_request());
    assert!(!answer(header, Kind::ByKernel).is_request());
}

#[test]
fn each_answer_goes_to_its_place_once() {
    let mut reads = reads(1500);
    let (one, two) = (ask(&mut reads, 0, 1, 0, 8192), ask(&mut reads, 5, 2, 8192, 4096));
    assert_eq!((one.len(), two.len(), one[7].offset, one[7].bytes), (8, 4, 7168, 1024));
    assert_eq!(reads.expected(), Some(Place { read: 0, at: 0, bytes: 1024 }));
    let whole = HEADER_BYTES + 1024;
    // The second is answered first, in any order.
    let mut done = vec![];
    for header in two.iter().chain(one.iter().rev()) {
        let header = answer(*header, Kind::ByKernel);
        assert_eq!(reads.answer(0, &header, whole - 1).1, Answer::Nothing, "short");
        assert_eq!(reads.answer(0, &answer(header, Kind::Read), whole).1, Answer::Nothing);
        let (_, Answer::Bytes(place)) = reads.answer(0, &header, whole) else { panic!("{header:?}") };
        assert_eq!(reads.get(place.read).unwrap().offset + place.at, header.offset);
        done.extend(reads.arrived(1000, place, header.kind).map(|read| read.token));
        assert_eq!(reads.answer(0, &header, whole).1, Answer::Nothing, "twice");
    }
    assert_eq!(
        (done, reads.len(), reads.take_counts()),
        (vec![2, 1], 0, Counts { by_kernel: 12, ..Counts::default() })
    );
    assert_eq!(reads.expected(), None);
}

#[test]
fn what_nobody_asked_for_is_nothing() {
    let mut reads = reads(BIG);
    let asked = ask(&mut reads, 0, 1, 4096, 4096)[0];
    let right = answer(asked, Kind::ByProcess);
    for wrong in [
        Header { sequence: asked.sequence.wrapping_add(1), ..right },
        Header { sequence: asked.sequence.wrapping_sub(1), ..right },
        Header { slab: 4, ..right },
        Header { offset: 0, ..right },
        Header { bytes: 1024, ..right },
    ] {
        assert_eq!(
            reads.answer(0, &wrong, HEADER_BYTES + wrong.bytes as usize).1,
            Answer::Nothing,
            "{wrong:?}"
        );
    }
    assert_eq!(reads.answer(0, &answer(asked, Kind::Refused), HEADER_BYTES).1, Answer::Refused);
    assert_eq!(reads.refused(0, 0).map(|read| read.token), Some(1));
    assert_eq!(reads.answer(0, &right, HEADER_BYTES + 4096).1, Answer::Nothing, "too late");
    assert!(reads.refused(0, 0).is_none());
}

#[test]
fn only_pages_are_asked_for_and_not_too_many() {
    let mut reads = reads(BIG);
    for (offset, bytes) in
        [(0, 0), (1, 4096), (0, 4095), (0, 12288), (1024, 1024), (1 << 32, 4096), (u64::MAX - 4095, 4096)]
    {
        assert!(!reads.can(0, offset, bytes), "{offset} {bytes}");
    }
    for token in 0..READS_MAX as u64 {
        ask(&mut reads, 0, token, 0, 8192);
    }
    assert!(!reads.can(0, 0, 4096));
    reads.take_back();
    assert!(reads.can(0, 0, 4096));
    assert_eq!(reads.give_up().count(), READS_MAX - 1);
}

#[test]
fn who_is_not_answered_gives_up_and_asks_rarely() {
    let mut reads = reads(BIG);
    let mut now = 0;
    // Answers within 40 µs: patience is the least there is.
    for token in 0..100 {
        let asked = answer(ask(&mut reads, now, token, 0, 4096)[0], Kind::ByKernel);
        now += 40_000;
        let (_, Answer::Bytes(place)) = reads.answer(0, &asked, HEADER_BYTES + 4096) else { panic!() };
        assert!(reads.arrived(now, place, asked.kind).is_some());
    }
    assert!(!reads.are_quick());
    // From then on none: as if a cable had been cut.
    let mut asked = 0;
    while now < 200_000_000_000 {
        if !reads.can(now, 0, 4096) {
            now += 10_000_000;
            continue;
        }
        ask(&mut reads, now, 7, 0, 4096);
        asked += 1;
        assert_eq!(reads.patience_ns(now), Some(1_000_000));
        assert!(reads.overdue(now + 999_999).is_none());
        now += 1_000_000;
        assert_eq!(reads.overdue(now).map(|read| read.token), Some(7));
    }
    assert!((20..70).contains(&asked), "{asked} in 200 s");
    assert_eq!(reads.patience_ns(now), None);
    assert!(reads.distrust() && !reads.distrust());
    assert!(!reads.can(u64::MAX, 0, 4096));
}

#[test]
fn one_lost_in_ten_changes_nothing() {
    let mut reads = reads(BIG);
    let mut now = 0;
    for round in 0..10_000 {
        let asked = ask(&mut reads, now, round, 0, 4096)[0];
        if round % 12 == 11 {
            now += 100_000_000;
            assert!(reads.overdue(now).is_some());
        } else {
            let (_, Answer::Bytes(place)) =
                reads.answer(0, &answer(asked, Kind::ByKernel), HEADER_BYTES + 4096)
            else {
                panic!()
            };
            reads.arrived(now + 3000, place, Kind::ByKernel);
        }
    }
    assert!(reads.are_quick());
}

#[test]
fn who_answers_late_is_waited_for_longer() {
    let mut reads = reads(BIG);
    let (mut now, mut given_up) = (0, 0);
    for round in 0..1000 {
        assert!(reads.can(now, 0, 4096), "{round}");
        let asked = answer(ask(&mut reads, now, round, 0, 4096)[0], Kind::ByProcess);
        // Mostly 4 us; now and then, as the process has something else to do, 8 ms.
        let takes = if round % 50 == 49 { 8_000_000 } else { 4_000 };
        let patience = reads.patience_ns(now).unwrap();
        if takes >= patience {
            assert_eq!(reads.overdue(now + patience).map(|read| read.token), Some(round));
            given_up += 1;
        }
        now += takes;
        match reads.answer(now, &asked, HEADER_BYTES + 4096).1 {
            Answer::Bytes(place) => assert!(reads.arrived(now, place, asked.kind).is_some()),
            other => assert_eq!((other, takes), (Answer::Nothing, 8_000_000)),
        }
    }
    assert!(given_up <= 20 && reads.take_counts().given_up == given_up);
}
