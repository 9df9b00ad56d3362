use super::*;
use alloc::vec;

const KEY: [u8; 16] = [7; 16];
const BIG: u32 = 65536;

fn reads(packet_bytes_max: u32) -> Reads<char> {
    Reads::new(KEY, u64::MAX - 2, false, packet_bytes_max).unwrap()
}

fn ask(reads: &mut Reads<char>, now_ns: u64, token: u64, offset: u32, bytes: u32) -> Vec<Header> {
    assert!(reads.can(now_ns, offset.into(), bytes));
    let requests = reads.ask(now_ns, token, 3, offset, bytes, 'x');
    requests
        .map(|request| {
            assert_eq!(Request::decode(&request.encode()), Some(request));
            assert_eq!(request.key, KEY);
            request.header
        })
        .collect()
}

fn answer(header: Header, kind: Kind) -> Header {
    Header { kind, ..header }
}

#[test]
fn headers_survive_the_wire_and_nonsense_does_not() {
    let header = Header { kind: Kind::Read, slab: 1, offset: 4096, bytes: 4096, sequence: 1 << 40 };
    let bytes = header.encode();
    assert_eq!(Header::decode(&bytes), Some(header));
    assert_eq!(Header::decode(&[&bytes[..], &[1; 9]].concat()), Some(header));
    assert!((0..ANSWER_BYTES).all(|len| Header::decode(&bytes[..len]).is_none()));
    assert_eq!(Header::decode(&[0; REQUEST_BYTES]), None);
    let request = Request { header, key: KEY };
    let bytes = request.encode();
    assert_eq!(Request::decode(&bytes), Some(request));
    assert!((0..REQUEST_BYTES).all(|len| Request::decode(&bytes[..len]).is_none()));
    assert_eq!(Request::decode(&[&bytes[..], &[0]].concat()), None);
    let of = |offset, bytes| Request { header: Header { offset, bytes, ..header }, key: KEY }.encode();
    for (offset, bytes) in [(4095, 4096), (1368, 1368), (512, 4096), (0, 0), (0, 2048), (0, 8192)] {
        assert_eq!(Request::decode(&of(offset, bytes)), None, "{offset} {bytes}");
    }
    assert!(Request::decode(&of(8192, 1368)).is_some());
    let answer = Request { header: answer(header, Kind::ByKernel), key: KEY };
    assert_eq!(Request::decode(&answer.encode()), None);
}

#[test]
fn answers_are_as_long_as_packets_may_be() {
    // Jumbo frames; Ethernet, tunnels in it, WireGuard; and what is less.
    for (is_v6, packet_bytes_max, bytes) in [
        (false, 9000, Some(4096)),
        (true, 4168, Some(4096)),
        (true, 4167, Some(1368)),
        (false, 1500, Some(1368)),
        (true, 1440, Some(1368)),
        (false, 1420, Some(1368)),
        (false, 1419, None),
        (true, 1439, None),
        (true, 0, None),
    ] {
        let reads = Reads::<char>::new(KEY, 0, is_v6, packet_bytes_max);
        assert_eq!(reads.map(|reads| reads.part_bytes), bytes, "{packet_bytes_max}");
    }
    for (bytes, lens) in [(4096, vec![4096]), (1368, vec![1368, 1368, 1360])] {
        let header = Header { kind: Kind::Read, slab: 1, offset: 8192, bytes, sequence: 5 };
        let answers: Vec<_> = header.answers(Kind::ByProcess).collect();
        assert_eq!(answers.iter().map(|answer| answer.bytes).collect::<Vec<_>>(), lens);
        let ends = answers.iter().map(|answer| answer.offset + answer.bytes);
        assert!(answers.iter().skip(1).map(|answer| answer.offset).eq(ends.take(answers.len() - 1)));
    }
}

