use super::*;
use netvm_core::slab::datagram::Request;

const LEASE: [u8; 16] = [9; 16];
const PORT: u16 = 4000;

/// Program and pages, or nothing where this user may have neither.
fn setting() -> Option<(Table, Pages, Mapping)> {
    let pages = match Pages::new((UNIT_BYTES / 4096) as u32) {
        Ok(pages) => pages,
        Err(error) => {
            println!("skipped (no eBPF for this user: {error})");
            return None;
        }
    };
    let memory = Mapping::anonymous(UNIT_BYTES as usize).unwrap();
    let numbered = |shared: netvm_sys::shared::SharedSlice| {
        (0..UNIT_BYTES as usize / 4096)
            .for_each(|page| shared.write_from(page * 4096, &contents(page)).unwrap());
        Ok(())
    };
    memory.replace_with_pages(0, &pages, numbered).unwrap();
    let table = Table::new(KEY_BYTES as u32, 10).unwrap();
    let keys = [Version::V4, Version::V6].map(|version| {
        let flow = Flow { from: address(version), to: (lender(version), 0x1B9E) };
        UnitKey::new(&LEASE, &flow, 5, 3)
    });
    table.insert(keys.iter().map(|key| (&key.0[..], &pages))).unwrap();
    Some((table, Pages::new(1).unwrap(), memory))
}

fn address(version: Version) -> [u8; 16] {
    match version {
        Version::V4 => "::ffff:10.1.2.3".parse::<std::net::Ipv6Addr>().unwrap().octets(),
        Version::V6 => "fd00::77".parse::<std::net::Ipv6Addr>().unwrap().octets(),
    }
}

fn lender(version: Version) -> [u8; 16] {
    match version {
        Version::V4 => "::ffff:10.1.2.4".parse::<std::net::Ipv6Addr>().unwrap().octets(),
        Version::V6 => [0xFD; 16],
    }
}

fn contents(page: usize) -> [u8; 4096] {
    std::array::from_fn(|at| (page * 7 + at / 8 + at % 8) as u8)
}

/// For a page of the unit, in answers of so many bytes.
fn request(page: u32, bytes: u32) -> Request {
    let offset = 3 * UNIT_BYTES as u32 + page * 4096;
    Request { header: Header { kind: Kind::Read, slab: 5, offset, bytes, sequence: 77 }, key: LEASE }
}

fn sum(header: &[u8]) -> u16 {
    let words = header.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum: u32 = words.sum();
    (sum + (sum >> 16)) as u16
}

fn packet(version: Version, request: &Request, link_bytes: usize) -> Vec<u8> {
    let udp_bytes = 8 + REQUEST_BYTES as u16;
    let mut packet = vec![];
    if link_bytes > 0 {
        packet.extend([1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15, 16]);
        packet.extend(if version == Version::V4 { [0x08, 0x00] } else { [0x86, 0xDD] });
    }
    match version {
        Version::V4 => {
            let mut ip = vec![0x45, 0];
            ip.extend((20 + udp_bytes).to_be_bytes());
            ip.extend([0, 7, 0x40, 0, 64, 17, 0, 0, 10, 1, 2, 3, 10, 1, 2, 4]);
            let sum = !sum(&ip);
            ip[10..12].copy_from_slice(&sum.to_be_bytes());
            packet.extend(ip);
        }
        Version::V6 => {
            packet.extend([0x60, 0, 0, 0]);
            packet.extend(udp_bytes.to_be_bytes());
            packet.extend([17, 64]);
            packet.extend(address(Version::V6));
            packet.extend([0xFD; 16]);
        }
    }
    packet.extend(PORT.to_be_bytes());
    packet.extend([0x1B, 0x9E]);
    packet.extend(udp_bytes.to_be_bytes());
    packet.extend([0, 0]);
    packet.extend(request.encode());
    packet
}

const SENT_BACK: i32 = 7;

const ALL: u32 = u32::MAX;

fn load(setting: &(Table, Pages, Mapping), link_bytes: i16, packet_bytes_max: u32) -> Program {
    Program::load(NAME, &program(&setting.0, &setting.1, Shape { link_bytes, packet_bytes_max })).unwrap()
}

