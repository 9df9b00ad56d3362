//! Every way a copy can take, and what is told when somebody on it fails.

use std::time::Instant;

use super::*;
use crate::node::{Node, Rights};
use crate::region::Peer;
use crate::security::{Secret, Security};

const BYTES: usize = 9 << 20;

/// A node that listens, with a segment.
struct Place {
    node: Node,
    address: String,
    memory: Arc<Mapping>,
    key: netvm_core::key::RemoteKey,
}

impl Place {
    fn new(rights: Rights) -> Self {
        Self::with(rights, Security::default())
    }

    fn with(rights: Rights, security: Security) -> Self {
        let node = Node::with_security(security).unwrap();
        let address = node.listen("127.0.0.1:0").unwrap();
        let memory = Node::memory(BYTES).unwrap();
        let key = node.export("memory", Arc::clone(&memory), rights).unwrap();
        Self { node, address, memory, key }
    }

    fn open(&self, from: &Node) -> (Peer, Region) {
        let peer = from.connect(&self.address).unwrap();
        let region = peer.import("memory", &self.key).unwrap();
        (peer, region)
    }

    fn fill(&self) {
        let bytes: Vec<u8> = (0..BYTES).map(|index| (index / 3) as u8 ^ (index >> 12) as u8).collect();
        self.memory.shared().write_from(0, &bytes).unwrap();
    }

    fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        self.memory.shared().sub(offset, len).unwrap().to_vec()
    }
}

#[test]
fn copies_take_the_way_that_policies_allow() {
    let (from, to) = (Place::new(Rights::Read), Place::new(Rights::ReadWrite));
    from.fill();
    let node = Node::new().unwrap();
    let ((_, source), (_, target)) = (from.open(&node), to.open(&node));
    let copy = |expected: Copied| {
        for (offset, to_offset, len) in [(0, 0, BYTES), (4097, 5, (5 << 20) + 1), (1, 2, 3)] {
            to.memory.shared().fill(0);
            let way = source.copy_to(offset as u64, &target, to_offset as u64, len as u64).unwrap();
            assert_eq!(way, expected);
            assert!(to.bytes(to_offset, len) == from.bytes(offset, len));
            let (before, after) = (to.bytes(0, to_offset), BYTES - to_offset - len);
            let after = to.bytes(to_offset + len, after);
            assert!(before.iter().chain(&after).all(|&byte| byte == 0), "bytes beside it");
        }
    };
    // Nobody may connect to anybody.
    copy(Copied::Through);
    let connected = to.node.connect(&from.address).unwrap();
    copy(Copied::Pulled);
    to.node.allow_copies(Copies::Never);
    copy(Copied::Through);
    from.node.allow_copies(Copies::Anywhere);
    copy(Copied::Pushed);
    from.node.allow_copies(Copies::Known);
    to.node.allow_copies(Copies::Known);
    copy(Copied::Pulled);
    drop(connected);
    copy(Copied::Through);
    // What is wrong is told, whatever the way.
    assert!(matches!(source.copy_to(1, &target, 0, BYTES as u64), Err(Error::Bounds { .. })));
    let error = target.copy_to(0, &source, 0, 1).unwrap_err();
    assert!(matches!(&error, Error::Op { lender, .. } if *lender == from.address), "{error}");
}

#[test]
fn a_copy_sees_what_was_written_before_it_on_both_sides() {
    let (from, to) = (Place::new(Rights::ReadWrite), Place::new(Rights::ReadWrite));
    let node = Node::new().unwrap();
    let ((_, source), (_, target)) = (from.open(&node), to.open(&node));
    for policy in [Copies::Anywhere, Copies::Never] {
        from.node.allow_copies(policy);
        to.node.allow_copies(policy);
        for round in 0..100u8 {
            source.write(0, &[round; 500]).unwrap();
            target.write(0, &[255; 1000]).unwrap();
            source.copy_to(0, &target, 100, 300).unwrap();
            let mut seen = [0; 500];
            target.read(0, &mut seen).unwrap();
            assert!(seen[..100].iter().chain(&seen[400..]).all(|&byte| byte == 255));
            assert_eq!(seen[100..400], [round; 300]);
        }
    }
}

