//! Whether pages that leave come back soon.
//!
//! A page that leaves by way of the pool gets a second chance there, and pays for it by a system call of its own. Where few are wanted again
//! while they would still be in the pool, pages that their lender holds already had better be dropped, many at a time.

/// Pages after which what was counted counts half,
const PAGES: u32 = 512;
/// and fewer than so many say nothing.
const PAGES_MIN: u32 = 128;

/// See the module's text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Returns {
    left: u32,
    back: u32,
    rare: bool,
}

impl Returns {
    /// Nothing is known: they are not rare.
    pub const fn new() -> Self {
        Self { left: 0, back: 0, rare: false }
    }

    /// Whether fewer come back soon than it takes for a second chance to pay.
    pub const fn are_rare(&self) -> bool {
        self.rare
    }

    /// So many pages have left. A second chance pays when more than one in `part` of them comes back; it pays no more when that is one in twice
    /// as many.
    pub fn note_left(&mut self, pages: u32, part: u32) {
        self.left = self.left.saturating_add(pages);
        if self.left >= PAGES_MIN {
            let returns = self.back.saturating_mul(part);
            self.rare = returns < if self.rare { self.left } else { self.left / 2 };
        }
        while self.left >= PAGES {
            self.left /= 2;
            self.back /= 2;
        }
    }

    /// A page is wanted again that left a short time ago.
    pub fn note_back(&mut self) {
        self.back = self.back.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether returns are rare after `pages` pages have left, of which every `nth` comes back.
    fn run(returns: &mut Returns, pages: u32, nth: u32) -> bool {
        for page in 1..=pages {
            if nth > 0 && page.is_multiple_of(nth) {
                returns.note_back();
            }
            if page.is_multiple_of(32) {
                returns.note_left(32, 8);
            }
        }
        returns.are_rare()
    }

    #[test]
    fn a_second_chance_is_given_until_it_is_known_that_it_is_not_taken() {
        let mut returns = Returns::new();
        assert!(!run(&mut returns, PAGES_MIN - 32, 0));
        assert!(run(&mut returns, 32, 0));
    }

    #[test]
    fn it_follows_what_happens() {
        let mut returns = Returns::new();
        assert!(run(&mut returns, 10_000, 20), "one in 20");
        assert!(!run(&mut returns, 2_000, 4), "one in 4");
        assert!(run(&mut returns, 2_000, 40), "one in 40");
        // Any numbers at all.
        returns.note_left(u32::MAX, u32::MAX);
        (0..10).for_each(|_| returns.note_back());
        returns.note_left(u32::MAX, u32::MAX);
    }

    #[test]
    fn it_does_not_go_to_and_fro() {
        // Between the limits whatever was decided stays.
        let mut rare = Returns::new();
        run(&mut rare, 2_000, 0);
        let mut frequent = Returns::new();
        run(&mut frequent, 2_000, 2);
        for _ in 0..50 {
            assert!(run(&mut rare, 320, 11) && !run(&mut frequent, 320, 11));
        }
    }
}