#[test]
fn reads_are_answered_as_they_must_be() {
    let Some(setting) = setting() else { return };
    for (version, bytes) in
        [(Version::V4, 4096), (Version::V6, 4096), (Version::V4, 1368), (Version::V6, 1368)]
    {
        let program = load(&setting, 14, ALL);
        let request = request(100, bytes);
        let asked = packet(version, &request, 14);
        let (verdict, answer) = program.test(&asked, 8192).unwrap();
        // Of several the last: the others have gone already.
        let expected = request.header.answers(Kind::ByKernel).last().unwrap();
        let start = asked.len() - REQUEST_BYTES;
        assert_eq!((verdict, answer.len()), (SENT_BACK, start + ANSWER_BYTES + expected.bytes as usize));
        assert_eq!(Header::decode(&answer[start..]), Some(expected));
        let at = (expected.offset % 4096) as usize;
        assert_eq!(answer[start + ANSWER_BYTES..], contents(100)[at..]);
        assert_eq!((&answer[..6], &answer[6..12]), (&asked[6..12], &asked[..6]));
        let ip = &answer[14..];
        let (udp, length) = match version {
            Version::V4 => {
                assert_eq!((sum(&ip[..20]), &ip[12..20]), (0xFFFF, &[10, 1, 2, 4, 10, 1, 2, 3][..]));
                (20, usize::from(u16::from_be_bytes([ip[2], ip[3]])))
            }
            Version::V6 => {
                assert_eq!((&ip[8..24], &ip[24..40]), (&[0xFD; 16][..], &address(version)[..]));
                (40, 40 + usize::from(u16::from_be_bytes([ip[4], ip[5]])))
            }
        };
        assert_eq!(length, ip.len());
        assert_eq!(&ip[udp..udp + 4], &[0x1B, 0x9E, 15, 160]);
        let datagram = usize::from(u16::from_be_bytes([ip[udp + 4], ip[udp + 5]]));
        assert_eq!((datagram, &ip[udp + 6..udp + 8]), (ip.len() - udp, &[0, 0][..]));
    }
}

#[test]
fn all_other_packets_go_on_as_they_were() {
    let Some(setting) = setting() else { return };
    let (whole, small) = (load(&setting, 14, ALL), load(&setting, 14, 1500));
    let passes = |program: &Program, packet: &[u8], what: &str| {
        assert_eq!(program.test(packet, 8192).unwrap(), (verdict::NEXT, packet.to_vec()), "{what}");
    };
    let right = request(1, 4096);
    for version in [Version::V4, Version::V6] {
        let asked = packet(version, &right, 14);
        passes(&small, &asked, "no room for a page");
        let header = right.header;
        for (what, wrong) in [
            ("another lease", Request { key: [8; 16], ..right }),
            ("another slab", Request { header: Header { slab: 4, ..header }, ..right }),
            ("another unit", Request { header: Header { offset: 0, ..header }, ..right }),
            ("not a page", Request { header: Header { offset: header.offset + 1368, ..header }, ..right }),
            ("two pages", Request { header: Header { bytes: 8192, ..header }, ..right }),
            ("nothing", Request { header: Header { bytes: 0, ..header }, ..right }),
            ("an answer", Request { header: Header { kind: Kind::ByKernel, ..header }, ..right }),
        ] {
            passes(&whole, &packet(version, &wrong, 14), what);
        }
        for at in 0..asked.len() {
            // Addresses of the link, identification, hop limit, checksums, the port that asks, and the sequence may be any.
            let (ip, start) = (14, asked.len() - REQUEST_BYTES);
            let udp = start - 8;
            let any = match version {
                Version::V4 => {
                    [0..12, ip + 1..ip + 2, ip + 4..ip + 6, ip + 8..ip + 9, ip + 10..ip + 12, 0..0]
                }
                Version::V6 => [0..12, ip + 1..ip + 4, ip + 7..ip + 8, 0..0, 0..0, 0..0],
            };
            let any = any.iter().any(|range| range.contains(&at))
                || (udp..udp + 2).contains(&at)
                || (udp + 6..udp + 8).contains(&at)
                || (start + 16..start + 24).contains(&at);
            for bit in 0..8 {
                let mut changed = asked.clone();
                changed[at] ^= 1 << bit;
                let (verdict, out) = whole.test(&changed, 8192).unwrap();
                // The low bits of the version stand for more of the header, the don't-fragment flag for nothing.
                let any = any
                    || (version == Version::V4 && at == ip + 6 && bit >= 6)
                    || (version == Version::V6 && at == ip && bit < 4);
                let is_another = at >= start
                    && Request::decode(&changed[start..]).is_some_and(|Request { header, key }| {
                        (header.offset / UNIT_BYTES as u32, header.slab, key) == (3, 5, LEASE)
                    });
                if any || is_another {
                    assert_eq!(verdict, SENT_BACK, "byte {at}, bit {bit}");
                } else {
                    assert_eq!((verdict, &out), (verdict::NEXT, &changed), "byte {at}, bit {bit}");
                }
            }
        }
        for len in 54..asked.len() {
            passes(&whole, &asked[..len], "cut");
        }
    }
}
