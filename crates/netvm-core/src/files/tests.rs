use super::*;
use crate::sim::Random;
use alloc::string::String;
use alloc::vec;

const BLOCKS: u64 = 64;
const OWNER: Owner = Owner { permissions: 0o644, uid: 7, gid: 8 };

fn at(seconds: i64) -> Time {
    Time { seconds, nanos: 0 }
}

/// The bytes behind the files, and what should be in them.
struct World {
    files: Files,
    volume: Vec<u8>,
    clock: i64,
}

impl World {
    fn new() -> Self {
        // What a volume holds before it is written to is never to be seen.
        Self {
            files: Files::new(BLOCKS * BLOCK_BYTES, OWNER, at(0)),
            volume: vec![0; (BLOCKS * BLOCK_BYTES) as usize],
            clock: 0,
        }
    }

    fn now(&mut self) -> Time {
        self.clock += 1;
        at(self.clock)
    }

    fn discard(&mut self) {
        for range in self.files.discards() {
            self.volume[range.start as usize..range.end as usize].fill(0);
        }
    }

    fn write(&mut self, file: Number, offset: u64, bytes: &[u8]) -> Result<(), Refused> {
        let now = self.now();
        let mut parts = Vec::new();
        self.files.begin();
        let result = self.files.write(file, offset, bytes.len() as u64, Some(now), &mut parts);
        self.discard();
        result?;
        let mut at = 0;
        for part in parts {
            assert_eq!(part.at, at);
            at += part.bytes;
            let to = part.offset.expect("a hole is written to") as usize;
            self.volume[to..to + part.bytes as usize].copy_from_slice(&bytes[part.at as usize..at as usize]);
        }
        assert_eq!(at, bytes.len() as u64);
        Ok(())
    }

    fn read(&mut self, file: Number, offset: u64, bytes: u64) -> Vec<u8> {
        let mut parts = Vec::new();
        self.discard();
        let count = self.files.read(file, offset, bytes, &mut parts).unwrap();
        let mut read = Vec::new();
        for part in parts {
            assert_eq!(part.at, read.len() as u64);
            match part.offset {
                None => read.resize(read.len() + part.bytes as usize, 0),
                Some(from) => read.extend(&self.volume[from as usize..(from + part.bytes) as usize]),
            }
        }
        assert_eq!(read.len() as u64, count);
        read
    }

    /// Every block is free, or is one file's.
    fn check_blocks(&self) {
        let mut taken = vec![0u8; BLOCKS as usize];
        for inode in self.files.inodes.values() {
            if let Body::File(map) = &inode.body {
                assert_eq!(map.count(), map.places().map(|blocks| blocks.end - blocks.start).sum::<u64>());
                map.places().flatten().for_each(|block| taken[block as usize] += 1);
            }
        }
        assert!(taken.iter().all(|&count| count <= 1));
        let taken = taken.iter().filter(|&&count| count == 1).count() as u64;
        assert_eq!(taken + self.files.room().free + self.files.space.waiting(), BLOCKS);
    }
}

