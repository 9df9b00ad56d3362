use super::*;
use netvm_core::slab::datagram::Header;

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
        for page in 0..UNIT_BYTES as usize / 1024 {
            shared.write_from(page * 1024, &[(page as u8).wrapping_add(1); 1024]).unwrap();
        }
        Ok(())
    };
    memory.replace_with_pages(0, &pages, numbered).unwrap();
    let table = Table::new(KEY_BYTES as u32, 10).unwrap();
    let keys = [Version::V4, Version::V6].map(|version| UnitKey::new(&LEASE, (address(version), PORT), 5, 3));
    table.insert(keys.iter().map(|key| (&key.0[..], &pages))).unwrap();
    Some((table, Pages::new(1).unwrap(), memory))
}

fn address(version: Version) -> [u8; 16] {
    match version {
        Version::V4 => "::ffff:10.1.2.3".parse::<std::net::Ipv6Addr>().unwrap().octets(),
        Version::V6 => "fd00::77".parse::<std::net::Ipv6Addr>().unwrap().octets(),
    }
}

fn request(page: u32, bytes: u32) -> Header {
    let offset = 3 * UNIT_BYTES as u32 + page * 4096;
    Header { kind: Kind::Read, slab: 5, offset, bytes, key: LEASE, sequence: 77 }
}

fn sum(header: &[u8]) -> u16 {
    let words = header.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum: u32 = words.sum();
    (sum + (sum >> 16)) as u16
}

fn packet(version: Version, header: &Header, link_bytes: usize) -> Vec<u8> {
    let udp_bytes = 8 + HEADER_BYTES as u16;
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
    packet.extend(header.encode());
    packet
}

const SENT_BACK: i32 = 7;

#[test]
fn reads_are_answered_as_they_must_be() {
    let Some((table, counts, _memory)) = setting() else { return };
    let shape = Shape { link_bytes: 14, whole: true };
    let program = Program::load(NAME, &program(&table, &counts, shape)).unwrap();
    for version in [Version::V4, Version::V6] {
        for (part, bytes) in [(0, 4096), (0, 1024), (1, 1024), (3, 1024)] {
            let header = request(100, bytes);
            let header = Header { offset: header.offset + part * 1024, ..header };
            let asked = packet(version, &header, 14);
            let (verdict, answer) = program.test(&asked, 8192).unwrap();
            assert_eq!((verdict, answer.len()), (SENT_BACK, asked.len() + bytes as usize));
            let start = asked.len() - HEADER_BYTES;
            assert_eq!(Header::decode(&answer[start..]), Some(Header { kind: Kind::ByKernel, ..header }));
            let contents = &answer[asked.len()..];
            for (index, piece) in contents.chunks(1024).enumerate() {
                assert_eq!(piece, [((100 * 4 + part as usize + index) as u8).wrapping_add(1); 1024]);
            }
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
}

#[test]
fn all_other_packets_go_on_as_they_were() {
    let Some((table, counts, _memory)) = setting() else { return };
    let shape = Shape { link_bytes: 14, whole: true };
    let whole = Program::load(NAME, &program(&table, &counts, shape)).unwrap();
    let small = Program::load(NAME, &program(&table, &counts, Shape { whole: false, ..shape })).unwrap();
    let passes = |program: &Program, packet: &[u8], what: &str| {
        assert_eq!(program.test(packet, 8192).unwrap(), (verdict::NEXT, packet.to_vec()), "{what}");
    };
    let right = request(1, 4096);
    for version in [Version::V4, Version::V6] {
        let asked = packet(version, &right, 14);
        passes(&small, &asked, "no room for a page");
        for (what, wrong) in [
            ("another lease", Header { key: [8; 16], ..right }),
            ("another slab", Header { slab: 4, ..right }),
            ("another unit", Header { offset: 0, ..right }),
            ("not a page", Header { offset: right.offset + 1024, ..right }),
            ("not a part", Header { offset: right.offset + 1, bytes: 1024, ..right }),
            ("two pages", Header { bytes: 8192, ..right }),
            ("nothing", Header { bytes: 0, ..right }),
            ("an answer", Header { kind: Kind::ByKernel, ..right }),
        ] {
            passes(&whole, &packet(version, &wrong, 14), what);
        }
        for at in 0..asked.len() {
            // Addresses of the link and the lender, identification, hop limit, checksums, and the sequence may be any.
            let (ip, udp) = (14, asked.len() - HEADER_BYTES - 8);
            let any = match version {
                Version::V4 => [
                    0..12,
                    ip + 1..ip + 2,
                    ip + 4..ip + 6,
                    ip + 8..ip + 9,
                    ip + 10..ip + 12,
                    ip + 16..ip + 20,
                ],
                Version::V6 => [0..12, ip + 1..ip + 4, ip + 7..ip + 8, ip + 24..ip + 40, 0..0, 0..0],
            };
            let any = any.iter().any(|range| range.contains(&at))
                || (udp + 2..udp + 4).contains(&at)
                || (udp + 6..udp + 8).contains(&at)
                || at >= asked.len() - 8;
            for bit in 0..8 {
                let mut changed = asked.clone();
                changed[at] ^= 1 << bit;
                let (verdict, out) = whole.test(&changed, 8192).unwrap();
                // The low bits of the version stand for more of the header, the don't-fragment flag for nothing.
                let any = any
                    || (version == Version::V4 && at == ip + 6 && bit >= 6)
                    || (version == Version::V6 && at == ip && bit < 4);
                let is_another = at >= asked.len() - HEADER_BYTES
                    && Header::decode(&changed[asked.len() - HEADER_BYTES..]).is_some_and(|header| {
                        header.is_request()
                            && (header.offset / UNIT_BYTES as u32, header.slab, header.key) == (3, 5, LEASE)
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
