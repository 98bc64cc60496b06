//! Random contents that need not be stored: every word follows from the seed and its offset in the file.

use rustix::rand::{GetRandomFlags, getrandom};

/// Bytes that are generated or compared at a time; they fit into a CPU cache.
pub(super) const CHUNK_BYTES: usize = 128 << 10;
/// The increment of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
const INCREMENT: u64 = 0x9E37_79B9_7F4A_7C15;

/// The contents of one file in one round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Contents {
    seed: u64,
}

impl Contents {
    /// Draws a random seed. Every run has other contents: nothing is deduplicated or left over from an earlier run.
    pub(super) fn random() -> Self {
        let mut bytes = [0; 8];
        // getrandom waits for entropy. It fails only if a kernel or a sandbox refuses it. Clock and address differ even
        // then.
        if getrandom(&mut bytes, GetRandomFlags::empty()).is_err() {
            let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
            bytes = (now.as_nanos() as u64 ^ bytes.as_ptr().addr() as u64).to_le_bytes();
        }
        Self { seed: u64::from_le_bytes(bytes) }
    }

    /// Returns the contents of another file of the same run.
    pub(super) fn of_file(self, index: usize) -> Self {
        Self { seed: mix(self.seed.wrapping_add(index as u64 + 1)) }
    }

    /// Returns other contents, for the next round.
    pub(super) fn next_round(self) -> Self {
        Self { seed: mix(self.seed) }
    }

    /// Writes the contents at `offset`, a multiple of 8.
    pub(super) fn fill(self, offset: u64, out: &mut [u8]) {
        assert!(offset.is_multiple_of(8), "offset {offset} must be a multiple of 8");
        let first = self.seed.wrapping_add((offset / 8).wrapping_mul(INCREMENT));
        let mut words = out.chunks_exact_mut(8);
        let mut state = first;
        for word in &mut words {
            word.copy_from_slice(&mix(state).to_le_bytes());
            state = state.wrapping_add(INCREMENT);
        }
        let rest = words.into_remainder();
        let last = mix(state).to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
    }

    /// Returns the first offset at which `bytes`, read at `offset`, differ from the contents.
    pub(super) fn first_difference(self, offset: u64, bytes: &[u8]) -> Option<u64> {
        let mut expected = vec![0; bytes.len().min(CHUNK_BYTES)];
        for (index, chunk) in bytes.chunks(CHUNK_BYTES).enumerate() {
            let at = offset + (index * CHUNK_BYTES) as u64;
            let expected = &mut expected[..chunk.len()];
            self.fill(at, expected);
            if chunk != expected {
                let within = chunk.iter().zip(expected.iter()).take_while(|(left, right)| left == right).count();
                return Some(at + within as u64);
            }
        }
        None
    }
}

/// Applies the finaliser of SplitMix64.
fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_piece_is_a_piece_of_the_whole(seed: u64, word in 0_usize..100, len in 0_usize..500) {
            let contents = Contents { seed };
            let mut whole = vec![0; 2000];
            contents.fill(0, &mut whole);
            let mut piece = vec![0; len];
            contents.fill(word as u64 * 8, &mut piece);
            prop_assert_eq!(&piece[..], &whole[word * 8..word * 8 + len]);
            prop_assert_eq!(contents.first_difference(word as u64 * 8, &piece), None);
        }

        #[test]
        fn one_changed_byte_is_found(at in 0_usize..300_000, flip in 1_u8..) {
            let contents = Contents::random();
            let mut bytes = vec![0; 300_000];
            contents.fill(4096, &mut bytes);
            bytes[at] ^= flip;
            prop_assert_eq!(contents.first_difference(4096, &bytes), Some(4096 + at as u64));
        }
    }

    #[test]
    fn runs_rounds_and_files_differ_and_bits_are_even() {
        let contents = Contents::random();
        assert_ne!(contents, Contents::random());
        assert_ne!(contents.of_file(0), contents.of_file(1));
        assert_ne!(contents.of_file(0), contents.next_round().of_file(0));
        let mut bytes = vec![0; 1 << 16];
        contents.fill(0, &mut bytes);
        let ones: u32 = bytes.iter().map(|byte| byte.count_ones()).sum();
        assert!((ones as f64 / (8.0 * 65536.0) - 0.5).abs() < 0.01);
    }
}
