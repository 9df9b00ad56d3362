//! Nodes that operate on each other's memory over one connection.

use std::sync::Arc;
use std::time::Duration;

use netvm::node::{Node, Rights};

const SOON: Duration = Duration::from_secs(10);

#[test]
fn who_was_connected_to_uses_the_same_connection() {
    let (one, two) = (Node::new().unwrap(), Node::new().unwrap());
    let address = one.listen("127.0.0.1:0").unwrap();
    let memories = [Node::memory(8192).unwrap(), Node::memory(8192).unwrap()];
    let key_one = one.export("one", Arc::clone(&memories[0]), Rights::ReadWrite).unwrap();
    let key_two = two.export("two", Arc::clone(&memories[1]), Rights::ReadWrite).unwrap();
    assert!(one.accept(Duration::ZERO).is_none(), "nobody has come");
    let to_one = two.connect(&address).unwrap();
    let to_two = one.accept(SOON).expect("a peer has come");
    assert!(one.accept(Duration::ZERO).is_none(), "each peer comes once");
    let here = to_two.import("two", &key_two).unwrap();
    let there = to_one.import("one", &key_one).unwrap();
    for round in 0..100u8 {
        here.write_flush(u64::from(round), &[round; 4000]).unwrap();
        there.write_flush(4096, &[round ^ 0xff; 4000]).unwrap();
        assert_eq!(memories[1].shared().sub(usize::from(round), 4000).unwrap().to_vec(), [round; 4000]);
        assert_eq!(memories[0].shared().sub(4096, 4000).unwrap().to_vec(), [round ^ 0xff; 4000]);
    }
    // Letting go of what was accepted ends nothing: the connection is the other side's.
    drop((here, to_two));
    there.write_flush(0, b"still there").unwrap();
    drop((there, to_one));
}

#[test]
fn an_accepted_peer_that_goes_fails_what_is_asked_of_it() {
    let one = Node::new().unwrap();
    let address = one.listen("127.0.0.1:0").unwrap();
    let two = Node::new().unwrap();
    let key = two.export("two", Node::memory(4096).unwrap(), Rights::ReadWrite).unwrap();
    let connection = two.connect(&address).unwrap();
    let region = one.accept(SOON).unwrap().import("two", &key).unwrap();
    region.write_flush(0, b"there").unwrap();
    drop(connection);
    let error = (0..1000).find_map(|_| {
        std::thread::sleep(Duration::from_millis(1));
        region.write_flush(0, b"gone").err()
    });
    let error = error.expect("the connection has ended").to_string();
    assert!(error.contains("the peer has closed the connection"), "{error}");
}

#[test]
fn large_writes_are_there_when_flushed() {
    let (one, two) = (Node::new().unwrap(), Node::new().unwrap());
    let memory = Node::memory(1 << 20).unwrap();
    let key = one.export("m", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    let region = two.connect_local(&one).unwrap().import("m", &key).unwrap();
    let bytes: Vec<u8> = (0..900_000u32).map(|index| (index * 7 / 3) as u8).collect();
    region.write_flush(11, &bytes).unwrap();
    assert_eq!(memory.shared().sub(11, bytes.len()).unwrap().to_vec(), bytes);
    assert!(region.write_flush((1 << 20) - 3, b"beyond").is_err());
}
