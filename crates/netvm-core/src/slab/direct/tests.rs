use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use super::*;
use crate::sim::Random;

const SLAB: u64 = 2 * UNIT_BYTES;
/// Cells of a slab, around the border of its units: what the model stores.
const CELLS: u64 = 16;
const CELL: u64 = UNIT_BYTES / 8;

enum Message {
    Write {
        slab: u32,
        cells: core::ops::Range<u64>,
        value: u64,
    },
    Provide(Unit, u32, bool),
    Discard {
        slab: u32,
        unit: u64,
    },
    /// Answered with what is there.
    Read {
        slab: u32,
        cells: core::ops::Range<u64>,
        expected: Vec<u64>,
    },
}

/// A lender that executes what comes over the session some time later, and tells of it later still.
#[test]
fn every_transfer_sees_all_that_was_posted_before() {
    let (mut direct_writes, mut direct_reads) = (0, 0);
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let mut direct = Direct::new(SLAB);
        let mut memory = vec![[0u64; CELLS as usize]; 2];
        let mut model = memory.clone();
        let mut provided = [[false; 2]; 2];
        let (mut session, mut answers) = (VecDeque::new(), VecDeque::new());
        let (mut posted, mut executed, mut applied) = (0u64, 0u64, 0u64);
        direct.borrowed(0);
        direct.borrowed(1);
        for step in 1..400 {
            let slab = random.below(2) as u32;
            let first = random.below(CELLS);
            let cells = first..first + 1 + random.below((CELLS - first).min(6));
            let (offset, bytes) = (cells.start * CELL, (cells.end - cells.start) * CELL);
            let span = |row: &[u64; 16]| row[cells.start as usize..cells.end as usize].to_vec();
            match random.below(12) {
                0..4 => {
                    for cell in cells.clone() {
                        model[slab as usize][cell as usize] = step;
                    }
                    if direct.write(applied, slab, offset, bytes) == Way::Direct {
                        direct_writes += 1;
                        for cell in cells {
                            assert!(provided[slab as usize][(cell * CELL / UNIT_BYTES) as usize]);
                            memory[slab as usize][cell as usize] = step;
                        }
                    } else {
                        session.push_back(Message::Write { slab, cells, value: step });
                        let refused = random.once_in(40);
                        let takes = !random.once_in(4);
                        direct.written(applied, posted, slab, offset, bytes, |unit, asked| {
                            if takes {
                                session.push_back(Message::Provide(unit, asked, !refused));
                            }
                            takes
                        });
                        posted += 1;
                    }
                }
                4..8 => {
                    let expected = span(&model[slab as usize]);
                    if direct.read(applied, slab, offset, bytes) == Way::Direct {
                        direct_reads += 1;
                        assert_eq!(span(&memory[slab as usize]), expected, "seed {seed}, step {step}");
                    } else {
                        session.push_back(Message::Read { slab, cells, expected });
                    }
                }
                8 if random.once_in(4) => {
                    let unit = random.below(2);
                    direct.discarded(slab, unit * UNIT_BYTES, UNIT_BYTES);
                    model[slab as usize][8 * unit as usize..][..8].fill(0);
                    session.push_back(Message::Discard { slab, unit });
                    // Whoever discards waits for the answer.
                    while !session.is_empty() {
                        execute(&mut session, &mut answers, &mut memory, &mut provided, &mut executed);
                    }
                }
                8..11 => execute(&mut session, &mut answers, &mut memory, &mut provided, &mut executed),
                _ => {
                    applied = executed;
                    for (asked, done) in answers.drain(..) {
                        direct.provided(asked, done);
                    }
                }
            }
        }
        while !session.is_empty() {
            execute(&mut session, &mut answers, &mut memory, &mut provided, &mut executed);
        }
        assert_eq!(memory, model, "seed {seed}");
    }
    assert!(direct_writes > 1000 && direct_reads > 1000, "{direct_writes} {direct_reads}");
}

fn execute(
    session: &mut VecDeque<Message>,
    answers: &mut VecDeque<(u32, bool)>,
    memory: &mut [[u64; 16]],
    provided: &mut [[bool; 2]; 2],
    executed: &mut u64,
) {
    match session.pop_front() {
        Some(Message::Write { slab, cells, value }) => {
            for cell in cells {
                memory[slab as usize][cell as usize] = value;
            }
            *executed += 1;
        }
        Some(Message::Provide(unit, asked, done)) => {
            provided[unit.slab as usize][unit.index as usize] |= done;
            answers.push_back((asked, done));
        }
        Some(Message::Discard { slab, unit }) => {
            memory[slab as usize][8 * unit as usize..][..8].fill(0);
            provided[slab as usize][unit as usize] = false;
        }
        Some(Message::Read { slab, cells, expected }) => {
            // Direct writes after it was posted may be seen; nothing older than what it expects.
            for (cell, expected) in cells.zip(expected) {
                assert!(memory[slab as usize][cell as usize] >= expected);
            }
        }
        None => {}
    }
}