#[test]
fn each_answer_goes_to_its_place_once() {
    for packet_bytes_max in [1500, BIG] {
        let mut reads = reads(packet_bytes_max);
        let (one, two) = (ask(&mut reads, 0, 1, 0, 8192), ask(&mut reads, 5, 2, 8192, 4096));
        assert_eq!((one.len(), two.len(), one[1].offset), (2, 1, 4096));
        let answers = |asked: &[Header]| -> Vec<Header> {
            asked.iter().flat_map(|header| header.answers(Kind::ByKernel)).collect()
        };
        let (one, two) = (answers(&one), answers(&two));
        assert_eq!(reads.expected(), Some(Place { read: 0, at: 0, bytes: one[0].bytes }));
        // The second is answered first, in any order.
        let mut done = vec![];
        for header in two.iter().chain(one.iter().rev()) {
            let whole = ANSWER_BYTES + header.bytes as usize;
            assert_eq!(reads.answer(0, header, whole - 1).1, Answer::Nothing, "short");
            assert_eq!(reads.answer(0, &answer(*header, Kind::Read), whole).1, Answer::Nothing);
            let (_, Answer::Bytes(place)) = reads.answer(0, header, whole) else { panic!("{header:?}") };
            assert_eq!(reads.get(place.read).unwrap().offset + place.at, header.offset);
            assert_eq!(place.bytes, header.bytes);
            done.extend(reads.arrived(1000, place, header.kind).map(|read| read.token));
            assert_eq!(reads.answer(0, header, whole).1, Answer::Nothing, "twice");
        }
        let by_kernel = (one.len() + two.len()) as u64;
        assert_eq!((done, reads.len()), (vec![2, 1], 0));
        assert_eq!(reads.take_counts(), Counts { by_kernel, ..Counts::default() });
        assert_eq!(reads.expected(), None);
    }
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
            reads.answer(0, &wrong, ANSWER_BYTES + wrong.bytes as usize).1,
            Answer::Nothing,
            "{wrong:?}"
        );
    }
    assert_eq!(reads.answer(0, &answer(asked, Kind::Refused), ANSWER_BYTES).1, Answer::Refused);
    assert_eq!(reads.refused(0, 0).map(|read| read.token), Some(1));
    assert_eq!(reads.answer(0, &right, ANSWER_BYTES + 4096).1, Answer::Nothing, "too late");
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
    reads.take_back(0, false);
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
        let (_, Answer::Bytes(place)) = reads.answer(0, &asked, ANSWER_BYTES + 4096) else { panic!() };
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
        assert_eq!(reads.patience_ns(now), Some(1_000_000), "as answers came so soon");
        assert!(reads.overdue(now + 999_999).is_none());
        now += 1_000_000;
        assert_eq!(reads.overdue(now).map(|read| read.token), Some(7));
    }
    assert!((20..400).contains(&asked), "{asked} in 200 s");
    assert_eq!(reads.patience_ns(now), None);
    reads.end();
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
                reads.answer(0, &answer(asked, Kind::ByKernel), ANSWER_BYTES + 4096)
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
        match reads.answer(now, &asked, ANSWER_BYTES + 4096).1 {
            Answer::Bytes(place) => assert!(reads.arrived(now, place, asked.kind).is_some()),
            other => assert_eq!((other, takes), (Answer::Nothing, 8_000_000)),
        }
    }
    assert!(given_up <= 20 && reads.take_counts().given_up == given_up);
}

#[test]
fn a_burst_of_losses_is_one_pause_and_a_wrong_page_another() {
    let mut reads = reads(BIG);
    for token in 0..READS_MAX as u64 {
        ask(&mut reads, token, token, 0, 4096);
    }
    let mut given_up = 0;
    while reads.overdue(1_000_000_000).is_some() {
        given_up += 1;
    }
    assert_eq!(given_up, READS_MAX);
    assert!(!reads.can(1_900_000_000, 0, 4096) && reads.can(2_000_000_001, 0, 4096));
    reads.distrust(2_000_000_001);
    assert!(!reads.can(3_900_000_000, 0, 4096) && reads.can(4_000_000_001, 0, 4096));
    for token in 0..3 {
        ask(&mut reads, 4_000_000_001, token, 0, 4096);
    }
    assert_eq!(reads.unheard(4_000_000_002).count(), 3);
    assert!(!reads.can(4_000_000_003, 0, 4096));
}