#[test]
fn files_hold_what_was_written() {
    let mut refused = 0;
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let mut world = World::new();
        let mut model: BTreeMap<String, (Number, Vec<u8>)> = BTreeMap::new();
        for step in 0..600u64 {
            let name = alloc::format!("f{}", random.below(8));
            let there = model.get(&name).map(|&(file, _)| file);
            let (offset, length) = (random.below(20 * BLOCK_BYTES), 1 + random.below(9 * BLOCK_BYTES));
            let now = world.now();
            match (random.below(8), there) {
                (_, None) => {
                    let file = world.files.make(ROOT, name.as_bytes(), Make::File, OWNER, now).unwrap();
                    model.insert(name, (file, Vec::new()));
                }
                (0..3, Some(file)) => {
                    let byte = 1 + random.below(255) as u8;
                    let bytes = vec![byte; length as usize];
                    match world.write(file, offset, &bytes) {
                        Ok(()) => {
                            let content = &mut model.get_mut(&name).unwrap().1;
                            let end = (offset + length) as usize;
                            content.resize(content.len().max(end), 0);
                            content[offset as usize..end].fill(byte);
                        }
                        Err(error) => {
                            assert_eq!(error, Refused::NoSpace);
                            refused += 1;
                        }
                    }
                }
                (3, Some(file)) => {
                    let change = Change { size: Some(offset), ..Change::default() };
                    world.files.change(file, &change, now).unwrap();
                    model.get_mut(&name).unwrap().1.resize(offset as usize, 0);
                }
                (4, Some(file)) => {
                    world.files.punch(file, offset, length, now).unwrap();
                    let content = &mut model.get_mut(&name).unwrap().1;
                    let (from, to) = (
                        (offset as usize).min(content.len()),
                        ((offset + length) as usize).min(content.len()),
                    );
                    content[from..to].fill(0);
                }
                (5, Some(file)) => {
                    let grow = random.once_in(2);
                    if world.files.allocate(file, offset, length, grow, now).is_ok() && grow {
                        let content = &mut model.get_mut(&name).unwrap().1;
                        content.resize(content.len().max((offset + length) as usize), 0);
                    }
                }
                (6, Some(_)) => {
                    world.files.remove(ROOT, name.as_bytes(), false, now).unwrap();
                    model.remove(&name);
                }
                (_, Some(_)) => {
                    let to = alloc::format!("f{}", random.below(8));
                    world
                        .files
                        .rename((ROOT, name.as_bytes()), (ROOT, to.as_bytes()), Rename::Replace, now)
                        .unwrap();
                    let moved = model.remove(&name).unwrap();
                    model.insert(to, moved);
                }
            }
            // Sometimes requests are still under way.
            if random.once_in(3) {
                let oldest = world.files.last.saturating_sub(random.below(4));
                world.files.settle(random.once_in(2).then_some(oldest));
            }
            world.discard();
            if step % 7 == 0 {
                world.check_blocks();
                for (name, (file, content)) in &model {
                    assert_eq!(world.files.find(ROOT, name.as_bytes()), Ok(*file));
                    assert_eq!(
                        world.files.attributes(*file).unwrap().size,
                        content.len() as u64,
                        "seed {seed} step {step}"
                    );
                    let read = world.read(*file, 0, 1 << 20);
                    assert!(read == *content, "seed {seed} step {step}: {name} differs");
                }
            }
        }
        for name in model.keys() {
            world.files.remove(ROOT, name.as_bytes(), false, at(1 << 20)).unwrap();
        }
        world.files.settle(None);
        assert_eq!(world.files.room().free, BLOCKS);
        world.check_blocks();
    }
    assert!(refused > 100, "it was full {refused} times only");
}

#[test]
fn freed_blocks_wait_for_those_who_may_read_them() {
    let mut world = World::new();
    let one = world.files.make(ROOT, b"one", Make::File, OWNER, at(1)).unwrap();
    world.write(one, 0, &vec![1; (BLOCKS * BLOCK_BYTES) as usize]).unwrap();
    let reading = world.files.begin();
    world.files.remove(ROOT, b"one", false, at(2)).unwrap();
    let two = world.files.make(ROOT, b"two", Make::File, OWNER, at(3)).unwrap();
    assert_eq!(world.write(two, 0, &[2]), Err(Refused::NoSpace));
    world.files.settle(Some(reading));
    assert_eq!(world.write(two, 0, &[2]), Err(Refused::NoSpace));
    world.files.settle(Some(reading + 1));
    world.write(two, 0, &[2]).unwrap();
    // Nothing of the first one is to be seen.
    world.write(two, 2 * BLOCK_BYTES - 1, &[3]).unwrap();
    let read = world.read(two, 0, 1 << 20);
    assert_eq!((read[0], read[read.len() - 1]), (2, 3));
    assert!(read[1..read.len() - 1].iter().all(|&byte| byte == 0));
}