#[test]
fn a_copy_within_one_node_may_overlap() {
    let place = Place::new(Rights::ReadWrite);
    let node = Node::new().unwrap();
    let (peer, region) = place.open(&node);
    for (offset, to_offset, len) in [
        (0, 1 << 19, 4 << 20),
        (1 << 19, 0, 4 << 20),
        (7, 8, 3 << 20),
        (5, 5, 1 << 20),
        (0, 5 << 20, 4 << 20),
    ] {
        place.fill();
        let mut expected = place.bytes(0, BYTES);
        expected.copy_within(offset..offset + len, to_offset);
        let way = region.copy_to(offset as u64, &region, to_offset as u64, len as u64).unwrap();
        assert_eq!(way, Copied::Locally);
        assert!(place.bytes(0, BYTES) == expected);
    }
    // Two segments of one node.
    let other = Node::memory(1 << 20).unwrap();
    let key = place.node.export("other", Arc::clone(&other), Rights::ReadWrite).unwrap();
    let second = peer.import("other", &key).unwrap();
    assert_eq!(region.copy_to(4096, &second, 0, 1 << 20), Ok(Copied::Locally));
    assert!(other.shared().to_vec() == place.bytes(4096, 1 << 20));
    place.node.unexport("other").unwrap();
    assert!(matches!(region.copy_to(0, &second, 0, 1), Err(Error::Op { .. })));
}

#[test]
fn what_the_third_node_refuses_is_told_with_its_name() {
    let (from, to) = (Place::new(Rights::ReadWrite), Place::new(Rights::ReadWrite));
    from.node.allow_copies(Copies::Anywhere);
    let node = Node::new().unwrap();
    let ((_, source), (_, target)) = (from.open(&node), to.open(&node));
    assert_eq!(source.copy_to(0, &target, 0, 1 << 20), Ok(Copied::Pushed));
    // The copier has its connection and import still.
    to.node.unexport("memory").unwrap();
    let error = source.copy_to(0, &target, 0, 1 << 20).unwrap_err();
    assert!(matches!(&error, Error::Op { lender, .. } if *lender == to.address), "{error}");
    from.node.unexport("memory").unwrap();
    let error = source.copy_to(0, &target, 0, 1 << 20).unwrap_err();
    assert!(matches!(&error, Error::Op { .. }), "{error}");
}

#[test]
fn nodes_copy_with_their_own_secrets_only() {
    let security = |byte| Security { secret: Some(Secret::from_bytes([byte; 32])), ..Security::default() };
    let (from, to) = (Place::with(Rights::Read, security(1)), Place::with(Rights::ReadWrite, security(2)));
    from.node.allow_copies(Copies::Anywhere);
    to.node.allow_copies(Copies::Anywhere);
    from.fill();
    // We have both secrets, they do not know each other's.
    let (one, two) = (Node::with_security(security(1)).unwrap(), Node::with_security(security(2)).unwrap());
    let ((_, source), (_, target)) = (from.open(&one), to.open(&two));
    assert_eq!(source.copy_to(0, &target, 0, 1 << 20), Ok(Copied::Through));
    assert!(to.bytes(0, 1 << 20) == from.bytes(0, 1 << 20));
}

#[test]
fn the_node_that_dies_is_named() {
    for (source_dies, policy) in
        [(true, Copies::Anywhere), (false, Copies::Anywhere), (true, Copies::Never), (false, Copies::Never)]
    {
        let (from, to) = (Place::new(Rights::Read), Place::new(Rights::ReadWrite));
        from.node.allow_copies(policy);
        to.node.allow_copies(Copies::Never);
        let client = Node::new().unwrap();
        let ((_, source), (_, target)) = (from.open(&client), to.open(&client));
        let dead = if source_dies { from.address.clone() } else { to.address.clone() };
        let start = Instant::now();
        let mut nodes = (Some(from.node), Some(to.node));
        let error = std::thread::scope(|scope| {
            let copying = scope.spawn(|| {
                loop {
                    if let Err(error) = source.copy_to(0, &target, 0, BYTES as u64) {
                        break error;
                    }
                }
            });
            std::thread::sleep(Duration::from_millis(50));
            if source_dies {
                nodes.0 = None;
            } else {
                nodes.1 = None;
            }
            copying.join().unwrap()
        });
        assert!(start.elapsed() < Duration::from_secs(60));
        match &error {
            Error::LenderLost { lender, .. } | Error::OutcomeUnknown { lender, .. } => {
                assert_eq!(*lender, dead, "{error}");
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn one_peer_cannot_keep_a_node_copying() {
    let (from, to) = (Place::new(Rights::Read), Place::new(Rights::ReadWrite));
    from.node.allow_copies(Copies::Anywhere);
    let client = Node::new().unwrap();
    let opened: Vec<_> = (0..20).map(|_| (from.open(&client), to.open(&client))).collect();
    let mut ways = Vec::new();
    for ((_, source), (_, target)) in &opened {
        ways.push(source.copy_to(0, target, 0, 4096).unwrap());
    }
    // More than there may be copiers: the last ones go through us.
    assert!(ways[..16].iter().all(|way| *way == Copied::Pushed), "{ways:?}");
    assert!(ways[16..].contains(&Copied::Through), "{ways:?}");
    // They end when they have nothing to do.
    let start = Instant::now();
    let ((_, source), (_, target)) = &opened[19];
    while source.copy_to(0, target, 0, 4096) != Ok(Copied::Pushed) {
        assert!(start.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(100));
    }
}
