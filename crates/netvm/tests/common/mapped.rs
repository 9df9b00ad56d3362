//! Far mappings of a pager, words in them, and random accesses that are checked against a model.

use super::{Lent, Random};
use netvm::pager::{Pager, PagerConfig, TierPolicy};
use netvm_sys::shared::SharedSlice;
use std::sync::Arc;

const PAGE: usize = 4096;
const READ_WRITE: i32 = 3;

/// A pager of one lender. Pages are not packed unless `change` says so: what is counted does not depend on what packing costs today then.
pub fn start(lent: &Lent, local_bytes: u64, change: impl FnOnce(&mut PagerConfig)) -> Arc<Pager> {
    let mut config = PagerConfig {
        local_bytes,
        lenders: vec![lent.address().to_owned()],
        area_bytes: 1 << 34,
        tier: TierPolicy::Lender,
        ..PagerConfig::default()
    };
    change(&mut config);
    Pager::start(config).unwrap()
}

pub fn mapped(pager: &Pager, offset: usize, bytes: usize) -> SharedSlice {
    let address = pager.area().start + offset;
    pager.map(address, bytes, READ_WRITE).unwrap();
    pager.memory(address, bytes).unwrap()
}

pub fn word(memory: SharedSlice, index: usize) -> u64 {
    let mut bytes = [0; 8];
    memory.read_into(index * 8, &mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

pub fn set_word(memory: SharedSlice, index: usize, value: u64) {
    memory.write_from(index * 8, &value.to_le_bytes()).unwrap();
}

/// One random word at a random place of each page, checked against a model in ordinary memory.
pub fn churn(memory: SharedSlice, seed: u64, steps: usize) {
    let pages = memory.len() / PAGE;
    let mut random = Random::new(seed);
    let mut model = vec![0_u64; memory.len() / 8];
    for _ in 0..steps {
        let index = (random.next() as usize % pages) * 512 + random.next() as usize % 512;
        assert_eq!(word(memory, index), model[index], "word {index}");
        if !random.next().is_multiple_of(3) {
            model[index] = random.next();
            set_word(memory, index, model[index]);
        }
    }
    for (index, &value) in model.iter().enumerate().step_by(7) {
        assert_eq!(word(memory, index), value, "word {index}");
    }
}
