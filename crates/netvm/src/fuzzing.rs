//! What the fuzz targets in `fuzz/` run. Each takes any bytes, and must neither panic nor hang, nor use much memory.
//!
//! Not part of the library's interface. The tests of this crate run them over the corpora, too.

mod control;
mod datagrams;
mod frames;
mod handshake;
mod words;

pub use control::control;
pub use datagrams::datagrams;
pub use frames::frames;
pub use handshake::handshake;
pub use words::words;

/// A client of the block view, before its first request; see `docs/design/block.md`.
///
/// # Panics
/// When something is wrong.
pub fn nbd(data: &[u8]) {
    crate::view::nbd::fuzz_negotiation(data);
}

/// The fuzzer's bytes, taken from the front; zeros when there are no more.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::from(self.byte()) % bound
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let bytes = self.bytes(N);
        out[..bytes.len()].copy_from_slice(bytes);
        out
    }

    /// So many bytes, or what is left.
    fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (head, tail) = self.0.split_at(count.min(self.0.len()));
        self.0 = tail;
        head
    }

    /// Bytes with their length (2) in front of them.
    fn piece(&mut self) -> &'a [u8] {
        let count = u16::from_le_bytes(self.array());
        self.bytes(usize::from(count))
    }
}

#[cfg(test)]
mod tests {
    use netvm_core::sim::Random;

    type Target = fn(&[u8]);
    const TARGETS: [(&str, Target); 6] = [
        ("handshake", super::handshake),
        ("frames", super::frames),
        ("control", super::control),
        ("words", super::words),
        ("datagrams", super::datagrams),
        ("nbd", super::nbd),
    ];

    fn corpus(name: &str) -> Vec<Vec<u8>> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/").to_owned() + name;
        let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder}: {error}"));
        files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect()
    }

    #[test]
    fn the_corpora_and_what_is_near_them_do_no_harm() {
        let mut random = Random::new(9);
        for (name, target) in TARGETS {
            let corpus = corpus(name);
            assert!(corpus.len() > 5, "{name} has no corpus");
            corpus.iter().for_each(|input| target(input));
            for _ in 0..3000 {
                let mut input = corpus[random.below(corpus.len() as u64) as usize].clone();
                for _ in 0..1 + random.below(4) {
                    let at = random.below(input.len().max(1) as u64) as usize;
                    match random.below(3) {
                        0 => input.insert(at, random.draw() as u8),
                        1 => input.truncate(at),
                        _ => input.iter_mut().skip(at).take(1).for_each(|byte| *byte = random.draw() as u8),
                    }
                }
                target(&input);
            }
        }
    }
}