#[test]
fn patience_grows_while_nothing_is_known_and_reads_of_a_slab_are_taken_back() {
    let mut reads = reads(BIG);
    let mut now = 0;
    // Answers take 30 ms, and nobody looks before.
    let mut patience = vec![];
    for token in 0..5 {
        let asked = answer(ask(&mut reads, now, token, 0, 4096)[0], Kind::ByKernel);
        patience.push(reads.patience_ns(now).unwrap());
        let given_up = reads.overdue(now + 29_999_999).is_some();
        now += 30_000_000;
        let came = reads.answer(now, &asked, ANSWER_BYTES + 4096).1;
        match came {
            Answer::Bytes(place) => assert!(!given_up && reads.arrived(now, place, asked.kind).is_some()),
            other => assert!(given_up && other == Answer::Nothing),
        }
    }
    assert_eq!(patience[0], 5_000_000);
    assert!(patience[1] > 30_000_000, "{patience:?}");
    ask(&mut reads, now, 8, 0, 4096);
    assert_eq!((reads.take_of(4).count(), reads.take_of(3).count(), reads.len()), (0, 1, 0));
}

#[test]
fn who_is_only_answered_by_the_process_asks_it_directly_for_a_while() {
    for (each_ns, kernel_at, until) in
        [(10_000_000, None, 1024), (1_000_000, Some(500), 501 + 2001), (1_000, None, 9999)]
    {
        let mut reads = reads(1500);
        let (mut now, mut asked) = (0, 0);
        while asked < 9999 && reads.can(now, 0, 4096) {
            let kind = if Some(asked) == kernel_at { Kind::ByKernel } else { Kind::ByProcess };
            let request = ask(&mut reads, now, asked, 0, 4096)[0];
            for header in request.answers(kind) {
                let whole = ANSWER_BYTES + header.bytes as usize;
                let (_, Answer::Bytes(place)) = reads.answer(now, &header, whole) else { panic!() };
                reads.arrived(now, place, kind);
            }
            assert!(reads.is_empty());
            (now, asked) = (now + each_ns, asked + 1);
        }
        assert_eq!(asked, until, "{each_ns}");
        assert!(reads.can(now + 1_000_000_000, 0, 4096));
    }
}

/// Reads of one page and of two that are waited for alone, whose answers come in any order, cut, twice, and among others'.
#[test]
fn whoever_waits_alone_has_all_of_its_answers_and_no_others() {
    let mut random = crate::sim::Random::new(3);
    for round in 0..200_u32 {
        let mut reads = reads(if round % 2 == 0 { 1500 } else { BIG });
        let pages = 1 + round / 2 % 2;
        assert!(reads.can(0, 8192, pages * 4096));
        let (mut one, other) =
            (reads.ask_alone(0, 3, 8192, pages * 4096).unwrap(), reads.ask_alone(0, 3, 0, 4096).unwrap());
        assert!(one.requests().all(|request| request.key == KEY) && reads.is_empty());
        let answers = |alone: &Alone| -> Vec<Header> {
            alone.requests().flat_map(|request| request.header.answers(Kind::ByKernel)).collect()
        };
        let (mut mine, others) = (answers(&one), answers(&other));
        let all = mine.len();
        for index in (1..all).rev() {
            mine.swap(index, random.below(index as u64 + 1) as usize);
        }
        assert_eq!(one.expected().at, 0);
        for (index, header) in mine.iter().enumerate() {
            let whole = ANSWER_BYTES + header.bytes as usize;
            for wrong in [
                answer(*header, Kind::Read),
                Header { slab: 4, ..*header },
                Header { offset: header.offset ^ 8, ..*header },
                Header { bytes: header.bytes - 8, ..*header },
            ] {
                assert_eq!(one.answer(&wrong, whole), Answer::Nothing, "{wrong:?}");
            }
            assert_eq!(one.answer(header, whole - 1), Answer::Nothing);
            assert_eq!(one.answer(&others[0], whole), Answer::Nothing);
            assert_eq!(one.answer(&answer(*header, Kind::Refused), ANSWER_BYTES), Answer::Refused);
            let Answer::Bytes(place) = one.answer(header, whole) else { panic!("{header:?}") };
            assert_eq!((place.read, 8192 + place.at, place.bytes), (0, header.offset, header.bytes));
            let kind = if index == 0 { Kind::ByProcess } else { Kind::ByKernel };
            assert_eq!(one.arrived(place, kind), index + 1 == all);
            assert_eq!(one.answer(header, whole), Answer::Nothing, "twice");
        }
        let report = one.report(Ended::Whole);
        assert_eq!((report.by_kernel, report.by_process), (all as u8 - 1, 1));
        assert_eq!(report.late, Some(others[0].sequence));
        assert_eq!(Report::from_words(report.words()), Some(report));
        reads.ended_alone(one.begun(), 5000, report);
        let counts = Counts { by_kernel: all as u64 - 1, by_process: 1, given_up: 0 };
        assert_eq!(reads.take_counts(), counts);
        assert!(reads.can(6000, 0, 4096));
    }
    assert_eq!(Report::from_words([0, 5]), None);
}