#[test]
fn what_is_lost_is_not_used_again_and_told() {
    let mut world = World::new();
    let (one, two) = (
        world.files.make(ROOT, b"1", Make::File, OWNER, at(1)).unwrap(),
        world.files.make(ROOT, b"2", Make::File, OWNER, at(1)).unwrap(),
    );
    world.write(one, 0, &vec![1; 10 * BLOCK_BYTES as usize]).unwrap();
    world.write(two, 0, &vec![1; 10 * BLOCK_BYTES as usize]).unwrap();
    // All of the first one, and some that are free.
    world.files.lose(0..10 * BLOCK_BYTES);
    world.files.lose(50 * BLOCK_BYTES..60 * BLOCK_BYTES);
    assert_eq!((world.files.is_damaged(one), world.files.is_damaged(two)), (true, false));
    world.files.remove(ROOT, b"1", false, at(2)).unwrap();
    world.files.settle(None);
    assert_eq!(world.files.room().free, BLOCKS - 30);
    world.write(two, 0, &vec![1; (BLOCKS - 20) as usize * BLOCK_BYTES as usize]).unwrap();
    assert_eq!(world.files.room().free, 0);
    assert!(!world.files.is_damaged(two));
    world.files.damage(two);
    assert!(world.files.is_damaged(two));
}

#[test]
fn names_and_folders() {
    let mut files = Files::new(1 << 20, OWNER, at(0));
    let a = files.make(ROOT, b"a", Make::Folder, OWNER, at(1)).unwrap();
    let b = files.make(a, b"b", Make::Folder, OWNER, at(1)).unwrap();
    let file = files.make(b, b"file", Make::File, OWNER, at(1)).unwrap();
    assert_eq!(files.find(b, b".."), Ok(a));
    assert_eq!(files.attributes(ROOT).unwrap().links, 3);
    for name in [&b""[..], b".", b"..", b"x/y", b"x\0y"] {
        assert_eq!(files.make(a, name, Make::File, OWNER, at(1)), Err(Refused::Invalid), "{name:?}");
    }
    assert_eq!(files.make(a, &[b'x'; 256], Make::File, OWNER, at(1)), Err(Refused::NameTooLong));
    assert_eq!(files.make(file, b"x", Make::File, OWNER, at(1)), Err(Refused::NotFolder));
    assert_eq!(files.make(99, b"x", Make::File, OWNER, at(1)), Err(Refused::Stale));
    assert_eq!(files.remove(ROOT, b"a", true, at(2)), Err(Refused::NotEmpty));
    assert_eq!(files.remove(ROOT, b"a", false, at(2)), Err(Refused::IsFolder));
    assert_eq!(files.remove(b, b"file", true, at(2)), Err(Refused::NotFolder));
    // Not below itself, also by an exchange.
    assert_eq!(files.rename((ROOT, b"a"), (b, b"a"), Rename::Replace, at(3)), Err(Refused::Invalid));
    assert_eq!(files.rename((b, b"file"), (ROOT, b"a"), Rename::Exchange, at(3)), Err(Refused::Invalid));
    assert_eq!(files.rename((a, b"b"), (ROOT, b"a"), Rename::Keep, at(3)), Err(Refused::Exists));
    assert_eq!(files.rename((ROOT, b"z"), (ROOT, b"a"), Rename::Replace, at(3)), Err(Refused::NotFound));
    files.rename((a, b"b"), (ROOT, b"b"), Rename::Keep, at(3)).unwrap();
    assert_eq!((files.find(b, b".."), files.attributes(ROOT).unwrap().links), (Ok(ROOT), 4));
    files.rename((ROOT, b"a"), (ROOT, b"b"), Rename::Exchange, at(4)).unwrap();
    assert_eq!((files.find(ROOT, b"a"), files.find(ROOT, b"b")), (Ok(b), Ok(a)));
    // An empty folder may be replaced by one.
    files.rename((ROOT, b"a"), (ROOT, b"b"), Rename::Replace, at(5)).unwrap();
    assert_eq!(files.attributes(a), Err(Refused::Stale));
    assert_eq!(files.attributes(ROOT).unwrap().links, 3);
    assert_eq!(files.find(b, b"file"), Ok(file));

    // Links keep it alive, and so does whoever knows it.
    files.link(file, ROOT, b"other", at(6)).unwrap();
    assert_eq!(files.link(b, ROOT, b"folder", at(6)), Err(Refused::NotPermitted));
    files.remove(b, b"file", false, at(7)).unwrap();
    files.remember(1, file);
    files.remember(2, file);
    files.remember(2, file);
    files.remove(ROOT, b"other", false, at(8)).unwrap();
    assert_eq!(files.attributes(file).unwrap().links, 0);
    files.forget(1, file, 100);
    files.forget(2, file, 1);
    assert!(files.knows(2, file) && !files.knows(1, file));
    files.end_session(2);
    assert_eq!(files.attributes(file), Err(Refused::Stale));
    // Who has removed a folder in which he is makes nothing in it.
    files.remember(3, b);
    files.remove(ROOT, b"b", true, at(9)).unwrap();
    assert_eq!(files.make(b, b"x", Make::File, OWNER, at(9)), Err(Refused::NotFound));
}

