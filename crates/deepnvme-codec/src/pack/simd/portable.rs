//! The portable codec, without SIMD.

use super::group_codec::{GroupCodec, WINDOW, collect_escaped};
use crate::pack::GROUP;

/// Works on words of eight bytes, and loops over set bits.
#[derive(Clone, Copy)]
pub(super) struct Portable;

/// For each byte, a word with 0xff for every set bit.
const MASKS: [u64; 256] = {
    let mut masks = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut bit = 0;
        while bit < 8 {
            masks[index] |= (0xff * (index as u64 >> bit & 1)) << (8 * bit);
            bit += 1;
        }
        index += 1;
    }
    masks
};
/// The lowest bit of every byte.
pub(super) const ONES: u64 = 0x0101_0101_0101_0101;
/// The seven low bits of every byte.
const LOW_SEVEN_BITS: u64 = 0x7f * ONES;

impl GroupCodec for Portable {
    #[inline(always)]
    fn expand(self, low: u64, high: u64, symbols: [u8; 3], next: &[u8; WINDOW], out: &mut [u8; GROUP]) {
        let [first, second, third] = symbols.map(|symbol| u64::from(symbol) * ONES);
        // Twice as long as needed: when no bit is left, writes go past the group.
        let mut bytes = [0; WINDOW];
        let codes = low.to_le_bytes().into_iter().zip(high.to_le_bytes());
        for ((low, high), word) in codes.zip(bytes.chunks_exact_mut(8)) {
            let (low, high) = (MASKS[usize::from(low)], MASKS[usize::from(high)]);
            word.copy_from_slice(&(first ^ (low & (first ^ second)) ^ (high & (first ^ third))).to_le_bytes());
        }
        let (mut escapes, mut taken) = (low & high, 0);
        while escapes != 0 {
            // Eight at a time, so that the branch is predicted more often.
            for _ in 0..8 {
                bytes[escapes.trailing_zeros() as usize % WINDOW] = next[taken % WINDOW];
                escapes &= escapes.wrapping_sub(1);
                taken += 1;
            }
        }
        out.copy_from_slice(&bytes[..GROUP]);
    }

    #[inline(always)]
    fn compress(self, bytes: &[u8; GROUP], symbols: [u8; 3], escaped: &mut [u8; GROUP]) -> (u64, u64) {
        let [first, second, third] = symbols.map(|symbol| equal(bytes, symbol));
        let escapes = !(first | second | third);
        collect_escaped(bytes, escapes, escaped);
        (second | escapes, third | escapes)
    }
}

/// Returns a bit for each byte that equals the symbol.
#[inline(always)]
fn equal(bytes: &[u8; GROUP], symbol: u8) -> u64 {
    let mut mask = 0;
    for (index, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
        let different = u64::from_le_bytes(*word) ^ (u64::from(symbol) * ONES);
        // The highest bit of each zero byte, and no other.
        let zeros = !(((different & LOW_SEVEN_BITS) + LOW_SEVEN_BITS) | different | LOW_SEVEN_BITS);
        // The product collects them in its highest byte.
        mask |= ((zeros >> 7).wrapping_mul(0x0102_0408_1020_4080) >> 56) << (8 * index);
    }
    mask
}