/// What has become of reads that are waited for alone decides about the next as with others.
#[test]
fn what_is_waited_for_alone_is_trusted_as_other_reads_are() {
    let many = |ended: Ended, late: bool| {
        let (mut reads, mut now, mut asked, mut last) = (reads(BIG), 0, 0, None);
        let first = reads.ask_alone(0, 3, 0, 4096).unwrap();
        reads.ended_alone(first.begun(), 20_000, first.report(Ended::Whole));
        while asked < 40
            && reads.can(now, 0, 4096)
            && let Some(alone) = reads.ask_alone(now, 3, 0, 4096)
        {
            assert!((1_000_000..=5_000_000).contains(&alone.patience_ns));
            // What had been given up came while this was waited for, soon enough to count.
            let report = Report { late: last.filter(|_| late), ..alone.report(ended) };
            last = alone.requests().next().map(|request| request.header.sequence);
            let ns = if ended == Ended::Late { 10_000_000 } else { 20_000 };
            reads.ended_alone(alone.begun(), ns, report);
            (now, asked) = (now + ns, asked + 1);
        }
        let expected = if ended == Ended::Whole { 0 } else { asked };
        assert_eq!(reads.take_counts().given_up, expected);
        (asked, reads.can(now, 0, 4096))
    };
    assert_eq!(many(Ended::Whole, false), (40, true));
    assert_eq!(many(Ended::Wrong, false), (1, false));
    let (asked, goes_on) = many(Ended::Refused, false);
    assert!((2..=4).contains(&asked) && !goes_on, "{asked}");
    // Lost is what has not come after 100 ms; what came after 10 is waited for by others.
    let (asked, goes_on) = many(Ended::Late, false);
    assert!((10..=14).contains(&asked) && !goes_on, "{asked}");
    let (asked, goes_on) = many(Ended::Late, true);
    assert!((2..=4).contains(&asked) && goes_on, "{asked}");
    // Who is answered soon looks again and again, others sleep.
    let mut reads = reads(BIG);
    let mut look = |ns: u64| {
        let alone = reads.ask_alone(0, 3, 0, 4096).unwrap();
        reads.ended_alone(alone.begun(), ns, alone.report(Ended::Whole));
        reads.ask_alone(0, 3, 0, 4096).map(|alone| alone.look_ns)
    };
    assert_eq!(look(20_000), Some(40_000));
    assert_eq!(look(500_000), Some(0));
    // Too long to wait for alone.
    assert_eq!(look(90_000_000), None);
}

/// Several that were wrong at once are one pause, and those of a session before are none.
#[test]
fn what_ended_alone_counts_once_and_for_its_own_session() {
    let (mut one, mut two) = (reads(BIG), Reads::<char>::new(KEY, 1 << 40, false, BIG).unwrap());
    let alone: Vec<_> = (0..9).map(|_| one.ask_alone(0, 3, 0, 4096).unwrap()).collect();
    for alone in &alone {
        let (begun, wrong) = (alone.begun(), alone.report(Ended::Wrong));
        two.ended_alone(begun, 20_000, wrong);
        one.ended_alone(begun, 20_000, wrong);
    }
    assert!(two.can(20_000, 0, 4096) && two.are_on(|| 0) && two.take_counts() == Counts::default());
    let second = 1_000_000_000;
    assert!(!one.can(second, 0, 4096) && !one.are_on(|| second));
    assert!(one.can(second + 20_000, 0, 4096) && one.are_on(|| second + 20_000));
    assert_eq!(one.take_counts().given_up, 9);
}