#[test]
fn what_is_not_in_the_file_or_beyond_the_slab_goes_over_the_session() {
    let mut direct = Direct::new(SLAB);
    assert_eq!(direct.read(0, 7, 0, 1), Way::Session);
    direct.written(0, 0, 7, 0, 1, |_, _| unreachable!("not in the file"));
    direct.borrowed(7);
    assert_eq!(direct.read(0, 7, SLAB - 1, 1), Way::Direct);
    assert_eq!(direct.read(0, 7, SLAB, 1), Way::Session);
    assert_eq!(direct.read(0, 7, u64::MAX, 2), Way::Session);
    assert_eq!(direct.write(0, 7, 1, u64::MAX), Way::Session);
    direct.written(0, 0, 7, u64::MAX, 2, |_, _| unreachable!("beyond the slab"));
    let mut asked = Vec::new();
    direct.written(0, 0, 7, UNIT_BYTES - 1, 2, |unit, number| {
        asked.push((unit, number));
        true
    });
    assert_eq!(asked, [(Unit { slab: 7, index: 0 }, 0), (Unit { slab: 7, index: 1 }, 1)]);
    direct.provided(9, true);
    assert_eq!(direct.write(1, 7, 0, 1), Way::Session, "not asked so often");
    direct.provided(0, true);
    assert_eq!(direct.write(0, 7, 0, 1), Way::Direct, "another byte than the one that is not known");
    assert_eq!(direct.write(0, 7, UNIT_BYTES - 1, 1), Way::Session);
    assert_eq!(direct.write(1, 7, UNIT_BYTES - 1, 1), Way::Direct);
    direct.returned(7);
    assert_eq!(direct.read(1, 7, 0, 1), Way::Session);
}

#[test]
fn what_is_inherited_is_read_behind_what_was_written() {
    let mut direct = Direct::new(SLAB);
    direct.inherited(3, 1);
    direct.borrowed(4);
    assert_eq!(direct.read(0, 3, 0, SLAB), Way::Inherited(1));
    assert_eq!(direct.read(0, 3, 1, SLAB), Way::Session);
    assert_eq!(direct.write(0, 3, 0, 1), Way::Session);
    direct.written(0, 0, 3, 10, 10, |_, _| unreachable!("not this lease's file"));
    assert_eq!(direct.read(0, 3, 19, 1), Way::Session);
    assert_eq!((direct.read(0, 3, 20, 1), direct.read(1, 3, 19, 1)), (Way::Inherited(1), Way::Inherited(1)));
    assert_eq!(direct.write(1, 3, 10, 10), Way::Session);
    // Given back, and borrowed again.
    direct.returned(3);
    assert_eq!(direct.read(1, 3, 0, 1), Way::Session);
    direct.borrowed(3);
    direct.inherited(5, 0);
    assert_eq!((direct.read(1, 3, 0, 1), direct.read(1, 5, 0, 1)), (Way::Direct, Way::Inherited(0)));
    direct.forget_inherited();
    assert_eq!((direct.read(1, 3, 0, 1), direct.read(1, 5, 0, 1)), (Way::Direct, Way::Session));
}

#[test]
fn more_writes_than_can_be_remembered_keep_everything_on_the_session() {
    let mut direct = Direct::new(SLAB);
    direct.borrowed(0);
    let count = crate::limits::WINDOW + 36;
    for sequence in 0..count {
        direct.written(0, sequence, 0, sequence, 1, |_, _| true);
    }
    assert_eq!(direct.read(count - 1, 0, UNIT_BYTES, 1), Way::Session);
    assert_eq!(direct.read(count, 0, 0, 1), Way::Direct);
}

#[test]
fn a_lender_that_is_far_behind_keeps_only_those_bytes_on_the_session() {
    let mut direct = Direct::new(SLAB);
    direct.borrowed(0);
    direct.written(0, 0, 0, 0, 1, |_, _| true);
    direct.provided(0, true);
    for sequence in 1..2000 {
        direct.written(0, sequence, 0, sequence, 1, |_, _| false);
        assert_eq!(direct.wants_word(0), sequence >= 31, "{sequence}");
    }
    assert_eq!(direct.write(0, 0, 2000, 1), Way::Direct);
    assert_eq!(direct.write(0, 0, 1999, 1), Way::Session);
    assert_eq!(direct.write(1000, 0, 999, 1), Way::Direct);
    assert_eq!(direct.write(1000, 0, 1000, 1), Way::Session);
    assert!(direct.wants_word(1000));
    assert_eq!(direct.write(1980, 0, 1979, 1), Way::Direct);
    assert!(!direct.wants_word(1980), "the next frame of the lender tells soon enough");
}
