//! The x86 codecs: AVX2 shuffles bytes by a table, AVX-512 has instructions to expand and compress bytes.

use std::arch::x86_64::*;

use fearless_simd::prelude::*;
use fearless_simd::{Avx2, Avx512, kernel, u8x32, u8x64};

use super::group_codec::{GroupCodec, WINDOW, collect_escaped};
use crate::pack::GROUP;

/// Makes a codec of two kernels.
macro_rules! group_codec {
    ($token:ident: $expand:ident, $compress:ident) => {
        impl GroupCodec for $token {
            #[inline(always)]
            fn expand(self, low: u64, high: u64, symbols: [u8; 3], next: &[u8; WINDOW], out: &mut [u8; GROUP]) {
                $expand(self, low, high, symbols, next, out);
            }

            #[inline(always)]
            fn compress(self, bytes: &[u8; GROUP], symbols: [u8; 3], escaped: &mut [u8; GROUP]) -> (u64, u64) {
                $compress(self, bytes, symbols, escaped)
            }
        }
    };
}

group_codec!(Avx512: expand_512, compress_512);
group_codec!(Avx2: expand_256, compress_256);

kernel! {
    #[inline(always)]
    fn expand_512(
        token: Avx512, low: u64, high: u64, symbols: [u8; 3], next: &[u8; WINDOW], out: &mut [u8; GROUP],
    ) {
        let [first, second, third] = symbols.map(|symbol| symbol as i8);
        let next: __m512i = u8x64::from_slice(token, &next[..GROUP]).into();
        let bytes = _mm512_mask_mov_epi8(_mm512_set1_epi8(first), low, _mm512_set1_epi8(second));
        let bytes = _mm512_mask_mov_epi8(bytes, high, _mm512_set1_epi8(third));
        let bytes: u8x64<_> = _mm512_mask_expand_epi8(bytes, low & high, next).simd_into(token);
        bytes.store_slice(out);
    }
}

kernel! {
    #[inline(always)]
    fn compress_512(
        token: Avx512, bytes: &[u8; GROUP], symbols: [u8; 3], escaped: &mut [u8; GROUP],
    ) -> (u64, u64) {
        let bytes: __m512i = u8x64::from_slice(token, bytes).into();
        let [first, second, third] =
            symbols.map(|symbol| _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8(symbol as i8)));
        let escapes = !(first | second | third);
        let compressed: u8x64<_> = _mm512_maskz_compress_epi8(escapes, bytes).simd_into(token);
        compressed.store_slice(escaped);
        (second | escapes, third | escapes)
    }
}

/// For eight bits, the source byte of each position, and 0x80 (zero) where no bit is set.
const SHUFFLES: [u64; 256] = {
    let mut shuffles = [0; 256];
    let mut index = 0;
    while index < 256 {
        let (mut bit, mut taken) = (0, 0);
        while bit < 8 {
            let set = index as u64 >> bit & 1;
            shuffles[index] |= (taken * set + 0x80 * (1 - set)) << (8 * bit);
            taken += set;
            bit += 1;
        }
        index += 1;
    }
    shuffles
};

kernel! {
    #[inline(always)]
    fn expand_256(
        token: Avx2, low: u64, high: u64, symbols: [u8; 3], next: &[u8; WINDOW], out: &mut [u8; GROUP],
    ) {
        let [first, second, third] = symbols.map(|symbol| _mm256_set1_epi8(symbol as i8));
        let (second, third) = (_mm256_xor_si256(first, second), _mm256_xor_si256(first, third));
        // Spread each bit to a byte: copy its byte of the word to all eight positions and test one bit in each.
        let places = _mm256_setr_epi64x(0, ONES, 2 * ONES, 3 * ONES);
        let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        let mask = |word: u32| {
            let word = _mm256_shuffle_epi8(_mm256_set1_epi32(word as i32), places);
            _mm256_cmpeq_epi8(_mm256_and_si256(word, bit), bit)
        };
        let mut taken = 0;
        for (half, out) in out.chunks_exact_mut(GROUP / 2).enumerate() {
            let (low, high) = ((low >> (32 * half)) as u32, (high >> (32 * half)) as u32);
            let (low_mask, high_mask) = (mask(low), mask(high));
            let known = _mm256_xor_si256(first, _mm256_and_si256(low_mask, second));
            let known = _mm256_xor_si256(known, _mm256_and_si256(high_mask, third));
            let known = _mm256_andnot_si256(_mm256_and_si256(low_mask, high_mask), known);
            let escaped = (low & high).to_le_bytes().map(|escapes| {
                // `taken` is at most 56 here. The remainder removes the bounds checks.
                let at = taken % GROUP;
                let source = i64::from_le_bytes([
                    next[at], next[at + 1], next[at + 2], next[at + 3],
                    next[at + 4], next[at + 5], next[at + 6], next[at + 7],
                ]);
                taken += escapes.count_ones() as usize;
                let shuffle = _mm_cvtsi64_si128(SHUFFLES[usize::from(escapes)] as i64);
                _mm_cvtsi128_si64(_mm_shuffle_epi8(_mm_cvtsi64_si128(source), shuffle))
            });
            let escaped = _mm256_setr_epi64x(escaped[0], escaped[1], escaped[2], escaped[3]);
            let bytes: u8x32<_> = _mm256_or_si256(known, escaped).simd_into(token);
            bytes.store_slice(out);
        }
    }
}

/// The lowest bit of every byte.
const ONES: i64 = super::portable::ONES as i64;

kernel! {
    #[inline(always)]
    fn compress_256(
        token: Avx2, bytes: &[u8; GROUP], symbols: [u8; 3], escaped: &mut [u8; GROUP],
    ) -> (u64, u64) {
        let (head, tail) = bytes.split_at(GROUP / 2);
        let head: __m256i = u8x32::from_slice(token, head).into();
        let tail: __m256i = u8x32::from_slice(token, tail).into();
        let [first, second, third] = symbols.map(|symbol| {
            let symbol = _mm256_set1_epi8(symbol as i8);
            let head = _mm256_movemask_epi8(_mm256_cmpeq_epi8(head, symbol)) as u32;
            let tail = _mm256_movemask_epi8(_mm256_cmpeq_epi8(tail, symbol)) as u32;
            u64::from(head) | u64::from(tail) << 32
        });
        let escapes = !(first | second | third);
        collect_escaped(bytes, escapes, escaped);
        (second | escapes, third | escapes)
    }
}
