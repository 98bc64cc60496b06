//! A seeded random generator (splitmix64). The same seed gives the same test on every machine.

use std::ops::Range;

/// A deterministic stream of numbers.
#[derive(Clone, Debug)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// Creates the stream of a seed. Adjacent seeds give unrelated streams.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Creates the stream of a seed and some keys, such as an operation's offset.
    #[must_use]
    pub fn keyed(seed: u64, words: &[u64]) -> Self {
        let mut rng = Self::new(seed);
        for word in words {
            rng.state = rng.next_u64() ^ word.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        rng
    }

    /// Returns the next 64 random bits.
    #[must_use]
    pub const fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number from 0 to `bound - 1`.
    ///
    /// # Panics
    /// If `bound` is 0.
    #[must_use]
    pub const fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "nothing is below 0");
        ((self.next_u64() as u128 * bound as u128) >> 64) as u64
    }

    /// Returns a number in the range.
    ///
    /// # Panics
    /// If the range is empty.
    #[must_use]
    pub const fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end - range.start)
    }

    /// Returns true with a probability of `per_mille` / 1000.
    #[must_use]
    pub const fn chance(&mut self, per_mille: u32) -> bool {
        self.below(1000) < per_mille as u64
    }

    /// Returns one of the items.
    ///
    /// # Panics
    /// If there are none.
    #[must_use]
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }

    /// Shuffles the items.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }

    /// Fills the slice with random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        let mut words = bytes.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.next_u64().to_le_bytes());
        }
        let rest = words.into_remainder();
        let last = self.next_u64().to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// Returns random bytes, the same for the same seed.
#[must_use]
pub fn random_bytes(bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = vec![0; bytes];
    Rng::new(seed).fill(&mut random);
    random
}

#[cfg(test)]
mod tests {
    use super::Rng;

    #[test]
    fn a_seed_is_a_stream() {
        let numbers = |seed| {
            let mut rng = Rng::new(seed);
            [rng.next_u64(), rng.next_u64(), rng.next_u64()]
        };
        assert_eq!(numbers(7), numbers(7));
        assert_ne!(numbers(7), numbers(8));
        assert_ne!(Rng::keyed(7, &[1, 2]).next_u64(), Rng::keyed(7, &[2, 1]).next_u64());
    }

    #[test]
    fn numbers_stay_in_their_range_and_reach_its_ends() {
        let mut rng = Rng::new(1);
        let seen: std::collections::BTreeSet<u64> = (0..1000).map(|_| rng.within(3..8)).collect();
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [3, 4, 5, 6, 7]);
        assert_eq!((0..1000).filter(|_| rng.chance(0)).count(), 0);
        assert_eq!((0..1000).filter(|_| rng.chance(1000)).count(), 1000);
    }

    #[test]
    fn a_shuffle_keeps_every_item() {
        let mut items: Vec<u32> = (0..50).collect();
        Rng::new(3).shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn fill_reaches_the_last_byte() {
        for len in 0..40 {
            let mut seen = vec![0_u8; len];
            for seed in 0..8 {
                let mut bytes = vec![0; len];
                Rng::new(seed).fill(&mut bytes);
                seen.iter_mut().zip(bytes).for_each(|(all, byte)| *all |= byte);
            }
            assert!(seen.iter().all(|byte| *byte != 0), "length {len}");
        }
    }
}
