//! splitmix64: random delays and schedules, and the known pattern of kernels and new memory.

/// Returns one step of splitmix64 for a state.
#[must_use]
pub fn splitmix64(state: u64) -> u64 {
    let mut mixed = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Returns the bytes that `fake_driver_fill_kernel` writes: byte `i` is the low byte of `splitmix64(seed + i / 8) >>
/// (8 * (i % 8))`.
#[must_use]
pub fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let words = (0..bytes.div_ceil(8) as u64).flat_map(|index| splitmix64(seed.wrapping_add(index)).to_le_bytes());
    words.take(bytes).collect()
}

/// A seeded random generator.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// Creates the generator of a seed and a key.
    pub(crate) fn keyed(seed: u64, key: u64) -> Self {
        Self(splitmix64(seed ^ splitmix64(key)))
    }

    /// Returns the next number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        splitmix64(self.0)
    }

    /// Returns a number below `bound`, or 0 if `bound` is 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.next() % bound }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pattern_agrees_with_its_formula() {
        let bytes = pattern(u64::MAX, 37);
        for (index, byte) in bytes.iter().enumerate() {
            let word = splitmix64(u64::MAX.wrapping_add(index as u64 / 8));
            assert_eq!(*byte, (word >> (8 * (index % 8))) as u8);
        }
        assert_eq!(bytes.len(), 37);
    }

    #[test]
    fn splitmix_is_the_published_one() {
        assert_eq!(splitmix64(0), 0xe220_a839_7b1d_cdaf);
    }
}
