//! Splits elements into exponents, which are compressed, and signs and mantissas, which are stored unchanged.
//!
//! | type | exponent | sign and mantissa of `n` elements |
//! |---|---|---|
//! | bf16 | bits 7 to 14 | `n` bytes: the sign above the mantissa |
//! | fp16 | bits 10 to 14 | `n` bytes: bits 0 to 7; then three 64-bit words for each 64 elements: bits 8, 9 and 15 |
//! | fp32 | bits 23 to 30 | `n` times two bytes: bits 0 to 15; then `n` bytes: the sign above bits 16 to 22 |

use super::GROUP;
use super::simd::{GroupCodec, WINDOW};
use crate::Float;

/// Bytes of a group's three words in fp16.
const THREE_BYTES: usize = 3 * GROUP / 8;
/// The escaped symbols of a layer in which code 3 means 3.
const THREES: [u8; WINDOW] = [3; WINDOW];

/// Returns the bytes of all signs and mantissas.
pub(super) fn sign_mantissa_bytes(float: Float, elements: usize) -> usize {
    match float {
        Float::Bf16 => elements,
        Float::F16 => elements + elements.div_ceil(GROUP) * THREE_BYTES,
        Float::F32 => 3 * elements,
    }
}

/// Writes the exponents of all elements to the start of `exponents`.
#[inline(always)]
pub(super) fn extract_exponents(float: Float, bytes: &[u8], exponents: &mut [u8]) {
    match float {
        Float::Bf16 => {
            for (element, exponent) in bytes.as_chunks().0.iter().zip(exponents) {
                *exponent = (u16::from_le_bytes(*element) >> 7) as u8;
            }
        }
        Float::F16 => {
            for (element, exponent) in bytes.as_chunks().0.iter().zip(exponents) {
                *exponent = (u16::from_le_bytes(*element) >> 10) as u8 & 0x1f;
            }
        }
        Float::F32 => {
            for (element, exponent) in bytes.as_chunks().0.iter().zip(exponents) {
                *exponent = (u32::from_le_bytes(*element) >> 23) as u8;
            }
        }
    }
}

/// Writes the signs and mantissas of all elements: [`sign_mantissa_bytes`] bytes.
#[inline(always)]
pub(super) fn extract_sign_mantissa(codec: impl GroupCodec, float: Float, bytes: &[u8], others: &mut [u8]) {
    let elements = bytes.len() / float.bytes();
    match float {
        Float::Bf16 => {
            for (element, other) in bytes.as_chunks::<2>().0.iter().zip(others) {
                *other = element[1] & 0x80 | element[0] & 0x7f;
            }
        }
        Float::F16 => {
            let (lows, words) = others.split_at_mut(elements);
            let bytes = bytes.as_chunks::<2>().0;
            for (element, low) in bytes.iter().zip(lows) {
                *low = element[0];
            }
            for (group, words) in bytes.chunks(GROUP).zip(words.chunks_exact_mut(THREE_BYTES)) {
                let (mut pairs, mut signs, mut unused) = ([0; GROUP], [0; GROUP], [0; GROUP]);
                for (element, (pair, sign)) in group.iter().zip(pairs.iter_mut().zip(&mut signs)) {
                    (*pair, *sign) = (element[1] & 3, element[1] >> 7);
                }
                let (eighth, ninth) = codec.compress(&pairs, [0, 1, 2], &mut unused);
                let (sign, _) = codec.compress(&signs, [0, 1, 2], &mut unused);
                words[..8].copy_from_slice(&eighth.to_le_bytes());
                words[8..16].copy_from_slice(&ninth.to_le_bytes());
                words[16..].copy_from_slice(&sign.to_le_bytes());
            }
        }
        Float::F32 => {
            let (lows, highs) = others.split_at_mut(2 * elements);
            let (lows, bytes) = (lows.as_chunks_mut::<2>().0, bytes.as_chunks::<4>().0);
            for (element, (low, high)) in bytes.iter().zip(lows.iter_mut().zip(highs)) {
                *low = [element[0], element[1]];
                *high = element[3] & 0x80 | element[2] & 0x7f;
            }
        }
    }
}

/// Assembles an element for each exponent. The first is the block's element `begin`, a multiple of [`GROUP`];
/// `elements` is the number of elements of the block, and `others` has the signs and mantissas of all.
#[inline(always)]
pub(super) fn assemble(
    codec: impl GroupCodec,
    float: Float,
    (exponents, others): (&[u8], &[u8]),
    (begin, elements): (usize, usize),
    out: &mut [u8],
) {
    match float {
        Float::Bf16 => {
            let parts = exponents.iter().zip(&others[begin..]);
            for (element, (exponent, other)) in out.as_chunks_mut().0.iter_mut().zip(parts) {
                let (exponent, other) = (u16::from(*exponent), u16::from(*other));
                *element = ((other & 0x80) << 8 | exponent << 7 | other & 0x7f).to_le_bytes();
            }
        }
        Float::F16 => {
            let (lows, words) = others.split_at(elements);
            let words = words[begin / GROUP * THREE_BYTES..].chunks_exact(THREE_BYTES);
            let groups = out.chunks_mut(2 * GROUP).zip(exponents.chunks(GROUP).zip(lows[begin..].chunks(GROUP)));
            for ((out, (exponents, lows)), words) in groups.zip(words) {
                let word = |at: usize| words[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
                let (mut pairs, mut signs) = ([0; GROUP], [0; GROUP]);
                codec.expand(word(0), word(8), [0, 1, 2], &THREES, &mut pairs);
                codec.expand(word(16), 0, [0, 0x80, 0], &THREES, &mut signs);
                let parts = exponents.iter().zip(lows).zip(pairs.iter().zip(&signs));
                for (element, ((exponent, low), (pair, sign))) in out.as_chunks_mut().0.iter_mut().zip(parts) {
                    *element = [*low, sign | (exponent & 0x1f) << 2 | pair];
                }
            }
        }
        Float::F32 => {
            let (lows, highs) = others.split_at(2 * elements);
            let parts = exponents.iter().zip(lows.as_chunks().0[begin..].iter().zip(&highs[begin..]));
            for (element, (exponent, (low, high))) in out.as_chunks_mut().0.iter_mut().zip(parts) {
                let (exponent, high) = (u32::from(*exponent), u32::from(*high));
                let low = u32::from(u16::from_le_bytes(*low));
                *element = ((high & 0x80) << 24 | exponent << 23 | (high & 0x7f) << 16 | low).to_le_bytes();
            }
        }
    }
}
