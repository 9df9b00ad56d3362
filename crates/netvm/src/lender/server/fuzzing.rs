//! The calls of two borrowers, or of whoever pretends to be one.

use netvm_core::endpoint::Paging;

use super::*;
use crate::lender::protocol::Inherited;
use crate::link::Stream;

fn served(role: Role) -> Option<Served> {
    let (stream, _peer) = Stream::pair().ok()?;
    Some(Served {
        session: Session::new(vec![Transport::Plain(stream, false)], 16, 16),
        role,
        lease: None,
        name: String::new(),
        heard: Instant::now(),
        pinged: false,
        asked_to_leave: false,
        wish: None,
        asking: false,
        cannot: false,
        pid: 0,
        ops: 0,
        returns: Returns::default(),
        waits_for_room: false,
        met: None,
    })
}

/// `| who and method 1 | length 1 | body |` and so on. A body of method 1 may name a ticket by a number. For input of odd length the lender packs.
pub(crate) fn fuzz(mut data: &[u8]) {
    let packed = data.len() % 2 == 1;
    let config = LenderConfig {
        listen: Vec::new(),
        size_bytes: 4 * 4096,
        slab_bytes: 4096,
        compress: packed.then_some(Compress { lend_bytes: 4 * 4096, overflow: None }),
        ..LenderConfig::default()
    };
    let Ok(mut lender) = Lender::bind(config) else { return };
    let roles = [Role::Borrower, Role::Borrower, Role::Observer];
    let mut peers: Vec<Served> = roles.into_iter().filter_map(served).collect();
    if peers.len() < roles.len() {
        return;
    }
    while let [first, len, rest @ ..] = data {
        let (body, rest) = rest.split_at(usize::from(*len).min(rest.len()));
        data = rest;
        let (who, method) = (usize::from(first % 3), u32::from(first / 3) % 17);
        let mut body = body.to_vec();
        if let (protocol::ATTACH, Some(&named)) = (method, body.first())
            && let Some(key) = lender.tickets.key(usize::from(named).wrapping_sub(1))
            && body.len() >= 16
        {
            body[..16].copy_from_slice(&key);
        }
        let _ = lender.answer(&mut peers[who], method, &body);
        if let (protocol::FILE, Some(lease)) = (method, peers[who].lease)
            && !packed
        {
            // As if they had met.
            if !lender.memories.has_file(lease) {
                let _ = lender.memories.give_file(lease);
            }
            let inherited = lender.memories.inherited(lease, protocol::INHERITED_MAX);
            let slabs =
                inherited.iter().flat_map(|(_, runs)| runs).flat_map(|&(first, count)| first..first + count);
            slabs.for_each(|slab| assert!(lender.memories.slabs.holds(lease, slab), "another one's"));
        }
        let used = lender.memories.slabs.used_bytes();
        assert!(used <= lender.memories.slabs.size_bytes(), "lent what there is not");
        // What it holds it may touch, and nothing else.
        let Lender { memories, .. } = &lender;
        let Served { lease, returns, ops, .. } = &mut peers[who];
        assert!(returns.waiting.is_empty() && returns.over.is_empty(), "nobody waits for anything");
        for slab in 0..6 {
            let mut view = View { memories, lease: *lease, returns, ops };
            let allowed = view.check(slab, 0, 4096, Access::Write).is_ok();
            if packed {
                assert!(
                    !allowed || view.write(slab, 0, &[first | 1; 4096], &Paging::default()) == Some(Ok(()))
                );
                assert!(!allowed || view.snapshot(slab, 9, 70) == Some(Ok(vec![first | 1; 70])));
            } else {
                assert_eq!(allowed, view.memory(slab, 0, 4096).is_some());
            }
            assert!(view.check(slab, 1, 4096, Access::Write).is_err());
        }
    }
    for peer in peers {
        lender.part(peer, &Failure::Ended);
    }
    let much_later = Instant::now() + Duration::from_secs(3600);
    for lease in lender.tickets.take_stale(much_later) {
        lender.close(lease);
    }
    assert_eq!(lender.memories.slabs.used_bytes(), 0, "nobody is left");
}

/// A lender's answer to whoever asks how it is doing.
pub(crate) fn fuzz_status(body: &[u8]) {
    if let Some(files) = Inherited::decode(BodyReader(body)) {
        let mut again = BodyWriter::default();
        files.encode(&mut again);
        assert!(again.0 == body || files.0.is_empty());
    }
    if let Some(status) = LenderStatus::decode(body) {
        assert_eq!(LenderStatus::decode(&status.encode()), Some(status));
    }
}