#[test]
fn reading_a_folder_that_changes() {
    let mut files = Files::new(1 << 20, OWNER, at(0));
    let name = |index: u32| alloc::format!("{index}").into_bytes();
    for index in 0..100 {
        files.make(ROOT, &name(index), Make::File, OWNER, at(1)).unwrap();
    }
    let (mut cookie, mut seen) = (0, Vec::new());
    let mut turn = 0;
    loop {
        let some: Vec<_> = files
            .entries(ROOT, cookie)
            .unwrap()
            .take(7)
            .map(|entry| (entry.cookie, entry.name.to_vec()))
            .collect();
        let Some(last) = some.last() else { break };
        cookie = last.0;
        seen.extend(some.into_iter().map(|(_, name)| name));
        // What is there all the time is seen once.
        let _ = files.remove(ROOT, &name(turn * 2 + 1), false, at(2));
        turn += 1;
    }
    assert_eq!(seen[..2], [b".".to_vec(), b"..".to_vec()]);
    for index in (0..100).step_by(2) {
        assert_eq!(seen.iter().filter(|&seen| *seen == name(index)).count(), 1);
    }
    assert_eq!(files.entries(ROOT, u64::MAX).unwrap().count(), 0);
}

#[test]
fn segments_stay_as_they_are() {
    let mut files = Files::new(1 << 20, OWNER, at(0));
    let file = files.add_segment(b"segment", 3, 5000, OWNER, at(1)).unwrap();
    let attributes = files.attributes(file).unwrap();
    assert_eq!((attributes.kind, attributes.size, attributes.blocks), (Kind::Segment(3), 5000, 2));
    let size = |size| Change { size: Some(size), ..Change::default() };
    assert_eq!(files.change(file, &size(5000), at(2)), Ok(()));
    assert_eq!(files.change(file, &size(0), at(2)), Err(Refused::NotPermitted));
    assert_eq!(files.remove(ROOT, b"segment", false, at(2)), Err(Refused::NotPermitted));
    assert_eq!(
        files.rename((ROOT, b"segment"), (ROOT, b"x"), Rename::Replace, at(2)),
        Err(Refused::NotPermitted)
    );
    files.make(ROOT, b"x", Make::File, OWNER, at(2)).unwrap();
    assert_eq!(
        files.rename((ROOT, b"x"), (ROOT, b"segment"), Rename::Replace, at(2)),
        Err(Refused::NotPermitted)
    );
    assert_eq!(
        files.rename((ROOT, b"x"), (ROOT, b"segment"), Rename::Exchange, at(2)),
        Err(Refused::NotPermitted)
    );
}

#[test]
fn every_change_has_a_later_time() {
    let mut world = World::new();
    let file = world.files.make(ROOT, b"f", Make::File, OWNER, at(1)).unwrap();
    world.clock = -1000;
    let mut last = world.files.attributes(file).unwrap().modified;
    for index in 0..5 {
        world.write(file, index, &[1]).unwrap();
        let now = world.files.attributes(file).unwrap().modified;
        assert!(now > last);
        last = now;
    }
    assert_eq!(at(5).after(Time { seconds: 5, nanos: 999_999_999 }), at(6));
}
